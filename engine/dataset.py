"""One split of a dataset, as a run of any task needs it."""

from collections.abc import Sequence
from typing import Protocol


class Dataset(Protocol):
    name: str  # for messages and results, as is split
    split: str
    classes: tuple[str, ...]  # names, by number
    palette: Sequence[tuple[int, int, int]] | None  # (R, G, B) of each class, if classes have colours

    def __len__(self) -> int: ...
