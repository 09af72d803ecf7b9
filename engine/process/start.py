"""Imported first by every command."""

import os
import sys
from types import TracebackType


def _say(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: no traceback after Ctrl-C, also while other modules load."""
    if issubclass(kind, KeyboardInterrupt):
        print("interrupted", file=sys.stderr)
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = _say
os.environ["MPLBACKEND"] = "agg"  # figures go to files, whatever backend is set
