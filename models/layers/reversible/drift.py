"""How far the inputs that a reversible network restores are from the true ones."""

from collections.abc import Iterable

import torch
from torch import Tensor

from .couplings import Coupling, in_halves
from .modules import Block, in_turn, inverse_of


@torch.no_grad()
def drift(blocks: Iterable[Block], x: Tensor) -> Tensor:
    """Largest error of a restored input, relative to the largest value of that input: a scalar.

    A row of couplings restores its input from its last output, so rounding errors add up over the row. Call it in eval
    mode: in training mode norms see the minibatch twice, and dropout differs.

    Args:
        blocks: as for `run_reversibly`.
        x: input of the first block.
    """
    errors = [torch.zeros((), device=x.device)]
    row: list[Coupling] = []
    for block in blocks:
        if in_halves(block) and block.invertible and (not row or row[0].split_dim == block.split_dim):
            row.append(block)
            continue
        x, error = _through(row, x)
        errors.append(error)
        row = [block] if in_halves(block) and block.invertible else []
        if row:
            continue
        y = in_turn(block if isinstance(block, tuple) else (block,), x)
        inverse = None if isinstance(block, tuple) else inverse_of(block)
        if inverse is not None:
            errors.append((inverse(y) - x).abs().max().float() / x.abs().max().clamp(min=1e-30))
        x = y
    errors.append(_through(row, x)[1])
    return torch.stack(errors).max()


def _through(row: list[Coupling], x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of couplings in a row, and the error of the input restored from it."""
    if not row:
        return x, torch.zeros((), device=x.device)
    first, second = row[0].split(x)
    # Contiguous, as restored halves are: kernels may round differently for views.
    start: tuple[Tensor, ...] = (first.contiguous(), second.contiguous())
    halves = start
    for coupling in row:
        halves = coupling.couple(*halves)
    y = row[0].join(halves)
    for half in (half for coupling in reversed(row) for half in reversed(coupling.half_steps())):
        halves = half.inverted().run(halves)
    wrong = torch.stack([(found - true).abs().max() for found, true in zip(halves, start, strict=True)]).max()
    return y, wrong.float() / x.abs().max().clamp(min=1e-30)
