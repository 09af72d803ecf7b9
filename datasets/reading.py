"""Reads image files, with the checks that decoders leave out. Every error names the file and the fix."""

import zlib
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

RESTORE = "Restore the file from the dataset's archive."
_PNG, _JPEG = b"\x89PNG", b"\xff\xd8"  # first bytes of a file
_GRAY, _COLOUR, _PALETTE = 0, 2, 3  # PNG colour types
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers of the frame header, which holds the size
_SEQUENTIAL = (0xC0, 0xC1)  # the markers of JPEGs that decode in one pass from the top
_JPEG_MARGIN = 16  # rows of the largest JPEG block: a row may be interpolated with rows below it
_TRAILER_BYTES = 4096  # look for the end mark in these last bytes: some cameras write padding after it
_NOT_INTACT = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises for damaged files

Window = tuple[slice, slice]  # rows and columns, each with start and stop
EVERYTHING: Window = slice(None), slice(None)


def decode_image(path: Path, window: Window = EVERYTHING) -> np.ndarray:
    """Decode an image to uint8 (H, W, 3) RGB. ValueError if the file is missing, truncated or not an image.

    EXIF orientation is ignored, because labels match the pixels as stored. Rows below `window` are neither decoded nor
    checked.
    """
    data = _read_complete(path)
    if window != EVERYTHING and (part := _decode_window(data, window, _COLOUR)) is not None:
        return part
    image = _decode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise ValueError(f"{path}: cannot be decoded as an image; expected an intact PNG or JPEG. {RESTORE}")
    return cv2.cvtColor(image[window], cv2.COLOR_BGR2RGB)


def decode_label(path: Path, window: Window = EVERYTHING) -> np.ndarray:
    """Decode a label file to uint8 (H, W); palette PNGs give indices. ValueError if the file holds anything else.

    Rows below `window` are not decoded, but the checksums of the whole file are verified.
    """
    data = _read_png(path)
    if window != EVERYTHING and (part := _decode_window(data, window, _GRAY, _PALETTE)) is not None:
        return part
    depth, colour_type = data[24:26]
    if colour_type == _PALETTE:  # OpenCV would return colours
        raw = _pillow(data)
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
    return raw[window]


def decode_instance_classes(path: Path, window: Window = EVERYTHING) -> np.ndarray:
    """Decode the classes, uint8 (H, W), from an instance file with values 256 * class + instance number."""
    return (decode_uint16(path)[window] // 256).astype(np.uint8)


def decode_uint16(path: Path) -> np.ndarray:
    """Decode an instance file to uint16 (H, W). ValueError if it holds anything else."""
    raw = _decode(_read_png(path), cv2.IMREAD_UNCHANGED)
    if raw is None:
        raise ValueError(f"{path}: cannot be decoded as instances; expected an intact PNG. {RESTORE}")
    _check_values(path, raw, np.uint16, "instances with one 16-bit value per pixel")
    return raw


def read_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image, from its header. ValueError if the file is unreadable or truncated.

    ValueError also above Pillow's limit, 178 megapixels: only a damaged header claims that many. Only the first and
    last bytes are read, so damage in between goes unnoticed until decoding.
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
    except Image.DecompressionBombError:
        assert Image.MAX_IMAGE_PIXELS is not None  # without a limit there is no such error
        limit = 2 * Image.MAX_IMAGE_PIXELS // 10**6
        raise ValueError(f"{path}: the header claims more than {limit} megapixels; expected fewer. {RESTORE}") from None
    except OSError as error:
        raise _unreadable(path, error) from None


def _check_values(path: Path, raw: np.ndarray, dtype: type, expected: str) -> None:
    if raw.ndim != 2 or raw.dtype != dtype:
        channels = 1 if raw.ndim == 2 else raw.shape[2]
        raise ValueError(
            f"{path}: has {channels} channel(s) of {raw.dtype}; expected {expected}. Use the original label "
            "files of the dataset."
        )


def _read_complete(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    _check_ends(path, data[:8], data[-_TRAILER_BYTES:])
    return data


def _read_png(path: Path) -> bytes:
    """Read a label file and verify its checksums: not all decoders do."""
    data = _read_complete(path)
    if not data.startswith(_PNG):
        raise ValueError(
            f"{path}: is a JPEG, which changes values; expected a PNG. Use the original label files of the dataset."
        )
    try:
        Image.open(BytesIO(data)).verify()
    except _NOT_INTACT:
        raise ValueError(
            f"{path}: damaged pixels or header, so it cannot be decoded; expected an intact PNG. {RESTORE}"
        ) from None
    return data


def _unreadable(path: Path, error: OSError) -> ValueError:
    return ValueError(f"{path}: cannot be read ({error.strerror or error}); expected a readable file. {RESTORE}")


def _check_ends(path: Path, head: bytes, tail: bytes) -> None:
    """ValueError if a PNG or JPEG stops before its end mark: decoders silently fill the missing part."""
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


def _pillow(data: bytes, window: Window = EVERYTHING) -> np.ndarray | None:
    try:
        image: Image.Image = Image.open(BytesIO(data))
        if window != EVERYTHING:
            rows, columns = window
            image = image.crop((columns.start, rows.start, columns.stop, rows.stop))
        return np.asarray(image)
    except _NOT_INTACT:
        return None


def _decode_window(data: bytes, window: Window, *colour_types: int) -> np.ndarray | None:
    """Decode a window of an ordinary PNG or JPEG; None if the file is of another kind and must be decoded whole.

    Both store rows from top to bottom, so decoding can stop below the window: the header is changed to claim that the
    image ends there. (OpenCV would still inflate the rest of a PNG, and complain about the rest of a JPEG.)
    """
    down_to = _png_down_to(data, window[0].stop, colour_types) if data.startswith(_PNG) else None
    if data.startswith(_JPEG):
        down_to = _jpeg_down_to(data, window[0].stop)
    return None if down_to is None else _pillow(down_to, window)


def _png_down_to(data: bytes, rows: int, colour_types: tuple[int, ...]) -> bytes | None:
    """The PNG with a header that claims `rows` rows; None if its pixels are of another kind."""
    header = data[12:29]  # "IHDR", width, height, depth, colour type, compression, filter, interlacing
    depth, colour_type, *_, interlaced = header[12:].ljust(5)
    if colour_type not in colour_types or interlaced or (depth != 8 and colour_type != _PALETTE):
        return None
    header = header[:8] + rows.to_bytes(4, "big") + header[12:]
    return data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]


def _jpeg_down_to(data: bytes, rows: int) -> bytes | None:
    """The JPEG with a header that claims `rows` rows, plus `_JPEG_MARGIN` if it has them.

    None for other kinds, e.g. progressive JPEGs, or without exactly three components.
    """
    offset = 2
    while offset + 1 < len(data) and data[offset] == 0xFF and data[offset + 1] not in _FRAMES:
        offset += 2 + int.from_bytes(data[offset + 2 : offset + 4], "big")  # a segment: marker, length, content
    frame = data[offset : offset + 10]  # marker, length (2 bytes), bits of a value, height (2), width (2), components
    if len(frame) < 10 or frame[1] not in _SEQUENTIAL or frame[4] != 8 or frame[9] != 3:
        return None
    height = min(int.from_bytes(frame[5:7], "big"), rows + _JPEG_MARGIN)
    return data[: offset + 5] + height.to_bytes(2, "big") + data[offset + 7 :]
