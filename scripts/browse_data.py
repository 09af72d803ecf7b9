"""Look at the training crops, after augmentation, with their labels:

    python -m scripts.browse_data data=camvid data.root=DIR out=DIR
    python -m scripts.browse_data data=camvid data.root=DIR out=DIR sampler=class_uniform count=32
    python -m scripts.browse_data experiment=table3/cityscapes_resnext101_std data.root=DIR out=DIR epoch=5

Takes the keys of train_seg.py or train_imagenet.py (data=image_folder, seed=…) and writes contact sheets of the first
crops of an epoch, in the run's order, continuing into later epochs if needed. Segmentation shows labels beside the
crops (ignored pixels show the plain image), classification the class in the title.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from omegaconf import MISSING
from rich.console import Console

from datasets import ClassificationDataset, SegmentationDataset, minibatches_per_epoch, reading_errors
from datasets.file_list import printable
from datasets.levels import mean_and_deviation
from datasets.segmentation import picture
from engine import assemble
from engine.configuration.command_line import configured
from engine.process.console import counted, make_console
from engine.process.distributed import World
from engine.process.output_files import write_figure
from engine.records.evaluated import Dataset
from engine.schema.classification import ClassificationData
from engine.schema.data import Data, SegmentationData
from engine.schema.keys import group, key
from engine.schema.segmentation import SegmentationRun
from engine.segmentation.pictures import folder_for_pictures, labelled
from scripts.reports import charts

ROWS, COLUMNS = 4, 2  # of crops on a sheet
INCHES, DPI = 2.8, 130  # side of a crop; dots per inch
Panel = tuple[str, np.ndarray, np.ndarray]  # title; crop, uint8 (h, w, 3) RGB; train ids in it, uint8


@dataclass
class BrowseData(SegmentationRun):
    data: Data = group()  # type: ignore[assignment]
    out: str = key(MISSING, written=True)  # folder of the sheets
    count: int = key(16, above=0, most=10_000)  # crops
    epoch: int = key(0, least=0)  # of the run, from 0

    def check(self) -> None:
        super().check()
        if isinstance(self.data, ClassificationData) and self.sampler.name != "uniform":
            raise ValueError(f"sampler={self.sampler.name} is for segmentation: leave it out")


def browse(config: BrowseData) -> list[Path]:
    """Write the sheets and return their files. ValueError: data or keys do not fit."""
    console = make_console()
    data = config.data
    files: list[Path] = []
    with reading_errors(data.timeout_seconds, keys="data."):
        if isinstance(data, ClassificationData):
            dataset: Dataset = assemble.classified_split(data, data.train_split, "data.train_split")
        else:
            dataset = assemble.labelled_dataset(cast(SegmentationData, data), "data.train_split", data.train_split)
        if isinstance(dataset, SegmentationDataset) and data.is_measured:
            data.mean, data.std = mean_and_deviation(dataset)
        names = [f"page_{number:03d}.png" for number in range(-(-config.count // (ROWS * COLUMNS)))]
        out = folder_for_pictures("out", config.out, dataset, names)
        crops = islice(panels(training_minibatches(config, dataset, console), dataset), config.count)
        while page := list(islice(crops, ROWS * COLUMNS)):
            files.append(out / names[len(files)])
            write_figure(files[-1], sheet(page, dataset), dpi=DPI)
    console.print(f"{config.count} crops on {len(files)} page(s): {config.out}", soft_wrap=True)
    return files


def training_minibatches(config: BrowseData, dataset: Dataset, console: Console) -> Iterable[dict]:
    """The minibatches of a run with this configuration, from the first step of the epoch on."""
    per_minibatch = config.data.crops_per_minibatch
    start_step = config.epoch * minibatches_per_epoch(len(dataset), per_minibatch)
    steps = start_step + -(-config.count // per_minibatch)
    if isinstance(dataset, ClassificationDataset):
        return assemble.classified_crops(config, dataset, steps, World(), start_step)
    with counted(console, "indexing the classes") as progress:
        index = assemble.class_index(config, dataset, World(), progress)
    return assemble.training_loader(config, dataset, steps, World(), start_step, index)


def panels(minibatches: Iterable[dict], dataset: Dataset) -> Iterator[Panel]:
    """A panel for each crop: beside it its labels, or in its title the class."""
    for minibatch in minibatches:
        for name, image, label in zip(minibatch["name"], minibatch["image"], minibatch["label"].numpy(), strict=True):
            crop = picture(image.permute(1, 2, 0).numpy(), dataset.shown)
            if isinstance(dataset, ClassificationDataset):
                yield f"{printable(name)}\n{printable(dataset.classes[label])}", crop, label
            else:
                yield printable(name), np.concatenate([crop, labelled(crop, label, dataset)], axis=1), label


@rc_context(charts.TEXTS)
def sheet(page: Sequence[Panel], dataset: Dataset) -> Figure:
    """Draw crops with their titles, and a legend of the classes in their labels."""
    rows = -(-len(page) // COLUMNS)
    figure = Figure(figsize=(COLUMNS * (2 * INCHES + 0.2), rows * (INCHES + 0.4) + 0.9), layout="constrained")
    all_axes = list(figure.subplots(rows, COLUMNS, squeeze=False).flat)
    for axes in all_axes:
        axes.set_axis_off()
    for axes, (title, crop, _) in zip(all_axes, page, strict=False):
        axes.imshow(crop)
        axes.set_title(title, loc="left", fontsize=8)
    if isinstance(dataset, SegmentationDataset):
        present = np.unique([label for _, _, label in page])
        classes = zip(np.array(dataset.palette) / 255, map(printable, dataset.classes), strict=True)
        handles = [
            Patch(facecolor=colour, edgecolor="gray", label=name)
            for number, (colour, name) in enumerate(classes)
            if number in present
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=5, fontsize=8, frameon=False)
    return figure


main = configured("browse_data", BrowseData)(browse)

if __name__ == "__main__":
    main()
