"""One split of a dataset, as a run of any task needs it."""

from collections.abc import Sequence
from typing import Protocol


class Dataset(Protocol):
    """
    name, split: for messages and results.
    classes: names of the classes, by number.
    palette: (R, G, B) of each class, or None for classes without colours.
    """

    name: str
    split: str
    classes: tuple[str, ...]
    palette: Sequence[tuple[int, int, int]] | None

    def __len__(self) -> int: ...
