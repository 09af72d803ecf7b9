"""Steps of plain and prepared networks, and their peaks, although measuring and planning both need the profiler."""

import copy
import gc
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import recompute_activations
from keepless.inputs import tensors_in
from keepless.recompute.passes.plan import ByPlan, Plan
from keepless.recompute.passes.recording import Recording
from keepless.recompute.signatures.signatures import Signatures
from keepless.recompute.step.costs import peak_bytes


class After(nn.Module):
    """A function of a layer's result."""

    def __init__(self, layer: nn.Module, function: Callable[[Any], Any]):
        super().__init__()
        self.layer, self.function = layer, function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


class Layers(nn.Module):
    """Equal layers. `before` is called with the network and its input, and returns another input."""

    def __init__(self, layers: int = 8, before: Callable[[Any, Tensor], Tensor] = lambda network, x: x):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.before, self.calls = before, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.before(self, x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.mean(1)


def pair(plain: nn.Module, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A network, and a copy that is prepared."""
    return plain, recompute_activations(copy.deepcopy(plain), **options)


def gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    network.zero_grad()
    network(x).square().mean().backward()
    return [parameter.grad for parameter in network.parameters()]


def step(network: nn.Module, x: Tensor, plan: Plan | None = None, seed: int = 1) -> list[Tensor]:
    """Outputs, gradients and buffers of a step, plain or by a plan, and the next random numbers.

    Gradients are there before, and zeroed.
    """
    torch.manual_seed(seed), random.seed(seed)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    with nullcontext() if plan is None else Recording(ByPlan(plan), inputs=[x]):
        outputs = tensors_in(network(x))
    torch.autograd.backward([output.square().mean() for output in outputs if output.requires_grad])
    gradients = [parameter.grad.clone() for parameter in network.parameters()]
    buffers = [buffer.clone() for buffer in network.buffers()]
    numbers = [torch.get_rng_state(), torch.tensor(random.random())]
    return [*(output.detach() for output in outputs), *gradients, *buffers, *numbers]


def assert_like(plain: nn.Module, within: nn.Module, *inputs: Tensor) -> None:
    """Steps of two networks are equal to the bit. Each gets inputs of its own."""
    for seed, x in enumerate(inputs):
        steps = [step(network, x.clone(), seed=seed) for network in (plain, within)]
        assert all(map(torch.equal, *steps))


def plans_of(network: nn.Module) -> Signatures:
    owners = {getattr(hook, "__self__", None) for hook in network._forward_hooks.values()}
    (hooks,) = [owner for owner in owners if hasattr(owner, "signatures")]  # FSDP2 has hooks, too
    return hooks.signatures


def plans(network: nn.Module) -> list[int]:
    """One number per size that borrows no plan: 1 if it has a plan, else 0."""
    return [int(signature.plan is not None) for signature in plans_of(network).recent if signature.lender is None]


def watched_count(network: nn.Module) -> int:
    """How many steps were watched, or were examples."""
    return plans_of(network)._watched_count


def plan_next_step(network: nn.Module, x: Tensor) -> None:
    """Make the plan of a step on x now, if there is none: from the step that was watched, or from another one."""
    signatures = plans_of(network)
    signature = signatures._use_signature(network, [x], (x,), {})
    signatures._plan_watched_steps(network)
    signatures._borrow_or_make_due(signature)
    if signature.is_due:
        signatures.plan_example(network, (x,), {})


def peak_of(network: nn.Module, x: Tensor) -> int:
    """Bytes at the peak of a planned step on x, with gradients already there."""
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    plan_next_step(network, x)  # measuring operators would end the profiler
    gc.collect()  # the profiler would count it if memory of an earlier measurement was freed during the step
    return peak_bytes(lambda: network(x).square().mean().backward(), x.device)
