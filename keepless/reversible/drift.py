"""Errors of the inputs that a reversible network restores."""

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

    `blocks` are as for `run_reversibly`, and x is the input of the first.
    """
    errors = [torch.zeros((), device=x.device)]
    wrong: Tensor | None
    for part in _in_rows(blocks):
        if isinstance(part, list):
            y, wrong = _through(part, x)
        else:
            y = in_turn(part, x)
            inverse = inverse_of(part)
            wrong = None if inverse is None else (inverse(y) - x).abs().max()
        if wrong is not None:
            errors.append(wrong.float() / x.abs().max().clamp(min=1e-30))
        x = y
    return torch.stack(errors).max()


def _in_rows(blocks: Iterable[Block]) -> list[list[Coupling] | Block]:
    """Blocks, with invertible couplings of one `split_dim` in a row as a list."""
    parts: list[list[Coupling] | Block] = []
    for block in blocks:
        last = parts[-1] if parts else None
        if not in_halves(block) or not block.invertible:
            parts.append(block)
        elif isinstance(last, list) and last[0].split_dim == block.split_dim:
            last.append(block)
        else:
            parts.append([block])
    return parts


def _through(row: list[Coupling], x: Tensor) -> tuple[Tensor, Tensor]:
    """The output of couplings in a row, and the largest error of the input restored from it."""
    first, second = row[0].split(x)
    # Contiguous, as restored halves are: kernels may round differently for views.
    start: tuple[Tensor, ...] = (first.contiguous(), second.contiguous())
    halves = start
    for coupling in row:
        halves = coupling.couple(*halves)
    y = row[0].join(halves)
    for half in (half for coupling in reversed(row) for half in reversed(coupling.half_steps())):
        halves = half.inverted().run(halves)
    return y, torch.stack([(found - true).abs().max() for found, true in zip(halves, start, strict=True)]).max()
