"""How commands end: on a stop request (`ONE_REQUEST_SECONDS`), or with an error message."""

import atexit
import ctypes
import hashlib
import json
import logging
import math
import os
import re
import signal
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from datasets.file_list import readable
from datasets.workers import NO_THREAD
from engine.process.allocations import cause_of, is_out_of_memory
from engine.process.console import logger, make_printing_safe
from engine.process.distributed import World, launcher
from engine.process.output_files import CHECK_DISK, explained

EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: try again later
SECONDS_TO_END = 20  # for Python's exit, when all files have been written
# Stop signals, and for how many seconds a repeated signal counts as the same request: Slurm and torchrun may both pass
# it on, torchrun repeats Ctrl-C at once, and a shell repeats a lost terminal's SIGHUP. Beyond the soft limit of
# processor time (ulimit -St), SIGXCPU comes every second. Data workers ignore them: datasets/workers.py.
ONE_REQUEST_SECONDS: dict[int, float] = {
    **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2), 5.0),
    signal.SIGINT: 1.0,
    signal.SIGXCPU: math.inf,
}
_IN_COMMAND: ContextVar[bool] = ContextVar("in_command", default=False)  # whether `errors_for_users` runs


class Preempted(BaseException):
    """The run stopped on request and can be resumed. Like KeyboardInterrupt, it passes every `except Exception`."""


class StopRequest:
    """Context in which a signal asks for a stop: it sets `requested` instead of killing the process.

    Until `training` is set there is nothing to save, and a signal raises `Preempted` at once. A signal that comes
    again, more than `ONE_REQUEST_SECONDS` after the first, kills the process. If torchrun dies, SIGTERM comes
    (engine/process/start.py). Ignored signals stay ignored (`nohup`, `&`). A command that ends ignores all of them.
    """

    def __init__(self) -> None:
        self.training = False
        self.requested = False
        self.requested_s: dict[int, float] = {}  # when each signal first came
        self.previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        self.previous_handlers = handle_stop_signals(self._request)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if _IN_COMMAND.get() and (kind is None or issubclass(kind, Preempted)):
            handle_stop_signals(signal.SIG_IGN)
        elif kind is None or not launcher():  # torchrun's SIGTERM must not kill the process before its error is printed
            restore_handlers(self.previous_handlers)

    def anywhere(self, world: World) -> bool:
        """Whether any rank was asked to stop. Every rank must call it."""
        return bool(world.sum_(torch.tensor(int(self.requested))))

    def _request(self, number: int, frame: object) -> None:
        if time.monotonic() > self.requested_s.setdefault(number, time.monotonic()) + ONE_REQUEST_SECONDS[number]:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        is_repeated = self.requested
        self.requested = True
        if not (self.training or is_repeated):  # another one must not interrupt what the first one makes the run do
            raise Preempted("stopped before the first step")


class UntilStopped:
    """Yields minibatches until any rank is asked to stop, then raises `Preempted`.

    Ranks with fewer minibatches check as often as the others, so none waits for another.
    """

    def __init__(self, items: Any, stop: StopRequest, world: World):
        self.items = items
        self.stop = stop
        self.world = world

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[dict]:
        items = iter(self.items)
        for turn in range(max(self.world.gather(len(self.items)))):
            if self.stop.anywhere(self.world):
                raise Preempted("stopped during an evaluation, which will be repeated")
            if turn < len(self.items):
                yield next(items)


def handle_stop_signals(handler: Any) -> dict[int, Any]:
    """Give stop signals that are not ignored a handler; return their previous handlers. (Only the main thread may.)"""
    if threading.current_thread() is not threading.main_thread():
        return {}
    numbers = [number for number in ONE_REQUEST_SECONDS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in numbers}


def restore_handlers(previous_handlers: dict[int, Any]) -> None:
    """Give stop signals the handlers that `handle_stop_signals` has replaced."""
    for number, handler in previous_handlers.items():
        signal.signal(number, handler)


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Context that raises TimeoutError in code that takes longer, such as a service's. Only the main thread can."""

    def give_up(number: int, frame: object) -> None:
        raise TimeoutError(f"did not return within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again, in case the code catches the error and waits on
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous_handler)


def _end_within_seconds(status: int) -> None:
    """An exit handler: end with `status` even if a library's handler hangs, as PyTorch's may on its compilers.

    It is registered last, so it runs first, but after all threads of ours, such as one that writes a checkpoint. The
    system's timer calls _exit(status): a signal handler of Python's is gone while the interpreter frees its memory.
    """
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        timer = ctypes.c_void_p()
        function = ctypes.cast(libc._exit, ctypes.c_void_p).value
        event = struct.pack("PiiP40x", status, 0, 2, function)  # struct sigevent with SIGEV_THREAD
        if libc.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(timer)) == 0:
            libc.timer_settime(timer, 0, struct.pack("4l", 0, 0, SECONDS_TO_END, 0), None)  # struct itimerspec


@contextmanager
def errors_for_users(restart_advice: str = "start it again") -> Iterator[None]:
    """Wraps a command: errors that its user can fix become a message and exit status 1; others keep their traceback.

    HYDRA_FULL_ERROR=1 keeps all tracebacks. `restart_advice`: how to go on after a stop on request. When the command
    ends, its exit status is decided: from then on the process ignores stop signals.
    """
    make_printing_safe()
    status = 1
    in_command = _IN_COMMAND.set(True)
    # Its warning that it finds no CUDA runtime only means that code is compiled for the CPU.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        try:
            yield
        finally:
            handle_stop_signals(signal.SIG_IGN)
            _IN_COMMAND.reset(in_command)
        status = 0
    except SystemExit as ended:  # of a command: its status, or a message
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        raise
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except Preempted as stopped:
        status = EXIT_CODE
        level = logging.INFO if logger.handlers else logging.WARNING
        logger.log(level, f"{stopped}; exit status {EXIT_CODE}: {restart_advice}")
        sys.exit(EXIT_CODE)
    except Exception as error:  # out-of-memory errors of OpenCV and PyTorch have any type
        logger.debug("", exc_info=True)  # the traceback goes to log.txt
        ending = _report(error)
        if ending is None:
            raise
        sys.exit(ending)
    finally:
        atexit.register(_end_within_seconds, status)


def _report(error: Exception) -> str | int | None:
    """Report an error to torchrun, if that runs; return what the command exits with, or None: with its traceback.

    It exits with the message, which Python then prints; or with 1 if torchrun prints it.
    """
    message = _message_for_users(error)
    if message is None and is_out_of_memory(error):
        reason = next(iter(str(error).strip().splitlines()), "the system gives no more")
        return (
            f"error: {cause_of(error)} outside of steps and images: {reason}. The network and its optimiser alone need "
            f"more than is free: stop other processes, raise ulimit -v if it is set, or use a smaller body"
        )
    if message is None or os.environ.get("HYDRA_FULL_ERROR") == "1":
        return None
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file:
        _write_for_torchrun(Path(file), message)
        if os.environ.get("TORCHELASTIC_RESTART_COUNT") == os.environ.get("TORCHELASTIC_MAX_RESTARTS"):
            return 1
    return message


def _message_for_users(error: Exception) -> str | None:
    """The message about an error that its user can fix; None if it has none."""
    if str(error) == NO_THREAD:
        error = OSError(f"{error}: the user has all that ulimit -u, or the container's limit, allows: end some")
    if not isinstance(error, (ValueError, FloatingPointError, MemoryError, OSError)) or not str(error):
        return None
    # DataLoader workers put the original message at the end of a traceback.
    text = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", str(error))[-1]
    message = readable(f"error: {text.strip()}", lines=True)
    if isinstance(error, OSError):
        _, cure = explained(error, Path(str(error.filename)).parent)
        if cure != CHECK_DISK:
            message += f": {cure[0].lower()}{cure[1:]}, then start it again"
    return message


def _write_for_torchrun(file: Path, message: str) -> None:
    """Write a process's error where torchrun reads it, in place of the traceback of `record`.

    Of several processes with the same error one has the message, and the earliest time: torchrun prints it last.
    """
    time_s = int(time.time())
    claim = file.parents[1] / f"{hashlib.sha256(message.encode()).hexdigest()[:16]}.said"  # beside the ranks' folders
    with suppress(OSError):
        try:
            claim.touch(exist_ok=False)
        except FileExistsError:
            message = "the same error as in another process"
            time_s += 1
    details = {"py_callstack": message, "timestamp": str(time_s)}
    file.write_text(json.dumps({"message": {"extraInfo": details}}))
