"""The items of classification: random crops for training, fixed views for evaluation.

Pixels stay uint8, unless a mean image is subtracted from them: then they are float32, in the same levels of 0 to 255.
Images in files are read one by one, images in memory by the minibatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from datasets.classification import ClassificationDataset
from datasets.image_transforms import PaddedCrop, RandomResizedCrop, ResizedRandomCrop
from datasets.loading import Draw, readable

Key = tuple[int, int]  # epoch, number of the image

_EPOCH_STREAM = 2  # samplers have 0 and 1


@dataclass(eq=False)
class ClassificationCrops(Dataset):
    """Augmented crops of images in files. Keys come from a sampler: (epoch, index).

    A crop depends only on the seed and its key, not on the number of workers or on earlier reads. `skip_unreadable`:
    see `TrainingCrops`.
    """

    dataset: ClassificationDataset
    transform: RandomResizedCrop | ResizedRandomCrop
    seed: int
    skip_unreadable: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> dict:
        """{"image": uint8 tensor (3, h, w) RGB, "label": int, "name": str, "skipped": str}

        "skipped" has one line for each unreadable image that this crop replaces.
        """
        return readable(self._crop, Draw(*key), len(self), self.skip_unreadable)

    def _crop(self, draw: Draw) -> dict:
        rng = np.random.default_rng([self.seed, draw.epoch, draw.image])
        return _item(self.dataset, self.transform(self.dataset.image(draw.image), rng), draw.image)


@dataclass(eq=False)
class CropsInMemory(Dataset):
    """Augmented crops of images in memory. As `ClassificationCrops`, but augmented by the minibatch."""

    dataset: ClassificationDataset
    transform: PaddedCrop
    seed: int
    # Epoch, corners and flips of all images.
    _drawn: tuple[int, np.ndarray, np.ndarray] | None = field(default=None, init=False, repr=False)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: Sequence[Key]) -> dict:
        """A minibatch, for `collated`. All keys have the same epoch."""
        epoch, numbers = keys[0][0], np.array([number for _, number in keys])
        images = self.dataset.in_memory(numbers)
        # One generator per epoch draws for all images at once: a generator per image would take longer than the crops.
        if self._drawn is None or self._drawn[0] != epoch:
            seeds = np.random.SeedSequence([self.seed, epoch], spawn_key=(_EPOCH_STREAM,))
            drawn = self.transform.draw(images.shape[2:], len(self), np.random.default_rng(seeds))
            self._drawn = (epoch, *drawn)
        _, corners, mirrored = self._drawn
        crops = self.transform.minibatch(images, corners[numbers], mirrored[numbers])
        return {**_minibatch(self.dataset, crops, numbers), "skipped": [""] * len(keys)}


@dataclass(eq=False)
class EvaluatedImages(Dataset):
    """Images in files as an evaluation sees them: `view` is a `CentreCrop` or `TenCrops`."""

    dataset: ClassificationDataset
    view: Callable[[np.ndarray], np.ndarray]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict:
        """{"image": uint8 tensor (3, h, w) RGB, or (10, 3, h, w) for ten crops, "label": int, "name": str}"""
        return _item(self.dataset, self.view(self.dataset.image(number)), number)


@dataclass(eq=False)
class ImagesInMemory(Dataset):
    """Whole images in memory, minus the dataset's mean image if it has one."""

    dataset: ClassificationDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, numbers: Sequence[int]) -> dict:
        """A minibatch, for `collated`."""
        chosen = np.array(numbers)
        return _minibatch(self.dataset, self.dataset.in_memory(chosen), chosen)


def collated(items: list[dict] | dict) -> dict:
    """`collate_fn` of a DataLoader: a minibatch from its items, unchanged if it was made as a whole.

    "image": uint8 or float32 (n, 3, h, w), "label": int64 (n,), all else lists.
    """
    return items if isinstance(items, dict) else default_collate(items)


def _item(dataset: ClassificationDataset, image: np.ndarray, number: int) -> dict:
    planes = np.ascontiguousarray(np.moveaxis(image, -1, -3))  # (…, 3, h, w)
    return {"image": torch.from_numpy(planes), "label": dataset.label(number), "name": dataset.image_name(number)}


def _minibatch(dataset: ClassificationDataset, images: np.ndarray, numbers: np.ndarray) -> dict:
    return {
        "image": torch.from_numpy(images),
        "label": torch.from_numpy(dataset.labels[numbers]),
        "name": [dataset.image_name(number) for number in numbers.tolist()],
    }
