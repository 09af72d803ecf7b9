"""Console, log and progress bars."""

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from io import BufferedWriter, FileIO, TextIOWrapper
from logging.handlers import WatchedFileHandler
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column, Table
from rich.text import Text

from datasets.file_list import readable
from engine.process.output_files import untouched

logger = logging.getLogger("engine")
SLOW_SECONDS = 1.0
LOG_SECONDS = 30.0
_SPEED_SECONDS = 300.0  # a bar's time left is estimated from its last minutes; a step may take one


class _ForgivingFile(FileIO):
    """A terminal, pipe or file for messages. Write errors are ignored: losing the terminal must not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:  # a closed terminal or pipe, a full disk
            return len(data)


def make_printing_safe() -> None:
    """Keep a lost terminal, or a character that it cannot show, from stopping the program.

    Such characters, e.g. in file names that are not UTF-8, are escaped.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is TextIOWrapper and not isinstance(getattr(stream.buffer, "raw", None), _ForgivingFile):
            file = BufferedWriter(_ForgivingFile(stream.fileno(), "w", closefd=False))
            setattr(sys, name, TextIOWrapper(file, stream.encoding, "backslashreplace", line_buffering=True))


class _Console(Console):
    """A console that escapes control characters in what it is given, also in tables: they may be part of a name."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(readable(text, lines=True), **options)


class _Formatter(logging.Formatter):
    """Escapes control characters in messages and tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return readable(super().format(record), lines=True)


class _LogFile(WatchedFileHandler):
    """Appends to a file, or to a new one if that was removed. Its errors, such as of a full disk, end nothing."""

    def _open(self) -> Any:
        was_removed = hasattr(self, "stream")
        file = open(self.baseFilename, "a", encoding="utf-8", errors="backslashreplace", opener=untouched)
        if was_removed:
            file.write("earlier lines are lost: this file was removed or replaced while the run used it\n")
        return file

    def emit(self, record: logging.LogRecord) -> None:
        with suppress(OSError):
            super().emit(record)


def make_console(rank: int = 0) -> Console:
    """A console for rank `rank`; only rank 0 prints. In files and pipes, lines do not break at 80 columns.

    Square brackets and colons are printed literally, as they may be part of a path or a name in the data.
    """
    make_printing_safe()
    make = partial(_Console, quiet=rank > 0, markup=False, emoji=False, highlight=False)
    console = make()
    return console if console.is_terminal else make(width=160)


def log_to(console: Console, file: Path | None, rank: int = 0) -> None:
    """Send the log to the console, and append it with times and debug messages to `file`.

    Ranks other than 0 print only warnings, to stderr.
    """
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False

    def add_handler(handler: logging.Handler, level: int, form: str | None = None, date: str | None = None) -> None:
        handler.setLevel(level)
        handler.setFormatter(_Formatter(form, date))
        logger.addHandler(handler)

    if rank > 0:
        add_handler(logging.StreamHandler(), logging.WARNING, f"rank {rank}: %(message)s")
        return
    if console.is_terminal:
        handler = RichHandler(
            console=console, show_path=False, show_level=False, highlighter=NullHighlighter(), keywords=[]
        )
        add_handler(handler, logging.INFO)
    else:  # a RichHandler would wrap lines
        add_handler(logging.StreamHandler(console.file), logging.INFO, "%(asctime)s %(message)s", "%Y-%m-%d %H:%M:%S")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        logging.raiseExceptions = False  # on a full disk: it would print a traceback for each line
        add_handler(_LogFile(file), logging.DEBUG, "%(asctime)s %(message)s")


class _CutText(TextColumn):
    """Text that ends in … where the terminal is too narrow for the whole bar. Count and time are never cut for it."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.plain = readable(text.plain)
        text.no_wrap = True
        text.overflow = "ellipsis"
        return text


def progress_bar(console: Console) -> Progress:
    """Bars with count, time left and the tasks' field `status`; nothing in a file or pipe."""
    return Progress(
        SpinnerColumn(table_column=Column(no_wrap=True)),
        _CutText("{task.description}", markup=False, table_column=Column()),
        BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=4)),  # the width that the texts leave
        MofNCompleteColumn(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(table_column=Column(no_wrap=True)),
        _CutText("{task.fields[status]}", markup=False, table_column=Column()),
        console=console,
        disable=not console.is_terminal,
        transient=True,
        expand=True,
        speed_estimate_period=_SPEED_SECONDS,
    )


def tracked(progress: Progress, items: Any, description: str, kind: str = "images") -> Iterator[Any]:
    """Yield the items, whose number is known, and count them in a temporary bar, or in the log if the bar is off.

    Then a line says how many items (of this `kind`) are done: after the first, if it took longer than `SLOW_SECONDS`,
    and every `LOG_SECONDS`, with the time left. The first may take longer than others, so it says nothing about them.
    """
    task = progress.add_task(description, total=len(items), status="")
    first_ended_s = 0.0
    due_s = time.perf_counter() + SLOW_SECONDS
    try:
        for done_count, item in enumerate(items, start=1):
            yield item
            progress.update(task, advance=1)
            now_s = time.perf_counter()
            if done_count == 1:
                first_ended_s = now_s
            if progress.disable and now_s > due_s and done_count < len(items):
                left = time_left(len(items) - done_count, now_s - first_ended_s, done_count - 1)
                logger.info(f"{description}: {done_count:,} of {len(items):,} {kind}{left}")
            if done_count == 1 or now_s > due_s:
                due_s = now_s + LOG_SECONDS
    finally:
        progress.remove_task(task)


def speed_of(image_count: int, since_s: float) -> str:
    """For the log: the speed of images that began at `since_s`, when the first ones had been started."""
    speed = image_count / (time.perf_counter() - since_s)
    return f"{image_count:,} images after the first ones: {speed:,.1f} images / s"


def time_left(waiting_count: int, seconds: float, done_count: int) -> str:
    """For the log: ", 1:23:45 left" for the waiting items, if those done took `seconds`; "" if none are done."""
    return f", {timedelta(seconds=round(waiting_count * seconds / done_count))} left" if done_count else ""


@contextmanager
def counted(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """Context that yields a function (done, total) to update a temporary bar; its first call shows the bar."""
    with progress_bar(console) as progress:
        task = progress.add_task(description, total=None, status="", visible=False)
        yield lambda done, total: progress.update(task, completed=done, total=total, visible=True)


def table_of(columns: Sequence[str], rows: Iterable[Sequence[str]] = (), title: str | None = None) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    return table


def table_of_shares(
    columns: Sequence[str], rows: Mapping[str, Sequence[float | None]], totals: Mapping[str, float]
) -> Table:
    """A table of shares in percent, a dash where one is missing, and below it the totals, the first in bold."""
    percentages = (
        [name, *("–" if share is None else f"{100 * share:.2f}" for share in shares)] for name, shares in rows.items()
    )
    table = table_of(columns, percentages)
    table.add_section()
    for number, (name, share) in enumerate(totals.items()):
        table.add_row(name, f"{100 * share:.2f}", style="bold" if number == 0 else None)
    return table
