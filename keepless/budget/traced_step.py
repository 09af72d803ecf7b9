"""Trace a step of a network on given arguments: in place, or as a rehearsal on fake tensors and a copy of the network.

Neither changes the network.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..inputs import tensors_in
from ..recompute.recording import Recording
from ..torch_internals import FakeTensor
from .costs import seconds_of
from .estimates import Estimates
from .execution import ByPlan
from .fakes import on_fakes
from .step import Step
from .trace import Progress, StepTrace


def traced_step(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], estimates: Estimates | None = None
) -> tuple[Step, float]:
    """A step of a network, and the seconds that it takes; 0 on fake tensors. `estimates`: see `StepTrace`.

    Gradients, buffers and the random state are then as before.
    """
    inputs = tensors_in((args, kwargs))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers() if not _is_expanded(buffer)]
    registered = [(module, dict(module._buffers)) for module in network.modules()]
    device = next((tensor.device for tensor in [*inputs, *parameters]), torch.device("cpu"))
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in [*inputs, *parameters])
    trace, seconds = StepTrace(estimates), 0.0

    def run(policy: ByPlan | None) -> None:
        """A forward and a backward pass."""
        with Recording(policy, inputs=inputs) as recording:
            outputs = tensors_in(network(*args, **kwargs))
        outputs = [output for output in outputs if output.requires_grad and output.is_floating_point()]
        if not outputs:
            raise ValueError("no output needs a gradient: expected a network in training, outside torch.no_grad()")
        if policy is not None:
            trace.watch_backward(outputs, recording.known.start)
        losses = backward_starts(outputs)
        torch.stack([output.float().square().mean() for output in losses]).sum().backward()

    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=not is_fake):
            if not is_fake:
                run(None)  # warms up
                seconds = seconds_of(lambda: run(None), device)[1]
            run(ByPlan(trace=trace))
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, of_module in registered:  # it may have assigned others
            module._buffers.update(of_module)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    if trace.progress() != Progress.ENDED:
        raise ValueError("the step could not be traced: call plan outside saved-tensor hooks and checkpoints")
    return trace.step(), seconds


def backward_starts(outputs: Sequence[Tensor]) -> list[Tensor]:
    """The outputs where backward starts: if one of them is a loss, the outputs that it is computed from are left out.

    A loss has no dimensions. Networks of Hugging Face return theirs together with the logits.
    """
    pending: list[Any] = [output.grad_fn for output in outputs if output.dim() == 0 and output.grad_fn is not None]
    seen = set(pending)
    while pending:
        following = [node for node, _ in pending.pop().next_functions if node is not None and node not in seen]
        seen.update(following)
        pending += following
    return [output for output in outputs if output.dim() == 0 or output.grad_fn not in seen]


def _is_expanded(tensor: Tensor) -> bool:
    """Whether entries share memory, as in an expanded tensor, which cannot be written to."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def rehearsed_step(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], estimates: Estimates | None
) -> Step:
    """The step of a network with these arguments, as far as its calls and its memory go. `estimates`: see `StepTrace`.

    It runs on fake tensors and a copy of the network, under the modes of the caller, such as autocast. Users' hooks are
    left out, because they may count or log; those of PyTorch, such as spectral norms, are copied.

    Raises what `on_fakes` raises, such as whatever the network raises when it asks for values of fake tensors; and
    RuntimeError if it has an LSTM, which saves other tensors on fake ones.
    """
    if any(isinstance(module, nn.LSTM) for module in network.modules()):
        raise RuntimeError("an LSTM cannot be rehearsed: on fake tensors it saves other tensors")
    while isinstance(network, DistributedDataParallel):
        network = network.module
    is_fake = any(isinstance(one, FakeTensor) for one in [*tensors_in((args, kwargs)), *network.parameters()])
    return on_fakes(partial(traced_step, estimates=None if is_fake else estimates), network, args, kwargs)[0]
