"""Count a training step on fake tensors: its bytes at every moment, and the time it would take on a device."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..inputs import tensors_in
from ..made_tensors import MadeTensors
from ..recompute.costs import seconds_for, work_of
from ..recompute.rehearsal import Loss, differentiable
from ..torch_internals import OpOverload


class Counted(MadeTensors):
    """Context that counts the bytes and seconds of operators. `peak`: the most bytes at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, function: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        moved, operations = work_of(function, args, kwargs or {}, result)
        if moved:
            self.seconds += seconds_for(moved, operations, tensors_in(result)[0])
        return result


def counted(forward: Callable[[], object]) -> Counted:
    """Count a forward and a backward pass. ValueError: no output needs a gradient."""
    with Counted() as count:
        outputs = differentiable(forward())
        loss = Loss.apply(*outputs)
        loss.backward(torch.empty_like(loss))
    return count


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
