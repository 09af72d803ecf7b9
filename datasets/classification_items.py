"""The items of classification: random crops for training, fixed views for evaluation.

Pixels stay uint8, unless a mean image is subtracted from them: then they are float32, in the same levels of 0 to 255.
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
    """Augmented crops. Keys come from a sampler: (epoch, index).

    A crop depends only on the seed and its key, not on the number of workers or on earlier reads. Images in memory with
    a `PaddedCrop` are augmented by the minibatch. `skip_unreadable`: see `TrainingCrops`.
    """

    dataset: ClassificationDataset
    transform: RandomResizedCrop | ResizedRandomCrop | PaddedCrop
    seed: int
    skip_unreadable: bool = False
    # Epoch, corners and flips of all images.
    _drawn: tuple[int, np.ndarray, np.ndarray] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        assert self.dataset.mean_image is None or isinstance(self.transform, PaddedCrop), "others take stored images"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Key) -> dict:
        """{"image": tensor (3, h, w) RGB, uint8 or float32, "label": int, "name": str, "skipped": str}

        "skipped" has one line for each unreadable image that this crop replaces.
        """
        return readable(self._crop, Draw(*key), len(self), self.skip_unreadable)

    def __getitems__(self, keys: Sequence[Key]) -> list[dict] | dict:
        """The items of a minibatch, for `collated`. All keys have the same epoch."""
        if self.dataset.pixels is None or not isinstance(self.transform, PaddedCrop):
            return [self[key] for key in keys]
        numbers = np.array([number for _, number in keys])
        crops = self._minibatch(self.transform, keys[0][0], numbers)
        return {**_minibatch(self.dataset, crops, numbers), "skipped": [""] * len(keys)}

    def _crop(self, draw: Draw) -> dict:
        number = draw.image
        if self.dataset.pixels is not None and isinstance(self.transform, PaddedCrop):
            crops = self._minibatch(self.transform, draw.epoch, np.array([number]))
            return _item(self.dataset, torch.from_numpy(crops[0]), number)
        rng = np.random.default_rng([self.seed, draw.epoch, number])
        crop = self.transform(self.dataset.image(number), rng)
        return _item(self.dataset, torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1))), number)

    def _minibatch(self, transform: PaddedCrop, epoch: int, numbers: np.ndarray) -> np.ndarray:
        images = self.dataset.in_memory(numbers)
        # One generator per epoch draws for all images at once: a generator per image would take longer than the crops.
        if self._drawn is None or self._drawn[0] != epoch:
            seeds = np.random.SeedSequence([self.seed, epoch], spawn_key=(_EPOCH_STREAM,))
            drawn = transform.draw(images.shape[2:], len(self), np.random.default_rng(seeds))
            self._drawn = (epoch, *drawn)
        _, corners, mirrored = self._drawn
        return transform.minibatch(images, corners[numbers], mirrored[numbers])


@dataclass(eq=False)
class EvaluatedImages(Dataset):
    """Images as an evaluation sees them: `view` is a `CentreCrop`, `TenCrops`, or None for whole images.

    Whole images in memory are minus the dataset's mean image, if it has one.
    """

    dataset: ClassificationDataset
    view: Callable[[np.ndarray], np.ndarray] | None

    def __post_init__(self) -> None:
        assert self.dataset.mean_image is None or self.view is None, "views show images as stored"

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, number: int) -> dict:
        """{"image": tensor (3, h, w) RGB, or (10, 3, h, w) for ten crops, "label": int, "name": str}

        The image is uint8, or float32 with a mean image.
        """
        if self.dataset.mean_image is not None:
            return _item(self.dataset, torch.from_numpy(self.dataset.in_memory(np.array([number]))[0]), number)
        image = self.dataset.image(number)
        seen = image if self.view is None else self.view(image)
        planes = np.ascontiguousarray(np.moveaxis(seen, -1, -3))  # (…, 3, h, w)
        return _item(self.dataset, torch.from_numpy(planes), number)

    def __getitems__(self, numbers: Sequence[int]) -> list[dict] | dict:
        """The items of a minibatch, for `collated`."""
        if self.dataset.pixels is None or self.view is not None:
            return [self[number] for number in numbers]
        chosen = np.array(numbers)
        return _minibatch(self.dataset, self.dataset.in_memory(chosen), chosen)


def collated(items: list[dict] | dict) -> dict:
    """`collate_fn` of a DataLoader: a minibatch from its items, unchanged if it was made as a whole.

    "image": uint8 or float32 (n, 3, h, w), "label": int64 (n,), all else lists.
    """
    return items if isinstance(items, dict) else default_collate(items)


def _item(dataset: ClassificationDataset, image: torch.Tensor, number: int) -> dict:
    return {"image": image, "label": dataset.label(number), "name": dataset.image_name(number)}


def _minibatch(dataset: ClassificationDataset, images: np.ndarray, numbers: np.ndarray) -> dict:
    return {
        "image": torch.from_numpy(images),
        "label": torch.from_numpy(dataset.labels[numbers]),
        "name": [dataset.image_name(number) for number in numbers.tolist()],
    }
