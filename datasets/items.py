"""The items that a DataLoader reads: random crops for training, whole images or fixed views for evaluation.

Pixels stay uint8, unless a mean image is subtracted from them: then they are float32, in the same levels of 0 to 255.
In classification, images in files are read one by one, images in memory by the minibatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset, default_collate

from datasets.augmentations import Augmentations, Moment
from datasets.classification import ClassificationDataset
from datasets.file_list import readable
from datasets.image_transforms import PaddedCrop, Transform, seeded
from datasets.segmentation import SegmentationDataset
from datasets.transforms import TrainingTransform, WrongPixel

_EPOCH_STREAM = 2  # of random numbers; samplers have 0 and 1


class Draw(NamedTuple):
    """One crop of a run: from `image`, in `epoch`, containing `pixel` (row, column) of class `class_id`.

    `place`: its position in the epoch, needed if an epoch may draw an image more than once. `moment`: where in the run.
    """

    epoch: int
    image: int
    place: int | None = None
    class_id: int | None = None
    pixel: tuple[int, int] | None = None
    moment: Moment = Moment()


@dataclass(eq=False)
class _Items(Dataset):
    """One item for each image of a split."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)


@dataclass(eq=False)
class TrainingCrops(_Items):
    """Augmented crops with labels of pixels. Keys come from a sampler: (epoch, index) or a `Draw`.

    A crop depends only on the seed and its key, not on the number of workers or on earlier reads. Items are {"image":
    uint8 tensor (channels, h, w), "label": uint8 tensor (h, w) of train ids, "name": str}. `index_folder`: of the class
    index that the pixels of the keys are from. ValueError: a file cannot be read.
    """

    dataset: SegmentationDataset
    transform: TrainingTransform
    seed: int
    index_folder: Path | None = None
    augmentations: Augmentations | None = None

    def __getitem__(self, key: tuple[int, int] | Draw) -> dict:
        draw = Draw(*key)
        undecoded_image, undecoded_label = self.dataset.undecoded(draw.image)
        rng = _generator(self.seed, draw)
        try:
            _check_pixel(draw.pixel, undecoded_image.shape)
            image, label = self.transform(undecoded_image, undecoded_label, rng, draw.pixel, draw.class_id)
        except WrongPixel as error:
            raise ValueError(
                f"{readable(self.dataset.path(draw.image))}: {error}, but the class index has its pixel (row, column) "
                f"{draw.pixel}: it changed since. Restore it, or remove {self.index_folder} and start again"
            ) from None
        if self.augmentations is not None:
            classes = len(self.dataset.classes)
            image, augmented_label = self.augmentations(
                image, label, _seeds(draw), draw.moment, classes, self._further_crop
            )
            label = np.ascontiguousarray(augmented_label)
        return {
            "image": _channels_first(image),
            "label": torch.from_numpy(label),
            "name": self.dataset.files[draw.image].name,
        }

    def _further_crop(self, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """A crop of any image, to be mixed into another."""
        return self.transform(*self.dataset.undecoded(int(rng.integers(len(self)))), rng)


def _check_pixel(pixel: tuple[int, int] | None, size: tuple[int, int]) -> None:
    """WrongPixel if an image of `size` (H, W) is too small to have a pixel (row, column)."""
    height, width = size
    if pixel is not None and (pixel[0] >= height or pixel[1] >= width):
        raise WrongPixel(f"is {width}x{height} pixels")


@dataclass(eq=False)
class ImagesInFiles(_Items):
    """Images of a classification in files: {"image": uint8 tensor (3, h, w) RGB, "label": int, "name": str}.

    With a `seed` they are augmented crops, with keys as in `TrainingCrops`. Otherwise they are seen as an evaluation
    sees them, with their numbers as keys: `transform` is from `fixed_crops`, and may return ten crops (10, 3, h, w).
    """

    dataset: ClassificationDataset
    transform: Transform
    seed: int | None = None
    augmentations: Augmentations | None = None

    def __getitem__(self, key: Any) -> dict:
        if self.seed is None:
            return self._item(key, self.transform(self._pixels(key)).contiguous())
        draw = Draw(*key)
        seed = int(_generator(self.seed, draw).integers(2**63))
        crop = seeded(self.transform, self._pixels(draw.image), seed).contiguous()
        if self.augmentations is not None:
            changed, _ = self.augmentations(crop.permute(1, 2, 0).numpy(), None, _seeds(draw), draw.moment)
            crop = _channels_first(changed)
        return self._item(draw.image, crop)

    def _pixels(self, number: int) -> torch.Tensor:
        return torch.from_numpy(self.dataset.image(number)).permute(2, 0, 1)

    def _item(self, number: int, image: torch.Tensor) -> dict:
        return {"image": image, "label": self.dataset.label(number), "name": self.dataset.image_name(number)}


def _generator(seed: int, draw: Draw) -> np.random.Generator:
    return np.random.default_rng([seed, *_seeds(draw)])


def _seeds(draw: Draw) -> tuple[int, ...]:
    """What tells a draw from the others of a run. A draw without a place is its image's only one in the epoch."""
    return (draw.epoch, draw.image) if draw.place is None else (draw.epoch, draw.image, draw.place)


@dataclass(eq=False)
class WholeImages(_Items):
    """Whole images with their labels, for evaluation and prediction. Sizes may differ: loaders give one at a time."""

    dataset: SegmentationDataset

    def __getitem__(self, index: int) -> dict:
        """{"image": uint8 tensor (channels, H, W), "label": uint8 tensor (H, W) unless it has none, "name": str}."""
        image, label, name = self.dataset.sample(index)
        item = {"image": _channels_first(image), "name": name}
        if label is not None:
            item["label"] = torch.from_numpy(label)
        return item


def _channels_first(image: np.ndarray) -> torch.Tensor:
    planes = np.empty((image.shape[2], *image.shape[:2]), np.uint8)
    cv2.split(image, list(planes))  # several times faster than numpy's copy of the transposed array
    return torch.from_numpy(planes)


@dataclass(eq=False)
class ImagesInMemory(_Items):
    """Images in memory, minus the dataset's mean image if it has one, a minibatch at a time, for `collated`.

    With a `transform` they are augmented crops, with the keys (epoch, index); otherwise whole images.
    """

    dataset: ClassificationDataset
    transform: PaddedCrop | None = None
    seed: int = 0
    augmentations: Augmentations | None = None
    # The epoch, corners and flips of its images.
    _epoch_draws: tuple[int, np.ndarray, np.ndarray] | None = field(default=None, init=False, repr=False)

    def __getitems__(self, keys: Sequence[Any]) -> dict:
        """{"image": uint8 or float32 (n, 3, h, w), "label": int64 (n,), "name": list}. All keys have the same epoch."""
        numbers = np.array(keys if self.transform is None else [number for _, number, *_ in keys])
        images = self.dataset.pixels_of(numbers)
        if self.transform is not None:
            corners, mirrored = self._draw_epoch(self.transform, keys[0][0], images.shape[2:])
            images = self.transform.minibatch(images, corners[numbers], mirrored[numbers])
            if self.augmentations is not None:
                crops = zip(images.transpose(0, 2, 3, 1), (Draw(*key) for key in keys), strict=True)
                changed = [self.augmentations(crop, None, _seeds(draw), draw.moment)[0] for crop, draw in crops]
                images = np.ascontiguousarray(np.stack(changed).transpose(0, 3, 1, 2))
        names = [self.dataset.image_name(number) for number in numbers.tolist()]
        return {
            "image": torch.from_numpy(images),
            "label": torch.from_numpy(self.dataset.labels[numbers]),
            "name": names,
        }

    def _draw_epoch(self, transform: PaddedCrop, epoch: int, size: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Corners and flips of all images of `size` in an epoch, which are drawn once.

        One generator draws for all images: a generator per image would take longer than the crops.
        """
        if self._epoch_draws is None or self._epoch_draws[0] != epoch:
            seeds = np.random.SeedSequence([self.seed, epoch], spawn_key=(_EPOCH_STREAM,))
            self._epoch_draws = (epoch, *transform.draw(size, len(self), np.random.default_rng(seeds)))
        _, corners, mirrored = self._epoch_draws
        return corners, mirrored

    def __getitem__(self, key: Any) -> dict:
        return {name: values[0] for name, values in self.__getitems__([key]).items()}


def collated(items: list[dict] | dict) -> dict:
    """`collate_fn` of a DataLoader: a minibatch from its items, unchanged if it was made as a whole.

    "image": uint8 or float32 (n, 3, h, w), "label": int64 (n,), all else lists.
    """
    return items if isinstance(items, dict) else default_collate(items)
