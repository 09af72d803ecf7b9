"""Signals: the first asks the run to stop, the same one again ends it. Errors that users can fix are one message."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import cv2
import pytest
import torch

from datasets.class_table import UnknownIds
from engine.checkpoint import files as checkpoint
from engine.process import stopping
from engine.process.distributed import World
from engine.process.output_files import write_file
from engine.process.stopping import Preempted, StopRequest, UntilStopped, errors_for_users
from models.checkpoints import torch_files
from tests.engine.checkpoint.test_files import files_of_at_most
from tests.runs import REPOSITORY


def handlers() -> list:
    return [signal.getsignal(number) for number in stopping.ONE_REQUEST_SECONDS]


@pytest.mark.parametrize("number, other", [(signal.SIGTERM, signal.SIGUSR1), (signal.SIGINT, signal.SIGTERM)])
def test_the_same_signal_again_ends_the_process_unless_it_is_the_same_request(monkeypatch, number, other):
    now, sent, before = 100.0, [], handlers()
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(stopping, "os", SimpleNamespace(kill=lambda *call: sent.append(call), getpid=os.getpid))
    with StopRequest() as stop:
        stop.training = True
        os.kill(os.getpid(), number)
        now += stopping.ONE_REQUEST_SECONDS[number]
        os.kill(os.getpid(), number)  # as Slurm and torchrun may both send it
        now += 0.01
        os.kill(os.getpid(), other)  # no second request
        assert stop.requested and not sent
        os.kill(os.getpid(), number)
        assert sent == [(os.getpid(), number)] and signal.getsignal(number) is signal.SIG_DFL
    assert before == handlers()


def test_the_same_request_does_not_change_the_exit_status():
    """A second SIGTERM, while Python exits, ended the process with status -15 instead of 75."""
    before = {number: signal.getsignal(number) for number in stopping.ONE_REQUEST_SECONDS}
    try:
        with pytest.raises(SystemExit) as ended, errors_for_users():
            raise Preempted("stopped")
        assert ended.value.code == stopping.EXIT_CODE and handlers() == [signal.SIG_IGN] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_signal_that_is_ignored_stays_so():
    """A shell starts background processes with SIGINT ignored: Ctrl-C is meant for others."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGINT)
        assert not stop.requested and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_before_the_first_step_a_request_is_answered_at_once():
    reached = []
    with pytest.raises(Preempted, match="^stopped before the first step$"), StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("the next line")
    assert stop.requested and not reached


def test_an_evaluation_stops_after_the_image_of_the_request():
    images = UntilStopped(["a", "b", "c"], stop := StopRequest(), World())
    assert next(seen := iter(images)) == "a"
    stop.requested = True
    with pytest.raises(Preempted, match="^stopped during an evaluation, which will be repeated$"):
        next(seen)


def test_a_request_while_a_checkpoint_is_read_says_nothing_of_damage(tmp_path, monkeypatch):
    torch.save({"step": 1}, tmp_path / "last.pt")
    monkeypatch.setattr(torch_files, "_check_bytes", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Preempted, match="^stopped before the first step$"), StopRequest():
        checkpoint.load(tmp_path / "last.pt")


def test_memory_that_runs_out_anywhere_is_a_message():
    with pytest.raises(SystemExit, match="error: out of memory outside of steps and images: .*smaller body"):
        with errors_for_users():
            torch.empty(2**60, dtype=torch.uint8)
    opencv = cv2.error("OpenCV(5) alloc.cpp:66: error: (-4:Insufficient memory) Failed to allocate 9 bytes")
    for error, what in ((MemoryError(), "the system gives no more"), (opencv, "Failed to allocate 9 bytes")):
        with pytest.raises(SystemExit, match=f"error: out of memory .*: .*{what}.*ulimit -v"), errors_for_users():
            raise error
    with pytest.raises(SystemExit, match="^error: a process died. If the machine ran out of memory, wait$"):
        with errors_for_users():  # has its words already
            raise ChildProcessError("a process died. If the machine ran out of memory, wait")
    for kind in (KeyError, RuntimeError):  # our own mistakes keep their traceback
        with pytest.raises(kind, match="our own"), errors_for_users():
            raise kind("our own mistake")


HANGS = """
import atexit, time
from engine.process import stopping
atexit.register(time.sleep, 600)
stopping.SECONDS_TO_END = 1
with stopping.errors_for_users():
    raise {error}
"""


@pytest.mark.parametrize(
    "error, status, said",
    [
        ("ValueError('no such file')", 1, "error: no such file"),
        pytest.param("stopping.Preempted('stopped')", 75, "stopped; exit status 75", marks=pytest.mark.slow),
    ],
)
def test_a_command_ends_after_its_message_although_a_library_waits(error, status, said):
    """PyTorch waits up to 300 s for the processes that compile."""
    script = HANGS.format(error=error)
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode == status and said in ended.stderr


def test_an_error_of_the_disk_ends_with_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match=f"^error: .*File too large: '{tmp_path}/a.png': make room there .*again$"):
        with errors_for_users(), files_of_at_most(40):
            write_file(tmp_path / "a.png", bytes(41))
    (tmp_path / "b.png").symlink_to("b.png")
    with pytest.raises(SystemExit, match=f"Too many levels .*'{tmp_path}/b.png': a link leads back to itself; remove"):
        with errors_for_users():
            (tmp_path / "b.png").read_bytes()


@pytest.mark.parametrize("kind, name", [(ValueError, "ValueError"), (UnknownIds, "datasets.class_table.UnknownIds")])
def test_users_see_the_message_of_a_worker_and_no_traceback(kind, name, monkeypatch):
    error = kind(f"Caught {kind.__name__} in DataLoader worker process 0.\n  File\n{name}: a.png: is bad")
    with pytest.raises(SystemExit, match="^error: a.png: is bad$"), errors_for_users():
        raise error
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # on request it is kept
    with pytest.raises(kind, match="Caught"), errors_for_users():
        raise error
