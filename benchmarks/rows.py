"""Rows of records as tables of pages: bytes, and times relative to a baseline's."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from scripts.reports.markdown import table

MIB, GIB = 2**20, 2**30
Rows = list[dict[str, Any]]
Columns = Sequence[tuple[str, str | Callable[[Any], str]]]  # title, format of a row or row -> its text


def columns(rows: Iterable[Any], shown: Columns, left: int = 1) -> str:
    """A table of rows, from a list of columns."""
    texts = ([text.format_map(row) if isinstance(text, str) else text(row) for _, text in shown] for row in rows)
    return table([title for title, _ in shown], texts, left)


Items = Iterable[Rows]  # what was measured in turns, item by item


def compared(items: Items, by: str = "", base: str = "") -> str:
    """A table of all rows that could be measured. Bytes, times and operations are also relative to an item's row
    `base`, a value of the key `by`.
    """
    lines: list[dict[tuple[str, str], str]] = []
    for rows in map(without_reasons, items):
        base_row = next((row for row in rows if row.get(by) == base), {})
        lines += [_cells(row, base_row, base) for row in rows]
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
        ratio = relative(row, base_row, key)
        if ratio is not None:
            cells[f"/ {base}", key] = "1" if row is base_row else f"{ratio:.2f}"
    return cells


def medians(items: Items, by: str, base: str) -> str:
    """A table of all values of the key `by`: bytes and times relative to `base`, medians over items (least – most)."""
    ratios: dict[str, dict[str, list[float]]] = {}
    for rows in map(without_reasons, items):
        base_row = next((row for row in rows if row[by] == base), {})
        for row in rows:
            for key in row if row is not base_row else ():
                ratio = relative(row, base_row, key)
                if ratio is not None:
                    ratios.setdefault(row[by], {}).setdefault(key, []).append(ratio.median)
    keys = dict.fromkeys(itertools.chain(*ratios.values()))
    titles = [by, "items", *(f"{key.rpartition('_')[0]} / {base}" for key in keys)]
    return table(
        titles,
        (
            [name, str(max(map(len, ratios_by_key.values()))), *(_range(ratios_by_key.get(key, [])) for key in keys)]
            for name, ratios_by_key in ratios.items()
        ),
    )


def _range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} – {max(values):.2f})" if values else ""


def _text(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(value) if isinstance(value, list) else str(value)
    return text.replace("|", "\\|")


def section(title: str, *paragraphs: str, level: int = 3) -> str:
    return "\n\n".join(filter(None, [f"{'#' * level} {title}", *paragraphs]))


def mib(count: float | None, digits: int = 1) -> str:
    """Bytes in MiB for a table; nothing if they are not known."""
    return "" if count is None else f"{count / MIB:.{digits}f}"


class Ratio(NamedTuple):
    """Median and quartiles; f"{ratio:.2f}" prints them all if they differ."""

    median: float
    lower: float
    upper: float

    def __format__(self, spec: str) -> str:
        quartiles = f" ({self.lower:{spec}} – {self.upper:{spec}})" if self.lower < self.upper else ""
        return f"{self.median:{spec}}{quartiles}"


def ratio_of(values: Sequence[float], base_values: Sequence[float]) -> Ratio:
    """The ratios of times to the baseline's, round by round."""
    ratios = [value / base_value for value, base_value in zip(values, base_values, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), lower, upper)


def without_reasons(rows: Iterable[dict]) -> Rows:
    """The rows that could be measured."""
    return [row for row in rows if "reason" not in row]


def relative(row: dict, base: dict, key: str) -> Ratio | None:
    """A row's value relative to the baseline's. None if one is missing, or the key holds no bytes, times or flops."""
    value = row.get(key)
    base_value = base.get(key)
    if not key.endswith(("_bytes", "_ms", "flops")) or not value or not base_value:
        return None
    return ratio_of(value, base_value) if isinstance(value, list) else ratio_of([value], [base_value])
