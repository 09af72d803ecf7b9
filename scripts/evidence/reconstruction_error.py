"""Measure how restored activations change the gradients of a training (RevNet, Figure 4):

    python -m scripts.evidence.reconstruction_error root=DIR checkpoints=FOLDER out=FILE.json
    python -m scripts.evidence.reconstruction_error root=DIR checkpoints=FOLDER precisions=[bfloat16] out=FILE.json
    python -m scripts.evidence.reconstruction_error measure=false out=docs/results/restored_gradients.json

FOLDER holds copies of a RevNet run's last.pt, made while it trained. At the weights of each, records the angle between
the gradients from restored and from stored activations, on the minibatch that the run takes next, in float32 and
bfloat16.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint import trained_forward
from engine.configuration import config as configuration
from engine.distributed import World, device_of
from engine.schema.classification import ClassificationRun
from keepless.reversible.drift import drift
from models.bodies import RevNet
from scripts.evidence import frame
from scripts.evidence.measuring import PRECISIONS, autocast
from scripts.evidence.reversible_costs import angle, gradient_of
from scripts.reports import charts
from scripts.reports.markdown import Columns, columns


@dataclass
class ReconstructionArguments(frame.DeviceArguments):
    root: str | None = None  # the data of the run: CIFAR-10, in any form that data=cifar10 takes
    checkpoints: str | None = None  # folder with copies of a run's last.pt
    precisions: list[str] = field(default_factory=lambda: list(PRECISIONS))  # of the measured steps

    def check(self) -> None:
        super().check()
        frame.check_choices("precisions", self.precisions, PRECISIONS)


def measure(arguments: ReconstructionArguments, clock: frame.Clock) -> dict:
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


COLUMNS: Columns = [
    ("", "{precision}"),
    ("largest angle", lambda found: f"{max(found['angle']):.2g}°"),
    ("median angle", lambda found: f"{np.median(found['angle']):.2g}°"),
    ("largest drift", lambda found: f"{max(found['drift']):.1g}"),
]


def page(result: dict, name: str) -> str:
    rows = [{**found, "precision": precision} for precision, found in curves_of(result["rows"]).items()]
    return frame.page_text(
        "restored_gradients",
        result,
        **{key: f"{value:,}" if key == "steps" else str(value) for key, value in result["run"].items()},
        count=len({row["step"] for row in result["rows"]}),
        picture=f"![angle and drift over steps]({name}.png)",
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
PANELS = {  # {title: {quantity: (label, style)}}; stored activations alone are dotted
    "angle between two gradients, degrees": {
        "angle": ("restored and stored, {}", "-"),
        "angle_to_float32": ("stored, {} and float32", ":"),
    },
    "drift: error of restored inputs, relative": {"drift": ("{}", "-")},
}


def pictures(result: dict) -> dict[str, Figure]:
    curves = curves_of(result["rows"])
    figure, panels = charts.panels(1, len(PANELS), (13 / 3 * len(PANELS), 4))
    for axes, (title, quantities) in zip(panels, PANELS.items(), strict=True):
        shown = [
            charts.Series(label.format(precision), found[name], found["step"], f"C{number}", style)
            for number, (precision, found) in enumerate(curves.items())
            for name, (label, style) in quantities.items()
            if name in found
        ]
        charts.lines(axes, shown, title=title, xlabel="step", yscale="log")
        axes.set_ylim(top=100 * axes.get_ylim()[1])  # room for the legend
        axes.legend(frameon=False)
    panels[0].set_yscale("symlog", linthresh=SMALLEST)  # below it linear, because some angles are 0
    panels[0].set_ylim(0, 2e3)
    return {"": figure}


run, main = frame.benchmark("reconstruction_error", ReconstructionArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
