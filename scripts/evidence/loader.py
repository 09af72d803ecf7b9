"""Measure training crops against a pipeline that resizes whole images and then crops them:

    python -m scripts.evidence.loader out=FILE.json
    python -m scripts.evidence.loader rounds=5 out=FILE.json
    python -m scripts.evidence.loader only=[PNG,JPEG] out=FILE.json

The images are synthetic. In each round, both pipelines read the same files and make the same crop.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from datasets import (
    SegmentationDataset,
    TrainingCrops,
    TrainingTransform,
    worker_init,
)
from datasets.cityscapes import cityscapes_classes
from datasets.segmentation import Files
from datasets.streets import draw_street
from engine.schema.keys import key
from scripts.reports import frame
from scripts.reports import markdown as md
from scripts.reports.markdown import Columns, Rows, section
from scripts.reports.measuring import timed

OURS = "ours"
OPENCV = "OpenCV: resize, then crop"
# Standard deviation of the grain, by the size of its grains in pixels: mostly coarse, like a photograph's noise.
GRAIN = {32: 8.0, 16: 6.0, 8: 4.5, 4: 3.5, 2: 3.0, 1: 0.6}

Key = tuple[int, int]  # epoch, index
Crop = tuple[Tensor, Tensor]  # image uint8 (3, h, w), label uint8 (h, w) of train ids


@dataclass
class LoaderArguments(frame.Arguments):
    small_size: list[int] = key([360, 480], least=64)  # CamVid's
    small_crop_size: int = key(240, above=0)  # configs/data/camvid.yaml
    png_size: list[int] = key([1024, 2048], least=64)  # height, width
    jpeg_size: list[int] = key([3648, 5472], least=64)  # height, width
    base_size: int = key(2048, above=0)  # configs/data/vistas.yaml; JPEGs are also measured without it
    crop_size: int = key(872, above=0)  # pixels, of large images
    pictures: int = key(4, above=0)  # different files of each kind
    rounds: int = key(40, above=0)  # each times every pipeline once


def items(arguments: LoaderArguments) -> dict[str, tuple]:
    """Each source of crops: suffix, size and crop of its images, and the size to which they are resized."""
    own = arguments
    sources = (
        ("small PNG", ".png", own.small_size, own.small_crop_size, None),
        ("PNG", ".png", own.png_size, own.crop_size, None),
        ("JPEG", ".jpg", own.jpeg_size, own.crop_size, None),
        ("JPEG, base_size", ".jpg", own.jpeg_size, own.crop_size, own.base_size),
    )
    return {source[0]: source for source in sources}


def measure(arguments: LoaderArguments, source: str, suffix: str, size: list[int], side: int, base: int | None) -> Rows:
    """Time all pipelines of a source in one thread, set up like a DataLoader's worker."""
    worker_init(0)
    with tempfile.TemporaryDirectory() as folder:
        pairs = drawn_pairs(Path(folder) / "pairs", arguments.pictures, size, suffix)
        images, labels = zip(*((own.image, own.label) for own in pairs.files), strict=True)
        about = f"{size[1]}x{size[0]} pixels, files of {kib(images)} KiB, labels of {kib(labels)} KiB"
        crops = TrainingCrops(pairs, TrainingTransform((side, side), base_size=base, fill=(0, 0, 0)), 0)
        keys = [(epoch, epoch % len(pairs)) for epoch in (0, *range(arguments.rounds))]  # one call is not timed
        each = {name: map(partial(make, crops), keys) for name, make in PIPELINES.items()}
        times_ms = timed({name: partial(next, made) for name, made in each.items()}, arguments.rounds, "cpu")
    return [{"source": source, "files": about, "pipeline": name, "times_ms": own} for name, own in times_ms.items()]


def kib(files: Sequence[Path]) -> str:
    return f"{statistics.mean(file.stat().st_size for file in files) / 1024:.0f}"


def scene(size: Sequence[int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """A drawn street, enlarged, with grain: image uint8 (H, W, 3) BGR and label uint8 (H, W) of Cityscapes' ids."""
    rng = np.random.default_rng(seed)
    height, width = size
    image, label = draw_street(rng)
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)[..., ::-1].astype(np.float32)
    for grain, deviation in GRAIN.items():
        noise = rng.standard_normal((-(-height // grain), -(-width // grain)), np.float32) * np.float32(deviation)
        image += cv2.resize(noise, (width, height), interpolation=cv2.INTER_LINEAR)[..., None]
    label = cv2.resize(label, (width, height), interpolation=cv2.INTER_NEAREST)
    return np.clip(image, 0, 255).round().astype(np.uint8), label


def drawn_pairs(folder: Path, count: int, size: Sequence[int], suffix: str) -> SegmentationDataset:
    """Write `count` images of `size` (H, W) with labels: PNGs, or JPEGs whose labels are palette PNGs."""
    folder.mkdir()
    files = [Files(f"{n}", folder / f"{n}{suffix}", folder / f"{n}_label.png") for n in range(count)]
    for number, entry in enumerate(files):
        image, label = scene(size, number)
        cv2.imwrite(str(entry.image), image, [cv2.IMWRITE_JPEG_QUALITY, 90])
        stored = Image.fromarray(label)
        if suffix == ".jpg":
            stored.putpalette([value % 256 for value in range(3 * 256)])
        stored.save(str(entry.label))
    return SegmentationDataset("streets", "train", files, cityscapes_classes())


def ours(crops: TrainingCrops, key: Key) -> Crop:
    item = crops[key]
    return item["image"], item["label"]


def read_label(file: Path | None) -> np.ndarray:
    """The ids of a label. OpenCV would return a palette PNG's colours."""
    assert file is not None
    with Image.open(file) as image:
        return np.array(image)


def opencv(crops: TrainingCrops, key: Key) -> Crop:
    """Padding is black in the image, and ignored in the label."""
    _, image_file, label_file = crops.dataset.files[key[1]]
    image = cv2.imread(str(image_file))
    assert image is not None
    (height, width), (top, left), mirrored = crops.geometry(key, image.shape[:2])
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    label = cv2.resize(read_label(label_file), (width, height), interpolation=cv2.INTER_NEAREST_EXACT)
    bottom, right = (start + side for start, side in zip((top, left), crops.transform.crop_size, strict=True))
    window = slice(max(0, top), bottom), slice(max(0, left), right)
    borders = max(0, -top), max(0, bottom - height), max(0, -left), max(0, right - width)
    image, label = image[window], label[window]
    if any(borders):
        image, label = (cv2.copyMakeBorder(part, *borders, cv2.BORDER_CONSTANT) for part in (image, label))
    if mirrored:
        image, label = cv2.flip(image, 1), cv2.flip(label, 1)
    planes = np.stack(cv2.split(cv2.cvtColor(image, cv2.COLOR_BGR2RGB)))
    return torch.from_numpy(planes), torch.from_numpy(crops.dataset.table.train_ids(label))


PIPELINES: dict[str, Callable[[TrainingCrops, Key], Crop]] = {OURS: ours, OPENCV: opencv}
COLUMNS: Columns = [
    ("pipeline", "{pipeline}"),
    ("ms", lambda row: f"{md.median_ms(row):.3g}"),
    ("crops/s per core", lambda row: f"{1e3 / round(md.median_ms(row), 3):.1f}"),
    ("time / ours", lambda row: md.relative_time(row, OURS)),
]


def about(arguments: dict) -> tuple[str, str]:
    sizes = f"{arguments['crop_size']} pixels (small PNG: {arguments['small_crop_size']})"
    rounds = f"{arguments['rounds']} rounds over {arguments['pictures']} pictures of each kind"
    return "Time of a crop", f"Crops of {sizes}, {rounds}"


def sections(call: dict, _: str) -> Iterator[str]:
    for source, rows in md.grouped(frame.rows_of(call), ["source"], "pipeline").items():
        yield section(f"{source}: {rows[OURS]['files']}", md.columns(rows.values(), COLUMNS))


BENCHMARK = frame.Benchmark("loader", LoaderArguments, items, measure, about, sections)
run, main = frame.command(BENCHMARK, __doc__)

if __name__ == "__main__":
    main()
