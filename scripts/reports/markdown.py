"""Tables and sections of pages in Markdown."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Columns = Sequence[tuple[str, str | Callable[[Any], str]]]  # title, format of a row or row -> its text


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A table; the columns after the first `left` hold numbers."""
    rule = "|" + "---|" * left + "---:|" * (len(titles) - left)
    header, *lines = (f"| {' | '.join(cells)} |" for cells in [titles, *rows])
    return "\n".join([header, rule, *lines])


def columns(rows: Iterable[Any], shown: Columns, left: int = 1) -> str:
    """A table of rows, from a list of columns."""

    def texts(row: Any) -> list[str]:
        return [text.format_map(row) if isinstance(text, str) else text(row) for _, text in shown]

    return table([title for title, _ in shown], map(texts, rows), left)


def section(title: str, *paragraphs: str) -> str:
    return "\n\n".join([f"## {title}", *paragraphs])


def conditions(environment: dict) -> str:
    """Hardware, threads if they are known, versions and commit."""
    count = environment.get("threads")
    threads = "" if count is None else f", {count} thread" + "s" * (count > 1)
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return f"{environment['hardware']}{threads}; {versions}; commit {environment['commit']}"
