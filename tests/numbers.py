"""Numbers in the documentation that come from a record: their marks, and the values that the records have.

A number is followed by a comment with its source, which readers do not see:

    72.4<!-- n: mean camvid/finetune/lite0*/results.json#miou x100 .1 -->

FILE is below docs/results and may have wildcards; `NAME@` is the run NAME with all its seeds. After # come keys and
positions, * for all; a dot within a name is written as a colon. Several values need a word before FILE: mean,
deviation, median, least, most or count. `FILE#a / FILE#b` divides. xN multiplies; .N is the number of digits.
`block NAME 2 "takes {} of"` is the number in a block that scripts generate, where the words stand for the second time.
"""

import json
import re
import statistics
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results"
MARK = re.compile(r"([+-]?[\d,.]*\d)(?: ?%)?<!-- n: (.*?) -->")
FOLDS: dict[str, Callable[[list[float]], float]] = {
    **{"mean": statistics.mean, "deviation": statistics.stdev, "median": statistics.median},
    **{"least": min, "most": max, "count": len},
}


def marked(text: str) -> Iterator[tuple[str, str]]:
    """Each marked number of a page as it is written, and its source. ValueError: a mark that cannot be where it is."""
    found = MARK.findall(text)
    if re.search(r"(?m)^\|.*<!-- n: [^>]*\|[^>]*-->", text):
        raise ValueError("a mark in a table must have no |, which ends a cell in comments too")
    if len(found) != text.count("<!-- n: "):
        raise ValueError("a mark <!-- n: … --> must follow its number")
    yield from ((number.replace(",", ""), source) for number, source in found)


def value_of(source: str) -> str:
    """Return the number in the records, written like the one in the text. ValueError: no value, or several."""
    if block := re.fullmatch(r'block (\S+) (\d+) "(.*)"', source):
        return _in_block(block[1], int(block[2]), block[3])
    parts = re.fullmatch(r"(.+?)(?: x(\S+))?(?: \.(\d))?", source)
    assert parts is not None, source
    first, *others = (_folded(each) for each in parts[1].split(" / "))
    for other in others:
        first /= other
    return f"{first * float(parts[2] or 1):.{parts[3] or 0}f}"


def _folded(source: str) -> float:
    fold, _, place = source.partition(" ")
    if fold not in FOLDS:
        fold, place = "", source
    pattern, _, path = place.partition("#")
    files = sorted({file for seed in ("", "_seed*") for file in RESULTS.glob(pattern.replace("@", seed))})
    values = [value for file in files for value in _at(_read(file), path.split(".") if path else [])]
    if fold:
        return float(FOLDS[fold](values))
    if len(values) != 1:
        raise ValueError(f"{source}: {len(values)} values, expected one")
    return float(values[0])


@cache
def _read(file: Path) -> Any:
    return json.loads(file.read_text())


def _at(value: Any, path: list[str]) -> Iterator[Any]:
    """The values at a path. `[name=value]` chooses those rows of a list."""
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
    pages = [RESULTS.parent.parent / "README.md", *sorted(RESULTS.parent.rglob("*.md"))]
    blocks = "".join(
        block
        for page in pages
        for block in re.findall(f"(?s)<!-- {name} start -->(.*?)<!-- {name} end", page.read_text())
    )
    before, after = map(re.escape, words.split("{}"))
    found = re.findall(f"{before}([\\d.,]*\\d){after}", blocks)
    if len(found) < place:
        raise ValueError(f"{words!r} in the block {name}: {len(found)} times, expected at least {place}")
    return found[place - 1].replace(",", "")
