"""Methods to train a network in less memory, and what each of them keeps, costs and changes."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from engine.memory import keep_freed_memory
from models.layers import recompute_activations
from scripts.bench.abn_strategies import compiled
from scripts.bench.frame import reason
from scripts.bench.measuring import kept_bytes, peak_bytes, timed
from scripts.bench.networks_list import EXACT_DEFAULT, EXACT_SIZE, blocks_of, build

PLAIN, RECOMPUTED, BLOCKS = "plain", "recompute_activations", "checkpoint per block"
ON_CPU, COMPILED, BUDGET = "save_on_cpu", "compiled", "compiled, budget 0.5"
ALL = "all methods"
METHODS = (PLAIN, RECOMPUTED, BLOCKS, ON_CPU, COMPILED, BUDGET)
WITH_COMPILER = ("resnet50", "mobilenet_v2", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "vit_b_16")
EXACT_IMAGES = 4  # on which gradients are compared

Forward = Callable[[Tensor], object]  # images -> tensors, maybe in containers


def methods_of(name: str, network: nn.Module, device: str, compiler: str | None) -> list[str]:
    """The methods that apply to a network."""
    applies = {
        BLOCKS: bool(blocks_of(network)),
        ON_CPU: device == "cuda",
        COMPILED: compiler is not None and name in WITH_COMPILER,
        BUDGET: compiler is not None and name in WITH_COMPILER,
    }
    return [method for method in METHODS if applies.get(method, True)]


def forward_of(network: nn.Module, method: str, compiler: str | None = None) -> Forward:
    """A network's forward pass by one of the methods. This may change the network."""
    if method == RECOMPUTED:
        return recompute_activations(network)
    if method == BLOCKS:
        for block in blocks_of(network):
            block.forward = partial(_checkpointed, block.forward)
    elif method == ON_CPU:
        return partial(_saved_on_cpu, network)
    elif method in (COMPILED, BUDGET):
        assert compiler is not None
        return compiled(network, compiler, budget=0.5 if method == BUDGET else 1.0)
    return network


def _checkpointed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A block that keeps its inputs alone. They are passed one by one, so that those in lists are counted as kept."""
    leaves, structure = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        return forward(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False)


def _saved_on_cpu(network: nn.Module, images: Tensor) -> object:
    with save_on_cpu(pin_memory=True):
        return network(images)


class Measurement:
    """What a process that measures networks holds, see `Elsewhere`."""

    def __init__(self, threads: int):
        torch.set_num_threads(threads)
        keep_freed_memory()

    def of(self, *arguments: Any) -> tuple[list[dict], list[dict]]:
        """See `measured`."""
        return measured(*arguments)


def measured(
    name: str, device: str, images: int, size: int, rounds: int, compiler: str | None
) -> tuple[list[dict], list[dict]]:
    """Steps of a network in training mode and float32, on `images` images of `size` pixels.

    Returns:
        A row for each method that works, and the reason for each that fails:
        {"network", "method", "kept_bytes": None if it cannot be counted, "peak_bytes", "times_ms",
        "deviation", "same_outputs": see `exactness`}, {"network", "method", "reason"}

    Raises:
        Exception: the plain network fails.
    """
    plain = _network(name, size)
    pixels = torch.randn(images, 3, size, size, device=device)
    rows: dict[str, dict] = {}
    left_out: dict[str, str] = {}
    steps: dict[str, Callable[[], None]] = {}
    for method in methods_of(name, plain, device, compiler):
        try:
            network = copy.deepcopy(plain).to(device)
            step = partial(_step, network, forward := forward_of(network, method, compiler), pixels)
            step()  # gradients exist; compiles
            kept = None if method == ON_CPU else kept_bytes(network, partial(forward, pixels), [pixels])
            exact = exactness(name, method, device) if method in (RECOMPUTED, BLOCKS) else {}
            network.zero_grad()  # the peak has the gradients of one step
            rows[method] = {"kept_bytes": kept, "peak_bytes": peak_bytes(step, device), **exact}
            steps[method] = step
        except Exception as error:  # e.g. out of memory, or of the compiler: the others can still be measured
            if method == PLAIN:  # nothing to compare with
                raise
            left_out[method] = reason(error)
    times_ms = timed(steps, rounds, device)
    torch._dynamo.reset()  # frees compiled code
    return (
        [{"network": name, "method": method, **row, "times_ms": times_ms[method]} for method, row in rows.items()],
        [{"network": name, "method": method, "reason": why} for method, why in left_out.items()],
    )


def _network(name: str, size: int) -> nn.Module:
    """A network with random weights, also where it starts from zeros: behind zeros, all gradients would be zero."""
    torch.manual_seed(0)
    network = build(name, size)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return network


def _step(network: nn.Module, forward: Forward, pixels: Tensor) -> None:
    loss = _loss(forward(pixels))
    network.zero_grad()
    loss.backward()


def _loss(outputs: object) -> Tensor:
    """A loss for whatever a network returns: the mean squares of its outputs, added."""
    return torch.stack([output.square().mean() for output in tree_leaves(outputs)]).sum()


def exactness(name: str, method: str, device: str) -> dict:
    """Compare a method with the plain network in float64, on small images and with the same random numbers.

    Returns:
        {"deviation": largest deviation of a gradient, relative to the largest gradient,
        "same_outputs": whether the outputs are equal to the bit}
    """
    size = EXACT_SIZE.get(name, EXACT_DEFAULT)
    plain = _network(name, size).to(device, torch.float64)
    pixels = torch.randn(EXACT_IMAGES, 3, size, size, device=device, dtype=torch.float64)
    network = copy.deepcopy(plain)
    found = []
    for module, forward in ((plain, plain), (network, forward_of(network, method))):
        torch.manual_seed(0)
        outputs = forward(pixels)
        parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(_loss(outputs), parameters, materialize_grads=True)
        found.append((torch.cat([g.flatten() for g in gradients]), tree_leaves(outputs)))
    (gradient, outputs), (own_gradient, own_outputs) = found
    return {
        "deviation": ((own_gradient - gradient).abs().max() / gradient.abs().max()).item(),
        "same_outputs": all(map(torch.equal, own_outputs, outputs)),
    }
