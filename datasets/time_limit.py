"""Limits how long reading may take: a disk or network folder that hangs would otherwise block a process for ever."""

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

GRACE_SECONDS = 10.0  # between the error and the end of a process that cannot raise it


class _TooLate(BaseException):
    """Interrupts a read. Decoders would take any other exception for a damaged file."""


class _Limit:
    """The time limit of the reads inside `reading_limit`."""

    def __init__(self, seconds: float, message: str):
        self.seconds, self.message = seconds, message
        self.running_since: float | None = None  # of the current read
        self.path: Path | None = None  # the file or folder that it reads
        self.over = threading.Event()

    @property
    def exceeded(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message

    def end_a_stuck_process(self) -> None:
        """Runs in a thread: a system call on a dead network folder ignores all signals but SIGKILL."""
        while not self.over.wait(1):
            since = self.running_since
            if since is not None and time.monotonic() > since + self.seconds + GRACE_SECONDS:
                print(f"error: {self.exceeded}", file=sys.stderr, flush=True)
                os._exit(1)


_limit: _Limit | None = None  # of this process


@contextmanager
def reading_limit(seconds: float, message: str) -> Iterator[None]:
    """Context in which a `limited` read that takes longer than `seconds` raises TimeoutError(message).

    A process that cannot raise it, because it is stuck in a system call, prints `message` and ends with exit status 1.
    Reads are limited in the main thread only: Python handles signals, here SIGALRM, nowhere else.
    """
    global _limit
    if not _in_main_thread():
        yield
        return
    outer, _limit = _limit, _Limit(seconds, message)
    handler = signal.signal(signal.SIGALRM, _raise_timeout)
    threading.Thread(target=_limit.end_a_stuck_process, daemon=True).start()
    try:
        yield
    finally:
        _limit.over.set()
        signal.signal(signal.SIGALRM, handler)
        _limit = outer


@contextmanager
def limited(path: Path | None = None) -> Iterator[None]:
    """Context or decorator of a read, of `path` if given: limits its time as the `reading_limit` around it says.

    It does nothing without a `reading_limit`, or inside another read.
    """
    if _limit is None or _limit.running_since is not None or not _in_main_thread():
        yield
        return
    _limit.running_since, _limit.path = time.monotonic(), path
    signal.setitimer(signal.ITIMER_REAL, _limit.seconds)
    try:
        yield
    except _TooLate:
        raise TimeoutError(_limit.exceeded) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _limit.running_since = None


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _raise_timeout(number: int, frame: FrameType | None) -> None:
    raise _TooLate
