"""What every part of the GPU's evidence has: items that are measured one by one, a page and pictures."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from matplotlib.figure import Figure

from scripts.evidence.frame import grouped
from scripts.reports import charts

Rows = list[dict]


class Setting(NamedTuple):
    """Where and how a part is measured."""

    rehearse: bool = False  # every line on a CPU, on tiny tensors, with Triton's interpreter
    camvid: str | None = None  # folder of CamVid; None: drawn scenes, in a rehearsal alone

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"

    @property
    def backend(self) -> str:
        """Of our layers, where they are measured by themselves."""
        return "triton" if self.rehearse else "auto"

    @property
    def compiler(self) -> str:
        return "aot_eager" if self.rehearse else "inductor"

    def rounds(self, count: int) -> int:
        return 1 if self.rehearse else count


class Part(NamedTuple):
    """One part. Items are measured in their order; names have parts between slashes."""

    title: str
    minutes: float  # expected for all items on an H100 or H200; never measured
    items: Callable[[Setting], Mapping[str, tuple]]  # {name: arguments of `measure`}
    measure: Callable[..., Rows]  # (setting, *arguments) -> rows; a row with "reason" says what could not be measured
    sections: Callable[[Rows], Iterable[str]]  # of the page
    pictures: Callable[[Rows], Mapping[str, Figure]] = lambda rows: {}  # by suffix of the file


def without_reasons(rows: Rows) -> Rows:
    """The rows of what could be measured."""
    return [row for row in rows if "reason" not in row]


def beside(rows: Rows, name: str, *by: str) -> Rows:
    """The same, each beside those with equal `by`: row["beside"] has them by `name`, see `frame.grouped`."""
    return [row for group in grouped(without_reasons(rows), by, name).values() for row in group.values()]


def relative(row: dict, base: str, value: Callable[[dict], float]) -> float | None:
    """A row's value divided by the value of the row `base` in its group; None if the group has no such row."""
    return value(row) / value(row["beside"][base]) if base in row["beside"] else None


def relative_text(row: dict, base: str, value: Callable[[dict], float]) -> str:
    """`relative` as the cell of a table."""
    ratio = relative(row, base, value)
    return "" if ratio is None else f"{ratio:.2f}"


def bars(rows: Rows, group: str, name: str, values: Mapping[str, Callable[[dict], float | None]]) -> dict[str, Figure]:
    """A panel for each of `values` (its title -> a row's value), with a group of bars per `group`, a bar per `name`."""
    groups, names = (list(dict.fromkeys(row[key] for row in rows)) for key in (group, name))
    if not rows:
        return {}
    figure, panels = charts.panels(len(values), 1, (max(8, 0.9 * len(groups)), 3.2 * len(values) + 0.8))
    found = {(row[group], row[name]): row for row in rows}
    for axes, (title, value) in zip(panels, values.items(), strict=True):
        shown = [
            charts.Series(each, [_or_nan(value, found.get((one, each))) for one in groups], colour=colour)
            for each, colour in zip(names, COLOURS * len(names), strict=False)
        ]
        charts.bars(axes, groups, shown, rotation=20 if len(groups) > 4 else 0, ylabel=title)
    charts.legend(figure, columns=4)
    return {"": figure}


def _or_nan(value: Callable[[dict], Any], row: dict | None) -> float:
    found = None if row is None else value(row)
    return float("nan") if found is None else found


COLOURS = (charts.BLACK, charts.BLUE, charts.VERMILION, charts.GREEN, charts.ORANGE, charts.SKY, charts.PURPLE)
