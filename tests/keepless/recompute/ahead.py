"""Steps of networks with a budget, and their peaks, although measuring and planning both need the profiler."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from keepless.inputs import tensors_in
from keepless.recompute.costs import peak_bytes
from keepless.recompute.plans import Plans
from keepless.recompute.recipes import ByPlan
from keepless.recompute.recording import Recording
from keepless.recompute.step import Plan


class After(nn.Module):
    """A function of a layer's result."""

    def __init__(self, layer: nn.Module, function: Callable[[Any], Any]):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    network.zero_grad()
    network(x).square().mean().backward()
    return [parameter.grad for parameter in network.parameters()]


def step(network: nn.Module, x: Tensor, plan: Plan | None = None, seed: int = 1) -> list[Tensor]:
    """Outputs, gradients and buffers of a step, plain or by a plan, and the next random number.

    Gradients are there before, and zeroed.
    """
    torch.manual_seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    with nullcontext() if plan is None else Recording(ByPlan([plan]), inputs=[x]):
        outputs = tensors_in(network(x))
    torch.autograd.backward([one.square().mean() for one in outputs if one.requires_grad])
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    buffers = [buffer.clone() for buffer in network.buffers()]
    return [*(one.detach() for one in outputs), *gradients, *buffers, torch.rand(1)]


def plans_of(network: nn.Module) -> Plans:
    """The plans of a network that has been given a budget."""
    (hooks,) = {hook.__self__ for hook in network._forward_hooks.values() if hasattr(hook, "__self__")}
    return hooks.plans


def planned_sizes(network: nn.Module) -> list:
    return [size for sizes in plans_of(network)._families.values() for size in sizes]


class Ahead(Plans):
    """Plans that are made before a pass, outside the profiler that measures it."""

    @classmethod
    def of(cls, network: nn.Module) -> "Ahead":
        """Prepare a network that has been given a budget."""
        (hooks,) = {hook.__self__ for hook in network._forward_hooks.values()}
        hooks.plans = cls(hooks.plans.budget)
        return hooks.plans

    def peak(self, network: nn.Module, x: Tensor, step: Callable[[], object] | None = None) -> int:
        """Bytes at the peak of a step on x, with gradients already there."""
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.policy = super().of_pass(network, (x,), {})
        return peak_bytes(step or (lambda: network(x).square().mean().backward()), x.device)

    def of_pass(self, module, args, kwargs):
        return self.policy
