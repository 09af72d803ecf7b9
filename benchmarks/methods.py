"""Methods to train a network in less memory, and how close their gradients are to the baseline's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from benchmarks.measuring import WARM_UP_STEPS, Step, autocast, compiled
from benchmarks.zoo import blocks_of
from keepless import recompute_activations
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from keepless.torch_internals import is_capturing, tree_flatten, tree_leaves, tree_unflatten

PLAIN, RECOMPUTED, BLOCKS = "plain", "recompute_activations", "checkpoint per block"
ON_CPU, COMPILED, BUDGET = "save_on_cpu", "compiled", "compiled, budget 0.5"
METHODS = (PLAIN, RECOMPUTED, BLOCKS, ON_CPU, COMPILED, BUDGET)
NOT_CAPTURED = (ON_CPU, COMPILED, BUDGET)  # memory on the host; code of a compiler that has graphs of its own
WITH_COMPILER = ("resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_16")
Forward = Callable[[Tensor], object]  # inputs -> tensors, maybe in containers


class WithLoss(nn.Module):
    """A network and its loss in one module, so that a plan counts the loss, which may dominate in segmentation."""

    def __init__(self, network: nn.Module, forward: Forward | None = None):
        super().__init__()
        self.network, self.run = network, network if forward is None else forward

    def forward(self, inputs: Tensor) -> Tensor:
        """The sum of the outputs' mean squares: a loss for any network."""
        return torch.stack([output.square().mean() for output in tree_leaves(self.run(inputs))]).sum()


def training_step(network: nn.Module, inputs: Tensor, precision: str, frees: bool = False) -> None:
    """Forward and backward pass. Before it, gradients are zeroed, or freed."""
    network.zero_grad(set_to_none=frees)
    with autocast(inputs.device.type, precision):
        loss = network(inputs)
    loss.backward()


def forward_of(network: nn.Module, method: str, compiler: str | None = None) -> Forward:
    """A network's forward pass by one of the methods. This may change the network."""
    if method == RECOMPUTED:
        return recompute_activations(network)
    if method == BLOCKS:
        return by_blocks(network)
    if method == ON_CPU:
        return partial(_saved_on_cpu, network)
    if method in (COMPILED, BUDGET):
        assert compiler is not None
        return compiled(network, compiler, budget=0.5 if method == BUDGET else 1.0)
    return network


def by_blocks(network: nn.Module, use_reentrant: bool = False) -> nn.Module:
    """Activation checkpointing of every block."""
    for block in blocks_of(network):
        block.forward = partial(_checkpointed, block.forward, use_reentrant)
    return network


def _checkpointed(forward: Callable[..., Any], use_reentrant: bool, *args: Any, **kwargs: Any) -> Any:
    """A block that saves only its inputs. They are passed one by one, so that those in lists also count as saved.

    While a CUDA graph is captured, the state of random numbers cannot be set back: a replay may take others again.
    """
    leaves, structure = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=use_reentrant, preserve_rng_state=not is_capturing())


def _saved_on_cpu(network: nn.Module, inputs: Tensor) -> object:
    with save_on_cpu(pin_memory=True):
        return network(inputs)


def methods_of(name: str, network: nn.Module, device: str, compiler: str | None) -> list[str]:
    """The methods that apply to a network."""
    is_compiled = compiler is not None and name in WITH_COMPILER
    applies = {BLOCKS: bool(blocks_of(network)), ON_CPU: device == "cuda", COMPILED: is_compiled, BUDGET: is_compiled}
    return [method for method in METHODS if applies.get(method, True)]


def gradients_of(network: nn.Module, inputs: Tensor, precision: str) -> Tensor:
    """The gradients of all trained parameters as one vector, always with the same random numbers."""
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    torch.manual_seed(0)
    with autocast(inputs.device.type, precision):
        loss = network(inputs)
    return torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, parameters, materialize_grads=True)])


def deviation(gradients: Tensor, reference: Tensor) -> float:
    """The largest difference, relative to the reference's largest gradient."""
    return ((gradients - reference).abs().max() / reference.abs().max()).item()


def counted(
    network: WithLoss,
    method: str,
    inputs: Tensor,
    precision: str,
    reference: Tensor,
    frees: bool = False,
    **facts: int,
) -> tuple[dict, Step]:
    """What a method saves, its peak and how far its gradients are from the `reference`; and its step, warmed up.

    `frees`: steps free gradients first, so peaks include those that have come.
    """
    step, device = partial(training_step, network, inputs, precision, frees), inputs.device.type
    for _ in range(WARM_UP_STEPS):
        step()
    network.zero_grad(set_to_none=frees)  # not within what is measured
    row: dict = {**facts, "peak_bytes": peak_bytes(step, device)}
    if method in METHODS and method != ON_CPU:
        with autocast(device, precision):
            row["kept_bytes"] = kept_bytes(network.network, partial(network.run, inputs), [inputs])
    if method not in (COMPILED, BUDGET):  # a second run of the baseline shows the noise
        row["deviation"] = deviation(gradients_of(network, inputs, precision), reference)
    return row, step
