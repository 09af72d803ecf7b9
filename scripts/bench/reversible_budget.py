"""Memory against time of every way to train in less memory, on networks of equal size and accuracy."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx

from models.bodies import resnet110_cifar, revnet110_cifar
from models.layers.norms.backends.compiled import compiler_available
from models.recomputation import RECOMPUTE, choose_recomputation
from scripts.bench.measuring import kept_bytes, peak_bytes, timed
from scripts.bench.reversible_memory import NORMS

BUDGETS = (1.0, 0.5)  # of torch.compile: the share of activations that it may keep


def budget(device: str, images: int, rounds: int) -> list[dict]:
    """Steps of ResNet-110 and RevNet-110 on `images` CIFAR images in float32: time, bytes kept, peak."""
    pixels = torch.randn(images, 3, 32, 32, device=device)
    labels = torch.randint(10, (images,), device=device)
    steps: dict[str, Callable[[], object]] = {}
    rows = []
    for title, network in candidates(device).items():
        forward = partial(_loss, network, pixels, labels)
        row = {"method": title, "kept_bytes": None if "compiled" in title else kept_bytes(network, forward, [pixels])}
        step = partial(_step, network, forward)
        step()  # gradients exist; compiles
        rows.append({**row, "peak_bytes": peak_bytes(step, device)})
        steps[title] = step
    times_ms = timed(steps, rounds, device)
    return [{**row, "times_ms": times_ms[str(row["method"])]} for row in rows]


def candidates(device: str) -> dict[str, nn.Module]:
    """{title: network}; compiled ones only where there is a compiler."""
    found: dict[str, nn.Module] = {}
    for norm, layer in NORMS.items():
        for recompute in RECOMPUTE:
            network = resnet110_cifar(layer, classes=10).to(device)
            choose_recomputation(network, network, recompute)
            found[f"ResNet-110, {norm}" + ("" if recompute == "none" else f", {recompute}")] = network
        found[f"RevNet-110, {norm}, reversible"] = revnet110_cifar(layer, classes=10).to(device)
    if compiler_available(device):
        for share in BUDGETS:
            network = resnet110_cifar(NORMS["std"], classes=10).to(device)
            found[f"ResNet-110, std, compiled, budget {share:g}"] = _Budgeted(network, share)
    return found


class _Budgeted(nn.Module):
    """A compiled network that may keep a share of its activations (`activation_memory_budget`)."""

    def __init__(self, network: nn.Module, share: float):
        super().__init__()
        self.network = network

        def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            with torch._functorch.config.patch(activation_memory_budget=share):
                return compile_fx(graph, inputs)

        self.compiled = torch.compile(network, dynamic=False, backend=backend)  # one each: graphs are not shared

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """As the network."""
        return self.compiled(pixels)


def _loss(network: nn.Module, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(network(pixels), labels)


def _step(network: nn.Module, forward: Callable[[], torch.Tensor]) -> None:
    loss = forward()
    network.zero_grad()
    loss.backward()
