"""The items that a DataLoader reads: random crops for training, whole images for evaluation. Pixels stay uint8."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from datasets.segmentation import SegmentationDataset
from datasets.transforms import TrainingTransform

MAX_SKIPPED = 8  # unreadable images in a row; more suggest a lost disk, not damaged files


class Draw(NamedTuple):
    """One crop of a run: from `image`, in `epoch`, containing `pixel` (row, column) of class `class_id`.

    `place`: its position in the epoch, needed if an epoch may draw an image more than once.
    """

    epoch: int
    image: int
    place: int | None = None
    class_id: int | None = None
    pixel: tuple[int, int] | None = None


@dataclass(eq=False)
class TrainingCrops(Dataset):
    """Augmented crops. Keys come from a sampler: (epoch, index) or a `Draw`.

    A crop depends only on the seed and its key, not on the number of workers or on earlier reads. `skip_unreadable`: if
    an image or its label cannot be read, take the crop from the next readable image and say why. More than
    `MAX_SKIPPED` unreadable images in a row raise ValueError.
    """

    dataset: SegmentationDataset
    transform: TrainingTransform
    seed: int
    skip_unreadable: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: tuple[int, int] | Draw) -> dict:
        """{"image": uint8 tensor (3, h, w) RGB, "label": uint8 tensor (h, w) of train ids, "name": str, "skipped": str}

        "skipped" has one line for each unreadable image that this crop replaces.
        """
        return readable(self._crop, Draw(*key), len(self), self.skip_unreadable)

    def _crop(self, draw: Draw) -> dict:
        image, label = self.transform(*self.dataset.undecoded(draw.image), self._rng(draw), draw.pixel)
        return {
            "image": _channels_first(image),
            "label": torch.from_numpy(label),
            "name": self.dataset.files[draw.image].name,
        }

    def geometry(
        self, key: tuple[int, int] | Draw, size: tuple[int, int]
    ) -> tuple[tuple[int, int], tuple[int, int], bool]:
        """`TrainingTransform.draw` of a crop from its image of `size` (H, W): scaled size, offset (top, left), flip."""
        draw = Draw(*key)
        return self.transform.draw(size, self._rng(draw), draw.pixel)

    def _rng(self, draw: Draw) -> np.random.Generator:
        # (epoch, index) keys have no place: they draw an image at most once per epoch.
        place = [] if draw.place is None else [draw.place]
        return np.random.default_rng([self.seed, draw.epoch, draw.image, *place])


def readable(crop: Callable[[Draw], dict], draw: Draw, images: int, skip_unreadable: bool) -> dict:
    """`crop(draw)` with "skipped", a line for each unreadable image that it replaces.

    With `skip_unreadable`, the next readable one of all `images` replaces an image that cannot be read. ValueError if
    more than `MAX_SKIPPED` in a row cannot; without it, if the image cannot.
    """
    skipped: list[str] = []
    while True:
        try:
            return {**crop(draw), "skipped": "\n".join(skipped)}
        except ValueError as error:
            if not skip_unreadable:
                raise
            if len(skipped) == MAX_SKIPPED:
                raise ValueError(
                    f"{MAX_SKIPPED + 1} images in a row cannot be read: too many to skip, so check that the folder "
                    f"and its disk are there; the last one: {error}"
                ) from error
            skipped.append(" ".join(str(error).split()))
            draw = draw._replace(image=(draw.image + 1) % images, class_id=None, pixel=None)


@dataclass(eq=False)
class WholeImages(Dataset):
    """Whole images with their labels, for evaluation and prediction. Sizes may differ, so batches hold one image."""

    dataset: SegmentationDataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict:
        """{"image": uint8 tensor (3, H, W) RGB, "label": uint8 tensor (H, W), "name": str}.

        "label" holds `ClassTable.scored_ids`; it is absent if the image has none. If every image has instances, there
        is also "instances", int32 (H, W), as in `SegmentationDataset.scored`.
        """
        (image, label, name), instances = self.dataset.scored(index)
        item = {"image": _channels_first(image), "name": name}
        if label is not None:
            item["label"] = torch.from_numpy(label)
        if instances is not None:
            item["instances"] = torch.from_numpy(instances)
        return item


def _channels_first(image: np.ndarray) -> torch.Tensor:
    planes = np.empty((3, *image.shape[:2]), np.uint8)
    cv2.split(image, list(planes))  # several times faster than numpy's copy of the transposed array
    return torch.from_numpy(planes)
