"""Passes whose steps are watched: the program's, and an example's before the training."""

from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...torch_internals import FakeTensor
from ..step.dry import differentiable, rehearsed_step
from ..step.sharded import is_sharded
from ..step.stand_ins import stand_ins
from ..step.step import Step
from ..step.watch import Watch, Watched


def watched_pass(module: nn.Module, inputs: Sequence[Tensor], frame: FrameType | None) -> Watched:
    """The context of a forward pass, called by this frame, whose step is watched."""
    tensors = [*module.parameters(), *inputs]
    has_values = not any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors)
    return Watched(Watch(inputs, has_values), frame)


def step_of_example(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """The step of a network on an example, with the mean square of the outputs as its loss. It changes nothing.

    A copy runs instead of the network if FSDP has sharded it, or if what the step saves has no room elsewhere.
    """
    if is_sharded(module):
        return rehearsed_step(module, args, kwargs)
    watch = _watch_of_example(module, args, kwargs)
    if watch.elsewhere.is_full:
        return rehearsed_step(module, args, kwargs)
    if watch.error is not None:
        raise watch.error
    return watch.step(module)


def _watch_of_example(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Watch:
    """Run the step of `step_of_example`, with stand-ins for the parameters."""
    inputs = tensors_in((args, kwargs))
    with stand_ins(module) as trained:
        recording = watched_pass(module, inputs, None)
        with recording:
            outputs = module(*args, **kwargs)
        losses = [start.square().mean() for start in differentiable(outputs)]
        recording.counting.awaits(module, outputs)
        leaves = [*trained, *(tensor for tensor in inputs if tensor.requires_grad and tensor.is_leaf)]
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses], inputs=leaves)
        del outputs, losses
    return recording.counting
