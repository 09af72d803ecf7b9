"""Interface of a dataset for runs of any task."""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

Item_co = TypeVar("Item_co", covariant=True)


class Dataset(Protocol):
    """One split. Messages and results show its name and split."""

    @property
    def name(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def classes(self) -> tuple[str, ...]: ...  # names, by number
    @property
    def palette(self) -> Sequence[tuple[int, int, int]] | None: ...  # (R, G, B) of each class; None without colours
    @property
    def mean_image(self) -> np.ndarray | None: ...  # float64 (3, H, W), subtracted from every image; None: nothing is
    def __len__(self) -> int: ...
    def names_and_sizes(self) -> tuple[str, str]: ...  # hashes: a resumed run needs equal names, and warns of sizes


class SizedIterable(Protocol[Item_co]):
    """An iterable with a length, such as a DataLoader."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Item_co]: ...
