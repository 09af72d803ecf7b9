"""Memory of reversible networks (RevNet's Table 1), and the time of their steps."""

import copy
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keepless import ABN, InPlaceABN, run_reversibly
from keepless.norms.backends.compiled import compiler_available
from keepless.saved import kept_bytes
from keepless.torch_internals import FakeTensorMode
from models import bodies
from models.bodies import RevNet, resnet110_cifar, revnet38_cifar, revnet104, revnet110_cifar
from models.bodies.revnet_units import ReversibleUnit
from models.recomputation import RECOMPUTE, choose_recomputation
from scripts.evidence import frame, measuring
from scripts.evidence.measuring import autocast, compiled, operations_of, peak_bytes, timed, training_step
from scripts.evidence.strategy_table import CROP_SIZE, kept_by_segmentation, segmentation_network

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
    for norm, reversible, precision in itertools.product(NORMS, (False, True), measuring.PRECISIONS):
        build = partial(bodies.revnet104, keep_activations=not reversible)
        rows.append(bytes_per_pixel("RevNet-104", build, norm, precision, reversible))
    return rows


def bytes_per_pixel(
    title: str, build: Callable[..., bodies.Body], norm: str, precision: str, reversible: bool = False
) -> dict:
    """{"case", "bytes_per_pixel"} of a body with the head, without images, in float32 or under autocast."""
    # The bytes of one more crop: without low-precision copies of the weights.
    two, three = (kept_by_segmentation(build, NORMS[norm], crops, precision, with_images=False) for crops in (2, 3))
    case = f"{title}, {norm}, {'reversible' if reversible else 'stored'}"
    if title != "ResNeXt-101":
        case += f", {precision}"
    return {"case": case, "bytes_per_pixel": round((three - two) / CROP_SIZE**2)}


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
            step()  # gradients exist, so that they are not in the peak
            operations = operations_of(step)
            row = {"units": count, "method": method, "kept_bytes": kept, "peak_bytes": peak_bytes(step, "cpu")}
            rows.append({**row, "flops": operations})
    return rows


BUDGETS = (1.0, 0.5)  # of torch.compile: the share of activations that it may keep


def budget(device: str, images: int, rounds: int) -> list[dict]:
    """Steps of ResNet-110 and RevNet-110 on `images` CIFAR images in float32: time, bytes kept, peak."""
    pixels = torch.randn(images, 3, 32, 32, device=device)
    labels = torch.randint(10, (images,), device=device)
    steps: dict[str, Callable[[], object]] = {}
    rows = []
    for title, (network, run) in candidates(device).items():
        loss = partial(loss_of, run, pixels, labels, "float32")
        row = {"method": title, "kept_bytes": None if run is not network else kept_bytes(network, loss, [pixels])}
        step = partial(training_step, network, loss)
        step()  # gradients exist; compiles
        rows.append({**row, "peak_bytes": peak_bytes(step, device, network)})
        steps[title] = step
    times_ms = timed(steps, rounds, device)
    return [{**row, "times_ms": times_ms[str(row["method"])]} for row in rows]


def candidates(device: str) -> dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]]:
    """{title: network, and its forward pass}; compiled ones only where there is a compiler."""
    found: dict[str, tuple[nn.Module, Callable[[Tensor], Tensor]]] = {}
    for norm, layer in NORMS.items():
        for recompute in RECOMPUTE:
            network = resnet110_cifar(layer, classes=10).to(device)
            choose_recomputation(network, network, recompute)
            found[f"ResNet-110, {norm}" + ("" if recompute == "none" else f", {recompute}")] = network, network
        network = revnet110_cifar(layer, classes=10).to(device)
        found[f"RevNet-110, {norm}, reversible"] = network, network
    if compiler_available(device):
        for share in BUDGETS:
            network = resnet110_cifar(NORMS["std"], classes=10).to(device)
            title = f"ResNet-110, std, compiled, budget {share:g}"
            found[title] = network, compiled(network, "inductor", share)
    return found


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
        return self.unit(x)


def variants(network: RevNet) -> dict[str, nn.Module]:
    """The same network three times: see docs/results/templates/reversible.md."""
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
    for norm, layout, precision in itertools.product(NORMS, measuring.LAYOUTS, measuring.PRECISIONS):
        torch.manual_seed(0)
        network = revnet38_cifar(NORMS[norm], classes=10)
        network.to(device, memory_format=measuring.LAYOUTS[layout])  # type: ignore[call-overload]  # torch's hints lack it
        images = torch.randn(count, 3, 32, 32, device=device).to(memory_format=measuring.LAYOUTS[layout])
        labels = torch.randint(10, (count,), device=device)
        networks = variants(network)
        steps: dict[str, Callable[[], object]] = {
            name: partial(step_of, networks[name], images, labels, precision) for name in VARIANTS
        }
        steps[FORWARD] = partial(loss_of, networks["stored"], images, labels, precision)
        times_ms = timed(steps, rounds, device)
        case = {"norm": norm, "layout": layout, "precision": precision}
        for name, step in steps.items():
            rows.append({**case, "variant": name, "times_ms": times_ms[name], "flops": operations_of(step)})
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
        exact = gradient_of(stored, images, labels, "float32")
        angles = {
            "angle_float32": angle(gradient_of(once, images, labels, "float32"), exact),
            "angle_bfloat16": angle(gradient_of(once, images, labels, "bfloat16"), exact),
            "angle_bfloat16_stored": angle(gradient_of(stored, images, labels, "bfloat16"), exact),
        }
        steps = {
            name: partial(step_of, network, images, labels, "float32")
            for name, network in (("stored", stored), ("once", once))
        }
        rows.append({"norm": norm, **timed(steps, rounds, device), **angles})
    return rows


def angle(gradient: Tensor, exact: Tensor) -> float:
    """Degrees between two gradients, each flattened."""
    gradient, exact = gradient.double(), exact.double()
    sine = (gradient / gradient.norm() - exact / exact.norm()).norm() / 2  # exact for small angles
    return 2 * math.degrees(math.asin(min(1.0, sine.item())))


def loss_of(forward: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, precision: str) -> Tensor:
    with autocast(images.device.type, precision):
        logits = forward(images)
        if labels.dim() > 1:  # pixels: in training, a segmentation network keeps its own resolution
            logits = F.interpolate(logits, labels.shape[1:], mode="bilinear")
        return F.cross_entropy(logits, labels)


def step_of(network: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Tensor:
    return training_step(network, partial(loss_of, network, images, labels, precision))


def gradient_of(network: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Tensor:
    """The gradients of all parameters, flattened."""
    step_of(network, images, labels, precision)
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
