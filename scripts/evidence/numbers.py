"""Numbers in the prose of pages, and the records that they come from. `scripts.evidence.sentences` lists the sentences.

A sentence stands once on its page, with any white space. `python -m scripts.evidence.documents` writes its numbers.
"""

import difflib
import json
import re
import statistics
import string
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from scripts.reports.frame import RESULTS
from scripts.reports.markdown import ratio_of
from scripts.reports.papers import REPOSITORY

NUMBER = r"([+-]?[\d,.]*\d)"
MEASURED = re.compile(r"\d+\.\d+|\d[\d,]*(?=[ -]?(?:%|ms\b|[GM]iB\b|points?\b))")  # needs a record, or is quoted
NO_PROSE = re.compile(r"(?s)<!-- (\w+) start -->.*?<!-- \1 end -->|```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+")


class Sentence(NamedTuple):
    """Words of a page with a format such as {:.2f} for each number, and the function that gives the numbers."""

    text: str
    values: Callable[[], Sequence[float]] = lambda: ()

    def found(self, page: str) -> re.Match:
        """Where it stands on a page; a group is a number. ValueError: it does not stand there exactly once."""
        words = [r"\s+".join(map(re.escape, part.split(" "))) for part, *_ in string.Formatter().parse(self.text)]
        places = list(re.finditer(NUMBER.join(words if self.text[-1] != "}" else [*words, ""]), page))
        if len(places) != 1:
            lines = " ".join(page.split()).split(". ")
            nearest = difflib.get_close_matches(self.text, lines, n=1, cutoff=0.3)
            raise ValueError(f"{self.text!r} occurs {len(places)} times, expected once; nearest: {nearest}")
        return places[0]

    def numbers(self) -> list[str]:
        """Its numbers as text. ValueError: they are not as many as the formats."""
        formats = [form for _, _, form, _ in string.Formatter().parse(self.text) if form is not None]
        values = self.values()
        if len(values) != len(formats):
            raise ValueError(f"{self.text!r}: {len(values)} values for {len(formats)} formats")
        return [format(value, form) for value, form in zip(values, formats, strict=True)]


def written(sentences: Sequence[Sentence], page: str) -> str:
    """The text of a page with the numbers that the records have. ValueError: a sentence or a number is not there."""
    changes = []
    for sentence in sentences:
        found = sentence.found(page)
        changes += [(*found.span(i), number) for i, number in enumerate(sentence.numbers(), 1)]
    for start, end, number in sorted(changes, reverse=True):
        page = page[:start] + number + page[end:]
    return page


def without_source(sentences: Sequence[Sentence], quoted: Sequence[str], page: str) -> list[str]:
    """The measured numbers in the prose of a page that no sentence gives, and that are not in a quoted text."""
    places = [sentence.found(page) for sentence in sentences]
    known = [place.span(i) for place in places for i in range(1, 1 + len(place.groups()))]
    known += [Sentence(text).found(page).span() for text in quoted]
    prose = NO_PROSE.sub(lambda other: " " * len(other[0]), page)
    return [
        f"{found[0]} in {' '.join(page[max(0, found.start() - 40) : found.end() + 20].split())!r}"
        for found in MEASURED.finditer(prose)
        if not any(start <= found.start() and found.end() <= end for start, end in known)
    ]


@cache
def record(name: str) -> Any:
    """A file of docs/results, without its suffix."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def rows(name: str, call: str, *items: str, **keys: Any) -> list[dict[str, Any]]:
    """The rows of a benchmark's call with these values, in these items or in all."""
    (found,) = (each["items"] for each in record(name)["calls"] if each.get("name", "") == call)
    several = (row for item in items or found for row in found[item])
    return [row for row in several if all(row.get(key) == value for key, value in keys.items())]


def row(name: str, call: str, item: str, **keys: Any) -> dict[str, Any]:
    """The only row of an item with these values. ValueError: there is none, or there are several."""
    found = rows(name, call, item, **keys)
    if len(found) != 1:
        raise ValueError(f"{name}: call {call!r}, item {item!r}, {keys}: {len(found)} rows, expected one")
    return found[0]


def ms(row: dict[str, Any]) -> float:
    """The median time of a row."""
    return statistics.median(row["times_ms"])


def ratio(one: Sequence[dict], other: Sequence[dict], key: str = "times_ms") -> float:
    """The median ratio of times of the same rounds, as in tables."""
    return ratio_of(*([time for row in several for time in row[key]] for several in (one, other))).median


def runs(name: str, *path: str, file: str = "results") -> list[float]:
    """A value in the results of a run and of its repetitions with other seeds."""
    found = []
    for folder in sorted([RESULTS / name, *RESULTS.glob(f"{name}_seed*")]):
        value = record(str((folder / file).relative_to(RESULTS)))
        for key in path:
            value = value[key]
        found.append(value)
    return found


def scores(name: str, key: str = "miou", file: str = "results") -> list[float]:
    """The scores of a run and of its repetitions, in %."""
    return [100 * score for score in runs(name, key, file=file)]


def spread(name: str, file: str = "results") -> tuple[float, float]:
    """Mean and standard deviation of mIoU over seeds, in %."""
    found = scores(name, file=file)
    return statistics.mean(found), statistics.stdev(found)


def in_block(name: str, words: str, place: int = 1) -> float:
    """The number {} where the words stand in the blocks of a name, on all pages. `place`: for which time, from 1."""
    pages = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    blocks = "".join(re.findall(f"(?s)<!-- {name} start -->(.*?)<!-- {name} end", "".join(map(Path.read_text, pages))))
    found = re.findall(NUMBER.join(map(re.escape, words.split("{}"))), blocks)
    if len(found) < place:
        raise ValueError(f"{words!r} in the block {name}: {len(found)} times, expected at least {place}")
    return float(found[place - 1].replace(",", ""))
