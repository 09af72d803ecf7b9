"""The structure of TIFF files: their pages, what Pillow misreads, and pages with any number of channels."""

import struct
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np
from PIL import Image, TiffImagePlugin

# Tags. An interpretation of 0: gray, 0 is white; 1: gray; 2: RGB; 3: palette; 5: CMYK; 6: YCbCr. A subfile of 1 is a
# reduced copy, of 4 a mask.
WIDTH, HEIGHT, BITS, INTERPRETATION, ORIENTATION = 256, 257, 258, 262, 274
PALETTE = 3  # an interpretation
_SUBFILE, _COMPRESSION, _FILL_ORDER, _CHANNELS, _PLANES, _PREDICTOR = 254, 259, 266, 277, 284, 317
_TILE_WIDTH, _TILE_STARTS, _EXTRA_CHANNELS, _KIND = 322, 324, 338, 339
_STRIPS_AND_TILES = (273, 279), (_TILE_STARTS, 325)  # where they begin, and their bytes
_PLACES = 273, 278, 279, 323, _TILE_STARTS, 325  # of where strips or tiles lie, and of their heights
_LOSSLESS = {1, 5, 8, 32_773, 32_946, 34_925, 50_000}  # none, LZW, deflate, PackBits, deflate, LZMA, Zstandard
_AS_STORED = 0, 1, 2, 5  # interpretations: gray, gray, RGB, CMYK

Tags = Mapping[int, Any]  # of a page


def pages_of(data: bytes) -> list[Tags]:
    """The tags of the pages of the first one's size, without reduced copies and masks. Raises as Pillow does."""
    header = data[: 16 if data[2:4] in (b"+\0", b"\0+") else 8]
    pages = list[Tags]()
    seen_places = set[int]()
    place = TiffImagePlugin.ImageFileDirectory_v2(header).next
    while place and place not in seen_places:
        seen_places.add(place)
        tags = TiffImagePlugin.ImageFileDirectory_v2(header)
        content = BytesIO(data)
        content.seek(place)
        tags.load(content)
        pages.append({**tags})
        place = tags.next
    size = pages[0][WIDTH], pages[0][HEIGHT]
    return [tags for tags in pages if (tags[WIDTH], tags[HEIGHT]) == size and not tags.get(_SUBFILE, 0) & 5]


def channels_of(tags: Tags) -> int:
    """The number of channels of a page."""
    return int(tags.get(_CHANNELS, 1))


def type_of(tags: Tags) -> str:
    """The type of a page's values, such as "float32"."""
    kinds = {1: "uint", 2: "int", 3: "float"}
    return f"{kinds.get(tags.get(_KIND, (1,))[0], 'another kind of ')}{tags.get(BITS, (1,))[0]}"


def check_pixels(tags: Tags, size: int) -> None:
    """ValueError unless all strips or tiles of a page lie in its file, which has `size` bytes.

    GDAL leaves out empty ones, and Pillow would read the file's beginning in their place.
    """
    for start_tag, length_tag in _STRIPS_AND_TILES:
        starts, lengths = tags.get(start_tag, ()), tags.get(length_tag, ())
        for start, length in zip_longest(starts, lengths, fillvalue=0):
            if not start or start + length > size:
                raise ValueError(f"a strip or tile of {length} bytes begins at {start}, and the file has {size}")


def is_misread(image: Image.Image, tags: Tags) -> bool:
    """Whether Pillow may misread a TIFF: wrong pixels, only one of several bands, or black where strips are missing.

    Pillow 13 was compared with tifffile over bits, kinds, interpretations, planes, compressions, byte orders, tiles,
    strips, predictors and orientations.
    """
    is_uncompressed = tags.get(_COMPRESSION, 1) == 1
    interpretation = tags.get(INTERPRETATION, 0)
    return (
        {*tags.get(_KIND, (1,))} != {1}
        or (tags.get(_PLANES) == 2 and tags.get(_CHANNELS, 1) > 1)
        or (is_uncompressed and interpretation == 6)  # its blocks of subsampled colours
        or (interpretation in (0, 1, 3) and 0 in tags.get(_EXTRA_CHANNELS, ()))
        or (BITS in tags and _has_missing_parts(image))
    )


def _has_missing_parts(image: Any) -> bool:
    """Whether strips or tiles of a TIFF that Pillow has opened do not cover its pixels."""
    areas = ((right - left) * (bottom - top) for _, (left, top, right, bottom), *_ in getattr(image, "tile", ()))
    return sum(areas) < image.width * image.height


def are_read_as_stored(pages: Sequence[Tags]) -> bool:
    """Whether `decode_page` gives the values of all pages, which have equally many bits, as they were stored."""
    bits = {bits for tags in pages for bits in tags.get(BITS, (1,))}
    return bits in ({8}, {16}) and all(
        tags.get(_COMPRESSION, 1) in _LOSSLESS
        and tags.get(INTERPRETATION) in _AS_STORED
        and (tags.get(_PLANES, 1) != 2 or channels_of(tags) <= 1)
        and {*tags.get(_KIND, (1,))} == {1}
        and tags.get(_FILL_ORDER, 1) == 1
        and tags.get(_PREDICTOR, 1) in (1, 2)
        for tags in pages
    )


def decode_page(data: bytes, tags: Tags) -> np.ndarray:
    """An interleaved page, uint8 or uint16 (H, W, its channels). Raises what Pillow does for damaged files.

    It is decoded as a gray TIFF with more columns, which Pillow reads whatever the number of channels.
    """
    check_pixels(tags, len(data))
    image: Any = TiffImagePlugin.TiffImageFile(BytesIO(_as_gray(data, tags)))
    with image:  # without Pillow's limit, as it counts columns
        if _has_missing_parts(image):
            raise ValueError("a strip or tile is missing")
        values = np.array(image).astype(f"u{tags[BITS][0] // 8}")
    pixels = values.reshape(tags[HEIGHT], tags[WIDTH], channels_of(tags))
    holds_differences = tags.get(_PREDICTOR, 1) == 2 and tags.get(_COMPRESSION, 1) != 1
    if holds_differences:  # each pixel less the one before it
        step = tags.get(_TILE_WIDTH, tags[WIDTH])
        for left, right in pairwise([*range(0, tags[WIDTH], step), tags[WIDTH]]):
            part = pixels[:, left:right]
            np.add.accumulate(part, axis=1, dtype=pixels.dtype, out=part)
    return ~pixels if tags.get(INTERPRETATION) == 0 else pixels


def _as_gray(data: bytes, tags: Tags) -> bytes:
    """A TIFF whose one page is gray, and has a column for each channel of each column of a page."""
    byte_order = data[:2]
    directory = TiffImagePlugin.ImageFileDirectory_v2(prefix=byte_order)
    for tag in (HEIGHT, _COMPRESSION, *_PLACES):
        if tag in tags:
            directory[tag] = tags[tag]
    for tag in (WIDTH, _TILE_WIDTH):
        if tag in tags:
            directory[tag] = channels_of(tags) * tags[tag]
    directory[BITS] = tags[BITS][0]
    directory[INTERPRETATION] = 1
    head = byte_order + struct.pack("<HL" if byte_order == b"II" else ">HL", 42, 8)
    # The directory comes first: it cannot be read as missing pixels. Pillow shifts the strips by its length, not tiles.
    if _TILE_STARTS in tags:
        shift = len(head) + len(directory.tobytes(len(head)))
        directory[_TILE_STARTS] = tuple(place + shift for place in tags[_TILE_STARTS])
    return head + directory.tobytes(len(head)) + data
