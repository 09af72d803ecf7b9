"""What restored activations do to the gradients of a whole training (RevNet, Figure 4), from checkpoints kept of it:

    python -m scripts.evidence.restored_gradients root=DIR checkpoints=FOLDER out=FILE.json
    python -m scripts.evidence.restored_gradients root=DIR checkpoints=FOLDER precisions=[float32] out=FILE.json
    python -m scripts.evidence.restored_gradients measure=false out=FILE.json

FOLDER holds copies of a RevNet run's last.pt, made while it trained. At the weights of each, records the angle between
the gradients from restored and from stored activations on the minibatch that the run takes next, in float32 and
bfloat16, and the drift.
"""

from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.configuration import config as configuration
from engine.distributed import World, device_of
from engine.schema.classification import ClassificationRun
from models.bodies import RevNet
from scripts.evidence import frame
from scripts.evidence.measuring import PRECISIONS
from scripts.evidence.reconstruction_error import CURVE_COLUMNS, angles_of, curves_of, drawn
from scripts.reports.markdown import columns


@dataclass
class RestoredArguments(frame.DeviceArguments):
    root: str | None = None  # the run's data
    checkpoints: str | None = None  # folder with copies of a run's last.pt
    precisions: list[str] = field(default_factory=lambda: list(PRECISIONS))  # of the gradients

    def check(self) -> None:
        super().check()
        frame.check_choices("precisions", self.precisions, PRECISIONS)


def measure(arguments: RestoredArguments, clock: frame.Clock) -> dict:
    """Measure at every checkpoint, in the order of their steps. ValueError: they are not of one RevNet's training."""
    files = Path(arguments.checkpoints).glob("*.pt") if arguments.checkpoints else ()
    steps = {file: checkpoint.load(file)["step"] for file in files}
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
        make = assemble.classification_network
        forward = assemble.trained_forward(config, make, state, file, images.classes, averaged=False, device=device)
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


def page(result: dict, name: str) -> str:
    rows = [{**found, "precision": precision} for precision, found in curves_of(result["rows"]).items()]
    return frame.page_text(
        "restored_gradients",
        result,
        **{name: f"{value:,}" if name == "steps" else str(value) for name, value in result["run"].items()},
        count=len({row["step"] for row in result["rows"]}),
        picture=f"![angle and drift over steps]({name}.png)",
        table=columns(rows, CURVE_COLUMNS),
    )


def pictures(result: dict) -> dict[str, Figure]:
    return {"": drawn(result["rows"])}


run, main = frame.benchmark("restored_gradients", RestoredArguments, measure, page, pictures)

if __name__ == "__main__":
    main()
