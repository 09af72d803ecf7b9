"""Processes of the loader: the memory of a DataLoader's worker, and the start of a training."""

import multiprocessing
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import cv2
import torch
from PIL import Image
from torch.utils.data import DataLoader

from datasets import ClassUniformMinibatches, TrainingCrops, index_classes, verify, vistas, worker_init
from scripts.bench.loader_pipelines import Key

Minibatches = Sequence[Sequence[Key]]


@contextmanager
def like_a_worker() -> Iterator[None]:
    """Context in which this process is set up like a DataLoader worker, with one thread per library."""
    threads, blocks = (cv2.getNumThreads(), torch.get_num_threads()), Image.core.get_blocks_max()
    worker_init(0)
    torch.set_num_threads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(threads[0])
        torch.set_num_threads(threads[1])
        Image.core.set_blocks_max(blocks)


def worker_mib(
    crops: TrainingCrops, minibatches: Sequence[Sequence[Key]], interval_s: float = 0.002
) -> dict[str, float]:
    """Measure a worker's own MiB before, while and after it makes `minibatches`: {"idle", "peak", "after"}."""
    return {"idle": _watched(crops, [], interval_s)["after"], **_watched(crops, minibatches, interval_s)}


def unique_mib(pid: int) -> float:
    """MiB of the pages that no other process has (Linux only)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _watched(crops: TrainingCrops, minibatches: Minibatches, interval_s: float) -> dict[str, float]:
    before = set(multiprocessing.active_children())
    batch_sampler = [list(keys) for keys in minibatches]
    loader = iter(DataLoader(crops, batch_sampler=batch_sampler, num_workers=1, worker_init_fn=worker_init))
    (worker,) = set(multiprocessing.active_children()) - before
    assert worker.pid is not None
    pid, done = worker.pid, threading.Event()
    seen = [unique_mib(pid)]

    def watch() -> None:
        while not done.wait(interval_s):
            seen.append(unique_mib(pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in minibatches:
            next(loader)
        done.wait(0.5)  # until the worker has started, or freed its last minibatch
    finally:
        done.set()
        watcher.join()
    return {"peak": max(seen), "after": unique_mib(pid)}


def start_s(root: Path, cache: Path) -> dict[str, float]:
    """Seconds that a new process spends on each step from its imports to the first keys of a training.

    `cache` is the folder that remembers which files were verified and indexed.
    """
    with patch.dict(os.environ, XDG_CACHE_HOME=str(cache)):
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(_start, root).result()


def _start(root: Path) -> dict[str, float]:
    times_s = [time.perf_counter()]
    dataset = vistas(root, "train")
    times_s.append(time.perf_counter())
    verify(dataset)
    times_s.append(time.perf_counter())
    index = index_classes(dataset)
    times_s.append(time.perf_counter())
    next(iter(ClassUniformMinibatches(index, crops_per_minibatch=1, seed=0, steps=1)))
    times_s.append(time.perf_counter())
    steps = ("list and pair files", "verify", "class index", "first keys")
    return {step: times_s[i + 1] - times_s[i] for i, step in enumerate(steps)}
