"""Look at the training crops, after augmentation, with their labels:

    python -m scripts.browse_data data=camvid data.root=DIR out=DIR
    python -m scripts.browse_data data=camvid data.root=DIR out=DIR sampler=class_uniform count=32
    python -m scripts.browse_data experiment=table3/cityscapes_resnext101_std data.root=DIR out=DIR epoch=5
    python -m scripts.browse_data data=image_folder data.root=DIR out=DIR

Takes the keys of train_seg.py or train_imagenet.py (experiment=…, seed=…) and writes pages of the first crops of an
epoch, in the run's order, continuing into the next epochs if needed. In segmentation, each crop is shown beside its
label, with the image's name and the scale. If the sampler drew the crop for a class, the class is named and a circle
marks the pixel that the crop had to contain. Ignored pixels show the plain image. In classification, each crop is shown
beside its whole image, with the image's name and class. Crops are shown before means are subtracted.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from omegaconf import MISSING, DictConfig
from rich.console import Console

from datasets import (
    ClassificationDataset,
    Draw,
    SegmentationDataset,
    TrainingCrops,
    minibatches_per_epoch,
    reading_errors,
)
from datasets.image_transforms import resized
from datasets.transforms import at_scale
from engine import assemble
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.console import counted, make_console, printable
from engine.distributed import World
from engine.output_files import write_figure
from engine.records.confusion_picture import with_literal_texts
from engine.schema.classification import CLASSIFICATION_DATASETS, ClassificationData
from engine.schema.data import SEGMENTATION_DATASETS, Data, SegmentationData
from engine.schema.keys import group, key
from engine.schema.segmentation import SegmentationRun
from engine.segmentation.pictures import class_patch, labelled

_ROWS, _COLUMNS = 4, 2  # crops on a page
_LEGEND_COLUMNS = 5
_CROP_INCHES, _DPI = 2.8, 130


@dataclass
class BrowseData(SegmentationRun):
    data: Data = group({**SEGMENTATION_DATASETS, **CLASSIFICATION_DATASETS})  # type: ignore[assignment]
    out: str = MISSING  # folder of the pages
    count: int = key(16, above=0, most=10_000)  # crops
    epoch: int = key(0, least=0)  # of the run, from 0

    def check(self) -> None:
        super().check()
        if isinstance(self.data, ClassificationData) and self.sampler.name != "uniform":
            raise ValueError(
                f"sampler={self.sampler.name} is for segmentation: leave it out with data={self.data.name}"
            )


class Shown(NamedTuple):
    """A crop and what it is shown beside, both uint8 (h, w, 3) RGB: its label in colours, or its whole image."""

    image: np.ndarray
    beside: np.ndarray
    title: str
    epoch: int  # of the run
    label: np.ndarray | None = None  # uint8 (h, w), in segmentation
    pixel: tuple[int, int] | None = None  # (row, column) that the crop had to contain


def browse(values: DictConfig) -> list[Path]:
    """Write the pages and return their files. Raises ValueError for data or keys that do not fit."""
    config = configuration.typed(values, BrowseData)
    console = make_console()
    with reading_errors(config.data.timeout_seconds, keys="data."):
        dataset = training_split(config.data)
        crops = islice(training_crops(config, dataset, console), config.count)
        out = Path(config.out)
        written: list[Path] = []
        while page := list(islice(crops, _ROWS * _COLUMNS)):
            written.append(out / f"page_{len(written):03d}.png")
            first, last = page[0].epoch, page[-1].epoch
            epochs = f"epoch {first}" if first == last else f"epochs {first} to {last}"
            title = f"{dataset.name} {dataset.split}, {config.sampler.name} sampling, seed {config.seed}, {epochs}"
            labels = [crop.label for crop in page if crop.label is not None]
            handles = legend(labels, dataset) if isinstance(dataset, SegmentationDataset) else []
            write_figure(written[-1], sheet(page, handles, title), dpi=_DPI)
    console.print(f"{config.count} crops on {len(written)} page(s): {out}", soft_wrap=True)
    return written


def training_split(data: Data) -> SegmentationDataset | ClassificationDataset:
    key_of_split = "data.train_split"
    if isinstance(data, ClassificationData):
        return assemble.classified_split(data, data.train_split, key_of_split)
    assert isinstance(data, SegmentationData), data
    return assemble.labelled_dataset(data, key_of_split, data.train_split)


def training_crops(
    config: BrowseData, dataset: SegmentationDataset | ClassificationDataset, console: Console
) -> Iterator[Shown]:
    """The crops of a run with this configuration, from the first step of the epoch on."""
    steps_per_epoch = minibatches_per_epoch(len(dataset), config.data.crops_per_minibatch)
    start_step = config.epoch * steps_per_epoch
    steps = start_step + -(-config.count // config.data.crops_per_minibatch)
    if isinstance(dataset, ClassificationDataset):
        loader = assemble.classified_crops(config, dataset, steps, World(), start_step)
    else:
        with counted(console, "indexing the classes") as progress:
            index = assemble.class_index(config, dataset, World(), progress)
        loader = assemble.training_loader(config, dataset, steps, World(), start_step, index)
    assert loader.batch_sampler is not None
    for keys, minibatch in zip(loader.batch_sampler, loader, strict=True):
        images = minibatch["image"].permute(0, 2, 3, 1).numpy()
        for key_of_crop, image, label, skipped in zip(
            keys, images, minibatch["label"].numpy(), minibatch["skipped"], strict=True
        ):
            draw = Draw(*key_of_crop)
            if skipped:  # the next readable image takes its place
                number = (draw.image + len(skipped.splitlines())) % len(dataset)
                draw = draw._replace(image=number, class_id=None, pixel=None)
            if isinstance(dataset, ClassificationDataset):
                title = f"{printable(dataset.image_name(draw.image))}\n{printable(dataset.classes[label])}"
                yield Shown(image, whole_image(dataset, draw.image, image.shape[0]), title, draw.epoch)
            else:
                assert isinstance(loader.dataset, TrainingCrops)
                title, pixel = described(loader.dataset, draw, label)
                yield Shown(image, labelled(image, label, dataset), title, draw.epoch, label, pixel)


def whole_image(dataset: ClassificationDataset, number: int, side: int) -> np.ndarray:
    """An image, resized to fit into a white square of `side` pixels: uint8 (side, side, 3) RGB."""
    image = dataset.image(number) if dataset.pixels is None else dataset.pixels[number].transpose(1, 2, 0)
    height, width = (max(1, side * length // max(image.shape[:2])) for length in image.shape[:2])
    square = np.full((side, side, 3), 255, np.uint8)
    square[(side - height) // 2 :, (side - width) // 2 :][:height, :width] = resized(image, (height, width))
    return square


def described(crops: TrainingCrops, draw: Draw, label: np.ndarray) -> tuple[str, tuple[int, int] | None]:
    """The title of a crop, and the position in the crop of the pixel that it was drawn for."""
    dataset = crops.dataset
    size = dataset.undecoded(draw.image)[0].shape
    scaled_size, offset, mirrored = crops.geometry(draw, size)
    facts = [f"scale {scaled_size[0] / size[0]:.2f}" + ", mirrored" * mirrored]
    pixel = None
    if draw.pixel is not None:
        assert draw.class_id is not None
        facts.append(f"drawn for {dataset.classes[draw.class_id]}")
        row, column = (
            at_scale(*axis) - start for *axis, start in zip(draw.pixel, size, scaled_size, offset, strict=True)
        )
        pixel = row, label.shape[1] - 1 - column if mirrored else column
    facts.append(f"{100 * (label == dataset.ignore_index).mean():.1f} % ignored")
    return f"{printable(dataset.files[draw.image].name)}\n{', '.join(facts)}", pixel


def legend(labels: Iterable[np.ndarray], dataset: SegmentationDataset) -> list[Patch]:
    """Colours, names and shares of the classes in labels, uint8 (H, W), largest first; the ignored share comes last."""
    pixels = np.sum([np.bincount(label.reshape(-1), minlength=256) for label in labels], axis=0)
    shares = 100 * pixels / pixels.sum()
    present = [
        class_id
        for class_id in np.argsort(-pixels, kind="stable")
        if pixels[class_id] and class_id != dataset.ignore_index
    ]
    patches = [class_patch(dataset.palette[i], f"{dataset.classes[i]} {shares[i]:.1f} %") for i in present]
    ignored = f"ignored {shares[dataset.ignore_index]:.1f} %"
    return [*patches, Patch(facecolor="white", edgecolor="gray", hatch="////", label=ignored)]


def sheet(page: Sequence[Shown], handles: list[Patch], title: str) -> Figure:
    """Draw crops beside their labels or whole images, with one legend of `handles`."""
    rows = -(-len(page) // _COLUMNS)
    legend_rows = -(-len(handles) // _LEGEND_COLUMNS)
    height = rows * (_CROP_INCHES + 0.5) + 0.22 * legend_rows + 0.6
    figure = Figure(figsize=(_COLUMNS * (2 * _CROP_INCHES + 0.2), height), layout="constrained")
    figure.suptitle(title)
    axes_of_crops = figure.subplots(rows, _COLUMNS, squeeze=False).reshape(-1)
    for axes in axes_of_crops:
        axes.set_axis_off()
    for axes, crop in zip(axes_of_crops, page, strict=False):
        height, width = crop.image.shape[:2]
        gap = np.full((height, max(1, width // 50), 3), 255, np.uint8)
        axes.imshow(np.concatenate([crop.image, gap, crop.beside], axis=1))
        axes.set_title(crop.title, loc="left", fontsize=8)
        if crop.pixel is not None:
            row, column = crop.pixel
            columns = [column, column + width + gap.shape[1]]
            for colour, line_width in (("black", 3), ("white", 1.5)):
                ring = dict(marker="o", markersize=11, markerfacecolor="none", linestyle="none", clip_on=False)
                axes.plot(columns, [row, row], markeredgecolor=colour, markeredgewidth=line_width, **ring)
    figure.legend(handles=handles, loc="outside lower center", ncols=_LEGEND_COLUMNS, fontsize=8, frameon=False)
    return with_literal_texts(figure)


@configured("browse_data", BrowseData)
def main(values: DictConfig) -> None:
    browse(values)


if __name__ == "__main__":
    main()
