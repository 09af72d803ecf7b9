"""Write files to folders given by the user, under names from the data."""

import errno
import os
from pathlib import Path

import cv2
import numpy as np
from PIL import Image


def writable_folder(key: str, folder: Path) -> Path:
    """Create a folder if needed and return it. ValueError, naming `key`, if it is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise ValueError(
            f"{key}: {folder} is not a writable folder ({error.strerror}); give another with {key}=…"
        ) from error
    return folder


def inside(folder: Path, name: str) -> Path:
    """The path of `name` in a folder. ValueError if the name, which comes from data, leaves it (.., /, a link)."""
    path = Path(os.path.realpath(folder / name))
    folder = Path(os.path.realpath(folder))
    if folder not in path.parents:
        raise ValueError(f"the name {name!r} would be written to {path}, outside of {folder}: rename it in the data")
    return path


def write_png(path: Path, pixels: np.ndarray, palette: np.ndarray | None = None) -> None:
    """Write uint8 (H, W) or RGB (H, W, 3) pixels; creates the folder.

    `palette`: uint8 (256, 3) RGB, for a palette PNG with indices `pixels` (H, W).
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if palette is not None:
        indexed = Image.fromarray(pixels)
        indexed.putpalette(palette.tobytes())  # unlike convert("P"), keeps the indices
        indexed.save(path, "PNG")
        return
    if pixels.ndim == 3:
        pixels = cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR)
    encoded, data = cv2.imencode(".png", pixels)
    assert encoded, path
    path.write_bytes(data.tobytes())
