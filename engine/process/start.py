"""Imported first by every command."""

import atexit
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_PR_SET_PDEATHSIG = 1  # of Linux's prctl


def _print_error(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: no traceback after Ctrl-C, also while other modules load."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


def _print_error_of_thread(arguments: threading.ExceptHookArgs) -> None:
    """`threading.excepthook`: nothing about TensorBoard's thread, whose error the main thread raises again."""
    if not type(arguments.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(arguments)


def _open_standard_streams() -> None:
    """Open stdin, stdout and stderr if they are closed: files would get their numbers, and then what is printed."""
    number = os.open(os.devnull, os.O_RDWR)
    while number <= 2:
        os.set_inheritable(number, True)
        stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)
        setattr(sys, ("stdin", "stdout", "stderr")[number], stream)  # in place of None
        number = os.open(os.devnull, os.O_RDWR)
    os.close(number)


def die_with_parent(number: signal.Signals) -> None:
    """Have Linux send this process a signal when its parent ends. (A stopped or stuck process obeys only SIGKILL.)"""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def _set_variables_of_torchrun() -> None:
    """Give one of several tasks of submitit the variables that torchrun sets, such as RANK and MASTER_ADDR."""
    from submitit.helpers import TorchDistributedEnvironment

    tasks = TorchDistributedEnvironment()
    if tasks.world_size > 1:
        tasks.export(set_cuda_visible_devices=False, overwrite=True)


def compiler_cache() -> Path:
    """A folder of this user alone for compiled code, which PyTorch loads as pickles, whoever has put them there.

    It is in the user's cache. Where there is none that code can be written to and run from, it lasts until this
    process ends.
    """
    from datasets.cache import cache_folder, make_private  # slow, so after `_print_error` is in place

    with suppress(OSError):
        cache = cache_folder()
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
            folder = make_private(cache / "compiled")
            if folder is not None and not os.statvfs(folder).f_flag & os.ST_NOEXEC:
                return folder
    folder = Path(tempfile.mkdtemp(prefix="compiled-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # not in workers, which end without exit handlers
    return folder


_open_standard_streams()
if not {"--shell-completion", "-sc"}.isdisjoint(sys.argv):
    from engine.process.completion import complete  # without torch

    complete()
if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun started this process. If it is killed, it cannot stop it
    die_with_parent(signal.SIGTERM)
if "SUBMITIT_EXECUTOR" in os.environ:
    _set_variables_of_torchrun()
sys.excepthook = _print_error
threading.excepthook = _print_error_of_thread
os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever backend is set
# PyTorch's defaults are in the folder for temporary files, where others may have been first; its headers stay there.
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")
if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiler_cache())
