"""Imported first by every command."""

import ctypes
import os
import signal
import sys
import threading
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


def _open_closed() -> None:
    """Open closed descriptors of stdin, stdout and stderr: files would get their numbers, and then what is printed."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)  # in place of None
    os.close(number)


def die_with_parent(number: signal.Signals) -> None:
    """Have Linux send this process a signal when its parent ends. (A stopped or stuck process obeys only SIGKILL.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


_open_closed()
if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process. If it is killed, it cannot stop it
    die_with_parent(signal.SIGTERM)
sys.excepthook, threading.excepthook = _say, _say_of_thread
os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever backend is set
