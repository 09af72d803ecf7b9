"""Measure how much accuracy JPEG copies of CIFAR-10 cost, on images whose original pixels are known:

    python -m scripts.evidence.jpeg_originals root=DIR originals=FILE.npz networks=[RUN_DIR/weights.pt] out=FILE.json
    python -m scripts.evidence.jpeg_originals root=DIR originals=FILE.npz folds=2 qualities=[50] out=FILE.json
    python -m scripts.evidence.jpeg_originals measure=false out=FILE.json

Networks that were trained on the copies classify the test images as originals and as copies. The experiment, in `steps`
steps, is also trained and tested on the originals, on the same images' copies, and on originals compressed to each of
`qualities`, for each of `folds` parts that are left out for testing. FILE.json is written again after each training:
the same command continues a run that was stopped. `originals`: {train,test}_images, uint8 (N, 32, 32, 3),
{train,test}_labels, and {train,test}_names: the copies, such as "test/cat/0000.jpg".
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

import numpy as np
import torch

import train_imagenet
from datasets import ClassificationDataset, cifar10
from engine.checkpoint import files as checkpoint
from engine.checkpoint import trained_forward
from engine.configuration import config as configuration
from engine.configuration.command_line import composed
from engine.records.provenance import provenance
from engine.schema.classification import ClassificationRun
from engine.schema.keys import key, override
from engine.tasks import TASKS
from scripts.evidence import frame
from scripts.evidence.jpeg_quality import TRAINING_FILES, check_qualities, compressed, save_records
from scripts.evidence.measuring import PRECISIONS
from scripts.reports.markdown import Columns, columns

SPLITS = ("train", "test")
TO_YCBCR = np.array([[0.299, 0.587, 0.114], [-0.168736, -0.331264, 0.5], [0.5, -0.418688, -0.081312]])  # JFIF


@dataclass
class OriginalsArguments(frame.Arguments):
    root: str | None = None  # the JPEG copies, in any form that data=cifar10 takes
    originals: str = ""  # the original pixels of some of them
    networks: list[str] = field(default_factory=list)  # checkpoints of networks trained on the copies
    recipe: str = "cifar10/resnet14"  # the experiment that is trained on originals and on copies
    steps: int = key(600, above=0)  # of each training
    folds: int = key(5, least=0)  # one training of each kind per fold; 0: none
    qualities: list[int] = field(default_factory=list)  # 1 to 100: also train on originals compressed to each of these
    precision: str = key("bfloat16", one_of=tuple(PRECISIONS))  # of networks and trainings
    compile: bool = False  # the trainings, by torch.compile

    def check(self) -> None:
        if self.folds == 1:
            raise ValueError("folds=1 leaves no images to train on: expected 0, or at least 2")
        check_qualities(self.qualities)


class Pairs(NamedTuple):
    """Images as originals and as JPEG copies, both uint8 (N, 3, 32, 32), and their labels, uint8 (N,)."""

    originals: np.ndarray
    copies: np.ndarray
    labels: np.ndarray


def measure(arguments: OriginalsArguments, clock: frame.Clock) -> Iterator[dict]:
    """Compare the networks, then the trainings. ValueError: an original has no copy of its name in `root`."""
    if not Path(arguments.originals).is_file():
        raise ValueError(f"originals={arguments.originals}: expected a .npz file with the original pixels")
    pairs = {split: _pairs(arguments, split) for split in SPLITS}
    own = provenance()
    found = frame.begun(arguments, own)
    environment = own | {"commit": frame.commits(found, own)}
    before_s = found.get("seconds", 0)
    if not found:
        found["images"] = {split: len(pairs[split].labels) for split in SPLITS}
        differences = np.concatenate([pair.copies.astype(float) - pair.originals for pair in pairs.values()])
        found["errors"] = _errors(differences)
        found["networks"] = [_network_on(Path(file), arguments, pairs["test"]) for file in arguments.networks]
        found["trainings"] = []
    everything = Pairs(*(np.concatenate(parts) for parts in zip(*pairs.values(), strict=True)))
    kinds = {"originals": everything.originals, "copies": everything.copies}
    kinds |= {f"quality {quality}": compressed(everything.originals, quality) for quality in arguments.qualities}
    done = {(row["fold"], row["images"]) for row in found["trainings"]}
    for fold in range(arguments.folds):
        for kind in [kind for kind in kinds if (fold, kind) not in done]:
            yield found | {"environment": environment, "seconds": round(before_s + clock.seconds, 1)}
            top1 = _trained_on(arguments, kinds[kind], everything.labels, fold)
            found["trainings"].append({"fold": fold, "images": kind, "top1": top1})
            clock.report(f"fold {fold}, {kind}: {top1:.2%}")
    yield found | {"environment": environment, "seconds": round(before_s + clock.seconds, 1)}


def _pairs(arguments: OriginalsArguments, split: str) -> Pairs:
    """The images of a split whose originals are known."""
    images = cifar10(arguments.root, split)
    assert images.pixels is not None and images.names is not None
    place = {f"{split}/{name}": number for number, name in enumerate(images.names)}
    with np.load(arguments.originals) as file:
        pixels, labels, names = (file[f"{split}_{part}"] for part in ("images", "labels", "names"))
    if missing := [name for name in names if name not in place]:
        raise ValueError(f"{arguments.originals}: root={arguments.root} has no copy named {missing[0]}")
    numbers = [place[name] for name in names]
    if (wrong := images.labels[numbers] != labels).any():
        raise ValueError(f"{arguments.originals}: {names[wrong][0]} has another label in root={arguments.root}")
    return Pairs(pixels.transpose(0, 3, 1, 2), images.pixels[numbers], labels.astype(np.uint8))


def _errors(differences: np.ndarray) -> dict[str, float]:
    """Mean square errors of pixels (N, 3, 32, 32): of red, green and blue together, and of JPEG's own channels."""
    channels = np.einsum("kc,nchw->knhw", TO_YCBCR, differences)
    own = dict(zip(("Y", "Cb", "Cr"), np.square(channels).mean((1, 2, 3)), strict=True))
    return {name: round(float(error), 1) for name, error in {"RGB": np.square(differences).mean(), **own}.items()}


def _network_on(path: Path, arguments: OriginalsArguments, pairs: Pairs) -> dict:
    """Accuracy of a trained network on originals and on copies, and the standard error of the difference."""
    state = checkpoint.load(path)
    config = configuration.of_checkpoint(state, ClassificationRun, f"{path}")
    config.trainer.precision, config.data.root = arguments.precision, arguments.root
    images = TASKS[config.task].dataset(config.data, "test", state)  # knows the mean image of the training
    assert isinstance(images, ClassificationDataset)
    cpu = torch.device("cpu")
    forward = trained_forward(config, state, path, images.classes, averaged=False, device=cpu)
    right = {}
    with torch.inference_mode():
        for kind in ("originals", "copies"):
            shown = replace(images, pixels=getattr(pairs, kind), labels=pairs.labels, names=pairs.labels)
            parts = torch.from_numpy(shown.in_memory(np.arange(len(shown)))).split(256)
            guesses = torch.cat([forward(part).argmax(dim=1) for part in parts])
            right[kind] = guesses.numpy() == pairs.labels
    gain = right["originals"].astype(float) - right["copies"]
    scores = {kind: float(hits.mean()) for kind, hits in right.items()}
    return {"network": path.parent.name, **scores, "standard_error": float(gain.std() / len(gain) ** 0.5)}


def _trained_on(arguments: OriginalsArguments, pixels: np.ndarray, labels: np.ndarray, fold: int) -> float:
    """Top-1 accuracy on the fold that the training has not seen; the folds are the same for every kind of image."""
    parts = np.array_split(np.random.default_rng(0).permutation(len(labels)), arguments.folds)
    tested = parts.pop(fold)
    trained = np.sort(np.concatenate(parts))
    trained = trained[: len(trained) // TRAINING_FILES * TRAINING_FILES]  # each file has as many images
    with tempfile.TemporaryDirectory() as folder:
        for split, chosen in {"train": trained, "test": np.sort(tested)}.items():
            save_records(Path(folder), split, pixels[chosen], labels[chosen])
        keys = f"experiment={arguments.recipe}", f"trainer.steps={arguments.steps}", "trainer.epochs=null"
        settings = f"trainer.precision={arguments.precision}", f"trainer.compile={arguments.compile}", f"seed={fold}"
        folders = override("data.root", folder), override("run_dir", f"{folder}/run")
        values = composed("train_imagenet", *keys, *settings, *folders)
        if values.lr_schedule.get("steps"):  # of the experiment's own length
            own = composed("train_imagenet", keys[0]).trainer.steps
            values.lr_schedule.steps = [step * arguments.steps // own for step in values.lr_schedule.steps]
        return train_imagenet.train(values)["top1"]


def _percent(name: str) -> str:
    return f"{{{name}:.2%}}"


NETWORK: Columns = [
    ("network", "{network}"),
    ("originals", _percent("originals")),
    ("copies", _percent("copies")),
    ("gain, points", lambda row: f"{100 * (row['originals'] - row['copies']):.1f} ± {100 * row['standard_error']:.1f}"),
]


def page(result: dict, name: str) -> str:
    return frame.page_text(
        "jpeg_originals",
        result,
        **{split: result["images"][split] for split in SPLITS},
        errors=", ".join(f"{channel} {error:.1f}" for channel, error in result["errors"].items()),
        network_table=columns(result["networks"], NETWORK),
        trainings=_trainings(result["trainings"], result["arguments"]),
    )


def _trainings(rows: list[dict], arguments: dict) -> list[str]:
    if not rows:
        return []
    folds: dict[int, dict[str, float]] = {}
    for row in rows:
        folds.setdefault(row["fold"], {})[row["images"]] = row["top1"]
    kinds = list(dict.fromkeys(row["images"] for row in rows))
    table: Columns = [("fold", "{fold}"), *((kind, f"{{{kind}}}") for kind in kinds)]
    cells = [
        {"fold": fold} | {kind: f"{top1[kind]:.2%}" if kind in top1 else "" for kind in kinds}
        for fold, top1 in folds.items()
    ]
    return [
        "## Trained on originals, or on copies",
        f"`experiment={arguments['recipe']}`, {arguments['steps']} steps, on all images whose originals are known, "
        f"except for one of {arguments['folds']} folds, on which it is tested. The trainings of a row have the same "
        f"images, folds and seed. *copies* are the files of CIFAR-10 as JPEG.",
        columns(cells, table),
        "\n".join(f"- {_gain(folds.values(), kind)}" for kind in kinds if kind != "originals"),
    ]


def _gain(folds: Iterable[dict[str, float]], kind: str) -> str:
    """How many points originals give more than images of another kind, in the folds that have both."""
    gains = [100 * (fold["originals"] - fold[kind]) for fold in folds if kind in fold]
    spread = f" ± {stdev(gains) / len(gains) ** 0.5:.1f} (standard error over folds)" if len(gains) > 1 else ""
    return f"Originals give {mean(gains):.1f}{spread} points more than {kind}."


run, main = frame.benchmark("jpeg_originals", OriginalsArguments, measure, page)

if __name__ == "__main__":
    main()
