"""Worker processes that read data: what they survive, how they end, and what errors say about them."""

import os
import signal

import cv2
import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from datasets import Workers, camvid, worker_failures, worker_init
from datasets.workers import in_order

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def answers_each_question(questions, answers) -> None:
    worker_init(0)
    while True:
        answers.send(questions.recv())


class Asked:
    """A worker process and the pipes to and from it."""

    def __init__(self):
        questions, self.questions = Workers().Pipe(duplex=False)
        self.answers, answers = Workers().Pipe(duplex=False)
        self.process = Workers().Process(target=answers_each_question, args=(questions, answers), daemon=True)
        self.process.start()
        questions.close(), answers.close()  # so a dead worker raises an error here instead of hanging

    def answer(self, question: str) -> str:
        self.questions.send(question)
        return self.answers.recv()


@pytest.fixture
def worker():
    asked = Asked()
    assert asked.answer("ready?") == "ready?"
    yield asked
    asked.process.kill()
    asked.process.join()


def test_signals_to_the_run_do_not_end_a_worker(worker):
    for number in SIGNALS:
        os.kill(worker.process.pid, number)
        assert worker.answer(number.name) == number.name


@pytest.mark.parametrize("who", ["PyTorch", "Python at its exit"])
def test_terminate_kills_a_worker_unseen_by_the_handler_of_dead_workers(worker, who, monkeypatch):
    seen = []
    previous = signal.signal(signal.SIGCHLD, lambda *_: seen.append("a worker died"))
    try:
        (worker.process if who == "PyTorch" else worker.process._popen).terminate()
        assert worker.process.exitcode == -signal.SIGKILL and seen == []
        signal.raise_signal(signal.SIGCHLD)
        assert seen == ["a worker died"]  # the handler is back
    finally:
        signal.signal(signal.SIGCHLD, previous)


def test_outside_a_worker_signals_are_not_ignored(monkeypatch):
    monkeypatch.setattr(cv2, "setNumThreads", lambda threads: None)
    monkeypatch.setattr(Image.core, "set_blocks_max", lambda blocks: None)
    before = [signal.getsignal(number) for number in SIGNALS]
    worker_init(0)
    assert [signal.getsignal(number) for number in SIGNALS] == before


TIMED_OUT, KILLED = "DataLoader timed out after 5 seconds", "DataLoader worker (pid 7) is killed by signal: Killed. "


@pytest.mark.parametrize(
    "words, keys, advice", [({}, "", ""), ({"keys": "data.", "advice": " Start again"}, "data.", " Start again")]
)
def test_failures_name_the_settings_and_end_with_the_advice(words, keys, advice):
    with pytest.raises(TimeoutError) as timed_out, worker_failures(2, 5, **words):
        raise RuntimeError(TIMED_OUT)
    message = str(timed_out.value)
    waited = f"delivered none for {keys}timeout_seconds=5 seconds: "
    assert message.startswith(f"the {keys}workers=2 processes that read images {waited}")
    assert message.endswith(f"raise {keys}timeout_seconds; {keys}workers=0 reads in the main process.{advice}")

    with pytest.raises(ChildProcessError) as killed, worker_failures(2, 5, **words):
        raise RuntimeError(KILLED)
    message = str(killed.value)
    assert message.startswith(f"one of the {keys}workers=2 processes that read images died: {KILLED.strip()} ")
    assert message.endswith(f"use fewer {keys}workers.{advice}")


def test_a_dead_worker_is_reported_even_if_it_interrupted_a_save():
    """torch.save raises another error when the signal handler's error interrupts it."""
    with pytest.raises(ChildProcessError, match="died: DataLoader worker"), worker_failures(2, 5):
        try:
            raise RuntimeError(KILLED)
        finally:
            raise RuntimeError("unexpected pos 128 vs 64")


def test_other_errors_pass():
    error = RuntimeError("shapes do not match")
    with pytest.raises(RuntimeError) as raised, worker_failures(2, 5):
        raise error
    assert raised.value is error


class Squares(Dataset):
    def __getitem__(self, index: int) -> tuple[int, int]:
        return index**2, os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_pass_gives_items_in_order_and_unchanged(workers):
    items = list(in_order(Squares(), [3, 1, 2, 5, 4], workers))
    assert [square for square, _ in items] == [9, 1, 4, 25, 16]
    assert len({process for _, process in items} - {os.getpid()}) == workers


def test_a_pass_uses_the_cores_that_it_may_use(camvid_folders, monkeypatch):
    """A scheduler may grant one of many."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2})
    assert in_order(camvid(camvid_folders, "train"), range(6)).num_workers == 1


class TooLarge:
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> np.ndarray:
        return np.empty(2**60, np.uint8)  # bytes


def test_memory_that_runs_out_in_a_worker_is_one_sentence():
    loader = DataLoader(TooLarge(), num_workers=1, worker_init_fn=worker_init, multiprocessing_context=Workers())
    with pytest.raises(MemoryError) as error, worker_failures(1, 5, keys="data."):
        next(iter(loader))
    where = "out of memory in one of the data.workers=1 processes that read images"
    assert str(error.value) == f"{where}: use smaller crops, or fewer data.workers"
