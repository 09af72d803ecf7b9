"""The registry: one row for each dataset that a configuration can name."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from datasets.camvid import camvid
from datasets.cifar import cifar10, cifar100
from datasets.cityscapes import cityscapes
from datasets.classification import ClassificationDataset
from datasets.coco_stuff import coco_stuff
from datasets.folder import folder, folder_splits
from datasets.imagenet import image_folder, imagenet, own_splits
from datasets.segmentation import SegmentationDataset
from datasets.shapes import IMAGES as SHAPES
from datasets.shapes import shapes
from datasets.synthetic import IMAGES as STREETS
from datasets.synthetic import synthetic
from datasets.vistas import vistas

Split = TypeVar("Split", SegmentationDataset, ClassificationDataset)
Images = Mapping[str, int | None]  # by split; None: nothing is published about the user's own images


@dataclass(frozen=True)
class Row(Generic[Split]):
    """Facts about a dataset that need no files.

    `make(root, split, **options)` opens a split. `images`: official number of images by split, or a function of root
    and options. `classes`: number of classes; None for the user's own images. `drawn`: it needs no folder.
    `in_memory`: small images of one size (classification).
    """

    make: Callable[..., Split]
    images: Images | Callable[..., Images]
    classes: int | None
    drawn: bool = False
    in_memory: bool = False

    def count_images(self, root: str | None, **options: object) -> dict[str, int | None]:
        return {**(self.images(root=root, **options) if callable(self.images) else self.images)}


FOR_SEGMENTATION: dict[str, Row[SegmentationDataset]] = {
    "camvid": Row(camvid, {"train": 367, "val": 101, "test": 233}, classes=11),
    "cityscapes": Row(cityscapes, {"train": 2975, "val": 500, "test": 1525}, classes=19),
    "coco_stuff": Row(
        coco_stuff,
        lambda lists, **_: {"train": 118_287 if lists == "full" else 40_000, "val": 5000, "test": 40_670},
        classes=91,
    ),
    "folder": Row(folder, lambda root, **_: dict.fromkeys(folder_splits(root)), classes=None),
    "synthetic": Row(synthetic, STREETS, classes=19, drawn=True),
    "vistas": Row(vistas, {"train": 18_000, "val": 2000, "test": 5000}, classes=65),
}
FOR_CLASSIFICATION: dict[str, Row[ClassificationDataset]] = {
    "cifar10": Row(cifar10, {"train": 50_000, "test": 10_000}, classes=10, in_memory=True),
    "cifar100": Row(cifar100, {"train": 50_000, "test": 10_000}, classes=100, in_memory=True),
    "image_folder": Row(image_folder, lambda root, **_: dict.fromkeys(own_splits(root)), classes=None),
    "imagenet": Row(imagenet, {"train": 1_281_167, "val": 50_000}, classes=1000),
    "shapes": Row(shapes, SHAPES, classes=8, drawn=True, in_memory=True),
}
ROWS: dict[str, Row] = {**FOR_SEGMENTATION, **FOR_CLASSIFICATION}
