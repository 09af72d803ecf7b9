"""Reads images of any number of channels. Of three: `datasets.reading`. Of others: each channel as its file stores it.

An interleaved TIFF is decoded as a gray TIFF with more columns, which Pillow reads whatever the number of channels.
"""

import struct
from collections.abc import Mapping, Sequence
from io import SEEK_END, BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin

from datasets import file_formats as formats
from datasets import reading
from datasets.file_formats import BITS, CHANNELS, COMPRESSION, HEIGHT, INTERPRETATION, KIND, PLANES, WIDTH, Tags
from datasets.file_list import readable, unfit
from datasets.reading import ALL_16, COLOURS, EVERYTHING, Range16, Stored, Unreadable, Window

ARRAY = ".npy"  # the suffix of images that are arrays
_ARRAY_MARK = b"\x93NUMPY"
_OF_PNG = {formats.GRAY: 1, formats.COLOUR: 3, 4: 2, 6: 4}  # channels of the colour types, except a palette
_FILL_ORDER, _ORIENTATION, _PREDICTOR, _TILE_WIDTH = 266, 274, 317, 322  # tags of TIFF files
_PLACES = 273, 278, 279, 323, 324, 325  # tags of where strips or tiles lie, and of their heights
_STARTS = 273, 324
_LOSSLESS = {1, 5, 8, 32_773, 32_946, 34_925, 50_000}  # none, LZW, deflate, PackBits, deflate, LZMA, Zstandard
_WHITE_IS_0, _PALETTE, _AS_STORED = 0, 3, (0, 1, 2, 5)  # interpretations: gray, gray, RGB, CMYK
_EXPECTED = {
    "TIFF": "a TIFF of unsigned integers of 8 or 16 bits, its channels interleaved or each a page, without JPEG inside",
    "array": "an array (H, W, channels) of uint8 or uint16",
}


class Beginning(bytes):
    """The first bytes of `file`, of which the others are read when they are needed."""

    file: Path


def read_file(path: Path, photograph: bool, channels: int) -> Stored:
    """`read`; of arrays of other than three channels only what is used is read, when it is."""
    if channels == COLOURS or path.suffix.lower() != ARRAY:
        return reading.read(path, photograph)
    where = Path(readable(path))
    if (why := unfit(path)) is not None:
        raise Unreadable(f"{where}: {why}.")
    try:
        with open(path, "rb") as stored:
            data = Beginning(stored.read(len(_ARRAY_MARK)))
        data.file = path
        if data != _ARRAY_MARK:
            raise ValueError(f"it begins with {bytes(data)!r}, as no array of NumPy")
    except (OSError, ValueError) as error:
        raise Unreadable(f"{where}: cannot be read ({error}); expected {_EXPECTED['array']}.") from None
    return Stored(where, data)


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
    stored = file if isinstance(file, Stored) else read_file(file, turned or channels != COLOURS, channels)
    if channels == COLOURS and not is_array(stored):
        return reading.decode_image(stored, window, turned, range16)
    pixels = _values(stored, channels, window)
    return np.ascontiguousarray(reading.as_levels(pixels, range16))


def size(file: Stored, turned: bool, channels: int) -> tuple[int, int]:
    """(width, height) of an image of a number of channels. ValueError: see `decode`."""
    if is_array(file):
        check_number(file, channels)
        height, width, _ = _array(file, None)[0]
        return width, height
    if channels == COLOURS:
        return file.size(turned)
    if file.has_end_mark:
        check_number(file, channels)
        return file.size(turned)
    height, width = _values(file, channels, EVERYTHING).shape[:2]
    return width, height


def stored_values(file: Stored, turned: bool, channels: int, shallow: bool = False) -> np.ndarray | None:
    """The values of an image, uint8 or uint16 (H, W, channels); None for 8 bits unless `shallow`.

    ValueError: see `decode`.
    """
    has_16 = file.data.startswith(formats.PNG) and file.data[24] == 16 if file.has_end_mark else turned  # or may have
    if not (shallow or has_16):
        return None
    is_read = channels == COLOURS and not is_array(file)
    pixels = reading.decode_values(file, turned=turned, deep=True) if is_read else _values(file, channels, EVERYTHING)
    return pixels if shallow or pixels.dtype == np.uint16 else None


def further_channels(file: Stored) -> int:
    """The number of channels of a PNG or TIFF if one besides gray or red, green and blue varies; else 0.

    Such are alpha, an infrared channel, or black in a CMYK TIFF: reading as RGB drops them, or mixes them in.
    """
    try:
        if not (file.data.startswith(formats.PNG) or file.is_tiff) or (number := count(file)) in (1, COLOURS):
            return 0
        further = _values(file, number, EVERYTHING)[..., 1 if number == 2 else COLOURS :]
    except ValueError:  # of a kind that is read as RGB only
        return 0
    return number if (further != further[:1, :1]).any() else 0


def pages_if_one_is_read(file: Stored, channels: int) -> int:
    """Number of pages of an image whose first page alone is read. 1 if all of its pages are read."""
    return 1 if channels != COLOURS and file.is_tiff else reading.pages(file)


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


def is_array(file: Stored) -> bool:
    return bytes(file.data[:6]) == _ARRAY_MARK


def count(file: Stored) -> int:
    """The number of channels that a file stores; of a TIFF, in all pages. ValueError: it has a palette."""
    path, data = file
    if is_array(file):
        return _array(file, None)[0][2]
    if data.startswith(formats.PNG):
        number = _OF_PNG.get(data[25], 0)
    elif file.is_tiff:
        its = _pages(file)
        number = 0 if _PALETTE in (tags.get(INTERPRETATION) for tags in its) else sum(map(_channels_of, its))
    else:
        with reading.decoding(path, f"an image; expected {', '.join(reading.PHOTOGRAPHS)}"):
            bands = Image.open(BytesIO(data), formats=reading.PHOTOGRAPHS).getbands()
        number = 0 if "P" in bands else len(bands)
    if number == 0:
        raise ValueError(f"{path}: has a palette, whose indices are no channel: convert it to gray or RGB.")
    return number


def check_number(file: Stored, channels: int) -> None:
    """ValueError if a file has another number of channels; one may be stored as three equal ones of one page."""
    as_colours = channels == 1 and not (file.is_tiff and len(_pages(file)) > 1)
    if (found := count(file)) != channels and not (found == COLOURS and as_colours):
        fix = _axes(file, channels) or "set channels to the number of every image, or convert this one"
        raise ValueError(f"{file.path}: has {found} channel{'s' * (found > 1)}, expected {channels}: {fix}.")


def _axes(file: Stored, channels: int) -> str:
    """What to do if the axes of an array, or of a TIFF's pages, seem to be in another order; "" if they do not."""
    if is_array(file):
        first, *others = _array(file, None)[0]
        if first == channels or first < min(others):
            return f"its first axis is {first} long: store (H, W, channels), as numpy.moveaxis(array, 0, 2) gives it"
    elif file.is_tiff and len(its := _pages(file)) > 1:
        height, width = its[0][HEIGHT], its[0][WIDTH]
        if width == channels or width < min(height, len(its)):
            as_channels = "tifffile.imwrite(FILE, array, photometric='minisblack', planarconfig='contig')"
            kind = f"it has {len(its)} pages of {height}x{width}, so the rows of an array (H, W, channels) became pages"
            return f"{kind}: store its channels, such as with {as_channels}"
    return ""


def _values(file: Stored, channels: int, window: Window) -> np.ndarray:
    """See `decode`: uint8 or uint16 (H, W, channels)."""
    path, data = file
    check_number(file, channels)
    if is_array(file):
        return _array(file, window)[1]
    if file.is_tiff and channels > 1:
        return _tiff(file)[window]
    if channels == 1:
        colours = reading.decode_values(file, window, turned=True, deep=True)
        if (colours != (gray := colours[..., :1])).any():
            raise ValueError(f"{path}: has 3 channels that differ, expected 1: gray, or RGB of equal channels.")
        return gray
    turn = reading.orientation(data)
    if not data.startswith(formats.PNG):
        with reading.decoding(path, "an image"), Image.open(BytesIO(data), formats=reading.PHOTOGRAPHS) as image:
            pixels, mode = np.asarray(ImageOps.exif_transpose(image)), image.mode
        if mode not in ("LA", "RGBA"):
            raise ValueError(f"{path}: is stored as {mode}; expected a PNG, {_EXPECTED['TIFF']}, or .npy.")
        return pixels[window]
    if turn == 1 and window != EVERYTHING and (part := reading.decode_window(data, window, 4, 6)) is not None:
        return part
    file.size()  # refuses too many pixels
    if b"acTL" in data:  # OpenCV skips a first image that the animation does not show
        data = formats.png_without(data, formats.PNG_ANIMATION)
    found = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_UNCHANGED)  # BGRA, of gray with alpha too
    if found is None:
        raise Unreadable(f"{path}: cannot be decoded as an image; expected a PNG, undamaged.")
    return reading.upright(found[..., [2, 1, 0, 3] if channels == 4 else [0, 3]], turn)[window]


def _array(file: Stored, window: Window | None) -> tuple[tuple[int, int, int], np.ndarray]:
    """(H, W, channels) of a .npy file, and its uint8 or uint16 pixels in a window; None: no pixels.

    Only the rows of the window are read, unless the array is in the order of columns. They are not mapped: a file that
    becomes shorter meanwhile would end the process. ValueError: the file holds something else, or ends early.
    """
    path, data = file
    with (
        reading.decoding(path, f"an image; expected {_EXPECTED['array']}"),
        open(data.file, "rb") if isinstance(data, Beginning) else BytesIO(data) as stored,
    ):
        version = np.lib.format.read_magic(stored)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, by_columns, dtype = read_header[version](stored)
        own = dtype.newbyteorder("=")
        if fits := own in (np.uint8, np.uint16) and len(shape) in (2, 3) and min(shape) > 0:
            if shape[0] * shape[1] > reading.MOST_PIXELS:
                raise Image.DecompressionBombError
            height, width, channels = (*shape, 1)[:3]
            start, row = stored.tell(), width * channels * dtype.itemsize
            if stored.seek(0, SEEK_END) < start + height * row:
                raise ValueError("it ends early")
            rows, columns = window or (slice(0), slice(0))
            first, last = (0, height) if by_columns and window else rows.indices(height)[:2]
            stored.seek(start + first * row)
            read = np.frombuffer(stored.read((last - first) * row), dtype)  # too few do not have this shape
            read = read.reshape((last - first, width, channels), order="F" if by_columns else "C")
            pixels = read[rows if by_columns else slice(None), columns].astype(own, order="C")
    if not fits:
        raise ValueError(f"{path}: is an array {shape} of {dtype}; expected {_EXPECTED['array']}.")
    return (height, width, channels), pixels


def _pages(file: Stored) -> list[Tags]:
    """The tags of a TIFF's pages, see `tiff_pages`."""
    with reading.decoding(file.path, f"an image; expected {_EXPECTED['TIFF']}"):
        return formats.tiff_pages(file.data)


def _channels_of(tags: Tags) -> int:
    return int(tags.get(CHANNELS, 1))


def _tiff(file: Stored) -> np.ndarray:
    """The channels of all pages, uint8 or uint16 (H, W, channels)."""
    path, data = file
    its = _pages(file)
    bits = {bits for tags in its for bits in tags.get(BITS, (1,))}
    others = (
        tags.get(COMPRESSION, 1) not in _LOSSLESS
        or tags.get(INTERPRETATION) not in _AS_STORED
        or (tags.get(PLANES, 1) == 2 and _channels_of(tags) > 1)
        or {*tags.get(KIND, (1,))} != {1}
        or tags.get(_FILL_ORDER, 1) != 1
        or tags.get(_PREDICTOR, 1) not in (1, 2)
        for tags in its
    )
    if any(others) or bits not in ({8}, {16}):
        held = f"cannot be decoded as an image (it holds {formats.tiff_type(its[0])})"
        raise ValueError(f"{path}: {held}; expected {_EXPECTED['TIFF']}: convert it.")
    with reading.decoding(path, f"an image; expected {_EXPECTED['TIFF']}"):
        if its[0][WIDTH] * its[0][HEIGHT] > reading.MOST_PIXELS:
            raise Image.DecompressionBombError
        found = np.concatenate([_page(data, tags) for tags in its], axis=2)
    return reading.upright(found, its[0].get(_ORIENTATION, 1))


def _page(data: bytes, tags: Tags) -> np.ndarray:
    """An interleaved page, uint8 or uint16 (H, W, its channels). Raises whatever Pillow does for damaged files."""
    formats.check_pixels(tags, len(data))
    channels, bits, order = _channels_of(tags), tags[BITS][0], "<" if data.startswith(b"II") else ">"
    gray: dict[int, Any] = {place: tags[place] for place in _PLACES if place in tags}
    gray |= {tag: channels * tags[tag] for tag in (WIDTH, _TILE_WIDTH) if tag in tags}
    gray |= {HEIGHT: tags[HEIGHT], BITS: bits, COMPRESSION: tags.get(COMPRESSION, 1), INTERPRETATION: 1}
    head = data[:2] + struct.pack(f"{order}HL", 42, 8)
    moved = len(head) + len(_directory(gray, order))  # the directory comes first: it cannot be read as missing pixels
    gray |= {tag: tuple(place + moved for place in tags[tag]) for tag in _STARTS if tag in tags}
    content = head + _directory(gray, order) + data
    image: Any = TiffImagePlugin.TiffImageFile(BytesIO(content))
    with image:  # without Pillow's limit, as it counts columns
        parts = ((right - left) * (bottom - top) for _, (left, top, right, bottom), *_ in image.tile)
        if sum(parts) < image.width * image.height:
            raise ValueError("a strip or tile is missing")
        pixels = np.array(image).astype(f"u{bits // 8}").reshape(tags[HEIGHT], tags[WIDTH], channels)
    if tags.get(_PREDICTOR, 1) == 2 and tags.get(COMPRESSION, 1) != 1:  # each pixel less the one before it
        step = tags.get(_TILE_WIDTH, tags[WIDTH])
        for left, right in pairwise([*range(0, tags[WIDTH], step), tags[WIDTH]]):
            part = pixels[:, left:right]
            np.add.accumulate(part, axis=1, dtype=pixels.dtype, out=part)
    return ~pixels if tags.get(INTERPRETATION) == _WHITE_IS_0 else pixels


def _directory(tags: Mapping[int, Any], order: str) -> bytes:
    """Tags of whole numbers as a TIFF stores them behind its first eight bytes."""
    entries, behind = struct.pack(f"{order}H", len(tags)), b""
    end = 8 + 2 + 12 * len(tags) + 4
    for tag, value in sorted(tags.items()):
        values = value if isinstance(value, tuple) else (value,)
        packed = struct.pack(f"{order}{len(values)}L", *values)
        if len(values) > 1:
            packed, behind = struct.pack(f"{order}L", end + len(behind)), behind + packed
        entries += struct.pack(f"{order}HHL", tag, 4, len(values)) + packed
    return entries + bytes(4) + behind
