"""What is known about a dataset without its files."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from datasets.classification import ClassificationDataset
from datasets.segmentation import SegmentationDataset

Images = Mapping[str, int | None]  # by split; None: nothing is published about the user's own images


@dataclass(frozen=True)
class Row:
    """A dataset: how a split is opened, and facts that need no files.

    `make(root, split, **options)` opens a split. `images`: official number of images by split, or a function of root
    and options. `classes`: number of classes; None for the user's own images. `drawn`: it needs no folder.
    """

    make: Callable[..., SegmentationDataset] | Callable[..., ClassificationDataset]
    images: Images | Callable[..., Images]
    classes: int | None
    drawn: bool = False

    def count_images(self, root: str | None, **options: object) -> dict[str, int | None]:
        return {**(self.images(root=root, **options) if callable(self.images) else self.images)}
