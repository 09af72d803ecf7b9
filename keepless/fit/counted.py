"""Count a training step on fake tensors: its bytes at every moment, and the time it would take on a device."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import flop_registry

from ..inputs import tensors_in
from ..recompute.costs import seconds_for
from ..recompute.rehearsal import backward_starts
from ..torch_internals import OpOverload
from .made_tensors import MadeTensors

# PyTorch counts only CUDA's flash attention; the CPU's operators begin with the same arguments.
_FLASH = "_scaled_dot_product_flash_attention"
_COUNTED_AS = {f"{_FLASH}_for_cpu{end}": getattr(torch.ops.aten, _FLASH + end) for end in ("", "_backward")}


class Counted(MadeTensors):
    """Context that counts the bytes and seconds of operators. `peak`: the most bytes at any moment."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def __torch_dispatch__(
        self, function: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> object:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        made, packet = tensors_in(result), function.overloadpacket
        if made and not function.is_view and "empty" not in packet.__name__:
            moved = sum(one.nbytes for one in [*tensors_in((args, kwargs)), *made])
            operations = flop_registry.get(_COUNTED_AS.get(packet.__name__, packet), lambda *_, **__: 0)
            self.seconds += seconds_for(moved, operations(*args, **(kwargs or {}), out_val=result), made[0])
        return result


class Loss(torch.autograd.Function):
    """A loss of 0 bytes, which gives each of its input tensors a gradient that exists until it has been read."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.forms = [(one.shape, one.dtype, one.device) for one in tensors]
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # one for each tensor
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.forms)


def counted(forward: Callable[[], object]) -> Counted:
    """Count a forward and a backward pass. ValueError: no output needs a gradient."""
    with Counted() as count:
        outputs = [one for one in tensors_in(forward()) if one.requires_grad and one.is_floating_point()]
        if not outputs:
            raise ValueError("no output of the network needs a gradient: expected a network with trainable parameters")
        loss = Loss.apply(*backward_starts(outputs))
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
