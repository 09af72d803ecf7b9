"""From a folder of many files to the first keys of a training, in a process of its own."""

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from datasets import ClassUniformMinibatches, index_classes, verify, vistas


def start_s(root: Path, cache: Path) -> dict[str, float]:
    """Seconds after the imports of a new process until its first keys are drawn, by what they are spent on.

    `cache` is the folder that remembers what was checked and indexed.
    """
    with _environment("XDG_CACHE_HOME", str(cache)):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_start, root).result()


def _start(root: Path) -> dict[str, float]:
    seconds, last = {}, time.perf_counter()

    def until_here(what: str) -> None:
        nonlocal last
        seconds[what], last = time.perf_counter() - last, time.perf_counter()

    dataset = vistas(root, "train")
    until_here("list and pair files")
    verify(dataset)
    until_here("verify")
    index = index_classes(dataset)
    until_here("class index")
    next(iter(ClassUniformMinibatches(index, crops_per_minibatch=1, seed=0, steps=1)))
    until_here("first keys")
    return seconds


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """An environment variable of the processes that are started inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
