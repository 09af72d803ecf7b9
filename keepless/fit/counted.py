"""Count a training step on fake tensors: its bytes at every moment, and the time it would take on a device."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..inputs import tensors_in
from ..made_tensors import MadeTensors
from ..recompute.costs import seconds_for, work_of
from ..recompute.rehearsal import Loss, differentiable
from ..torch_internals import OpOverload


class Count(NamedTuple):
    """A forward and a backward pass."""

    peak: int  # the most bytes at any moment
    seconds: float  # estimated


class _Timed(MadeTensors):
    """Also adds up the seconds of operators."""

    seconds = 0.0

    def __torch_dispatch__(
        self, function: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        moved, operations = work_of(function, args, kwargs or {}, result)
        if moved:
            self.seconds += seconds_for(moved, operations, tensors_in(result)[0])
        return result


def counted(forward: Callable[[], object]) -> Count:
    """Count a forward and a backward pass. ValueError: no output needs a gradient."""
    with _Timed() as made:
        outputs = differentiable(forward())
        loss = Loss.apply(*outputs)
        loss.backward(torch.empty_like(loss))
    return Count(made.peak, made.seconds)


def repeated_blocks(network: nn.Module) -> list[nn.Module]:
    """Blocks that are usually checkpointed: the outermost modules with submodules whose class occurs more than once.

    `nn.Sequential` counts only if no other class does.
    """
    inside = [one for one in network.modules() if any(one.children()) and one is not network]
    number = Counter(map(type, inside))
    repeated = {kind for kind in number if number[kind] > 1} - {nn.ModuleList, nn.ModuleDict}
    blocks = [one for one in inside if type(one) in (repeated - {nn.Sequential} or repeated)]
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested]
