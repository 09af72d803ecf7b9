"""Signals: the first asks the run to stop, the same one again ends it."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from engine import stopping
from engine.stopping import EXIT_CODE, Preempted, StopRequest


def test_the_same_signal_again_ends_the_process_unless_it_is_the_same_request(monkeypatch):
    now, sent, before = 100.0, [], [signal.getsignal(number) for number in stopping.SIGNALS]
    monkeypatch.setattr(stopping, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(stopping, "os", SimpleNamespace(kill=lambda *call: sent.append(call), getpid=os.getpid))
    with StopRequest(patience_seconds=60) as stop:
        stop.training = True
        os.kill(os.getpid(), signal.SIGTERM)
        now += stopping.ONE_REQUEST_SECONDS
        os.kill(os.getpid(), signal.SIGTERM)  # as Slurm and torchrun may both send it
        now += 0.01
        os.kill(os.getpid(), signal.SIGUSR1)  # another signal: no second request
        assert stop.requested and not sent
        os.kill(os.getpid(), signal.SIGTERM)
        assert sent == [(os.getpid(), signal.SIGTERM)] and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert stop.last_resort.finished.is_set() and before == [signal.getsignal(number) for number in stopping.SIGNALS]


UNANSWERED = """
import os, signal, time
from engine import stopping
with stopping.StopRequest(patience_seconds=0.1) as stop:
    stop.training = True
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(600)
"""


def test_a_request_that_is_not_answered_ends_the_process():
    done = subprocess.run([sys.executable, "-c", UNANSWERED], capture_output=True, text=True, timeout=300)
    assert done.returncode == EXIT_CODE
    assert done.stderr.startswith("asked to stop 0.1 seconds ago, but no step has ended since: ends without saving")


def test_before_the_first_step_a_request_is_answered_at_once():
    reached = []
    with pytest.raises(Preempted, match="^stopped before the first step$"), StopRequest(patience_seconds=60) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        reached.append("the next line")
    assert stop.requested and not reached and stop.last_resort.finished.is_set()
