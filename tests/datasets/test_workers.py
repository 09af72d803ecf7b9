"""Worker processes that read data: signals, the end of the process, errors."""

import errno
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing import active_children, get_context
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from datasets import SegmentationDataset, Workers, reading_errors, worker_init
from datasets.coco_stuff import coco_stuff_classes
from datasets.segmentation import Files
from datasets.workers import Loader, map_in_order
from engine.process.stopping import ONE_REQUEST_SECONDS

SIGNALS = tuple(ONE_REQUEST_SECONDS)


def answers_each_question(questions) -> None:
    worker_init(0)
    while True:
        questions.send(questions.recv())


@pytest.mark.parametrize("caller", ["PyTorch", "Python at its exit"])
def test_only_terminate_ends_a_worker_unseen_by_the_handler_of_dead_workers(caller):
    pipe, other_end = Workers().Pipe()
    worker = Workers().Process(target=answers_each_question, args=(other_end,), daemon=True)
    worker.start()
    other_end.close()  # so a dead worker raises an error here instead of hanging
    seen = []
    previous = signal.signal(signal.SIGCHLD, lambda *_: seen.append("a worker died"))
    try:
        for question in ("ready?", *SIGNALS):
            if question in SIGNALS:  # to the whole run
                os.kill(worker.pid, question)
            pipe.send(question)
            assert pipe.recv() == question
        (worker if caller == "PyTorch" else worker._popen).terminate()
        assert worker.exitcode == -signal.SIGKILL and seen == []
        signal.raise_signal(signal.SIGCHLD)
        assert seen == ["a worker died"]  # the handler is back
    finally:
        signal.signal(signal.SIGCHLD, previous)
        worker.kill()


KILLED = "DataLoader worker (pid 7) is killed by signal: Killed. "
BUS_ERROR = "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are "
FULL = "Caught RuntimeError in DataLoader worker process 0.\n…\nRuntimeError: unable to allocate shared memory(shm) "


def test_failures_name_the_settings_and_end_with_the_advice():
    words = {"keys": "data.", "advice": " Start again"}
    for reason, kind, message in (
        (KILLED, ChildProcessError, f"a process that reads images died: {re.escape(KILLED.strip())} .* data.workers. "),
        (BUS_ERROR, MemoryError, r"/dev/shm is full \(\d+ MiB, \d+ MiB free\): .* data.workers=0 needs none. "),
        (FULL, MemoryError, r"/dev/shm is full \(\d+ MiB, \d+ MiB free\): .* data.workers=0 needs none. "),
    ):
        with pytest.raises(kind, match=f"^{message}Start again$"), reading_errors(600, **words):
            raise RuntimeError(reason)


def test_a_dead_worker_is_reported_even_if_it_interrupted_a_save():
    """torch.save raises another error when the signal handler's error interrupts it."""
    with pytest.raises(ChildProcessError, match="died: DataLoader worker"), reading_errors(600):
        try:
            raise RuntimeError(KILLED)
        finally:
            raise RuntimeError("unexpected pos 128 vs 64")


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), RuntimeError("DataLoader timed out")])
def test_other_errors_pass(error):
    with pytest.raises(RuntimeError) as raised, reading_errors(600):
        raise error
    assert raised.value is error


class Images(Dataset):
    """Eight tensors; reading number 5 does `fault` to the worker."""

    def __init__(self, fault: Callable[[], object]):
        self.fault = fault

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 5:
            self.fault()
        return torch.full((9,), index)


def test_a_worker_that_delivers_nothing_is_reported_and_killed():
    before = active_children()
    waited = "no data came for data.timeout_seconds=1 seconds: a disk .* raise data.timeout_seconds. Look$"
    with pytest.raises(TimeoutError, match=waited), reading_errors(1, keys="data.", advice=" Look"):
        list(Loader(Images(lambda: time.sleep(1000)), 2, batch_size=1))
    assert active_children() == before


def test_after_an_error_no_worker_is_left_and_lack_of_memory_is_one_sentence():
    before = active_children()
    with pytest.raises(ValueError, match="unreadable"):
        list(Loader(Images(lambda: int("unreadable")), 2, batch_size=1))
    with pytest.raises(MemoryError) as error, reading_errors(600):
        list(Loader(Images(lambda: np.empty(2**60, np.uint8)), 1))
    where = "out of memory in a process that reads images"
    assert str(error.value) == f"{where}: use smaller crops, or fewer workers"
    assert active_children() == before


@pytest.mark.parametrize("error", [ConnectionResetError(errno.ECONNRESET, "reset by peer"), EOFError()])
def test_a_worker_that_dies_while_it_hands_over_an_item_is_reported(error, monkeypatch):
    """PyTorch asks the worker for the file that holds a tensor, and raises what becomes of their connection."""

    def lost(loader) -> None:
        raise error

    monkeypatch.setattr(_MultiProcessingDataLoaderIter, "_next_data", lost)
    with pytest.raises(ChildProcessError, match="died: DataLoader worker exited"), reading_errors(600):
        list(Loader(Images(int), 1, batch_size=1))


def square(index: int) -> tuple[int, int]:
    return index**2, os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_gives_items_in_order_and_unchanged(workers, monkeypatch):
    items = list(map_in_order(square, [3, 1, 2, 5, 4], workers))
    assert [answer for answer, _ in items] == [9, 1, 4, 25, 16]
    assert len({process for _, process in items} - {os.getpid()}) == workers
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2})  # a scheduler may grant one core of many
    assert map_in_order(square, range(6)).num_workers == 1


def test_workers_may_open_as_many_files_as_the_system_permits():
    """Each tensor on its way needs one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        assert len(list(Loader(torch.zeros(9, 3), workers=1, batch_size=1))) == 9
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (limits[1], limits[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_workers_refuse_a_folder_for_temporary_files_whose_path_is_too_long_for_sockets(tmp_path, monkeypatch):
    """No data would come, and the run would wait for data.timeout_seconds."""
    deep = tmp_path / ("t" * 90)
    deep.mkdir()
    config = multiprocessing.current_process()._config
    monkeypatch.setitem(config, "tempdir", None)  # where Python remembers its folder
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ValueError, match=f"cannot open sockets in {deep}/.*: set TMPDIR to a .* short path"):
        Loader(torch.zeros(2, 3), workers=1)
    assert len(Loader(torch.zeros(2, 3), workers=0)) == 2  # which needs none


def leaves_a_stopped_worker(worker_ids) -> None:
    items = iter(Loader(torch.zeros(50, 3), workers=1, batch_size=1))
    next(items)
    (worker,) = active_children()
    os.kill(worker.pid, signal.SIGSTOP)
    worker_ids.send(worker.pid)
    os._exit(0)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux ends the children of a process")
def test_a_stopped_worker_does_not_outlive_its_run():
    context = get_context("fork")
    received, worker_ids = context.Pipe(duplex=False)
    run = context.Process(target=leaves_a_stopped_worker, args=(worker_ids,))
    run.start()
    worker_ids.close()
    worker = received.recv()
    run.join()
    ended = received.poll(120)  # by the end of the last process that could write
    if not ended:
        os.kill(worker, signal.SIGKILL)
    assert ended


@pytest.mark.parametrize("number", [errno.EROFS, errno.EAGAIN])
def test_what_keeps_workers_from_starting_is_named(number, monkeypatch):
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    reason = os.strerror(number)
    cause = rf"^no process .* \({reason}\): .* /dev/shm, .*ulimit -u.* data.workers=0 needs neither. Again$"
    monkeypatch.setattr(Workers, "Lock", fail)
    with pytest.raises(ChildProcessError, match=cause), reading_errors(600, keys="data.", advice=" Again"):
        list(Loader(Images(int), 1, batch_size=1))
    with pytest.raises(ChildProcessError, match="^no process .* \\(can't start new thread"), reading_errors(600):
        raise RuntimeError("can't start new thread")


def private_mib() -> float:
    """Memory of this process that it shares with no other."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024


def reads_every_entry(dataset: SegmentationDataset, grown) -> None:
    before = private_mib()
    for number in np.random.default_rng(0).permutation(len(dataset)):
        assert dataset.files[number].name
    grown.send(private_mib() - before)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells how much memory processes share")
def test_workers_share_the_list_of_files():
    """COCO-Stuff's. A list of tuples would grow each worker by 40 to 100 MiB."""
    folder, count = Path("/data/coco_stuff/train2017"), 118_287
    files = [Files(f"{n:012}", folder / f"{n:012}.jpg", folder / f"{n:012}.png") for n in range(count)]
    dataset = SegmentationDataset("coco_stuff", "train", files, coco_stuff_classes())
    assert len(dataset) == count and dataset.has_labels and dataset.files[-1] == files[-1]
    assert dataset.files[3] == files[3]
    files.clear()  # or the worker's garbage collector copies their pages
    context = get_context("fork")
    received, grown = context.Pipe(duplex=False)
    worker = context.Process(target=reads_every_entry, args=(dataset, grown))
    worker.start()
    worker.join()
    assert received.recv() < 25  # Python's own objects grow it by 2 to 12


def test_a_low_limit_of_open_files_is_named(monkeypatch):
    """Workers would fail one by one, and the run wait for data."""
    monkeypatch.setattr(resource, "getrlimit", lambda which: (16, 16))
    monkeypatch.setattr(resource, "setrlimit", lambda which, limits: None)
    with pytest.raises(ValueError, match="^2 processes that read images need 32 open files, 16 are allowed: raise uli"):
        list(Loader([1, 2], 2))


def test_code_that_ends_its_worker_is_reported_at_once(capfd):
    """With status 0, nobody noticed until the time limit."""
    with pytest.raises(ChildProcessError, match="process that reads images died: .* exited unexpectedly"):
        with reading_errors(600):
            list(map_in_order(lambda number: sys.exit(0), range(4), workers=2))
    assert "sys.exit(0) ended a process that reads data" in capfd.readouterr().err
