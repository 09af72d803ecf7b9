"""Measure how restored activations change the gradients of a training (RevNet, Figure 4):

    python -m scripts.evidence.reconstruction_error root=DIR out=FILE.json
    python -m scripts.evidence.reconstruction_error root=DIR steps=100 every=10 precisions=[bfloat16] out=FILE.json
    python -m scripts.evidence.reconstruction_error root=DIR checkpoints=FOLDER out=FILE.json

Trains two RevNets on CIFAR-10 side by side: one stores its activations, the other restores them. Both start from the
same weights and see the same crops. Records the angle between restored and stored gradients, the loss and the test
error, in float32 and bfloat16. With checkpoints=FOLDER it trains nothing: FOLDER holds copies of a RevNet run's
last.pt, made while it trained. At the weights of each, it records the angle on the minibatch that the run takes next.
"""

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from torch.optim.lr_scheduler import MultiStepLR

from datasets import ClassificationDataset, CropsInMemory, PaddedCrop, cifar10
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint import trained_forward
from engine.configuration import config as configuration
from engine.distributed import World, device_of
from engine.schema.classification import ClassificationRun
from engine.schema.keys import key
from keepless.reversible.drift import drift
from models.bodies import RevNet, revnet38_cifar, revnet110_cifar, revnet164_cifar
from scripts.evidence import frame
from scripts.evidence.measuring import PRECISIONS, autocast
from scripts.evidence.reversible_costs import NORMS, angle, gradient_of, step_of
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns

BODIES = {"revnet38": revnet38_cifar, "revnet110": revnet110_cifar, "revnet164": revnet164_cifar}
MEAN, STD = (125.3, 123.0, 113.9), (63.0, 62.1, 66.7)  # of CIFAR-10's training pixels


@dataclass
class ReconstructionArguments(frame.DeviceArguments):
    root: str | None = None  # CIFAR-10, in any form that data=cifar10 takes; with checkpoints: the run's data
    checkpoints: str | None = None  # folder with copies of a run's last.pt; null: train two networks
    body: str = key("revnet38", one_of=tuple(BODIES))  # the network
    norm: str = key("std", one_of=tuple(NORMS))  # its norms
    steps: int = key(600, above=0)  # length of the training
    every: int = key(25, above=0)  # steps between two measurements
    images: int = key(100, above=1)  # per step
    lr: float = key(0.1, above=0)  # learning rate
    test_images: int = key(10_000, above=0)  # for the test error
    precisions: list[str] = field(default_factory=lambda: list(PRECISIONS))  # a training for each

    def check(self) -> None:
        super().check()
        frame.check_choices("precisions", self.precisions, PRECISIONS)
        default = type(self)()
        for name in ("body", "norm", "steps", "every", "images", "lr", "test_images"):
            if self.checkpoints and getattr(self, name) != getattr(default, name):
                raise ValueError(f"{name}={getattr(self, name)} is of a training: leave it out, or checkpoints")


def measure(arguments: ReconstructionArguments, clock: frame.Clock) -> dict:
    return (of_checkpoints if arguments.checkpoints else of_two_trainings)(arguments, clock)


def of_two_trainings(arguments: ReconstructionArguments, clock: frame.Clock) -> dict:
    """Train both networks in each precision. ValueError if there is no CIFAR-10 in `root`."""
    train, test = (cifar10(arguments.root, split) for split in ("train", "test"))
    rows, errors = [], []
    for precision in arguments.precisions:
        torch.manual_seed(0)
        restored = BODIES[arguments.body](NORMS[arguments.norm], classes=10).to(arguments.device)
        stored = copy.deepcopy(restored)
        stored.keep_activations = True
        for row in _train(arguments, stored, restored, train, precision):
            rows.append({"precision": precision, **row})
            clock.report(f"{precision} step {row['step']}: {row['angle']:.4f} degrees")
        for name, network in (("stored", stored), ("restored", restored)):
            errors.append(
                {"precision": precision, "network": name, "error": _error(network, test, arguments, precision)}
            )
    return {"rows": rows, "errors": errors}


def of_checkpoints(arguments: ReconstructionArguments, clock: frame.Clock) -> dict:
    """Measure at every checkpoint, in the order of their steps. ValueError: they are not of one RevNet's training."""
    steps = {file: checkpoint.load(file)["step"] for file in Path(str(arguments.checkpoints)).glob("*.pt")}
    if not steps:
        raise ValueError(f"checkpoints={arguments.checkpoints}: expected a folder with copies of a run's last.pt")
    first, *_ = ordered = sorted(steps, key=steps.__getitem__)
    config = _configuration(checkpoint.load(first), first)
    keys = configuration.fixed(config)
    config.data.root, config.data.workers = arguments.root, 0
    images, _ = assemble.classified_splits(config.data)
    device, rows = device_of(arguments.device), []
    for file in ordered:
        state, step = checkpoint.load(file), steps[file]
        if configuration.fixed(_configuration(state, file)) != keys:
            raise ValueError(f"{file} is of another training than {first}: expected checkpoints of one run")
        forward = trained_forward(config, state, file, images.classes, averaged=False, device=device)
        if not isinstance(forward.network, RevNet) or not forward.network.reversible_blocks:
            raise ValueError(f"{file} is of a network without reversible blocks: expected a RevNet's")
        minibatch = next(iter(assemble.classified_crops(config, images, step + 1, World(), start_step=step)))
        shown, labels = forward.normalised(minibatch["image"]), minibatch["label"].to(device)
        for precision in arguments.precisions:
            found = angles_of(forward.network.train(), shown, labels, precision)
            rows.append({"precision": precision, "step": step, **found})
            clock.report(f"step {step}, {precision}: {found['angle']:.4f} degrees")
    training = {name: keys[f"trainer.{name}"] for name in ("steps", "precision", "compile")}
    return {"run": {**training, "units": keys["body.structure"], "norm": config.norm.name}, "rows": rows}


def _configuration(state: dict, file: Path) -> ClassificationRun:
    return configuration.of_checkpoint(state, ClassificationRun, f"{file}")


def _train(
    arguments: ReconstructionArguments, stored: RevNet, restored: RevNet, train: ClassificationDataset, precision: str
) -> Iterator[dict]:
    networks = {"stored": stored, "restored": restored}
    optimizers = [
        torch.optim.SGD(network.parameters(), arguments.lr, momentum=0.9, weight_decay=2e-4)
        for network in networks.values()
    ]
    milestones = [arguments.steps // 2, 3 * arguments.steps // 4]
    schedules = [MultiStepLR(optimizer, milestones) for optimizer in optimizers]
    for step, (images, labels) in enumerate(_minibatches(train, arguments)):
        if step % arguments.every == 0:
            measured = angles_of(restored, images, labels, precision)
        losses = {}
        for (name, network), optimizer, schedule in zip(networks.items(), optimizers, schedules, strict=True):
            losses[name] = step_of(network, images, labels, precision).item()
            optimizer.step()
            schedule.step()
        if step % arguments.every == 0:
            yield {"step": step, **measured, **{f"loss_{name}": loss for name, loss in losses.items()}}


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


def _minibatches(dataset: ClassificationDataset, arguments: ReconstructionArguments) -> Iterator[tuple[Tensor, Tensor]]:
    crops = CropsInMemory(dataset, PaddedCrop(padding=2, fill=MEAN), seed=0)
    if arguments.images > len(dataset):
        raise ValueError(f"images={arguments.images}: expected at most {len(dataset)}, the images of the data")
    per_epoch = len(dataset) // arguments.images
    for step in range(arguments.steps):
        epoch, place = divmod(step, per_epoch)
        order = np.random.default_rng(epoch).permutation(len(dataset))
        numbers = order[place * arguments.images :][: arguments.images].tolist()
        minibatch = crops.__getitems__([(epoch, number) for number in numbers])
        yield _normalised(minibatch["image"], arguments.device), minibatch["label"].to(arguments.device)


def _normalised(images: Tensor, device: str) -> Tensor:
    mean, std = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (MEAN, STD))
    return (images.to(device) - mean) / std


@torch.no_grad()
def _error(network: RevNet, test: ClassificationDataset, arguments: ReconstructionArguments, precision: str) -> float:
    """Percentage of test images that are classified wrong."""
    assert test.pixels is not None
    network.eval()
    wrong, count = 0, min(arguments.test_images, len(test))
    for chosen in np.array_split(np.arange(count) * len(test) // count, max(1, count // 500)):
        images = _normalised(torch.from_numpy(test.pixels[chosen]), arguments.device)
        with autocast(images.device.type, precision):
            predicted = network(images).argmax(1).cpu()
        wrong += int((predicted != torch.from_numpy(test.labels[chosen])).sum())
    return round(100 * wrong / count, 2)


CURVE_COLUMNS: Columns = [
    ("", "{precision}"),
    ("largest angle", lambda found: f"{max(found['angle']):.2g}°"),
    ("median angle", lambda found: f"{np.median(found['angle']):.2g}°"),
    ("largest drift", lambda found: f"{max(found['drift']):.1g}"),
]
COLUMNS: Columns = [
    *CURVE_COLUMNS,
    ("error stored, %", lambda found: f"{found['stored']['error']:.2f}"),
    ("error restored, %", lambda found: f"{found['restored']['error']:.2f}"),
]


def page(result: dict, name: str) -> str:
    errors = frame.grouped(result.get("errors", ()), ["precision"], "network")
    rows = [
        {**found, **errors.get(precision, {}), "precision": precision}
        for precision, found in curves_of(result["rows"]).items()
    ]
    if "run" in result:  # of checkpoints
        return frame.page_text(
            "restored_gradients",
            result,
            **{key: f"{value:,}" if key == "steps" else str(value) for key, value in result["run"].items()},
            count=len({row["step"] for row in result["rows"]}),
            picture=f"![angle and drift over steps]({name}.png)",
            table=columns(rows, CURVE_COLUMNS),
        )
    return frame.page_text(
        "reconstruction_error",
        result,
        picture=f"![angle, loss and drift over steps]({name}.png)",
        table=columns(rows, COLUMNS),
    )


def curves_of(rows: Iterable[dict]) -> dict[str, dict[str, list]]:
    """{precision: {name of a quantity: its values over steps}}"""
    curves: dict[str, dict[str, list]] = {}
    for row in rows:
        of_precision = curves.setdefault(row["precision"], {})
        for name, value in row.items():
            of_precision.setdefault(name, []).append(value)
    return curves


SMALLEST = 1e-5  # degrees
QUANTITIES = {  # {panel: {quantity: (label, style)}}; what has stored activations alone is dotted
    "angle of the gradient, degrees": {
        "angle": ("restored to stored, {}", "-"),
        "angle_to_float32": ("stored, {} to float32", ":"),
    },
    "training loss": {"loss_stored": ("stored, {}", ":"), "loss_restored": ("restored, {}", "-")},
    "drift": {"drift": ("{}", "-")},
}


def pictures(result: dict) -> dict[str, Figure]:
    return {"": drawn(result["rows"])}


def drawn(rows: list[dict]) -> Figure:
    """The quantities of each panel over steps. A panel without any is left out."""
    curves, measured = curves_of(rows), set().union(*rows)
    quantities = {title: names for title, names in QUANTITIES.items() if measured & names.keys()}
    figure, panels = charts.panels(1, len(quantities), (13 / 3 * len(quantities), 4))
    for axes, (title, shown_here) in zip(panels, quantities.items(), strict=True):
        shown = [
            charts.Series(label.format(precision), found[name], found["step"], f"C{number}", style)
            for number, (precision, found) in enumerate(curves.items())
            for name, (label, style) in shown_here.items()
            if name in found
        ]
        charts.lines(axes, shown, title=title, xlabel="step", yscale="linear" if title == "training loss" else "log")
        if title.startswith("angle"):
            axes.set_yscale("symlog", linthresh=SMALLEST)  # below it linear, because some angles are 0
            axes.set_ylim(0, 2e3)  # room for the legend
        if title == "drift":
            axes.set_ylim(top=100 * axes.get_ylim()[1])
        axes.legend(frameon=False)
    return figure


run, main = frame.benchmark("reconstruction_error", ReconstructionArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
