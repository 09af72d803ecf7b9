"""Reading image files with the checks that decoders leave out; every error names the file and the fix."""

import zlib
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

RESTORE = "Restore the file from the dataset's archive."
_PNG, _JPEG = b"\x89PNG", b"\xff\xd8"  # how the files begin
_GRAY, _COLOUR, _PALETTE = 0, 2, 3  # a PNG's colour types
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # a JPEG's markers of the header that holds the size
_SEQUENTIAL = (0xC0, 0xC1)  # of them, those of a JPEG that is decoded in one pass from the top
_JPEG_MARGIN = 16  # rows of a JPEG's largest block: a row may be interpolated with the ones below it
_TRAILER_BYTES = 4096  # the end mark of an image is looked for here: some cameras write padding behind it
_NOT_INTACT = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # what Pillow raises

Window = tuple[slice, slice]  # rows and columns of an image, with start and stop
EVERYTHING: Window = slice(None), slice(None)


def decode_image(path: Path, window: Window = EVERYTHING) -> np.ndarray:
    """The image as uint8 (H, W, 3) RGB. ValueError where the file is missing, truncated or not an image.

    An orientation written in the file is not applied: the labels lie on the pixels as they are stored. Of a `window`
    alone, the rows below it are not decoded, and so not checked.
    """
    data = _read_complete(path)
    if window != EVERYTHING and (part := _decode_window(data, window, _COLOUR)) is not None:
        return part
    image = _decode(data, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    if image is None:
        raise ValueError(f"{path}: cannot be decoded as an image; expected an intact PNG or JPEG. {RESTORE}")
    return cv2.cvtColor(image[window], cv2.COLOR_BGR2RGB)


def decode_label(path: Path, window: Window = EVERYTHING) -> np.ndarray:
    """The values of a label file, uint8 (H, W); of a palette PNG the indices. ValueError where they are not that.

    Of a `window` alone, the rows below it are not decoded; the check sums are those of the whole file.
    """
    data = _read_png(path)
    if window != EVERYTHING and (part := _decode_window(data, window, _GRAY, _PALETTE)) is not None:
        return part
    depth, colour_type = data[24:26]
    if colour_type == _PALETTE:  # OpenCV would give its colours
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
    """The classes in a file of instances, uint8 (H, W): its values are 256 * class + number of the instance."""
    return (decode_uint16(path)[window] // 256).astype(np.uint8)


def decode_uint16(path: Path) -> np.ndarray:
    """The values of a file of instances, uint16 (H, W). ValueError where they are not that."""
    raw = _decode(_read_png(path), cv2.IMREAD_UNCHANGED)
    if raw is None:
        raise ValueError(f"{path}: cannot be decoded as instances; expected an intact PNG. {RESTORE}")
    _check_values(path, raw, np.uint16, "instances with one 16-bit value per pixel")
    return raw


def read_size(path: Path) -> tuple[int, int]:
    """(width, height) of an image, from its header; ValueError where the file is unreadable or stops too early.

    ValueError also beyond Pillow's limit, 178 megapixels: so many are the work of a flipped bit. Only the first and
    last bytes are read, so damage in the middle stays unnoticed until decoding.
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
        limit = 2 * Image.MAX_IMAGE_PIXELS // 10**6
        raise ValueError(
            f"{path}: the header says that it has more than {limit} megapixels; expected at most so many. {RESTORE}"
        ) from None
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


def _read_png(path: Path) -> bytes:
    """A file of labels, in which no bit has changed: not all decoders look at a PNG's check sums."""
    data = _read_complete(path)
    if not data.startswith(_PNG):
        raise ValueError(
            f"{path}: is a JPEG, which changes values; expected a PNG. Use the label files that the dataset "
            "distributes."
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


def _pillow(data: bytes, window: Window = EVERYTHING) -> np.ndarray | None:
    try:
        image = Image.open(BytesIO(data))
        if window != EVERYTHING:
            rows, columns = window
            image = image.crop((columns.start, rows.start, columns.stop, rows.stop))
        return np.asarray(image)
    except _NOT_INTACT:
        return None


def _decode_window(data: bytes, window: Window, *colour_types: int) -> np.ndarray | None:
    """A window of an ordinary PNG or JPEG; None where the file is of another kind, and has to be decoded whole.

    Both are stored from the top to the bottom, so that a decoder can stop at the end of the window. What makes it stop
    is a header which says that the image ends there. (OpenCV would inflate the rest of a PNG all the same, and
    complain about that of a JPEG.)
    """
    down_to = _png_down_to(data, window[0].stop, colour_types) if data.startswith(_PNG) else None
    if data.startswith(_JPEG):
        down_to = _jpeg_down_to(data, window[0].stop)
    return None if down_to is None else _pillow(down_to, window)


def _png_down_to(data: bytes, rows: int, colour_types: tuple[int, ...]) -> bytes | None:
    """The PNG file with a header that says that it has `rows` rows; None where its pixels are of another kind."""
    header = data[12:29]  # "IHDR", width, height, depth, colour type, compression, filter, interlacing
    depth, colour_type, *_, interlaced = header[12:].ljust(5)
    if colour_type not in colour_types or interlaced or (depth != 8 and colour_type != _PALETTE):
        return None
    header = header[:8] + rows.to_bytes(4, "big") + header[12:]
    return data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]


def _jpeg_down_to(data: bytes, rows: int) -> bytes | None:
    """The JPEG file with a header that says that it has `rows` rows, and some more where it has them.

    None where it is progressive, say, or has other than three components.
    """
    place = 2
    while place + 1 < len(data) and data[place] == 0xFF and data[place + 1] not in _FRAMES:
        place += 2 + int.from_bytes(data[place + 2 : place + 4], "big")  # a segment: marker, length, content
    frame = data[place : place + 10]  # marker, length (2 bytes), bits of a value, height (2), width (2), components
    if len(frame) < 10 or frame[1] not in _SEQUENTIAL or frame[4] != 8 or frame[9] != 3:
        return None
    height = min(int.from_bytes(frame[5:7], "big"), rows + _JPEG_MARGIN)
    return data[: place + 5] + height.to_bytes(2, "big") + data[place + 7 :]
