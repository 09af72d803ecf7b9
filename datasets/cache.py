"""Where the project keeps what it can make again: drawn pictures, and which data it has already checked."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`inplace-abn-segmentation` in $XDG_CACHE_HOME, or in ~/.cache. It need not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inplace-abn-segmentation"
