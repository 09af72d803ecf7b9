"""What a program prints: console, log, progress bars."""

import logging
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

logger = logging.getLogger("engine")


def make_console(rank: int = 0) -> Console:
    """The terminal; if the output goes to a file or a pipe, lines are not broken at 80 columns.

    Of several processes only the first prints. Square brackets and colons are printed as they are: they may be part of
    a path or a name in the data.
    """
    make = partial(Console, quiet=rank > 0, markup=False, emoji=False)
    console = make()
    return console if console.is_terminal else make(width=160)


def log_to(console: Console, file: Path | None, rank: int = 0) -> None:
    """Send the log to the console and append it, with times and details, to `file`.

    Processes other than the first print their warnings to stderr.
    """
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    if rank > 0:
        warnings_only = logging.StreamHandler()
        warnings_only.setFormatter(logging.Formatter(f"rank {rank}: %(message)s"))
        warnings_only.setLevel(logging.WARNING)
        logger.addHandler(warnings_only)
        return
    if console.is_terminal:
        on_console = RichHandler(console=console, show_path=False, show_level=False, highlighter=None)
    else:  # a line is a line
        on_console = logging.StreamHandler(console.file)
        on_console.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
    on_console.setLevel(logging.INFO)
    logger.addHandler(on_console)
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        in_file = LogFile(file)
        in_file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logger.addHandler(in_file)


class LogFile(logging.FileHandler):
    """Drops lines that a full disk does not take: logging would print a traceback for each, and the run ends anyway."""

    def handleError(self, record: logging.LogRecord) -> None:
        pass


def progress_bar(console: Console, *extra: TextColumn) -> Progress:
    """A progress bar with count, the `extra` columns and the time left; nothing unless the console is a terminal."""
    return Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        *extra,
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def tracked(progress: Progress, items: Sized, description: str) -> Iterator:
    """Yield the items and count them in a bar of `progress`, which is removed at the end."""
    task = progress.add_task(description, total=len(items), status="")
    try:
        for item in items:
            yield item
            progress.advance(task)
    finally:
        progress.remove_task(task)


@contextmanager
def counted(console: Console, description: str) -> Iterator[Callable[[int, int], None]]:
    """A function (done, total) that updates a progress bar, which appears with its first call."""
    with progress_bar(console) as progress:
        task = progress.add_task(description, total=None, status="", visible=False)

        def show(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total, visible=True)

        yield show
