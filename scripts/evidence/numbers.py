"""Numbers in the prose of the documents, and the records that they come from.

docs/results/numbers.yaml lists sentences or table rows by page:

    README.md:
      - text: 'standard norms | 74.42 | {} ± {}'
        from: [mean camvid/table3/std@/results.json#miou x100 .1, deviation …]

`text` stands once on the page, with any white space; each {} is a number. `quoted` lists, by page, texts with published
numbers. A source is FILE#PATH below docs/results: FILE may have wildcards, and `NAME@` is the run NAME with all its
seeds; PATH is keys and positions, * for all, [name=value] for the rows with this value, and a colon for a dot in a
name. Several values need a word before FILE: mean, deviation, median, least, most or count. `ratio A / B` compares
times round by round, as tables do; `A / B` divides. xN multiplies; .N is the number of digits. `block NAME 2 "takes {}
of"` is the number in a block that scripts generate, where the words stand for the second time.
"""

import difflib
import json
import re
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import OmegaConf

from scripts.reports.frame import RESULTS
from scripts.reports.markdown import ratio_of
from scripts.reports.papers import REPOSITORY

NUMBER = r"([+-]?[\d,.]*\d)"
MEASURED = re.compile(r"\d+\.\d+|\d[\d,]*(?=[ -]?(?:%|ms\b|[GM]iB\b|points?\b))")  # needs a record, or is quoted
NO_PROSE = re.compile(r"(?s)<!-- (\w+) start -->.*?<!-- \1 end -->|```.*?```|`[^`]*`|\]\([^)]*\)|https?://\S+")
FOLDS: dict[str, Callable[[list[float]], float]] = {
    **{"mean": statistics.mean, "deviation": statistics.stdev, "median": statistics.median},
    **{"least": min, "most": max, "count": len},
}


class Entry(NamedTuple):
    text: str
    sources: list[str]

    def found(self, page: str) -> re.Match:
        """Where it stands on a page; a group is a number. ValueError: it does not stand there exactly once."""
        words = [r"\s+".join(map(re.escape, part.split(" "))) for part in self.text.split("{}")]
        places = list(re.finditer(NUMBER.join(words), page))
        if len(places) != 1:
            lines = " ".join(page.split()).split(". ")
            nearest = difflib.get_close_matches(self.text, lines, n=1, cutoff=0.3)
            raise ValueError(f"{self.text!r} occurs {len(places)} times, expected once; nearest: {nearest}")
        if len(places[0].groups()) != len(self.sources):
            raise ValueError(f"{self.text!r}: {len(places[0].groups())} numbers have {len(self.sources)} sources")
        return places[0]


@cache
def listed() -> dict[Any, Any]:
    content = OmegaConf.to_container(OmegaConf.load(RESULTS / "numbers.yaml"))
    assert isinstance(content, dict)
    return content


def pages() -> list[Path]:
    return [REPOSITORY / name for name in listed() if name != "quoted"]


def entries(page: Path) -> list[Entry]:
    """The sentences of a page."""
    own = listed().get(page.relative_to(REPOSITORY).as_posix(), [])
    return [Entry(entry["text"], entry["from"]) for entry in own]


def written(page: Path, text: str) -> str:
    """The text of a page with the values that the records have. ValueError: a sentence or a value is not there."""
    changes = []
    for entry in entries(page):
        found = entry.found(text)
        for i, source in enumerate(entry.sources, 1):
            changes.append((*found.span(i), value_of(source, grouped="," in found[i])))
    for start, end, value in sorted(changes, reverse=True):
        text = text[:start] + value + text[end:]
    return text


def without_source(page: Path, text: str) -> list[str]:
    """The measured numbers in the prose of a page of `quoted` that have no record and are not quoted."""
    name = page.relative_to(REPOSITORY).as_posix()
    if name not in listed()["quoted"]:
        return []
    known = [entry.found(text).span(i) for entry in entries(page) for i in range(1, len(entry.sources) + 1)]
    for quoted in listed()["quoted"][name]:
        known.append(Entry(quoted, []).found(text).span())
    prose = NO_PROSE.sub(lambda other: " " * len(other[0]), text)
    return [
        f"{found[0]} in {' '.join(text[max(0, found.start() - 40) : found.end() + 20].split())!r}"
        for found in MEASURED.finditer(prose)
        if not any(start <= found.start() and found.end() <= end for start, end in known)
    ]


def value_of(source: str, grouped: bool = False) -> str:
    """The number in the records as text; `grouped`: with commas. ValueError: no value, or several."""
    if block := re.fullmatch(r'block (\S+) (\d+) "(.*)"', source):
        return _in_block(block[1], int(block[2]), block[3])
    parts = re.fullmatch(r"(ratio )?(.+?)(?: x(\S+))?(?: \.(\d))?", source)
    assert parts is not None, source
    first, *others = parts[2].split(" / ")
    if parts[1]:
        value = ratio_of(_values(first), _values(others[0])).median
    elif others and "times_ms" in source:
        raise ValueError(f"{source}: times are compared by `ratio A / B`, as in the tables")
    else:
        value = _folded(first)
        for other in others:
            value /= _folded(other)
    return f"{value * float(parts[3] or 1):{',' if grouped else ''}.{parts[4] or 0}f}"


def _folded(source: str) -> float:
    fold, _, place = source.partition(" ")
    values = _values(place if fold in FOLDS else source)
    if fold in FOLDS:
        return float(FOLDS[fold](values))
    if len(values) != 1:
        raise ValueError(f"{source}: {len(values)} values, expected one")
    return float(values[0])


def _values(place: str) -> list[float]:
    pattern, _, path = place.partition("#")
    files = sorted({file for seed in ("", "_seed*") for file in RESULTS.glob(pattern.replace("@", seed))})
    return [value for file in files for value in _at(_read(file), path.split(".") if path else [])]


@cache
def _read(file: Path) -> Any:
    return json.loads(file.read_text())


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    """The values at a path."""
    if not path:
        yield value
        return
    step, rest = path[0].replace(":", "."), path[1:]
    if step == "*":
        for each in value.values() if isinstance(value, dict) else value:
            yield from _at(each, rest)
    elif step.startswith("["):
        wanted = dict(pair.split("=", 1) for pair in step.strip("[]").split(";"))
        for row in value:
            if all(str(row.get(name)) == text for name, text in wanted.items()):
                yield from _at(row, rest)
    else:
        yield from _at(value[int(step)] if isinstance(value, list) else value[step], rest)


def _in_block(name: str, place: int, words: str) -> str:
    pages = "".join(
        page.read_text() for page in [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
    )
    blocks = "".join(re.findall(f"(?s)<!-- {name} start -->(.*?)<!-- {name} end", pages))
    before, after = map(re.escape, words.split("{}"))
    found = re.findall(f"{before}([\\d.,]*\\d){after}", blocks)
    if len(found) < place:
        raise ValueError(f"{words!r} in the block {name}: {len(found)} times, expected at least {place}")
    return found[place - 1]
