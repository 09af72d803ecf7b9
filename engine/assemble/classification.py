"""Configuration keys -> classification datasets and loaders."""

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Subset

from datasets import (
    ClassificationDataset,
    ImagesInFiles,
    ImagesInMemory,
    PaddedCrop,
    ShuffledMinibatches,
    collated,
    fixed_crops,
    random_crops,
)
from datasets.classification import mean_image
from datasets.stream import Draws
from datasets.workers import Loader
from engine.assemble.contracts import builder
from engine.assemble.data import augmentations, evaluation_loader, loader, root_named, sampler_arguments
from engine.process.distributed import World
from engine.schema.classification import ClassificationData, ImageNetData, SmallImagesData
from engine.schema.training import TrainingRun


def classified_splits(config: ClassificationData) -> tuple[ClassificationDataset, ClassificationDataset]:
    """Training and validation split, minus the former's mean image if configured. ValueError: `classified_split`."""
    train_set = classified_split(config, config.train_split, "data.train_split")
    val_set = classified_split(config, config.val_split, "data.val_split")
    assert train_set.classes == val_set.classes, "each dataset compares its splits"
    if config.mean_image:
        mean = mean_image(train_set)
        return train_set.minus(mean), val_set.minus(mean)
    return train_set, val_set


def classified_split(config: ClassificationData, split: str, key: str = "data.split") -> ClassificationDataset:
    """One split. ValueError, naming its config key `key`, if the dataset has no such split or files are missing."""
    with root_named(config, f"{key}={split}: "):
        dataset = builder("data", config)(config.root, split=split)
    return replace(dataset, range16=config.range16)


def classified_crops(
    config: TrainingRun, dataset: ClassificationDataset, total_steps: int, world: World, start_step: int = 0
) -> Loader:
    """This rank's share of a minibatch of training crops for each step from `start_step` to `total_steps`.

    ValueError: the minibatch size does not fit the images or the world size.
    """
    data = config.data
    crops: Dataset
    if isinstance(data, SmallImagesData):
        padded = PaddedCrop(data.crop_size, data.padding, fill=data.mean_colour(), flip=data.flip)
        crops = ImagesInMemory(dataset, padded, config.seed, augmentations(config))
    else:
        assert isinstance(data, ImageNetData), data
        transform = random_crops(data.crop_size, None if data.crops == "release" else data.resize, data.flip)
        crops = ImagesInFiles(dataset, transform, config.seed, augmentations(config))
    order = sampler_arguments(config, total_steps, world, start_step)
    sampler = ShuffledMinibatches(len(dataset), **order)
    draws = Draws(sampler, "sampler", order, len(dataset))
    return loader(crops, data, world, batch_sampler=draws, collate_fn=collated)


def evaluation_minibatches(
    data: ClassificationData,
    dataset: ClassificationDataset,
    world: World,
    image_count: int | None = None,
    *,
    batch_size: int,
    ten_crops: bool = False,
) -> Loader:
    """This rank's share of a split, in minibatches for an evaluation.

    `image_count`: evaluate only this many, spread evenly over the split in the order of classes.
    """
    images: Dataset
    if isinstance(data, ImageNetData):
        images = ImagesInFiles(dataset, fixed_crops(data.resize, data.crop_size, ten_crops))
    else:
        images = ImagesInMemory(dataset)
    if image_count is not None and image_count < len(dataset):
        by_class = np.argsort(dataset.labels, kind="stable").tolist()
        images = Subset(images, [by_class[number * len(dataset) // image_count] for number in range(image_count)])
    return evaluation_loader(images, data, world, batch_size=batch_size, collate_fn=collated)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of logits (N, classes) and labels (N,), in at least float32.

    In 16 bits the loss has three digits, and the gradient of a scaled float16 loss overflows.
    """
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)
