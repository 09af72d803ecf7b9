"""Signals: the first asks the run to stop, the same one again ends it."""

import os
import signal
import subprocess
import sys

import pytest

from engine import stopping
from engine.stopping import StopRequest

ASKED_TWICE = """
import os, signal, sys, time
from engine import stopping
stopping.ONE_REQUEST_SECONDS = float(sys.argv[1])
with stopping.StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested
    os.kill(os.getpid(), signal.SIGUSR1)  # another signal: no second request
    time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still there")
"""


@pytest.mark.parametrize("seconds, status, output", [(60, 0, "still there\n"), (0, -signal.SIGTERM, "")])
def test_the_same_signal_again_ends_the_process_unless_it_is_the_same_request(seconds, status, output):
    done = subprocess.run([sys.executable, "-c", ASKED_TWICE, str(seconds)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (status, output), done.stderr


def test_handlers_are_restored():
    before = signal.getsignal(signal.SIGTERM)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested and signal.getsignal(signal.SIGTERM) is before
    assert stopping.ONE_REQUEST_SECONDS > 1
