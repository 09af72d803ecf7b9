"""Imported first by every command: turns errors while its other modules load into one line."""

import os
import resource
import sys
from types import TracebackType

_MOST_THREADS = 1_024


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: no traceback after Ctrl-C, or if `ulimit -v` may be too low."""
    addresses = resource.getrlimit(resource.RLIMIT_AS)[0]
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    elif addresses != resource.RLIM_INFINITY and issubclass(kind, (ImportError, MemoryError)):
        limit = f"ulimit -v permits {addresses >> 20:,} MiB of addresses"
        print(f"error: {error}: {limit}, which may be too few for PyTorch alone; raise it", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say
os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever draws windows here
threads = os.environ.get("OMP_NUM_THREADS") or "1"
if not all(count.isdecimal() and 0 < int(count) <= _MOST_THREADS for count in threads.split(",")):
    sys.exit(f"error: OMP_NUM_THREADS={threads}: expected a number of threads, 1 to {_MOST_THREADS}")
