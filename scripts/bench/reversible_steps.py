"""Time of training steps of reversible networks, with activations stored and reconstructed."""

import copy
import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from models.bodies import RevNet, revnet38_cifar, revnet104
from scripts.bench import frame
from scripts.bench.measuring import timed
from scripts.bench.reversible_memory import NORMS
from scripts.recomputation_table import segmentation_network

VARIANTS = ("stored", "once", "twice")
FORWARD = "stored, forward pass"


class Unknown(nn.Module):
    """A unit that is not known to be a coupling, as a user's own invertible module."""

    def __init__(self, unit: nn.Module):
        super().__init__()
        self.unit = unit
        self.invertible = unit.invertible
        if unit.invertible:
            self.inverse = unit.inverse

    def forward(self, x: Tensor) -> Tensor:
        """As the unit."""
        return self.unit(x)


def variants(network: RevNet) -> dict[str, nn.Module]:
    """The same network three times: see METHOD in `reversible`."""
    stored, twice = copy.deepcopy(network), copy.deepcopy(network)
    stored.keep_activations = True
    for number in range(2, network.stages + 2):
        stage = getattr(twice, f"mod{number}")
        for name, unit in list(stage.named_children()):
            setattr(stage, name, Unknown(unit))
    return dict(zip(VARIANTS, (stored, network, twice), strict=True))


def cifar_steps(device: str, count: int, rounds: int, clock: frame.Clock) -> list[dict]:
    """Steps of RevNet-38 on `count` images, in every norm, layout and precision."""
    rows = []
    for norm in NORMS:
        for layout in ("contiguous", "channels_last"):
            for precision in ("float32", "bfloat16"):
                torch.manual_seed(0)
                network = revnet38_cifar(NORMS[norm], classes=10)
                network.to(device, memory_format=_format(layout))  # type: ignore[call-overload]  # torch's hints lack it
                images = torch.randn(count, 3, 32, 32, device=device).to(memory_format=_format(layout))
                labels = torch.randint(10, (count,), device=device)
                networks = variants(network)
                steps: dict[str, Callable[[], object]] = {
                    name: partial(_step, networks[name], images, labels, precision) for name in VARIANTS
                }
                steps[FORWARD] = partial(_forward, networks["stored"], images, labels, precision)
                times_ms = timed(steps, rounds, device)
                case = {"norm": norm, "layout": layout, "precision": precision}
                rows += [
                    {**case, "variant": name, "times_ms": times_ms[name], "flops": _flops(steps[name])}
                    for name in steps
                ]
                clock.report(", ".join(case.values()))
    return rows


def segmentation_steps(device: str, crop_size: int, rounds: int) -> list[dict]:
    """Steps of RevNet-104 with a DeepLabV3 head on two crops, and the angles of their gradients, for every norm."""
    rows = []
    for norm in NORMS:
        torch.manual_seed(0)
        once = segmentation_network(revnet104, NORMS[norm]).to(device)
        stored = segmentation_network(partial(revnet104, keep_activations=True), NORMS[norm]).to(device)
        stored.load_state_dict(once.state_dict())
        images = torch.randn(2, 3, crop_size, crop_size, device=device)
        labels = torch.randint(19, (2, crop_size, crop_size), device=device)
        exact = _gradient(stored, images, labels, "float32")
        angles = {
            "angle_float32": angle(_gradient(once, images, labels, "float32"), exact),
            "angle_bfloat16": angle(_gradient(once, images, labels, "bfloat16"), exact),
            "angle_bfloat16_stored": angle(_gradient(stored, images, labels, "bfloat16"), exact),
        }
        steps = {
            name: partial(_step, network, images, labels, "float32")
            for name, network in (("stored", stored), ("once", once))
        }
        rows.append({"norm": norm, **timed(steps, rounds, device), **angles})
    return rows


def angle(gradient: Tensor, exact: Tensor) -> float:
    """Degrees between two gradients, each flattened."""
    gradient, exact = gradient.double(), exact.double()
    sine = (gradient / gradient.norm() - exact / exact.norm()).norm() / 2  # exact for small angles
    return 2 * math.degrees(math.asin(min(1.0, sine.item())))


def _forward(network: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Tensor:
    with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == "bfloat16"):
        return F.cross_entropy(network(images), labels)


def _step(network: nn.Module, images: Tensor, labels: Tensor, precision: str) -> None:
    loss = _forward(network, images, labels, precision)
    network.zero_grad()
    loss.backward()


def _gradient(network: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Tensor:
    _step(network, images, labels, precision)
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def _flops(step: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


def _format(layout: str) -> torch.memory_format:
    return torch.channels_last if layout == "channels_last" else torch.contiguous_format
