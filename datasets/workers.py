"""Worker processes that read data: how they start, stop and fail, and one pass over a dataset on all cores.

They are processes, not threads: if a thread that used OpenCV ends while a process is forked, the new process may
inherit an OpenCV mutex that stays locked forever. A training run forks its workers right after such a pass.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import parent_process, popen_fork
from multiprocessing.context import ForkContext, ForkProcess
from typing import TypeVar

import cv2
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

_Item = TypeVar("_Item")

_KEPT_BLOCKS = 6  # of 16 MiB: an image of 25 megapixels at four bytes per pixel


class _Killed(popen_fork.Popen):
    """A process that `terminate` ends by SIGKILL, because workers ignore SIGTERM."""

    def terminate(self) -> None:
        # PyTorch's SIGCHLD handler would report the killed worker as a failure.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.kill()
        self.wait()
        signal.signal(signal.SIGCHLD, handler)


class Workers(ForkContext):
    """`multiprocessing_context` of a DataLoader whose workers run `worker_init`."""

    class Process(ForkProcess):
        _Popen = _Killed  # when Python exits, it calls `terminate` of this object, not of the process


def worker_init(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: ignores signals, limits OpenCV's threads, lets Pillow reuse memory."""
    # Schedulers, torchrun and Ctrl-C signal the whole process group. The signals are meant for the main process: it
    # still needs data to finish its step, and then stops its workers.
    if parent_process() is not None:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
    cv2.setNumThreads(0)  # OpenCV's own threads would compete with the other workers
    # Let Pillow reuse the memory of a large image: getting new pages from the system each time can take as long as
    # decoding. (This call is private, but the only alternative is an environment variable.)
    Image.core.set_blocks_max(_KEPT_BLOCKS)


@contextmanager
def worker_failures(workers: int, timeout_seconds: int, keys: str = "", advice: str = "") -> Iterator[None]:
    """Turn PyTorch's errors about the `workers` processes of a DataLoader into errors that say what to do.

    Messages name the settings `{keys}workers` and `{keys}timeout_seconds`, and end with `advice`.

    Raises:
        TimeoutError: the workers delivered nothing for `timeout_seconds`.
        ChildProcessError: a worker was killed.
        MemoryError: a worker could not allocate memory.
    """
    try:
        yield
    except RuntimeError as error:
        # PyTorch notices a dead worker in a signal handler: its error may interrupt a save, which raises its own.
        known = ("DataLoader", "Caught MemoryError")
        message = next((text for text in _messages(error) if text.startswith(known)), "")
        if message.startswith("Caught"):
            raise MemoryError(
                f"out of memory in one of the {keys}workers={workers} processes that read images: use smaller crops, "
                f"or fewer {keys}workers"
            ) from error
        if message.startswith("DataLoader timed out"):
            raise TimeoutError(
                f"the {keys}workers={workers} processes that read images delivered none for {keys}timeout_seconds="
                f"{timeout_seconds} seconds: a disk or network folder may hang; if reading is just slow, raise "
                f"{keys}timeout_seconds; {keys}workers=0 reads in the main process.{advice}"
            ) from error
        if message.startswith("DataLoader worker"):
            raise ChildProcessError(
                f"one of the {keys}workers={workers} processes that read images died: {message.strip()} If the "
                f"machine ran out of memory, use fewer {keys}workers.{advice}"
            ) from error
        raise


def _messages(error: BaseException | None) -> Iterator[str]:
    """Messages of an error and its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def in_order(source: Dataset, indices: Sequence[int], workers: int | None = None) -> DataLoader:
    """Yield `source[index]` for each of `indices`, in order and unchanged, read by `workers` processes.

    The default is one process per core; 0 reads in this process.
    """
    count = min(_cores() if workers is None else workers, len(indices))
    return DataLoader(
        source,
        sampler=indices,
        batch_size=None,
        collate_fn=_unchanged,
        num_workers=count,
        worker_init_fn=worker_init,
        multiprocessing_context=Workers() if count else None,
        # Starting an iterator draws a random number. With a generator of its own, the run's random numbers do not
        # depend on whether this pass was needed or its result was cached.
        generator=torch.Generator(),
    )


def _cores() -> int:
    """Cores that this process may use; a scheduler may grant fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _unchanged(item: _Item) -> _Item:
    return item
