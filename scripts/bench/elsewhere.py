"""Objects in separate processes, which keep their process-wide settings to themselves."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any


class Elsewhere:
    """`make(*arguments)` in a new process; `call` calls its methods there. A context manager: the process ends with it.

    It also ends if this process is killed, even in the middle of a call.
    `make` is pickled by name, so it must be defined at the top of a module. If it fails, every call raises its error.
    """

    def __init__(self, make: Callable[..., object], *arguments: object):
        self.process = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        self.made = self.process.submit(_make, make, arguments)

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *exception: object) -> None:
        self.process.shutdown()

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method and return its result. Raises its error, or BrokenProcessPool if the process has died."""
        self.made.result()
        return self.process.submit(_call, method, arguments).result()


_made: list[object] = []  # the one object of this process


def _make(make: Callable[..., object], arguments: tuple) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _made.append(make(*arguments))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _call(method: str, arguments: tuple) -> Any:
    return getattr(_made[0], method)(*arguments)
