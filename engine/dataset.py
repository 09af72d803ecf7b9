"""A split of either task, and iterables with a length."""

from collections.abc import Iterator
from typing import Protocol, TypeVar

from datasets import ClassificationDataset, SegmentationDataset

Item_co = TypeVar("Item_co", covariant=True)
Dataset = SegmentationDataset | ClassificationDataset


class SizedIterable(Protocol[Item_co]):
    """An iterable with a length, such as a DataLoader."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Item_co]: ...
