"""Memory that only one process has: of a DataLoader's worker while it reads, over one that has read nothing."""

import multiprocessing
import threading
from collections.abc import Iterable
from pathlib import Path

from torch.utils.data import DataLoader

from datasets import TrainingCrops, worker_init


def worker_mib(crops: TrainingCrops, minibatches: list[list[tuple[int, int]]], interval_s: float = 0.002) -> dict:
    """{"idle", "peak", "after"}: MiB that the worker alone has, before, during and after it makes `minibatches`."""
    return {
        "idle": _watched(crops, [], interval_s)["after"],
        **_watched(crops, minibatches, interval_s),
    }


def unique_mib(pid: int) -> float:
    """MiB of the pages that no other process has (Linux only)."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1024


def _watched(crops: TrainingCrops, minibatches: Iterable, interval_s: float) -> dict:
    before = set(multiprocessing.active_children())
    loader = iter(DataLoader(crops, batch_sampler=minibatches, num_workers=1, worker_init_fn=worker_init))
    (worker,) = set(multiprocessing.active_children()) - before
    seen, done = [unique_mib(worker.pid)], threading.Event()

    def watch() -> None:
        while not done.wait(interval_s):
            seen.append(unique_mib(worker.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        for _ in minibatches:
            next(loader)
        done.wait(0.5)  # it starts, or frees what it made last
    finally:
        done.set()
        watcher.join()
    return {"peak": max(seen), "after": unique_mib(worker.pid)}
