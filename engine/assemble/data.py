"""Configuration keys -> datasets and loaders."""

import json
import math
import os
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, suppress
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from datasets import ClassIndex, SegmentationDataset, TrainingCrops, TrainingTransform, colour_jitter, index_classes
from datasets.augmentations import MOST_MIXES, Augmentations, moment_fields
from datasets.class_list import CLASSES
from datasets.folder import IN_FOLD
from datasets.row import Row
from datasets.segmentation import join_splits
from datasets.stream import Draws
from datasets.workers import Loader
from engine.assemble.contracts import builder, imported, own_keys
from engine.process.console import logger
from engine.process.distributed import World, cores_per_rank
from engine.schema.data import Data, SegmentationData
from engine.schema.keys import as_list
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation.batches import AtOnce
from engine.segmentation.inference import Views

MOST_AUTOMATIC = 8  # data workers of a process


def dataset(
    config: SegmentationData, split: str | list[str], key: str = "data.split", draw: bool = False
) -> SegmentationDataset:
    """One split of the dataset, or several as one; its files are paired and counted but not yet read.

    `key`: the config key of `split`, for messages.
    `draw`: draw missing synthetic images; not for a checkpoint, whose data folder must not be written to.

    ValueError: the dataset has no such split, or files are missing.
    """
    row = row_of(config)
    open_split = builder("data", config)
    splits = {} if row.classes is None else row.count_images(config.root, **own_keys("data", config))
    options = {"draw": draw, "own_images": "give data=folder"} if row.drawn else {}
    parts = []
    for name in as_list(split):
        if splits and name not in splits and not IN_FOLD.match(name):
            raise ValueError(
                f"{key}={name}: split {name!r} is unknown to {config.name}; expected one of {', '.join(splits)}"
            )
        with root_named(config, f"{key}={name}: "):
            parts.append(open_split(config.root, split=name, **options))
    joined_parts = join_splits(parts)
    joined_parts.range16 = config.range16
    return joined_parts


def check_classes(config: Data, state: dict) -> None:
    """ValueError if a folder of own images has no classes.json. The message gives the checkpoint's classes as one.

    `state`: the content of the checkpoint.
    """
    root = Path(os.path.expanduser(config.root or ""))
    if config.name != "folder" or not root.is_dir() or os.path.lexists(root / CLASSES):
        return
    ids = state.get("label_ids", range(len(state["classes"])))
    rows = zip(ids, state["classes"], state["palette"], strict=True)
    classes = {number: {"name": name, "colour": colour} for number, name, colour in rows}
    all_classes = [classes.get(number, {"name": "void"}) for number in range(max(ids) + 1)]
    ignored = sorted({*range(max(ids)), 255} - {*ids})
    content = json.dumps({"classes": all_classes, "ignored": ignored}, ensure_ascii=False)
    raise ValueError(
        f"data.root={root}: {CLASSES} is missing there. Copy it from the images that the network was trained on, or "
        f"write the checkpoint's classes: {content}"
    )


def row_of(config: Data) -> Row:
    """The dataset: how its splits are opened, and facts that need no files."""
    return imported("data", type(config))


@contextmanager
def root_named(config: Data, split: str = "") -> Iterator[None]:
    """Context that puts `split` and data.root, with its value, before the messages of ValueErrors."""
    try:
        yield
    except ValueError as error:
        cure = " (give data.root=DIR)" if config.root is None else ""
        raise ValueError(f"{split}data.root={config.root}{cure}: {error}") from error


def official_images(config: Data) -> dict[str, int | None]:
    """The official number of images in each split of the dataset; None for splits of the user's own images."""
    with root_named(config):
        return row_of(config).count_images(config.root, **own_keys("data", config))


def official_classes(config: Data) -> int | None:
    """The official number of classes of the dataset; None for the user's own images."""
    return row_of(config).classes


def shortfalls(config: Data, train_set: Any, val_set: Any) -> list[str]:
    """Sentences about splits that have fewer images than are official."""
    counts = official_images(config)
    sentences = []
    for key, names, split in (("train_split", config.train_split, train_set), ("val_split", config.val_split, val_set)):
        count = sum(counts.get(name) or math.inf for name in as_list(names))
        is_official = official_classes(config) in (None, len(split.classes))  # else it is own data in the same layout
        if is_official and len(split) < count < math.inf:
            sentences.append(f"data.{key}={names} has {len(split):,} of the {count:,} images of {config.name}")
    return sentences


def labelled_splits(config: SegmentationData) -> tuple[SegmentationDataset, SegmentationDataset]:
    """The training and the validation split. ValueError for missing files, or for a split without labels."""
    train_set = labelled_dataset(config, "data.train_split", config.train_split)
    return train_set, labelled_dataset(config, "data.val_split", config.val_split)


def labelled_dataset(config: SegmentationData, key: str, split: str | list[str]) -> SegmentationDataset:
    """Like `dataset`, but ValueError if the split's labels are withheld. `key` is the config key of `split`."""
    labelled = dataset(config, split, key=key, draw=True)
    if not labelled.has_labels:
        raise ValueError(
            f"{key}={split}: {config.name} has no labels in this split; choose one with labels, such as val"
        )
    return labelled


def training_loader(
    config: SegmentationRun,
    dataset: SegmentationDataset,
    total_steps: int,
    world: World,
    start_step: int = 0,
    index: ClassIndex | None = None,
) -> Loader:
    """This rank's share of a minibatch of crops for each step from `start_step` to `total_steps`.

    `index`: from `class_index`.

    ValueError: the minibatch size does not fit the images or the world size.
    """
    data = config.data
    sampler = config.sampler
    order = sampler_arguments(config, total_steps, world, start_step)
    names = [entry.name for entry in dataset.files]
    source = index if sampler.needs_class_index else len(dataset)
    crops = training_crops(data, dataset, config.seed, index, augmentations(config))
    minibatches = builder("sampler", sampler)(source, names=names, **order)
    draws = Draws(minibatches, f"sampler={sampler.name}", order, len(dataset))
    return loader(crops, data, world, batch_sampler=draws)


def class_index(
    config: SegmentationRun, dataset: SegmentationDataset, world: World, progress: Callable[[int, int], None]
) -> ClassIndex | None:
    """The class index of the training split; None if neither sampler nor loss needs it. Rank 0 builds a missing one.

    `progress(done, total)` counts images. ValueError: see `index_classes`.
    """
    is_drawn = config.sampler.needs_class_index
    if not is_drawn and not config.loss.needs_class_index:
        return None
    read = partial(index_classes, dataset, config.sampler.folder, progress=progress, folder_key="sampler.folder")
    index = None
    with world.first_goes_ahead() as first:
        if first:
            index = read()
    if index is None:
        index = read()  # built again if machines do not share the folder
    absent = index.absent_classes()
    if is_drawn and absent and world.first:
        logger.warning(
            f"class-uniform sampling: {len(absent)} of {len(index.classes)} classes have no pixel in the training "
            f"split and are not drawn: {', '.join(absent)}"
        )
    return index


def sampler_arguments(config: TrainingRun, total_steps: int, world: World, start_step: int = 0) -> dict:
    """Arguments shared by all samplers of minibatches."""
    return dict(
        crops_per_minibatch=config.data.crops_per_minibatch,
        seed=config.seed,
        steps=total_steps,
        start_step=start_step,
        rank=world.rank,
        world_size=world.size,
    )


def augmentations(config: TrainingRun) -> Augmentations | None:
    """The run's own augmentations; None if it has none."""
    functions = {name: builder("augmentations", choice)() for name, choice in config.augmentations.items()}
    for name, function in functions.items():
        _check_augmentation(name, function, config.data.most_mixes)
    return Augmentations(functions, config.seed) if functions else None


def _check_augmentation(name: str, function: Callable[..., Any], most_mixes: int) -> None:
    """ValueError: it mixes too many crops, or does not take the arguments that it will be given."""
    mixes = getattr(function, "mixes", 0)
    if type(mixes) is not int or not 0 <= mixes <= most_mixes:
        raise ValueError(
            f"augmentations={name} has mixes={mixes!r}: expected a whole number of further crops up to "
            f"{MOST_MIXES}, and 0 in classification, which has none"
        )
    arguments = ["crop", "label", "generator", "others"] if mixes else ["crop", "label", "generator"]
    try:
        with suppress(ValueError):  # code in C may have no signature
            signature(function).bind(*arguments, **dict.fromkeys(moment_fields(function)))
    except TypeError as error:
        raise ValueError(
            f"augmentations={name} does not take ({', '.join(arguments)}): {error}; an attribute mixes = k asks "
            f"for k others"
        ) from error


def training_crops(
    config: SegmentationData,
    dataset: SegmentationDataset,
    seed: int,
    index: ClassIndex | None = None,
    augmentations: Augmentations | None = None,
) -> TrainingCrops:
    """The augmented crops that a sampler draws from."""
    jitter = config.colour_jitter
    lowest, highest = config.scale
    transform = TrainingTransform(
        config.crop(),
        scale=(lowest, highest),
        flip=config.flip,
        base_size=config.base_size,
        fill=config.mean_colour(),
        colour_jitter=colour_jitter(**vars(jitter)) if any(vars(jitter).values()) else None,
        antialias=config.antialias,
    )
    return TrainingCrops(dataset, transform, seed, None if index is None else index.folder, augmentations)


def evaluation_loader(
    source: Dataset, config: Data, world: World, image_count: int | None = None, batch_size: int = 1, **batching: Any
) -> Loader:
    """Load images in order; ranks split the first `image_count` of them (None: all) without overlap.

    `batching`: further arguments of DataLoader.
    """
    assert isinstance(source, Sized), source
    count = len(source) if image_count is None else min(image_count, len(source))
    shard = range(world.rank, count, world.size)  # unpadded: no image counts twice
    return loader(source, config, world, sampler=shard, batch_size=batch_size, **batching)


def at_once(config: SegmentationRun, device: torch.device, process_count: int, views: Views | None = None) -> AtOnce:
    """How many images are segmented at once, and in which views. `process_count`: of the training."""
    trainer = config.trainer
    views = views or Views(config.data.base_size, config.data.antialias)
    if trainer.evaluate_batch_size != "auto":
        return AtOnce(trainer.evaluate_batch_size, views=views)
    crops = -(-config.data.crops_per_minibatch // (process_count * trainer.accumulation_steps))
    pixels = None if device.type == "cpu" else crops * math.prod(config.data.crop())
    return AtOnce(pixels=pixels, views=views)


def loader(source: Dataset, config: Data, world: World, **batching: Any) -> Loader:
    """A Loader of `source` with the configured workers. `batching`: further arguments of DataLoader."""
    return Loader(source, workers_of(config), pin_memory=world.device.type == "cuda", **batching)


def workers_of(config: Data) -> int:
    """Data workers of this process."""
    return min(cores_per_rank(), MOST_AUTOMATIC) if config.workers == "auto" else config.workers
