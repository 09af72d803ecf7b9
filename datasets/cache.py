"""The cache folder. Everything in it can be made again: drawn images, class indices, records of passed checks."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """`inplace-abn-segmentation` in $XDG_CACHE_HOME, by default in ~/.cache. It may not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inplace-abn-segmentation"
