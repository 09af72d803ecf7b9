"""Tables and sections of pages in Markdown, and the numbers in them: bytes, and ratios of times."""

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

MIB, GIB = 2**20, 2**30
Rows = list[dict[str, Any]]
Columns = Sequence[tuple[str, str | Callable[[Any], str]]]  # title, format of a row or row -> its text


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


def listed(rows: Rows) -> list[str]:
    """A table with a column for each key of the rows; nothing if there are none."""
    titles = dict.fromkeys(itertools.chain(*rows))
    return [table([*titles], ([_text(row.get(title, "")) for title in titles] for row in rows))] * bool(rows)


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
    """Median and quartiles; f"{ratio:.2f}" prints them all."""

    median: float
    lower: float
    upper: float

    def __format__(self, spec: str) -> str:
        return f"{self.median:{spec}} ({self.lower:{spec}} – {self.upper:{spec}})"


def ratio_of(ours: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratios of our times to the others', round by round."""
    ratios = [own / other for own, other in zip(ours, others, strict=True)]
    lower, _, upper = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), lower, upper)


def without_reasons(rows: Iterable[dict]) -> Rows:
    """The rows that could be measured."""
    return [row for row in rows if "reason" not in row]


def grouped(rows: Iterable[dict], by: Sequence[str], name: str) -> dict[str, dict[str, dict]]:
    """{values of the keys `by`: {value of the key `name`: row}}; a row finds its group in row["beside"]."""
    groups: dict[str, dict[str, dict]] = {}
    for row in without_reasons(rows):
        group = groups.setdefault(", ".join(str(row[key]) for key in by if key in row), {})
        group[row[name]] = {**row, "beside": group}
    return groups


def median_ms(row: dict, times: str = "times_ms") -> float:
    return statistics.median(row[times])


def relative_time(row: dict, other: str, times: str = "times_ms") -> str:
    """A cell of a table: the time of this row, relative to the row `other` of the same group."""
    base = row["beside"].get(other, {})
    return "" if times not in base else "1" if base is row else f"{ratio_of(row[times], base[times]):.2f}"


def relative(row: dict, other: str, value: str) -> str:
    """A cell of a table: a value of this row, divided by the value of the row `other` of the same group."""
    base = row["beside"].get(other)
    known = base is not None and base.get(value) and row.get(value) is not None
    return "" if not known else "1" if base is row else f"{row[value] / base[value]:.2f}"


def time_ratio(rows: Mapping[str, dict], ours: str, others: str, times: str = "times_ms") -> Ratio:
    """`ratio_of` the times of two rows of a group."""
    return ratio_of(rows[ours][times], rows[others][times])
