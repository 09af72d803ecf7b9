"""Reading image files with the checks that decoders leave out; every error names the file and the fix."""

from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

RESTORE = "Restore the file from the dataset's archive."
_PNG, _JPEG = b"\x89PNG", b"\xff\xd8"  # how the files begin
_PALETTE = 3  # a PNG's colour type
_TRAILER_BYTES = 4096  # the end mark of an image is looked for here: some cameras write padding behind it


def decode_image(path: Path) -> np.ndarray:
    """The image as uint8 (H, W, 3) RGB. ValueError where the file is missing, truncated or not an image.

    An orientation written in the file is not applied: the labels lie on the pixels as they are stored.
    """
    image = _decode(_read_complete(path), cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise ValueError(f"{path}: cannot be decoded as an image; expected an intact PNG or JPEG. {RESTORE}")
    return cv2.cvtColor(image, cv2.COLOR_BGR2RGB)


def decode_label(path: Path) -> np.ndarray:
    """The values of a label file, uint8 (H, W); of a palette PNG the indices. ValueError where they are not that."""
    data = _read_complete(path)
    depth, colour_type = data[24:26] if data.startswith(_PNG) and len(data) > 25 else (8, None)
    if colour_type == _PALETTE:  # OpenCV would give its colours
        raw = _decode_palette(data)
    elif depth < 8:
        raise ValueError(
            f"{path}: has {depth} bits per pixel; expected a label with one 8-bit class id per pixel (decoders "
            f"stretch smaller values). {RESTORE}"
        )
    else:
        raw = _decode(data, cv2.IMREAD_UNCHANGED)
    if raw is None:
        raise ValueError(f"{path}: cannot be decoded as a label; expected an intact PNG. {RESTORE}")
    _check_values(path, raw, np.uint8, "a label with one 8-bit class id per pixel (not a colour picture)")
    return raw


def decode_instances(path: Path) -> np.ndarray:
    """The classes in a file of instances, uint8 (H, W): its values are 256 * class + number of the instance."""
    return (decode_uint16(path) // 256).astype(np.uint8)


def decode_uint16(path: Path) -> np.ndarray:
    """The values of a file of instances, uint16 (H, W). ValueError where they are not that."""
    raw = _decode(_read_complete(path), cv2.IMREAD_UNCHANGED)
    if raw is None:
        raise ValueError(f"{path}: cannot be decoded as instances; expected an intact PNG. {RESTORE}")
    _check_values(path, raw, np.uint16, "instances with one 16-bit value per pixel")
    return raw


def read_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image, from its header; ValueError where the file is unreadable or stops too early.

    Only the first and last bytes are read, so damage in the middle stays unnoticed until decoding.
    """
    try:
        with open(path, "rb") as file:
            head = file.read(8)
            length = file.seek(0, 2)
            file.seek(max(0, length - _TRAILER_BYTES))
            _check_ends(path, head, file.read())
            file.seek(0)
            with Image.open(file) as image:
                return image.size
    except (UnidentifiedImageError, SyntaxError):
        raise ValueError(f"{path}: has no readable image header; expected an intact PNG or JPEG. {RESTORE}") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _check_values(path: Path, raw: np.ndarray, dtype: type, expected: str) -> None:
    if raw.ndim != 2 or raw.dtype != dtype:
        channels = 1 if raw.ndim == 2 else raw.shape[2]
        raise ValueError(
            f"{path}: has {channels} channel(s) of {raw.dtype}; expected {expected}. Use the label files that the "
            "dataset distributes."
        )


def _read_complete(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    _check_ends(path, data[:8], data[-_TRAILER_BYTES:])
    return data


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path}: cannot be read ({error.strerror or error}); expected a readable file. {RESTORE}")


def _check_ends(path: Path, head: bytes, tail: bytes) -> None:
    """ValueError if a PNG or JPEG stops before its end mark: decoders fill the missing part in silence."""
    if not head:
        raise ValueError(f"{path}: the file is empty; expected a PNG or JPEG. {RESTORE}")
    if head.startswith(_PNG):
        end, what = b"IEND", "PNG"
    elif head.startswith(_JPEG):
        end, what = b"\xff\xd9", "JPEG"
    else:
        raise ValueError(f"{path}: is neither PNG nor JPEG (starts with {head[:4]!r}); expected one of them. {RESTORE}")
    if end not in tail:
        raise ValueError(f"{path}: the {what} file is truncated; expected the mark {end!r} at its end. {RESTORE}")


def _decode(data: bytes, flags: int) -> np.ndarray | None:
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        return None


def _decode_palette(data: bytes) -> np.ndarray | None:
    try:
        return np.asarray(Image.open(BytesIO(data)))
    except (OSError, SyntaxError, ValueError):
        return None
