"""The classes of the user's own images: the file classes.json."""

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from datasets.class_names import check_names
from datasets.class_table import ClassTable, distinct_colours, rgb
from datasets.layout import read_json

CLASSES = "classes.json"
EXAMPLE = '{"classes": [{"name": "wood", "colour": [120, 80, 40]}, {"name": "bark"}, …], "ignored": [255]}'
TRAINED = range(2, 254)  # classes; a single one leaves nothing to learn
_IGNORED = 255  # unless the file says otherwise
Colour = tuple[int, int, int]


def folder_classes(file: Path) -> ClassTable:
    """The classes of a file classes.json.

    A class's position is its id. Ids in "ignored" are not trained, nor are the classes that have them. Predictions hold
    ids, as PNGs with the classes' colours, unless these are `lookalikes`. ValueError for a file of another form.
    """
    try:
        content = read_json(file)
        _check_form(content)
        entries = content["classes"]
        ignored = sorted(bytes(content.get("ignored", [_IGNORED])))
        colours = {
            number: rgb(entry["colour"]) for number, entry in enumerate(entries) if entry.get("colour") is not None
        }
        ids = [number for number in range(len(entries)) if number not in ignored]
        names = tuple(entries[number]["name"] for number in ids)
        check_names(zip(ids, names, strict=True))
        _check_distinct("names", names)
        _check_distinct("colours", [*colours.values()])
        if len(ids) not in TRAINED:
            raise ValueError(f"the number of classes that are not ignored is {len(ids)}, expected 2 to 253")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # the user's file may hold anything
        raise ValueError(
            f"{file}: cannot be read as a list of classes ({type(error).__name__}: {error}); expected {EXAMPLE}"
        ) from None
    return ClassTable(
        names=names,
        palette=distinct_palette({number: colours.get(number) for number in ids}),
        official_ids=tuple(ids),
        label_ids={**dict.fromkeys(ignored, 255), **{number: train_id for train_id, number in enumerate(ids)}},
        label_colours={int.from_bytes(colour, "big"): number for number, colour in colours.items()},
        official_void=ignored[0] if ignored else _IGNORED,
        coloured_predictions=True,
        ignored_by=f'"ignored" in {file}',
        ignored=tuple(number for number in ignored if number < len(entries)),
    )


def _check_form(content: Any) -> None:
    """ValueError, or an error of Python's, unless a file holds classes and ids, and nothing else."""
    if not isinstance(content, dict) or not all(isinstance(entry, dict) for entry in content["classes"]):
        raise ValueError('every class needs an object, such as {"name": "wood"}')
    if not isinstance(content.get("ignored", []), list):
        raise ValueError(f'"ignored" is {content["ignored"]}, expected a list of ids, such as [{_IGNORED}]')
    foreign = [number for number in content.get("ignored", []) if number not in range(256)]
    if foreign:
        raise ValueError(f'"ignored" has {foreign[0]!r}, expected ids from 0 to 255')
    keys = {*content} - {"classes", "ignored"} | {key for entry in content["classes"] for key in entry}
    unknown = sorted(keys - {"name", "colour"})
    if unknown:
        raise ValueError(f"the key {unknown[0]!r} is unknown")


def _check_distinct(kind: str, values: Sequence[object]) -> None:
    repeated = sorted({str(value) for value in values if values.count(value) > 1})
    if repeated:
        raise ValueError(f"two {kind} are {repeated[0]}, expected different ones")


def lookalikes(colours: Mapping[int, Sequence[int]]) -> set[int]:
    """Classes whose colour looks like another class's: every channel differs by less than 8 levels."""
    similar_counts = _look_alike([*colours.values()], [*colours.values()]).sum(axis=1)  # each is like itself
    return {number for number, count in zip(colours, similar_counts, strict=True) if count > 1}


def distinct_palette(colours: Mapping[int, Colour | None]) -> tuple[Colour, ...]:
    """One colour per class: its own, or a spare one if it has none or its own looks like another class's."""
    own_colours = {number: colour for number, colour in colours.items() if colour is not None}
    chosen = {number: own_colours[number] for number in own_colours.keys() - lookalikes(own_colours)}
    # Each colour is near at most one colour of the grid, so enough of these are left.
    levels = range(20, 256, 32)
    spare = [*distinct_colours(256), *product(levels, levels, levels)]
    for number in sorted(colours.keys() - chosen.keys()):
        candidates = [spare[number], *spare]
        is_near = _look_alike(candidates, [*chosen.values()]).any(axis=1)
        chosen[number] = candidates[int(is_near.argmin())]
    return tuple(chosen[number] for number in colours)


def _look_alike(rows: Sequence[Sequence[int]], columns: Sequence[Sequence[int]]) -> np.ndarray:
    """Which pairs of colours look alike, bool (rows, columns)."""
    row_levels, column_levels = (np.array(colours, np.int16).reshape(-1, 3) for colours in (rows, columns))
    return (np.abs(row_levels[:, None] - column_levels) < 8).all(axis=2)
