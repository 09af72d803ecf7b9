"""Rehearse a step of a network on a copy: with fake tensors, or if it reads values, with real ones."""

import gc
import logging
from collections.abc import Sequence
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...torch_internals import FakeTensor, pop_hooks
from ..recorder.recording import hooks_around
from .copied import is_sharded, on_copy
from .counting import Counting
from .step import Step

_log = logging.getLogger(__name__)


class Loss(torch.autograd.Function):
    """A loss of 0 bytes, which gives each of its input tensors a gradient that exists until it has been read."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.forms = [(one.shape, one.stride(), one.dtype, one.device) for one in tensors]
        return tensors[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:  # one for each tensor
        return tuple(
            torch.empty_strided(shape, stride, dtype=dtype, device=device) for shape, stride, dtype, device in ctx.forms
        )


def differentiable(outputs: object) -> list[Tensor]:
    """The outputs of a network where a backward pass starts. ValueError: no output needs a gradient."""
    found = [one for one in tensors_in(outputs) if one.requires_grad]
    if not found:
        raise ValueError(
            "no output of the network needs a gradient: train some of it, outside torch.no_grad(), and return tensors "
            "in lists, tuples, dictionaries or dataclasses"
        )
    return backward_starts(found)


def counted_step(
    network: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    measures: bool = False,
    copy_parameters: bool = False,
) -> Step:
    """A step of a network, real or on fake tensors. `measures`: see `Counting`; always on for real tensors.

    The mean squares of the outputs are its losses; if operators are not measured, as by planners that count the loss
    themselves, a `Loss`. Gradients and buffers are those of the step afterwards.
    """
    inputs = tensors_in((args, kwargs))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in [*inputs, *parameters])
    counting = Counting(inputs, measures or not is_fake)
    counting.copy_parameters = copy_parameters
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    outputs = counting.forward_pass(network, args, kwargs)
    with counting.made:
        counting.forward_ends(tensors_in(outputs))
        starts = differentiable(outputs)
        losses = [one.square().mean() for one in starts] if counting.measures else [Loss.apply(*starts)]
        torch.autograd.backward(losses, [torch.ones_like(one) for one in losses])
        del outputs, starts, losses
    return counting.step()


def backward_starts(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs where backward starts: if one is a loss (a scalar), the outputs it is computed from are left out.

    Hugging Face's networks return the loss together with the logits.
    """
    pending: list[Any] = [output.grad_fn for output in outputs if output.dim() == 0 and output.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = [node for node, _ in pending.pop().next_functions if node is not None and node not in seen]
        seen.update(following)
        pending += following
    return [output for output in outputs if output.dim() == 0 or output.grad_fn not in seen]


def rehearsed_step(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], is_real: bool = False) -> Step:
    """The calls and memory of a network's step with these arguments.

    It runs on a copy of the network, under the modes of the caller, such as autocast: on fake tensors, or if that
    raises an error, as in a network that reads values, on real ones, while the values that autograd saves are in the
    CPU's memory. Users' hooks are left out, because they may count or log; hooks of PyTorch (e.g. spectral norms) and
    of `to_inplace` are copied. `is_real`: fake tensors are not tried.

    Raises what `on_copy` raises.
    """
    tensors = [*tensors_in((args, kwargs)), *network.parameters()]
    without_values = any(isinstance(one, FakeTensor) or one.is_meta for one in tensors)
    hooks = len(hooks_around())
    try:
        if not is_real or without_values:
            run = partial(counted_step, measures=not without_values, copy_parameters=is_sharded(network))
            return on_copy(run, network, args, kwargs)
    except Exception as error:  # a network may raise anything
        if without_values:
            raise
        _log.info("the step does not run on fake tensors: %s: %s", type(error).__name__, error)
    if len(hooks_around()) > hooks:
        gc.collect()  # contexts end with the error's frames; some never end, and leave hooks behind
        for _ in range(len(hooks_around()) - hooks):
            pop_hooks()
    try:
        return on_copy(counted_step, network, args, kwargs, is_fake=False)
    except Exception as error:
        clear_frames(error.__traceback__)  # they hold tensors of the copy
        raise
    finally:
        gc.collect()  # modules of the copy may refer to each other in a circle
