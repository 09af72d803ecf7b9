"""Decodes images of any number of channels. Three: `datasets.reading`. Others: each channel as its file stores it."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageOps

from datasets import file_formats as formats
from datasets import reading
from datasets.file_formats import BITS, COMPRESSION, HEIGHT, INTERPRETATION, KIND, PLANES, PREDICTOR, WIDTH, channels_of
from datasets.reading import ALL_16, EVERYTHING, Range16, Window
from datasets.stored import COLOURS, EXPECTED_ARRAY, EXPECTED_TIFF, Stored, Unreadable, check_area, decoding, read

_FILL_ORDER, _ORIENTATION = 266, 274  # tags of TIFF files
_LOSSLESS = {1, 5, 8, 32_773, 32_946, 34_925, 50_000}  # none, LZW, deflate, PackBits, deflate, LZMA, Zstandard
_AS_STORED = 0, 1, 2, 5  # interpretations: gray, gray, RGB, CMYK


def decode(
    file: Path | Stored,
    window: Window = EVERYTHING,
    turned: bool = False,
    range16: Range16 = ALL_16,
    channels: int = COLOURS,
) -> np.ndarray:
    """Decode an image to levels, uint8 (H, W, channels), contiguous. Of three channels: arrays, or `decode_image`.

    Images of other numbers are `turned`. One channel: gray in any format, or RGB whose channels are equal. Otherwise
    PNG with alpha, TIFF (interleaved, or pages that are channels; CMYK too), arrays, and formats that Pillow opens with
    an alpha channel. ValueError: the file has another number of channels, a palette, or cannot be read.
    """
    stored = file if isinstance(file, Stored) else read(file, turned or channels != COLOURS)
    if channels == COLOURS and stored.format != "array":
        return reading.decode_image(stored, window, turned, range16)
    return np.ascontiguousarray(reading.as_levels(_decode_values(stored, channels, window), range16))


def size(file: Stored, turned: bool, channels: int) -> tuple[int, int]:
    """(width, height) of an image of a number of channels. ValueError: see `decode`."""
    if not file.has_windows:
        height, width, _ = decode(file, turned=turned, channels=channels).shape
        return width, height
    if channels != COLOURS or file.format == "array":
        file.check_channels(channels)
    return file.size(turned)


def stored_values(file: Stored, turned: bool, channels: int, shallow: bool = False) -> np.ndarray | None:
    """The values of an image, uint8 or uint16 (H, W, channels); None for 8 bits unless `shallow`.

    ValueError: see `decode`.
    """
    if file.is_png_or_jpeg:
        may_have_16_bits = file.png_kind is not None and file.png_kind[0] == 16
    else:
        may_have_16_bits = turned
    if not (shallow or may_have_16_bits):
        return None
    if channels == COLOURS and file.format != "array":
        values = reading.decode_values(file, turned=turned, is_deep=True)
    else:
        values = _decode_values(file, channels, EVERYTHING)
    return values if shallow or values.dtype == np.uint16 else None


def further_channels(file: Stored) -> int:
    """The number of channels of a PNG or TIFF if one besides gray or red, green and blue varies; else 0.

    Such are alpha, an infrared channel, or black in a CMYK TIFF: reading as RGB drops them, or mixes them in.
    """
    if file.format not in ("PNG", "TIFF"):
        return 0
    try:
        count = file.channels
        if count in (1, COLOURS):
            return 0
        further = _decode_values(file, count, EVERYTHING)[..., 1 if count == 2 else COLOURS :]
    except ValueError:  # of a kind that is read as RGB only
        return 0
    return count if (further != further[:1, :1]).any() else 0


def pages_if_one_is_read(file: Stored, channels: int) -> int:
    """Number of pages of an image whose first page alone is read. 1 if all of its pages are read."""
    return 1 if channels != COLOURS and file.format == "TIFF" else file.page_count


def visible(channels: int, shown: Sequence[int] | None = None) -> tuple[int, ...]:
    """The places of the channels that a picture shows as red, green and blue.

    `shown`: one or three of them, counted from 1; None: the first three, of one or two the first.
    """
    chosen = [number - 1 for number in shown or ()] or [*range(COLOURS if channels >= COLOURS else 1)]
    return (*chosen,) if len(chosen) == COLOURS else (chosen[0],) * COLOURS


def picture(image: np.ndarray, shown: Sequence[int] | None = None) -> np.ndarray:
    """What a picture shows of an image, uint8 (H, W, C) -> uint8 (H, W, 3) RGB. `shown`: see `visible`."""
    places = visible(image.shape[2], shown)
    return image if places == (*range(image.shape[2]),) else np.ascontiguousarray(image[..., places])


def _decode_values(file: Stored, channels: int, window: Window) -> np.ndarray:
    """See `decode`: uint8 or uint16 (H, W, channels)."""
    file.check_channels(channels)
    if file.format == "array":
        return _decode_array(file, window)
    if file.format == "TIFF" and channels > 1:
        return _decode_tiff(file)[window]
    if channels == 1:
        return _decode_gray(file, window)
    if file.format != "PNG":
        with decoding(file.path, "an image"), Image.open(BytesIO(file.data), formats=formats.PILLOW_FORMATS) as image:
            pixels = np.asarray(ImageOps.exif_transpose(image))
            mode = image.mode
        if mode not in ("LA", "RGBA"):
            raise ValueError(f"{file.path}: is stored as {mode}; expected a PNG, {EXPECTED_TIFF}, or .npy.")
        return pixels[window]
    return _decode_alpha_png(file, channels, window)


def _decode_gray(file: Stored, window: Window) -> np.ndarray:
    """One channel (H, W, 1) of a gray image, or of RGB whose channels are equal."""
    colours = reading.decode_values(file, window, turned=True, is_deep=True)
    gray = colours[..., :1]
    if (colours != gray).any():
        raise ValueError(f"{file.path}: has 3 channels that differ, expected 1: gray, or RGB of equal channels.")
    return gray


def _decode_alpha_png(file: Stored, channels: int, window: Window) -> np.ndarray:
    """The channels of a PNG with alpha: two, or four."""
    if file.orientation == 1 and window != EVERYTHING:
        crop = reading.decode_window(file, window, formats.GRAY_ALPHA, formats.COLOUR_ALPHA)
        if crop is not None:
            return crop
    file.size()  # refuses too many pixels before they are inflated
    bgra = cv2.imdecode(np.frombuffer(file.still_data, np.uint8), cv2.IMREAD_UNCHANGED)  # of gray with alpha too
    if bgra is None:
        raise Unreadable(f"{file.path}: cannot be decoded as an image; expected a PNG, undamaged.")
    return reading.upright(bgra[..., [2, 1, 0, 3] if channels == 4 else [0, 3]], file.orientation)[window]


def _decode_array(file: Stored, window: Window) -> np.ndarray:
    """The pixels of an array in a window, uint8 or uint16.

    Only the rows of the window are read, unless the array is in the order of columns. They are not mapped: a file that
    becomes shorter meanwhile would end the process. ValueError: the file holds something else, or ends early.
    """
    (height, width, channels), dtype, by_columns, start = file.array_header
    rows, columns = window
    first, last = (0, height) if by_columns else rows.indices(height)[:2]
    row_bytes = width * channels * dtype.itemsize
    with decoding(file.path, f"an image; expected {EXPECTED_ARRAY}"), file.open_array() as stream:
        stream.seek(start + first * row_bytes)
        pixels = np.frombuffer(stream.read((last - first) * row_bytes), dtype)  # too few do not have this shape
        pixels = pixels.reshape((last - first, width, channels), order="F" if by_columns else "C")
        return pixels[rows if by_columns else slice(None), columns].astype(dtype.newbyteorder("="), order="C")


def _is_read_as_stored(tags: formats.Tags) -> bool:
    """Whether `decode_page` gives the values of a TIFF's page as they were before it was compressed."""
    return (
        tags.get(COMPRESSION, 1) in _LOSSLESS
        and tags.get(INTERPRETATION) in _AS_STORED
        and (tags.get(PLANES, 1) != 2 or channels_of(tags) <= 1)
        and {*tags.get(KIND, (1,))} == {1}
        and tags.get(_FILL_ORDER, 1) == 1
        and tags.get(PREDICTOR, 1) in (1, 2)
    )


def _decode_tiff(file: Stored) -> np.ndarray:
    """The channels of all pages, uint8 or uint16 (H, W, channels)."""
    first_page = file.tiff_pages[0]
    bits = {bits for tags in file.tiff_pages for bits in tags.get(BITS, (1,))}
    if not all(map(_is_read_as_stored, file.tiff_pages)) or bits not in ({8}, {16}):
        problem = f"cannot be decoded as an image (it holds {formats.tiff_type(first_page)})"
        raise ValueError(f"{file.path}: {problem}; expected {EXPECTED_TIFF}: convert it.")
    with decoding(file.path, f"an image; expected {EXPECTED_TIFF}"):
        check_area(first_page[WIDTH], first_page[HEIGHT])
        pixels = np.concatenate([reading.decode_page(file.data, tags) for tags in file.tiff_pages], axis=2)
    return reading.upright(pixels, first_page.get(_ORIENTATION, 1))
