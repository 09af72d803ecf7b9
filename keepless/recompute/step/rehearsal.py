"""Rehearse a step on a copy of a network: with fake tensors, or with real ones if it reads values."""

import gc
import logging
from collections.abc import Callable, Sequence
from functools import partial
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...saved import gradient_bytes, gradient_dtype, is_ordinary
from ...torch_internals import ASKS_FOR_VALUES, FakeTensor, pop_hooks
from ..passes.plan import ByPlan, Plan
from ..passes.recording import Recording, hooks_around
from .copied import LeftBehind, Overwritten, on_copy
from .counting import Counting
from .sharded import is_sharded
from .simulation import plain_peak
from .step import Step
from .trace import nodes_of

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
    limit: float | int | None = None,
) -> Step:
    """A step of a network, real or on fake tensors. `measures`: see `Counting`; always on for real tensors.

    `limit`: a budget. If nothing can be recomputed and the step exceeds it, the step ends after the forward pass.

    The losses are the mean squares of the outputs; if operators are not measured, as in planners that count the loss
    themselves, it is a `Loss`. Afterwards buffers are those of the step, and gradients that were there have no meaning.
    """
    inputs = tensors_in((args, kwargs))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in [*inputs, *parameters])
    counting = Counting(inputs, measures or not is_fake)
    counting.copy_parameters = copy_parameters
    without = [parameter for parameter in parameters if parameter.grad is None]
    for parameter in without:
        parameter.grad = torch.empty_like(parameter, dtype=gradient_dtype(parameter))
    try:
        outputs = counting.forward_pass(network, args, kwargs)
        with counting.made, counting.gradients_of(parameters):
            counting.forward_ends(tensors_in(outputs))
            starts = differentiable(outputs)
            if limit is not None and not counting.has_choices():
                step, gradients = counting.step(network), sum(map(gradient_bytes, parameters))
                if (limit < 1) if isinstance(limit, float) else (plain_peak(step) > limit + gradients):
                    return step
            losses = [one.square().mean() for one in starts] if counting.measures else [Loss.apply(*starts)]
            torch.autograd.backward(losses, [torch.ones_like(one) for one in losses])
            del outputs, starts, losses
        return counting.step(network)
    finally:
        for parameter in without:
            parameter.grad = None


def backward_starts(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs where backward starts: if one is a loss (a scalar), the outputs it is computed from are left out.

    Hugging Face's networks return the loss together with the logits.
    """
    seen = {*nodes_of(output for output in outputs if output.dim() == 0)}
    return [output for output in outputs if output.dim() == 0 or output.grad_fn not in seen]


def rehearsed_step(
    network: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_real: bool = False,
    limit: float | int | None = None,
    only_fake: bool = False,
) -> Step:
    """The calls and memory of a network's step with these arguments.

    It runs on a copy of the network, under the modes of the caller, such as autocast: on fake tensors, or if that
    raises an error, as in a network that reads values, on real ones, while the values that autograd saves are in the
    CPU's memory. The copy's parameters then share the network's memory, unless the forward pass writes over them.
    Users' hooks are left out, because they may count or log; hooks of PyTorch (e.g. spectral norms) and of `to_inplace`
    are copied. `is_real`: do not try fake tensors. `limit`: see `counted_step`.

    Raises what `on_copy` raises. RuntimeError: `only_fake`, and it does not run on fake tensors.
    """
    tensors = [*tensors_in((args, kwargs)), *network.parameters()]
    without_values = any(isinstance(one, FakeTensor) or one.is_meta for one in tensors)
    hooks, run = len(hooks_around()), partial(counted_step, limit=limit)
    cause = "on fake tensors it makes other calls"
    try:
        if not is_real or without_values:
            on_fakes = partial(run, measures=not without_values, copy_parameters=is_sharded(network))
            return on_copy(on_fakes, network, args, kwargs)
    except Exception as error:  # a network may raise anything
        if without_values or isinstance(error, LeftBehind):
            raise
        values = "it reads values, as x.item() and x[mask] do"
        cause = values if isinstance(error, ASKS_FOR_VALUES) else f"on fake tensors it raises {text_of(error)}"
        if is_sharded(network):
            raise RuntimeError(f"a sharded network is planned on fake tensors alone, but {cause}") from error
        _log.info("the step does not run on fake tensors: %s", text_of(error))
    if len(hooks_around()) > hooks:
        gc.collect()  # ends contexts in the error's frames; some never end, and leave hooks behind
        for _ in range(len(hooks_around()) - hooks):
            pop_hooks()
    if only_fake:
        raise RuntimeError(cause)
    copies = sum(parameter.nbytes for parameter in network.parameters() if not is_ordinary(parameter))
    try:
        step = _on_real_tensors(run, network, args, kwargs, shares=True)
    except Overwritten:
        copies = sum(parameter.nbytes for parameter in network.parameters())
        step = _on_real_tensors(run, network, args, kwargs, shares=False)
    on_cpu = all(one.is_cpu for one in tensors)
    return step._replace(rehearsal=copies + plain_peak(step, saves=on_cpu), cause=cause)


def follows(plan: Plan, network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a network makes the calls of a plan on real tensors, too; True if that cannot be tried on a copy."""

    def run(copy: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        policy = ByPlan(plan)
        with Recording(policy, inputs=tensors_in((args, kwargs))):
            copy(*args, **kwargs)
        return policy.plan is not None

    try:
        return _on_real_tensors(run, network, args, kwargs, shares=True)
    except Exception:  # a network may raise anything
        return True


def text_of(error: Exception) -> str:
    """The type of an error, and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"


def _on_real_tensors(
    run: Callable[..., Any], network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shares: bool
) -> Any:
    def run_on(copy: nn.Module, *given: Any) -> Any:
        trained = [one for one in copy.parameters() if one.requires_grad and is_ordinary(one)]
        shared: dict[Any, Tensor] = {}  # memory of gradients to add to, whose values nothing reads
        for one in sorted(trained, key=Tensor.numel, reverse=True):
            if (kind := (gradient_dtype(one), one.device)) not in shared:
                shared[kind] = torch.empty(one.numel(), dtype=kind[0], device=one.device)
            one.grad = shared[kind][: one.numel()].view(one.shape)
        return run(copy, *given)

    try:
        return on_copy(run_on, network, args, kwargs, is_fake=False, shares=shares)
    except Exception as error:
        clear_frames(error.__traceback__)  # they hold tensors of the copy
        raise
    finally:
        gc.collect()  # modules of the copy may refer to each other in a circle
