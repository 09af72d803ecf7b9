"""What networks keep for the backward pass, counted under fake tensors, and RevNet's Table 1."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from models import bodies
from models.bodies.revnet_units import ReversibleUnit
from models.layers import ABN, InPlaceABN, run_reversibly
from scripts.bench.measuring import kept_bytes, peak_bytes
from scripts.recomputation_table import segmentation_network

NORMS: dict[str, Callable[[int], nn.Module]] = {"std": partial(ABN, activation="relu"), "inplace": InPlaceABN}
PUBLISHED = {  # MB, MemCNN's README
    "ResNet-32": 238.6,
    "ResNet-110": 810.7,
    "ResNet-164": 2452.8,
    "RevNet-38": 85.6,
    "RevNet-110": 85.7,
    "RevNet-164": 432.7,
}
DEPTHS = (4, 16, 64, 256)  # units
CHANNELS, SIDE, IMAGES = 32, 16, 4  # of the units of Table 1

Run = Callable[[Sequence[nn.Module], Tensor], Tensor]


def activations() -> list[dict]:
    """Megabytes (10^6 bytes) kept of a step on 100 CIFAR images, for MemCNN's six networks."""
    rows = []
    for title in PUBLISHED:
        build = getattr(bodies, f"{title.lower().replace('-', '')}_cifar")
        row: dict = {"network": title}
        for norm, layer in NORMS.items():
            with FakeTensorMode():
                network = build(layer, classes=10)
                images, labels = torch.empty(100, 3, 32, 32), torch.empty(100, dtype=torch.long)
                row[norm] = kept_bytes(network, lambda: F.cross_entropy(network(images), labels), [images]) / 1e6  # noqa: B023
                row["parameters"] = sum(parameter.numel() for parameter in network.parameters())
        rows.append(row)
    return rows


def segmentation() -> list[dict]:
    """Bytes per input pixel kept by RevNet-104 with a DeepLabV3 head, beside ResNeXt-101."""
    rows = [bytes_per_pixel("ResNeXt-101", bodies.resnext101, norm, "float32") for norm in NORMS]
    for norm in NORMS:
        for reversible in (False, True):
            build = partial(bodies.revnet104, keep_activations=not reversible)
            for precision in ("float32", "bfloat16"):
                rows.append(bytes_per_pixel("RevNet-104", build, norm, precision, reversible))
    return rows


def bytes_per_pixel(
    title: str, build: Callable[..., bodies.Body], norm: str, precision: str, reversible: bool = False
) -> dict:
    """{"case", "bytes_per_pixel"} of a body with the head, at 512 pixels, in float32 or under autocast."""
    kept, crop_size = [], 512
    with FakeTensorMode():
        network = segmentation_network(build, NORMS[norm])
        for crops in (2, 3):  # what an additional crop keeps, without low-precision copies of the weights
            images = torch.empty(crops, 3, crop_size, crop_size)
            labels = torch.empty(crops, crop_size, crop_size, dtype=torch.long)
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
                kept.append(kept_bytes(network, lambda: F.cross_entropy(network(images), labels), [images]))  # noqa: B023
    case = f"{title}, {norm}, {'reversible' if reversible else 'stored'}"
    if title != "ResNeXt-101":
        case += f", {precision}"
    return {"case": case, "bytes_per_pixel": round((kept[1] - kept[0]) / crop_size**2)}


def _plain(units: Sequence[nn.Module], x: Tensor) -> Tensor:
    for unit in units:
        x = unit(x)
    return x


def _segments(length: int, units: Sequence[nn.Module], x: Tensor) -> Tensor:
    for start in range(0, len(units), length):
        x = checkpoint(_plain, units[start : start + length], x, use_reentrant=False)
    return x


def _recursive(units: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Keeps the input of each half, in every half again: O(log L) memory, O(L log L) operations."""
    if len(units) == 1:
        return units[0](x)
    middle = len(units) // 2
    x = checkpoint(_recursive, units[:middle], x, use_reentrant=False)
    return checkpoint(_recursive, units[middle:], x, use_reentrant=False)


METHODS: dict[str, Callable[[int], Run]] = {
    "naive": lambda count: _plain,
    "blocks": lambda count: partial(_segments, 1),
    "sqrt": lambda count: partial(_segments, round(math.sqrt(count))),
    "recursive": lambda count: _recursive,
    "reversible": lambda count: run_reversibly,
}


def depths() -> list[dict]:
    """RevNet's Table 1: every method on chains of units, in float32 with standard norms."""
    rows = []
    for count in DEPTHS:
        torch.manual_seed(0)
        units = nn.ModuleList(
            ReversibleUnit(CHANNELS, (CHANNELS, CHANNELS), norm_act=NORMS["std"]) for _ in range(count)
        )
        x = torch.randn(IMAGES, CHANNELS, SIDE, SIDE, requires_grad=True)
        for method, run_of in METHODS.items():
            run = partial(run_of(count), list(units))
            kept = kept_bytes(units, lambda: run(x * 1), [])  # noqa: B023
            step = lambda: run(x * 1).sum().backward()  # noqa: E731, B023
            step()  # gradients exist
            with FlopCounterMode(display=False) as counter:
                step()
            row = {"units": count, "method": method, "kept_bytes": kept, "peak_bytes": peak_bytes(step, "cpu")}
            rows.append({**row, "flops": counter.get_total_flops()})
    return rows
