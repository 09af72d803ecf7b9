"""Measure how much accuracy JPEG compression of CIFAR-10 costs:

    python -m scripts.evidence.jpeg_quality root=DIR out=FILE.json
    python -m scripts.evidence.jpeg_quality root=DIR qualities=[30] seed=1 out=FILE.json
    python -m scripts.evidence.jpeg_quality measure=false out=FILE.json

Saves training and test images as JPEG files of each quality, with colours at half the resolution (4:2:0), and trains
cifar10/preact_resnet32 on these copies.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image

import train_imagenet
from datasets import cifar10
from engine.configuration.command_line import composed
from engine.schema.keys import key, override
from scripts.evidence import frame
from scripts.reports.markdown import Columns, columns

EXPERIMENT = "cifar10/preact_resnet32"
TRAINING_FILES = 5  # of CIFAR-10's binary form


@dataclass
class QualityArguments(frame.Arguments):
    root: str | None = None  # CIFAR-10, in any form that data=cifar10 takes
    qualities: list[int] = field(default_factory=lambda: [75, 50, 20])  # of the copies, 1 to 100; one training each
    seed: int = key(0, least=0)  # of every training

    def check(self) -> None:
        if not self.qualities:
            raise ValueError("qualities=[]: expected at least one")
        check_qualities(self.qualities)


def check_qualities(qualities: list[int]) -> None:
    if not all(1 <= quality <= 100 for quality in qualities):
        raise ValueError(f"qualities={qualities}: expected numbers from 1 to 100")


def measure(arguments: QualityArguments, clock: frame.Clock) -> Iterator[dict]:
    """Train on the copies of each quality. ValueError if there is no CIFAR-10 in `root`."""
    rows: list[dict] = []
    for quality in arguments.qualities:
        with tempfile.TemporaryDirectory() as folder:
            error = _save_copies(arguments.root, Path(folder), quality)
            folders = override("data.root", folder), override("run_dir", f"{folder}/run")
            values = composed("train_imagenet", f"experiment={EXPERIMENT}", f"seed={arguments.seed}", *folders)
            results = train_imagenet.train(values)
        rows.append({"quality": quality, "mean_square_error": error, "top1": results["top1"]})
        clock.report(f"quality {quality}: {results['top1']:.2%}")
        yield {"rows": rows}


def _save_copies(root: str | None, folder: Path, quality: int) -> float:
    """Write the copies' pixels as CIFAR's binary records. Returns their mean square error."""
    errors = []
    for split in ("train", "test"):
        images = cifar10(root, split)
        assert images.pixels is not None
        copies = compressed(images.pixels, quality)
        errors.append(np.square(copies.astype(np.float32) - images.pixels).mean((1, 2, 3)))
        save_records(folder, split, copies, images.labels)
    return round(float(np.concatenate(errors).mean()), 2)


def save_records(folder: Path, split: str, pixels: np.ndarray, labels: np.ndarray) -> None:
    """Write images, uint8 (N, 3, 32, 32), in CIFAR-10's binary form: five files for "train", one for "test"."""
    records = np.column_stack([labels.astype(np.uint8), pixels.reshape(len(pixels), -1)])
    names = (
        ["test_batch.bin"]
        if split == "test"
        else [f"data_batch_{number}.bin" for number in range(1, TRAINING_FILES + 1)]
    )
    for name, part in zip(names, np.array_split(records, len(names)), strict=True):
        part.tofile(folder / name)


def compressed(images: np.ndarray, quality: int) -> np.ndarray:
    """Images, uint8 (N, 3, H, W), after JPEG compression with colours at half the resolution."""
    copies = np.empty_like(images)
    for copy, pixels in zip(copies, images, strict=True):
        file = BytesIO()
        Image.fromarray(pixels.transpose(1, 2, 0)).save(file, "JPEG", quality=quality, subsampling="4:2:0")
        copy[:] = np.asarray(Image.open(file)).transpose(2, 0, 1)
    return copies


COLUMNS: Columns = [
    ("quality", "{quality}"),
    ("mean square error", "{mean_square_error:.1f}"),
    ("top-1 %", lambda row: f"{100 * row['top1']:.2f}"),
]


def page(result: dict, name: str) -> str:
    rows = sorted(result["rows"], key=lambda row: -row["quality"])
    return frame.page_text("jpeg_quality", result, experiment=EXPERIMENT, table=columns(rows, COLUMNS, left=0))


run, main = frame.benchmark("jpeg_quality", QualityArguments, measure, page)

if __name__ == "__main__":
    main()
