"""The structure of PNG and JPEG files. Functions take the bytes of a file and decode no pixels."""

import re
import struct
import zlib
from collections.abc import Iterator

# Names in Pillow. Its readers of other formats may start programs (EPS: Ghostscript), whatever a file is called.
PILLOW_FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
PNG, JPEG = b"\x89PNG", b"\xff\xd8"  # first bytes of a file
JPEG_END = b"\xff\xd9"  # further bytes do not belong to the image
GRAY, COLOUR, PALETTE, GRAY_ALPHA, COLOUR_ALPHA = 0, 2, 3, 4, 6  # PNG colour types
_PIXELS = b"IDAT"  # the kind of the chunks that hold a PNG's pixels, compressed together
PNG_PIXELS, PNG_ANIMATION = (_PIXELS, b"fdAT"), (b"acTL", b"fcTL", b"fdAT")  # kinds of chunks
_HEADER = struct.Struct(">IIBBBBB")  # width, height, depth, colour type, compression, filter, interlacing
CHANNELS_OF_PNG = {GRAY: 1, COLOUR: 3, PALETTE: 1, GRAY_ALPHA: 2, COLOUR_ALPHA: 4}
# First column, first row, and the steps to the next ones, of the parts in which a PNG stores its pixels; interlaced: 7.
_GRIDS = (
    [(0, 0, 1, 1)],
    [(0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2)],
)
_PNG_SIGNATURE, _AROUND_CONTENT = 8, 12  # bytes before the first chunk; of a chunk's length, kind and checksum
_MARKER = re.compile(rb"\xff[^\x00\x01\xd0-\xd7\xff]")  # a JPEG marker, except restarts between coded pixels
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # JPEG markers of the frame header, which holds the size
_SEQUENTIAL = (0xC0, 0xC1)  # the markers of JPEGs that decode in one pass from the top
_JPEG_MARGIN = 16  # rows of the largest JPEG block: a row may be interpolated with rows below it


def png_chunks(data: bytes) -> Iterator[memoryview]:
    """The chunks up to the end mark: length, kind, content, checksum. Stops early if the file does."""
    view = memoryview(data)
    start = _PNG_SIGNATURE
    while (end := start + _AROUND_CONTENT + int.from_bytes(data[start : start + 4], "big")) <= len(data):
        yield view[start:end]
        if data[start + 4 : start + 8] == b"IEND":
            return
        start = end


def png_is_intact(data: bytes) -> bool:
    """Whether a PNG has its header and all its chunks with the right checksums, and nothing between them."""
    chunks = list(png_chunks(data))
    if data[8:16] != b"\0\0\0\x0dIHDR" or not chunks or chunks[-1][4:8] != b"IEND":
        return False
    return all(zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big") for chunk in chunks)


def png_size(data: bytes) -> tuple[int, int]:
    """(width, height) from the header of an intact PNG."""
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


def png_without(data: bytes, kinds: tuple[bytes, ...]) -> bytes:
    """A PNG without its chunks of some kinds."""
    return data[:_PNG_SIGNATURE] + b"".join(chunk for chunk in png_chunks(data) if chunk[4:8] not in kinds)


def png_pixels_only(data: bytes, rows: int | None = None) -> bytes:
    """The PNG down to `rows` rows (default: all), without text and other chunks that do not change pixels' values.

    ValueError or zlib.error if its pixels end early or are damaged: Pillow would leave missing rows black.
    """
    width, height, depth, colour_type, _, _, interlaced = _HEADER.unpack(data[16:29])
    height = rows or height
    size = _inflated_size(width, height, depth * CHANNELS_OF_PNG[colour_type], interlaced)
    chunks = [chunk for chunk in png_chunks(data) if chr(chunk[4]).isupper()]
    compressed = b"".join(chunk[8:-4] for chunk in chunks if chunk[4:8] == _PIXELS)
    pixels = zlib.decompressobj().decompress(compressed, size)
    if len(pixels) < size:
        raise ValueError("its pixels end early")
    header = b"IHDR" + data[16:20] + height.to_bytes(4, "big") + data[24:29]
    start = data[:12] + header + zlib.crc32(header).to_bytes(4, "big")
    between = b"".join(chunk for chunk in chunks[1:-1] if chunk[4:8] != _PIXELS)
    stored = zlib.compress(pixels, 0)  # Pillow does not inflate them again
    return b"".join([start, between, len(stored).to_bytes(4, "big"), _PIXELS, stored, bytes(4), chunks[-1]])


def _inflated_size(width: int, height: int, bits: int, interlaced: int) -> int:
    """The bytes of a PNG's pixels, of so many bits each, before they are compressed; each row begins with a filter."""
    grids = [(len(range(y, height, dy)), len(range(x, width, dx))) for x, y, dx, dy in _GRIDS[interlaced]]
    return sum(rows * (1 + (columns * bits + 7) // 8) for rows, columns in grids if columns)


def png_down_to(data: bytes, rows: int, colour_types: tuple[int, ...]) -> bytes | None:
    """`png_pixels_only`, or None if its pixels are of another kind."""
    depth, colour_type, *_, interlaced = data[24:29]
    if colour_type not in colour_types or interlaced or (depth != 8 and colour_type != PALETTE):
        return None
    return png_pixels_only(data, rows)


def jpeg_has_end(data: bytes) -> bool:
    """Whether the image has its end mark. A thumbnail's is inside a segment, which is skipped."""
    if data.endswith(JPEG_END):
        return True
    position = 2
    while marker := _MARKER.search(data, position):
        if marker.group() == JPEG_END:
            return True
        position = marker.end() + int.from_bytes(data[marker.end() : marker.end() + 2], "big")
    return False


def jpeg_down_to(data: bytes, rows: int) -> bytes | None:
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
