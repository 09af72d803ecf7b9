"""Measure how much of each class training sees under uniform and class-uniform sampling:

    python -m scripts.class_shares data=camvid data.root=DIR out=docs/results/class_shares_camvid
    python -m scripts.class_shares data=camvid data.root=DIR out=FILE epochs=1 fraction=0.5
    python -m scripts.class_shares data=cityscapes data.root=DIR out=FILE data.crop_size=672

Cuts the crops that a training would see, with its scales, windows and flips. Counts the pixels of each class and the
crops that show it. Writes the counts to OUT.json and plots them in OUT.png.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from omegaconf import MISSING, DictConfig

from datasets import (
    ClassUniformMinibatches,
    ShuffledMinibatches,
    index_classes,
    minibatches_per_epoch,
    reading_errors,
)
from engine import assemble
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.console import counted, make_console, progress_bar, tracked
from engine.distributed import World
from engine.output_files import write_figure, write_file
from engine.records.provenance import provenance
from engine.schema.data import SEGMENTATION_DATASETS, SegmentationData
from engine.schema.keys import group, key
from scripts.reports import charts

LABELS = {"uniform": "uniform", "class_uniform": "class-uniform"}


@dataclass
class ClassShares:
    data: SegmentationData = group(SEGMENTATION_DATASETS)
    out: str = MISSING  # path of the two files, without suffix
    epochs: int = key(5, above=0)  # how many are drawn
    seed: int = key(0, least=0)  # of the crops
    fraction: float = key(1.0, above=0, most=1)  # sampler.fraction
    folder: str | None = None  # for the class index, as sampler.folder of a training; null: the cache folder


def compare(values: DictConfig) -> dict:
    """Count, write both files, and return the JSON's content. Raises ValueError for data or keys that do not fit."""
    config = configuration.typed(values, ClassShares)
    data, console = config.data, make_console()
    with reading_errors(data.timeout_seconds, keys="data."):
        dataset = assemble.labelled_dataset(data, "data.train_split", data.train_split)
        with counted(console, f"indexing {dataset.name} {dataset.split}") as progress:
            index = index_classes(dataset, config.folder, progress=progress)
        steps = config.epochs * minibatches_per_epoch(len(dataset), data.crops_per_minibatch)
        options = dict(crops_per_minibatch=data.crops_per_minibatch, seed=config.seed, steps=steps)
        samplers = {
            "uniform": ShuffledMinibatches(len(dataset), **options),
            "class_uniform": ClassUniformMinibatches(index, fraction=config.fraction, **options),
        }
        crops = assemble.training_crops(data, dataset, config.seed)
        seen = {}
        with progress_bar(console) as progress:
            for name, sampler in samplers.items():
                loader = assemble.loader(crops, data, World(), batch_sampler=sampler)
                seen[name] = count(tracked(progress, loader, LABELS[name]), len(dataset.classes))
    result = {
        "dataset": dataset.name,
        "split": dataset.split,
        "images": len(dataset),
        "crop_size": data.crop_size,
        "scale": list(data.scale),
        "crops": steps * data.crops_per_minibatch,
        "epochs": config.epochs,
        "seed": config.seed,
        "fraction": config.fraction,
        "classes": list(dataset.classes),
        "pixels_in_images": index.counts.sum(axis=0).tolist(),
        **seen,
        "environment": provenance(),
    }
    out = Path(config.out)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in result.items()]
    write_file(out.with_name(f"{out.name}.json"), "{\n" + ",\n".join(lines) + "\n}\n")
    write_figure(out.with_name(f"{out.name}.png"), figure(result), dpi=120)
    return result


def count(minibatches: Iterable[dict], classes: int) -> dict[str, list[int]]:
    """Count over all crops: {"pixels": labelled pixels of each class, "crops": crops that show each class}."""
    pixels, crops = np.zeros(classes, np.int64), np.zeros(classes, np.int64)
    for minibatch in minibatches:
        for label in minibatch["label"].numpy():
            of_class = np.bincount(label.reshape(-1), minlength=256)[:classes]
            pixels += of_class
            crops += of_class > 0
    return {"pixels": pixels.tolist(), "crops": crops.tolist()}


def figure(result: dict) -> Figure:
    """Draw each class's share of the labelled pixels, and of the crops that show it, for classes in the split."""
    present = [i for i, pixels in enumerate(result["pixels_in_images"]) if pixels]
    present.sort(key=lambda i: -result["pixels_in_images"][i])
    names, images = [result["classes"][i] for i in present], f"{result['dataset']} {result['split']}"
    drawing, (of_pixels, of_crops) = charts.panels(1, 2, (11, 4.2))
    for axes, quantity, title in (
        (of_pixels, "pixels", "share of the labelled pixels, %"),
        (of_crops, "crops", "crops that show the class, %"),
    ):
        shares = []
        for name, label in LABELS.items():
            counts = np.array(result[name][quantity])
            total = max(1, counts.sum()) if quantity == "pixels" else result["crops"]
            shares.append(charts.Series(label, (100 * counts / total)[present]))
        charts.bars(axes, names, shares, rotation=40, ylabel=title)
    of_pixels.set(yscale="log", ylim=(None, 100))
    of_pixels.yaxis.set_major_formatter("{x:g}")
    equal = 100 / len(present)
    of_pixels.axhline(equal, color="grey", linewidth=1, linestyle="--")
    of_pixels.annotate("equal shares", (len(present) - 0.5, equal), ha="right", va="bottom", color="grey")
    of_crops.set_ylim(0, 100)
    of_pixels.legend(frameon=False, title="sampling", loc="upper right")
    low, high = result["scale"]
    drawing.suptitle(f"{images}: {result['crops']} crops of {result['crop_size']} pixels, scales {low} to {high}")
    return drawing


@configured("class_shares", ClassShares)
def main(values: DictConfig) -> None:
    compare(values)
    print(f"{values.out}.json, {values.out}.png")


if __name__ == "__main__":
    main()
