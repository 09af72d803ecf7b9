"""Measure every step of a network with a budget, although measuring and planning both need the profiler."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from keepless.budget.costs import peak_bytes
from keepless.budget.plans import PlansByShape


class Ahead(PlansByShape):
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
