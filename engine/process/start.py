"""Imported first by every command."""

import ctypes
import os
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: no traceback after Ctrl-C, also while other modules load."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _say_of_thread(arguments: threading.ExceptHookArgs) -> None:
    """`threading.excepthook`: nothing about TensorBoard's thread, whose error the main thread raises again."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(arguments)


def die_with_parent(number: signal.Signals) -> None:
    """Have Linux send this process a signal when its parent ends. (A stopped or stuck process obeys only SIGKILL.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _lost_torchrun() -> bool:
    """Whether the torchrun that started this process has ended, so that another process, such as init, is its parent.

    Torchrun is a Python program, and starts each process in a session of its own; a script in between is in that
    session too, and stays the parent.
    """
    if sys.platform != "linux" or os.getsid(0) != os.getpid():
        return False
    try:
        program = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")[0]
    except OSError:  # another user's
        return True
    return b"python" not in os.path.basename(program)


if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process. If it is killed, it cannot stop it
    die_with_parent(signal.SIGTERM)
    if _lost_torchrun():
        sys.exit("error: torchrun ended before this process started: start it again")
sys.excepthook, threading.excepthook = _say, _say_of_thread
os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever backend is set
