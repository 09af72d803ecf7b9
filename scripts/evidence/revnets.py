"""Reversible networks and their rivals, for `reversible`: chains of units, steps of whole networks, and gradients."""

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from engine import assemble
from engine.checkpoint import files
from engine.configuration import config as configuration
from engine.prediction import trained_forward
from engine.process.distributed import World, device_of
from engine.schema.classification import ClassificationRun
from keepless import ABN, InPlaceABN, run_reversibly
from keepless.norms.backends.compiled import compiler_available
from keepless.reversible.drift import drift
from keepless.saved import kept_bytes
from keepless.torch_internals import FakeTensorMode
from models import bodies
from models.bodies import RevNet, resnet110_cifar, revnet110_cifar
from models.bodies.revnet_units import ReversibleUnit
from models.recomputation import RECOMPUTE, choose_recomputation
from scripts.evidence.counted import CROP_SIZE, kept_by_segmentation
from scripts.reports.measuring import PRECISIONS, autocast, compiled, operations_of, peak_bytes

NORMS: dict[str, Callable[[int], nn.Module]] = {"std": partial(ABN, activation="relu"), "inplace": InPlaceABN}
CHANNELS, SIDE, IMAGES = 32, 16, 4  # of the units of Table 1
BUDGETS = (1.0, 0.5)  # of torch.compile: the share of activations that it may keep
VARIANTS = ("stored", "once", "twice")
Run = Callable[[Sequence[nn.Module], Tensor], Tensor]


def activations_of(title: str) -> dict:
    """Megabytes (10^6 bytes) that a step on 100 CIFAR images keeps, such as of "ResNet-32"."""
    build = getattr(bodies, f"{title.lower().replace('-', '')}_cifar")
    row: dict = {"network": title}
    for norm, layer in NORMS.items():
        with FakeTensorMode():
            network = build(layer, classes=10)
            images, labels = torch.empty(100, 3, 32, 32), torch.empty(100, dtype=torch.long)
            kept = kept_bytes(network, partial(loss_of, network, images, labels, "float32"), [images])
            row |= {norm: kept / 1e6, "parameters": sum(parameter.numel() for parameter in network.parameters())}
    return row


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


def chain_of(count: int) -> Iterator[dict]:
    """RevNet's Table 1: every method on a chain of units, in float32 with standard norms."""
    torch.manual_seed(0)
    units = nn.ModuleList(ReversibleUnit(CHANNELS, (CHANNELS, CHANNELS), norm_act=NORMS["std"]) for _ in range(count))
    x = torch.randn(IMAGES, CHANNELS, SIDE, SIDE, requires_grad=True)
    for method, run_of in METHODS.items():
        run = partial(run_of(count), list(units))

        def forward(run: Callable[[Tensor], Tensor] = run) -> Tensor:
            return run(x * 1)

        def step(forward: Callable[[], Tensor] = forward) -> None:
            forward().sum().backward()

        kept = kept_bytes(units, forward, [])
        step()  # gradients exist, so that they are not in the peak
        operations = operations_of(step)
        row = {"units": count, "method": method, "kept_bytes": kept, "peak_bytes": peak_bytes(step, "cpu")}
        yield {**row, "flops": operations}


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


def step_of(
    network: nn.Module,
    images: Tensor,
    labels: Tensor,
    precision: str,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> None:
    """Forward and backward pass. Gradients of the step before live until the loss is there."""
    loss = loss_of(network if forward is None else forward, images, labels, precision)
    network.zero_grad()
    loss.backward()


def gradient_of(network: nn.Module, images: Tensor, labels: Tensor, precision: str) -> Tensor:
    """The gradients of all parameters, flattened."""
    step_of(network, images, labels, precision)
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def restored_angles(root: str | None, checkpoints: str | None, device: str) -> Iterator[dict]:
    """Angles at the weights of copies of a run's last.pt, in the order of their steps.

    ValueError: they are not of one RevNet's training.
    """
    steps = {file: files.load(file)["step"] for file in Path(str(checkpoints)).glob("*.pt")}
    if not steps:
        raise ValueError(f"checkpoints={checkpoints}: expected a folder with copies of a run's last.pt")
    first, *_ = ordered = sorted(steps, key=steps.__getitem__)
    config = configuration.of_checkpoint(files.load(first), ClassificationRun, f"{first}")
    keys = configuration.fixed(config)
    config.data.root, config.data.workers = root, 0
    images, _ = assemble.classified_splits(config.data)
    training = {name: keys[f"trainer.{name}"] for name in ("steps", "precision", "compile")}
    training |= {"units": keys["body.structure"], "norm": config.norm.name}
    for file in ordered:
        state, step = files.load(file), steps[file]
        if configuration.fixed(configuration.of_checkpoint(state, ClassificationRun, f"{file}")) != keys:
            raise ValueError(f"{file} is of another training than {first}: expected checkpoints of one run")
        forward = trained_forward(config, state, file, images.classes, averaged=False, device=device_of(device))
        if not isinstance(forward.network, RevNet) or not forward.network.reversible_blocks:
            raise ValueError(f"{file} is of a network without reversible blocks: expected a RevNet's")
        minibatch = next(iter(assemble.classified_crops(config, images, step + 1, World(), start_step=step)))
        shown, labels = forward.normalised(minibatch["image"]), minibatch["label"].to(device)
        for precision in PRECISIONS:
            found = angles_of(forward.network.train(), shown, labels, precision)
            yield {"precision": precision, "step": step, **found} | ({"run": training} if file == first else {})


def angles_of(network: RevNet, images: Tensor, labels: Tensor, precision: str) -> dict[str, float]:
    """Angles at the present weights, and the drift. The network's statistics and mode stay as they are."""
    twin = copy.deepcopy(network)

    def gradient(keep_activations: bool, precision: str) -> Tensor:
        twin.keep_activations = keep_activations
        return gradient_of(twin, images, labels, precision)

    exact = gradient(True, precision)
    found = {"angle": angle(gradient(False, precision), exact)}
    if precision != "float32":
        found["angle_to_float32"] = angle(exact, gradient(True, "float32"))
    with autocast(images.device.type, precision):
        found["drift"] = drift(twin.reversible_blocks, images).item()
    return found
