"""How far the inputs that a reversible network restores are from the true ones."""

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from .couplings import Coupling
from .reversible import Block, in_turn


@torch.no_grad()
def drift(blocks: Iterable[Block], x: Tensor) -> Tensor:
    """Largest error of a restored input, relative to the largest value of that input: a scalar.

    A row of couplings restores its input from its last output, so rounding errors add up over the row.

    Args:
        blocks: as for `run_reversibly`.
        x: input of the first block.
    """
    row: list[Coupling] = []
    errors = [torch.zeros((), device=x.device)]
    start = x

    def end_row() -> None:
        if row:
            restored = functools.reduce(lambda y, coupling: coupling.inverse(y), reversed(row), x)
            errors.append((restored - start).abs().max().float() / start.abs().max().clamp(min=1e-30))

    for block in blocks:
        if isinstance(block, Coupling) and block.invertible:
            start = start if row else x
            row.append(block)
            x = block(x)
        else:
            end_row()
            row = []
            x = in_turn(block if isinstance(block, tuple) else (block,), x)
    end_row()
    return torch.stack(errors).max()
