"""Index the classes of a training split ahead of class-uniform sampling:

    python -m scripts.build_class_index data=cityscapes data.root=DIR
    python -m scripts.build_class_index data=vistas data.root=DIR folder=DIR workers=16
    python -m scripts.build_class_index data=folder data.root=DIR positions=64

Otherwise a training with sampler=class_uniform does this at its first start. The split is data.train_split. An
interrupted run continues where it stopped. Prints each class's pixels and the number of labels that contain it.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from omegaconf import DictConfig
from rich.table import Table

from datasets import ClassIndex, index_classes, reading_errors
from engine import assemble
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.console import counted, make_console, table_of
from engine.schema.data import SEGMENTATION_DATASETS, SegmentationData
from engine.schema.keys import group, key


@dataclass
class ClassIndexRun:
    data: SegmentationData = group(SEGMENTATION_DATASETS)  # only name, root, train_split and timeout_seconds matter
    folder: str | None = None  # for the index, as sampler.folder of a training; null: the cache folder
    positions: int = key(32, above=0)  # pixels stored per image and class, as sampler.positions of a training
    workers: int | None = key(None, least=0)  # processes; null: one per core


def index(values: DictConfig) -> ClassIndex:
    """Make or find the index and print its counts. Raises ValueError if data, labels or folder are unusable."""
    config = configuration.typed(values, ClassIndexRun)
    console = make_console()
    with reading_errors(config.data.timeout_seconds, keys="data.", workers_key="workers"):
        dataset = assemble.labelled_dataset(config.data, "data.train_split", config.data.train_split)
        before = time.perf_counter()
        with counted(console, f"indexing {dataset.name} {dataset.split}") as progress:
            found = index_classes(dataset, config.folder, config.positions, config.workers, progress)
    seconds = time.perf_counter() - before
    title = f"{dataset.name} {dataset.split}, {len(dataset)} images, {seconds:.1f} s"
    pixels, images = found.counts.sum(axis=0), np.count_nonzero(found.counts, axis=0)
    console.print(class_table(title, found.classes, pixels, images))
    return found


def class_table(title: str, classes: Sequence[str], pixels: np.ndarray, labels: np.ndarray) -> Table:
    """Per class: pixels, share of all classes' pixels, and number of labels that contain it."""
    total = max(1, pixels.sum())
    rows = (
        [name, f"{count:,}", f"{100 * count / total:.2f}", str(containing)]
        for name, count, containing in zip(classes, pixels, labels, strict=True)
    )
    return table_of(["class", "pixels", "share %", "labels"], rows, title)


@configured("build_class_index", ClassIndexRun)
def main(values: DictConfig) -> None:
    index(values)


if __name__ == "__main__":
    main()
