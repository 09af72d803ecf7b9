"""Worker processes that read data: how they start, stop and fail, and one pass over a dataset on all cores.

They are processes, not threads: if a thread that used OpenCV ends while a process is forked, the new process may
inherit an OpenCV mutex that stays locked forever. A training run forks its workers right after such a pass.
"""

import ctypes
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from errno import EACCES, EAGAIN, ENOENT, ENOSPC, ENOSYS, EPERM, EROFS
from multiprocessing import parent_process, popen_fork, util
from multiprocessing.connection import Listener
from multiprocessing.context import ForkContext, ForkProcess
from typing import Any

import cv2
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

Progress = Callable[[int, int], None] | None  # called with (done, total) after each item

_SECONDS_TO_DIE = 5  # it takes longer only in an uninterruptible system call
_PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal to send when the parent ends
# Seconds (0: none) that workers may take, and the message about it.
_limit: ContextVar[tuple[float, str]] = ContextVar("limit", default=(0, ""))
_NO_START = "DataLoader workers cannot start: "
# Errors of a full limit of processes, and of a /dev/shm that is missing or read-only.
_WHY_NO_START = (EAGAIN, EACCES, ENOENT, ENOSYS, EPERM, EROFS)
NO_THREAD = "can't start new thread"  # Python's words for a full limit
_KEPT_BLOCKS = 6  # of 16 MiB: an image of 25 megapixels at four bytes per pixel


class _Killed(popen_fork.Popen):
    """A process that `terminate` ends by SIGKILL, because workers ignore SIGTERM."""

    def terminate(self) -> None:
        # PyTorch's SIGCHLD handler would report the killed worker as a failure.
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self.kill()
        self.wait(_SECONDS_TO_DIE)
        signal.signal(signal.SIGCHLD, handler)


class Workers(ForkContext):
    """`multiprocessing_context` of a DataLoader whose workers run `worker_init`."""

    class Process(ForkProcess):
        _Popen = _Killed  # when Python exits, it calls `terminate` of this object, not of the process

        def run(self) -> None:
            try:
                super().run()
            except SystemExit as error:  # with status 0 nobody would notice until the time limit
                raise RuntimeError(f"sys.exit({error.code!r}) ended a process that reads data") from error


def worker_init(worker_id: int) -> None:
    """`worker_init_fn` of a DataLoader: ignores signals, limits OpenCV's threads, lets Pillow reuse memory."""
    # Schedulers, torchrun and Ctrl-C signal the whole process group. The signals are meant for the main process: it
    # still needs data to finish its step, and then stops its workers.
    if parent_process() is not None:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGXCPU):
            signal.signal(number, signal.SIG_IGN)
        if sys.platform == "linux":  # a stopped or stuck worker obeys only SIGKILL
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    cv2.setNumThreads(0)  # OpenCV's own threads would compete with the other workers
    # Let Pillow reuse the memory of a large image: getting new pages from the system each time can take as long as
    # decoding. (This call is private, but the only alternative is an environment variable.)
    Image.core.set_blocks_max(_KEPT_BLOCKS)


class Loader(DataLoader):
    """A DataLoader whose `workers` processes run `worker_init`; 0 reads in this process.

    Inside `reading_errors` it raises TimeoutError if its workers deliver nothing in the time given there.
    ValueError: workers cannot make sockets in the folder for temporary files, TMPDIR.
    """

    def __init__(self, source: Dataset | Sequence, workers: int, **options: Any):
        if workers:  # they hand over tensors by sockets; without one, no data would come
            try:
                Listener(family="AF_UNIX").close()
            except OSError as error:
                raise ValueError(
                    f"processes that read data cannot open sockets in {util.get_temp_dir()} ({error}): set TMPDIR to a "
                    f"folder with a short path, such as /tmp (sockets allow 107 bytes), or read without processes, "
                    f"with workers=0"
                ) from None
        super().__init__(
            source,  # type: ignore[arg-type]  # any sequence will do
            num_workers=workers,
            worker_init_fn=worker_init,
            multiprocessing_context=Workers() if workers else None,
            # Iterators draw a random number when they start. With a separate generator, the run's random numbers do
            # not depend on its evaluations, or on whether a pass was needed or its result was cached.
            generator=torch.Generator(),
            **options,
        )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # PyTorch promises a class of its own
        if self.num_workers:
            self.timeout, timeout_message = _limit.get()
            _allow_open_files(self.num_workers)
        items: Any = None
        try:
            if self.num_workers:
                self.multiprocessing_context.Lock()  # if it failed below, PyTorch would print errors of its own
            items = super().__iter__()
            yield from items
        except RuntimeError as error:
            if str(error).startswith("DataLoader timed out"):  # PyTorch has no class for it: see `reading_errors`
                raise TimeoutError(timeout_message) from None
            raise
        except (ConnectionError, EOFError) as error:  # of the pipe to a worker
            raise RuntimeError(f"DataLoader worker exited unexpectedly ({error})") from error
        except OSError as error:
            if error.errno == ENOSPC:
                raise RuntimeError(f"DataLoader workers cannot start for lack of shared memory: {error}") from error
            if items is None and error.errno in _WHY_NO_START:
                raise RuntimeError(f"{_NO_START}{error.strerror}") from error
            raise
        finally:
            # An error's traceback keeps PyTorch's iterator. The garbage collector would end its queues first: workers
            # would not learn that they should stop, and PyTorch would wait five seconds for each.
            if self.num_workers and items is not None:
                items._shutdown_workers()


def _allow_open_files(workers: int) -> None:
    """Let this process open as many files as the system permits. ValueError if these are too few for its workers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)  # each tensor on its way needs an open file
    if most == resource.RLIM_INFINITY:  # which macOS says, but does not grant
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    needed = 20 + 6 * workers
    if most < needed:
        problem = f"{workers} processes that read images need {needed} open files, {most} are allowed"
        raise ValueError(f"{problem}: raise ulimit -n, or read without processes, with workers=0")


@contextmanager
def reading_errors(
    timeout_seconds: int, keys: str = "", advice: str = "", workers_key: str | None = None
) -> Iterator[None]:
    """Context for reading data: the workers of a `Loader` get a time limit, and its errors say what to do.

    Reads in this process, such as listing folders, have no limit. Messages name the settings
    `{keys}timeout_seconds` and `workers_key` (default: `{keys}workers`), and end with `advice`.

    Raises:
        TimeoutError: the workers delivered nothing for `timeout_seconds`.
        ChildProcessError: a worker was killed, or cannot start.
        MemoryError: a worker could not allocate memory, or the shared memory is too small.
    """
    workers_key = workers_key or f"{keys}workers"
    timeout_message = (
        f"no data came for {keys}timeout_seconds={timeout_seconds} seconds: a disk or network folder hangs, or a "
        f"process that reads images was stopped; if reading is just slow, raise {keys}timeout_seconds.{advice}"
    )
    outer_limit = _limit.set((timeout_seconds, timeout_message))
    try:
        yield
    except RuntimeError as error:
        # PyTorch has no classes for these errors, so the first words of their messages tell them apart; if these
        # change, tests/datasets/test_workers.py fails. The causes count because PyTorch notices a dead worker in a
        # signal handler: its error may interrupt a save, which raises its own.
        beginnings = ("DataLoader worker", "Caught MemoryError", "Caught RuntimeError in DataLoader worker", NO_THREAD)
        message = next((text for text in _messages(error) if text.startswith(beginnings)), "")
        explanation = _explanation(message, workers_key, advice)
        if explanation is None:
            raise
        raise explanation from error
    finally:
        _limit.reset(outer_limit)


def _explanation(message: str, workers_key: str, advice: str) -> Exception | None:
    """The error that says what to do about a message of PyTorch's workers; None for other messages."""
    if message.startswith((_NO_START, NO_THREAD)):
        return ChildProcessError(
            f"no process that reads images can start ({message.removeprefix(_NO_START)}): it needs a writable "
            f"/dev/shm, and fewer processes and threads of the user than allowed (ulimit -u, or the container's "
            f"limit). Change what is missing, or give fewer {workers_key}; {workers_key}=0 needs neither.{advice}"
        )
    if "shared memory" in message or "Bus error" in message:
        usage = shutil.disk_usage("/dev/shm")
        room = f"{usage.total >> 20} MiB, {usage.free >> 20} MiB free"
        return MemoryError(
            f"/dev/shm is full ({room}): the processes that read images pass them on there. Give it more (docker "
            f"run --shm-size=8g), or use smaller crops or fewer {workers_key}; {workers_key}=0 needs none.{advice}"
        )
    if message.startswith("Caught MemoryError"):
        return MemoryError(f"out of memory in a process that reads images: use smaller crops, or fewer {workers_key}")
    if message.startswith("DataLoader worker"):
        died = message.splitlines()[0].strip()  # a configuration that is being read adds lines about its keys
        return ChildProcessError(
            f"a process that reads images died: {died} If the machine ran out of memory, or of processes and "
            f"threads (ulimit -u), use fewer {workers_key}.{advice}"
        )
    return None


def _messages(error: BaseException | None) -> Iterator[str]:
    """Messages of an error and its causes."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__


def map_in_order(look: Callable[[int], Any], indices: Sequence[int], workers: int | None = None) -> Loader:
    """Yield `look(index)` for each of `indices`, in order and unchanged, computed by `workers` processes.

    The default is one process per core; 0 computes in this process.
    """
    cores = len(os.sched_getaffinity(0))  # a scheduler may grant fewer than the machine has
    count = min(cores if workers is None else workers, len(indices))
    return Loader(indices, count, batch_size=None, collate_fn=look)
