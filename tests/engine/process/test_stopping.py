"""Signals: the first asks the run to stop, the same one again ends it. Errors that users can fix are one message."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import cv2
import pytest
import torch

from datasets.class_table import UnknownIds
from engine.checkpoint import files as checkpoint
from engine.process import stopping
from engine.process.console import log_to, logger, make_console, progress_bar
from engine.process.distributed import World
from engine.process.stopping import Preempted, StopRequest, UntilStopped, errors_for_users
from models.checkpoints import torch_files
from tests.ranks import FORKSERVER
from tests.runs import REPOSITORY


def handlers() -> list:
    return [signal.getsignal(number) for number in stopping.ONE_REQUEST_SECONDS]


@pytest.fixture(autouse=True)
def as_in_a_terminal():
    """nohup starts a program with SIGHUP ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(
    "number, second_number",
    [(signal.SIGTERM, signal.SIGUSR1), (signal.SIGINT, signal.SIGTERM), (signal.SIGHUP, signal.SIGXCPU)],
)
def test_the_same_signal_again_ends_the_process_unless_it_is_the_same_request(monkeypatch, number, second_number):
    now_s, sent, before = 100.0, [], handlers()
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(stopping, "os", SimpleNamespace(kill=lambda *call: sent.append(call), getpid=os.getpid))
    with StopRequest() as stop:
        stop.training = True
        os.kill(os.getpid(), number)
        now_s += stopping.ONE_REQUEST_SECONDS[number]
        os.kill(os.getpid(), number)  # as Slurm and torchrun may both send it
        now_s += 0.01
        os.kill(os.getpid(), second_number)  # no second request
        assert stop.requested and not sent
        os.kill(os.getpid(), number)
        assert sent == [(os.getpid(), number)] and signal.getsignal(number) is signal.SIG_DFL
    assert before == handlers()


@pytest.mark.parametrize(
    "ending", [Preempted("stopped"), ValueError("wrong"), KeyboardInterrupt(), SystemExit(3), None]
)
def test_no_signal_changes_the_exit_status_of_a_command_that_ends(ending):
    """A second SIGTERM, while Python exits, ended the process with status -15 instead of 75, or 0."""
    seen = []
    with suppress(SystemExit), errors_for_users():
        with StopRequest():
            if ending:
                raise ending
        seen.append(handlers())  # before `errors_for_users` can ignore them
    assert handlers() == [signal.SIG_IGN] * 6 and seen in ([], [handlers()])


def test_another_signal_does_not_interrupt_what_the_first_has_begun():
    """Before the first step, as when a closing terminal sends SIGHUP after a scheduler's SIGTERM."""
    ended = []
    with pytest.raises(Preempted), StopRequest():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGHUP)
            ended.append("cleaned up")
    assert ended


def _saves_when_asked(file: Path, terminal: str) -> None:
    """A training without steps. Its terminal is `terminal`, as that of a session of ssh."""
    os.setsid()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    descriptor = os.open(terminal, os.O_RDWR)  # becomes its controlling terminal, whose end sends SIGHUP
    for number in range(3):
        os.dup2(descriptor, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    with errors_for_users(), StopRequest() as stop:
        log_to(console := make_console(), file.with_name("log.txt"))
        assert console.is_terminal
        stop.training = True
        with progress_bar(console) as bar:
            bar.add_task("training", total=None, status="")
            file.with_name("begun").touch()
            while not stop.requested:
                logger.info("step")
        file.touch()
        raise Preempted("stopped after a step")


def test_a_closed_terminal_is_a_stop_request(tmp_path):
    """Nobody takes the lines that follow."""
    master, slave = os.openpty()
    process = FORKSERVER.Process(target=_saves_when_asked, args=(tmp_path / "saved", os.ttyname(slave)))
    process.start()
    while process.is_alive() and not (tmp_path / "begun").exists():
        with suppress(BlockingIOError):
            os.set_blocking(master, False)
            os.read(master, 2**16)
    os.close(slave), os.close(master)
    process.join(300)
    assert process.exitcode == stopping.EXIT_CODE and (tmp_path / "saved").exists()
    assert (tmp_path / "log.txt").read_text().endswith("stopped after a step; exit status 75: start it again\n")


def test_the_signal_of_a_limit_of_processor_time_is_one_request(monkeypatch):
    """It comes every second, and says that a part of the time is left."""
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=iter(range(0, 10**6, 3600)).__next__))
    monkeypatch.setattr(os, "kill", lambda *_: pytest.fail("the process would be killed"))
    with StopRequest() as stop:
        stop.training = True
        for _ in range(3):
            signal.raise_signal(signal.SIGXCPU)


def test_a_signal_that_is_ignored_stays_so():
    """A shell starts background processes with SIGINT ignored: Ctrl-C is meant for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop.requested and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_an_evaluation_stops_after_the_image_of_the_request():
    images = UntilStopped(["a", "b", "c"], stop := StopRequest(), World())
    assert next(seen := iter(images)) == "a"
    stop.requested = True
    with pytest.raises(Preempted, match="^stopped during an evaluation, which will be repeated$"):
        next(seen)


def test_before_the_first_step_a_request_is_answered_at_once(tmp_path, monkeypatch):
    """While a checkpoint is read, the message says nothing of damage."""
    torch.save({"step": 1}, tmp_path / "last.pt")
    monkeypatch.setattr(torch_files, "_check_bytes", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="^stopped before the first step$"), StopRequest() as stop:
        checkpoint.load(tmp_path / "last.pt")
    assert stop.requested


def test_memory_that_runs_out_anywhere_is_a_message():
    with pytest.raises(SystemExit, match="error: out of memory outside of steps and images: .*smaller body"):
        with errors_for_users():
            torch.empty(2**60, dtype=torch.uint8)
    opencv = cv2.error("OpenCV(5) alloc.cpp:66: error: (-4:Insufficient memory) Failed to allocate 9 bytes")
    for error, reason in ((MemoryError(), "the system gives no more"), (opencv, "Failed to allocate 9 bytes")):
        with pytest.raises(SystemExit, match=f"error: out of memory .*: .*{reason}.*ulimit -v"), errors_for_users():
            raise error
    for kind in (KeyError, RuntimeError):  # our own mistakes keep their traceback
        with pytest.raises(kind, match="our own"), errors_for_users():
            raise kind("our own mistake")


def test_a_thread_that_cannot_start_is_a_message():
    """Commands write files, and show their progress, in threads."""
    with pytest.raises(SystemExit, match="^error: can't start new thread: .*ulimit -u.* end some$"), errors_for_users():
        raise RuntimeError("can't start new thread")


HANGS = """
import atexit, os, time
from engine.process import stopping
class Large:
    def __del__(self, kill=os.kill, numbers=tuple(stopping.ONE_REQUEST_SECONDS), own=os.getpid(), sleep=time.sleep):
        for number in numbers:
            kill(own, number)
        sleep(600)
stopping.SECONDS_TO_END = 1
with stopping.errors_for_users():
    {code}
"""


@pytest.mark.table
@pytest.mark.parametrize(
    "code, status, message",
    [
        ("atexit.register(time.sleep, 600); raise ValueError('no such file')", 1, "error: no such file"),
        ("atexit.large = Large()", 0, ""),  # its memory is freed last, by another module
        pytest.param(
            "atexit.large = Large(); raise stopping.Preempted('stopped')", 75, "stopped", marks=pytest.mark.slow
        ),
    ],
)
def test_a_command_ends_with_its_status_although_a_library_waits(code, status, message):
    """PyTorch waits up to 300 s for the processes that compile; freeing memory may take long on a busy machine."""
    script = HANGS.format(code=code)
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode == status and message in ended.stderr


@pytest.mark.parametrize("kind, name", [(ValueError, "ValueError"), (UnknownIds, "datasets.class_table.UnknownIds")])
def test_users_see_the_message_of_a_worker_and_no_traceback(kind, name, monkeypatch):
    error = kind(f"Caught {kind.__name__} in DataLoader worker process 0.\n  File\n{name}: a.png: is bad")
    with pytest.raises(SystemExit, match="^error: a.png: is bad$"), errors_for_users():
        raise error
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # on request it is kept
    with pytest.raises(kind, match="Caught"), errors_for_users():
        raise error
