"""Tables and sections of pages in Markdown, and the numbers in them: bytes, and ratios of times."""

import itertools
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from datasets.file_list import printable

MIB, GIB = 2**20, 2**30
WIDTH = 140  # of the lines of pages, in characters
Rows = list[dict[str, Any]]
Columns = Sequence[tuple[str, str | Callable[[Any], str]]]  # title, format of a row or row -> its text


def escaped(name: object) -> str:
    """A name of a file or class in prose or a table, where Markdown would take some characters for HTML or its own."""
    return re.sub(r"[&<>|`\[\]]", lambda found: f"&#{ord(found[0])};", printable(name))


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the columns after the first `left` hold numbers."""
    rule = "|" + "---|" * left + "---:|" * (len(titles) - left)
    header, *lines = (f"| {' | '.join(cells)} |" for cells in [titles, *rows])
    return "\n".join([header, rule, *lines])


def columns(rows: Iterable[Any], shown: Columns, left: int = 1) -> str:
    """A table of rows, from a list of columns; empty columns after the first `left` are left out."""

    def texts(row: Any) -> list[str]:
        return [text.format_map(row) if isinstance(text, str) else text(row) for _, text in shown]

    lines = [[title for title, _ in shown], *map(texts, rows)]
    kept = [number for number in range(len(shown)) if number < left or any(line[number] for line in lines[1:])]
    titles, *others = ([line[number] for number in kept] for line in lines)
    return table(titles, others, left)


def in_lines(text: str) -> str:
    """A text whose prose and commands have lines of at most `WIDTH` characters, where they have a space or a comma.

    A shell reads the lines of a command as one.
    """
    lines, is_code = [], False
    for line in text.splitlines():
        is_code ^= line.startswith("```")
        if len(line) <= WIDTH or line.startswith(("|", "!", "#")):
            lines.append(line)
        elif is_code:
            lines.append(_folded(line))
        else:
            indent = "  " if line.startswith("- ") else ""
            lines += textwrap.wrap(
                line, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
    return "\n".join(lines)


def _folded(command: str) -> str:
    """Not within quotes, where a backslash is one of the text."""
    lines = [""]
    for part in re.findall(r"(?:'[^']*'|[^ ,'])*[ ,]?", command):
        if lines[-1] and len(lines[-1] + part) >= WIDTH:
            lines.append("")
        lines[-1] += part
    return "\\\n".join(lines)


def unfolded(text: str) -> str:
    """Commands in one line each."""
    return text.replace("\\\n", "")


Items = Iterable[Rows]  # what was measured in turns, item by item


def compared(items: Items, by: str = "", base: str = "") -> str:
    """A table of all rows that could be measured. Bytes, times and operations are also relative to an item's row
    `base`, a value of the key `by`.
    """
    lines: list[dict[tuple[str, str], str]] = []
    for rows in map(without_reasons, items):
        first = next((row for row in rows if row.get(by) == base), {})
        lines += [_cells(row, first, base) for row in rows]
    titles = dict.fromkeys(itertools.chain(*lines))
    return table([title for title, _ in titles], ([line.get(title, "") for title in titles] for line in lines))


def _cells(row: dict, base_row: dict, base: str) -> dict[tuple[str, str], str]:
    """{(title of a column, key): text}"""
    cells: dict[tuple[str, str], str] = {}
    for key, value in row.items():
        name, _, unit = key.rpartition("_")
        if unit == "bytes":
            cells[f"{name}, MiB", key] = mib(value, 2)
        elif unit == "ms":
            cells[f"{name}, ms", key] = f"{statistics.median(value):.4g}"
        elif key not in ("flops", "part"):
            cells[key, key] = _text(value)
        if (ratio := relative(row, base_row, key)) is not None:
            cells[f"/ {base}", key] = "1" if row is base_row else f"{ratio:.2f}"
    return cells


def medians(items: Items, by: str, base: str) -> str:
    """A table of all values of the key `by`: bytes and times relative to `base`, medians over items (least – most)."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for rows in map(without_reasons, items):
        first = next((row for row in rows if row[by] == base), {})
        for row in rows:
            for key in row if row is not first else ():
                if (ratio := relative(row, first, key)) is not None:
                    ratios.setdefault(row[by], {}).setdefault(key, []).append(ratio.median)
    keys = dict.fromkeys(itertools.chain(*ratios.values()))
    titles = [by, "items", *(f"{key.rpartition('_')[0]} / {base}" for key in keys)]
    return table(
        titles,
        (
            [name, str(max(map(len, own.values()))), *(_range(own.get(key, [])) for key in keys)]
            for name, own in ratios.items()
        ),
    )


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})" if values else ""


def _text(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(value) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|")


def section(title: str, *paragraphs: str, level: int = 3) -> str:
    return "\n\n".join(filter(None, [f"{'#' * level} {title}", *paragraphs]))


def conditions(environment: dict) -> str:
    """Hardware, threads if known, versions and commit, and why the commit is not the code's."""
    count = environment.get("threads")
    threads = "" if count is None else f", {count} thread" + "s" * (count > 1)
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    lost = f" ({environment['provenance']})" if "provenance" in environment else ""
    return f"{environment['hardware']}{threads}; {versions}; commit {environment['commit']}{lost}"


def mib(count: float | None, digits: int = 1) -> str:
    """Bytes in MiB for a table; nothing if they are not known."""
    return "" if count is None else f"{count / MIB:.{digits}f}"


def mean_of(percentages: Sequence[float]) -> str:
    """The mean and, of several, their standard deviation; a dash without any."""
    if len(percentages) < 2:
        return f"{percentages[0]:.2f}" if percentages else "–"
    return f"{statistics.mean(percentages):.2f} ± {statistics.stdev(percentages):.2f}"


class Ratio(NamedTuple):
    """Median and quartiles; f"{ratio:.2f}" prints them all if they differ."""

    median: float
    lower: float
    upper: float

    def __format__(self, spec: str) -> str:
        quartiles = f" ({self.lower:{spec}} – {self.upper:{spec}})" if self.lower < self.upper else ""
        return f"{self.median:{spec}}{quartiles}"


def ratio_of(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratios of our times to the others', round by round."""
    ratios = [own / other for own, other in zip(ours, others, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), lower, upper)


def without_reasons(rows: Iterable[dict]) -> Rows:
    """The rows that could be measured."""
    return [row for row in rows if "reason" not in row]


def relative(row: dict, base: dict, key: str) -> Ratio | None:
    """A row's value relative to the baseline's. None if one is missing, or the key holds no bytes, times or flops."""
    ours, others = row.get(key), base.get(key)
    if not key.endswith(("_bytes", "_ms", "flops")) or not ours or not others:
        return None
    return ratio_of(ours, others) if isinstance(ours, list) else ratio_of([ours], [others])
