"""Reads image files, with the checks that decoders leave out. Every error names the file and says what is wrong."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
from PIL import ExifTags, Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from datasets import file_formats as formats
from datasets.file_formats import BITS, CHANNELS, COMPRESSION, INTERPRETATION, KIND, PLANES
from datasets.file_list import readable, unfit

MOST_PIXELS = 2 * 89_478_485  # above this, Pillow refuses to open an image
_NEARLY_ALL = 0.9  # of a PNG's rows: OpenCV decodes all rows faster than Pillow decodes this many
# Names in Pillow. Its readers of other formats may start programs (EPS: Ghostscript), whatever a file is called.
PHOTOGRAPHS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "PNG", "PPM", "QOI", "TGA", "TIFF", "WEBP")
_ON_ITS_SIDE = (5, 6, 7, 8)  # EXIF orientations that swap width and height

_EXTRA_CHANNELS = 338  # a tag of TIFF files
# Kinds of PNGs: depth, colour type (4 and 6 have alpha). Decoders stretch gray of 2 and 4 bits.
_LABELS = {(8, formats.GRAY), *((depth, formats.PALETTE) for depth in (1, 2, 4, 8))}
_MASKS = {(1, formats.GRAY), (16, formats.GRAY), (8, 4), (8, 6)}
_TIFF = "a TIFF of gray, RGB, CMYK or a palette, with unsigned integers of 8 or 16 bits, channels interleaved"
_AS_IDS = (  # a command; what is no id becomes a value above 255, which is refused
    'python -c "import numpy, sys; from PIL import Image; [Image.fromarray(numpy.asarray(Image.open(file))'
    ".astype('uint16')).save(file) for file in sys.argv[1:]]\" LABELS/*.tif"
)
_PNG_OR_JPEG = "an image; expected a PNG or JPEG"

Window = tuple[slice, slice]  # rows and columns, each with start and stop
EVERYTHING: Window = slice(None), slice(None)
# The two values of 16-bit images that become black and white, or two for each channel, one after the other.
Range16 = Sequence[int]
ALL_16 = 0, 65_535
COLOURS, MOST_CHANNELS = 3, 64  # channels of an RGB image; of an image, see `datasets.channels`


class Unreadable(ValueError):
    """A file is missing, damaged, or not of the expected kind."""


class Stored(NamedTuple):
    """A file that has been read: its path, for messages, and its bytes (PNG and JPEG: checked to be complete)."""

    path: Path
    data: bytes

    @property
    def has_end_mark(self) -> bool:
        """Whether it is a PNG or JPEG: only these can be checked, and decoded in parts, without decoding all pixels."""
        return bytes(self.data[:4]).startswith((formats.PNG, formats.JPEG))

    @property
    def is_tiff(self) -> bool:
        return bytes(self.data[:4]) in TiffImagePlugin.PREFIXES

    def size(self, turned: bool = False) -> tuple[int, int]:
        """(width, height), from the header of a PNG or JPEG; other formats are decoded. `turned`: see `decode_image`.

        Unreadable if the header is damaged; ValueError above Pillow's limit, 178 megapixels.
        """
        if not self.has_end_mark:
            height, width, _ = decode_image(self, turned=turned).shape
            return width, height
        with decoding(self.path, _PNG_OR_JPEG):
            if self.data.startswith(formats.PNG):
                width, height = formats.png_size(self.data)
            else:
                width, height = Image.open(BytesIO(self.data), formats=["JPEG"]).size
            if width * height > MOST_PIXELS:
                raise Image.DecompressionBombError
        return (height, width) if turned and orientation(self.data) in _ON_ITS_SIDE else (width, height)


def read(path: Path, photograph: bool = False) -> Stored:
    """Read a file. Unreadable if it is missing, incomplete or, unless it is a `photograph`, neither PNG nor JPEG.

    Also unless it is a regular file of at most 4 GiB: a pipe would be waited for, and a device may never end.
    """
    if (why := unfit(path)) is not None:
        raise Unreadable(f"{readable(path)}: {why}.")
    try:
        data = path.read_bytes()
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}); expected a readable file"
        raise Unreadable(f"{readable(path)}: {why}.") from None
    return complete(path, data, photograph)


def complete(path: Path, data: bytes, photograph: bool = False) -> Stored:
    """A file whose bytes have been read. Unreadable as in `read`: decoders would fill missing parts without a word.

    A PNG is complete if all its chunks have the right checksums, a JPEG if it has its end mark.
    """
    path = Path(readable(path))
    is_png, is_jpeg = data.startswith(formats.PNG), data.startswith(formats.JPEG)
    if not (is_png or is_jpeg or (data and photograph)):
        what = f"is neither PNG nor JPEG (starts with {data[:4]!r})" if data else "the file is empty"
        raise Unreadable(f"{path}: {what}; expected a PNG or JPEG.")
    if (is_png and not formats.png_is_intact(data)) or (is_jpeg and not formats.jpeg_has_end(data)):
        kind = "PNG" if is_png else "JPEG"
        raise Unreadable(f"{path}: the {kind} file is truncated or damaged; expected an intact one.")
    return Stored(path, data)


def decode_image(
    file: Path | Stored, window: Window = EVERYTHING, turned: bool = False, range16: Range16 = ALL_16
) -> np.ndarray:
    """Decode a PNG or JPEG to uint8 (H, W, 3) RGB. Unreadable if the file is missing, truncated or of another kind.

    Gray is copied to three channels, and alpha is dropped. `range16`: the values of 16-bit images, lowest and highest,
    between which the 256 levels lie, or these two for each channel; others are clipped. By default 16-bit values keep
    their upper eight bits.
    `turned`: read all formats of `PHOTOGRAPHS` (the first frame or page), and rotate by EXIF orientation, as viewers
    do. Otherwise the orientation is ignored, because published labels match the pixels as stored. Rows far below
    `window` are not decoded.
    """
    pixels = decode_values(_stored(file, photograph=turned), window, turned, deep=tuple(range16) != ALL_16)
    return as_levels(pixels, range16)


def pairs_of(range16: Range16, channels: int) -> list[tuple[int, int]]:
    """The two values of each channel."""
    return [*zip(range16[::2], range16[1::2], strict=True)] * (channels if len(range16) == 2 else 1)


def as_levels(values: np.ndarray, range16: Range16) -> np.ndarray:
    """The levels of values (H, W, C), uint8; values of 8 bits are levels. `range16`: see `decode_image`."""
    if values.dtype == np.uint8:
        return values
    if len(range16) == 2:
        return levels_of(*range16)[values]
    planes = zip(np.moveaxis(values, 2, 0), pairs_of(range16, values.shape[2]), strict=True)
    return np.stack([levels_of(*pair)[plane] for plane, pair in planes], axis=2)


@cache
def levels_of(low: int, high: int) -> np.ndarray:
    """The level of each 16-bit value, uint8 (65536,). Of the whole range it is, as in all decoders, the upper byte."""
    scaled = (np.arange(65_536).clip(low, high) - low) * 256
    return (scaled >> 16 if (low, high) == ALL_16 else scaled // (high - low)).clip(0, 255).astype(np.uint8)


def decode_values(file: Stored, window: Window = EVERYTHING, turned: bool = False, deep: bool = False) -> np.ndarray:
    """See `decode_image`. `deep`: uint16 (H, W, 3) if the file has 16 bits per channel."""
    path, data = file
    if turned and not file.has_end_mark:
        return _decode_photograph(file, deep)[window]
    if data.startswith(formats.PNG) and b"acTL" in data:  # OpenCV skips a first image that the animation does not show
        data = formats.png_without(data, formats.PNG_ANIMATION)
    turn = orientation(file.data) if turned else 1
    if turn == 1 and window != EVERYTHING and (part := decode_window(data, window, formats.COLOUR)) is not None:
        return part
    image = None
    try:
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION | (cv2.IMREAD_ANYDEPTH if deep else 0)
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(f"out of memory while an image of {len(data):,} bytes was decoded") from error
    if image is None:
        raise Unreadable(f"{path}: cannot be decoded as {_PNG_OR_JPEG}, undamaged.")
    return upright(image, turn)[window]


def upright(image: np.ndarray, turn: int) -> np.ndarray:
    """An image (H, W, C) rotated as an EXIF orientation says."""
    if turn == 1:
        return image
    image = image.swapaxes(0, 1) if turn in _ON_ITS_SIDE else image
    return np.ascontiguousarray(image[:: -1 if turn in (3, 4, 7, 8) else 1, :: -1 if turn in (2, 3, 6, 7) else 1])


def decode_label(file: Path | Stored, window: Window = EVERYTHING) -> np.ndarray:
    """Decode a label file to uint8 (H, W); palette PNGs give indices. ValueError if the file holds anything else.

    Rows far below `window` are not decoded.
    """
    path, data = _stored(file)
    if not data.startswith(formats.PNG):
        raise Unreadable(
            f"{path}: is a JPEG, which changes values; expected a PNG (docs/data.md, Labels of other kinds, has a "
            f"program)."
        )
    if (kind := (data[24], data[25])) not in _LABELS:
        expected = "one 8-bit class id per pixel (not a colour picture)"
        raise Unreadable(f"{path}: is a PNG of {kind[0]} bits and colour type {kind[1]}; expected {expected}.")
    if window != EVERYTHING and (part := decode_window(data, window, formats.GRAY, formats.PALETTE)) is not None:
        return part
    return _exact(path, data)[window]


def decode_mask(file: Path | Stored, window: Window = EVERYTHING) -> np.ndarray:
    """Decode a label of the user's own images, (H, W): uint8 ids, or int32 0xRRGGBB if it holds colours.

    Reads what `decode_label` does, PNGs with one bit per pixel (ids 0 and 1), 16-bit gray with ids up to 255, RGB,
    alpha if it is opaque, and the same as TIFFs. ValueError if the file holds anything else, or has an EXIF
    orientation, which is applied to images only.
    """
    path, data = stored = _stored(file, photograph=True)
    if stored.has_end_mark and orientation(data) > 1:
        raise Unreadable(f"{path}: has an EXIF orientation, but labels are read as stored; expected none.")
    kind = tuple(data[24:26]) if data.startswith(formats.PNG) else None  # depth and colour type
    if not stored.has_end_mark:
        raw = _decode_tiff_label(stored)[window]
    elif kind == (8, formats.COLOUR):
        raw = decode_image(stored, window)
    elif kind in _MASKS:
        raw = _exact(path, data)[window]
    else:
        return decode_label(stored, window)
    if raw.ndim == 2:
        if raw.max(initial=0) > 255:
            raise Unreadable(f"{path}: holds the value {raw.max()}; expected ids from 0 to 255.")
        return raw.astype(np.uint8)
    if raw.shape[2] in (2, 4):
        if (raw[..., -1] < 255).any():
            raise Unreadable(f"{path}: has transparent pixels, which have no class; expected opaque ones.")
        raw = raw[..., :-1]
    if raw.shape[2] == 1:
        return raw[..., 0]
    red, green, blue = np.moveaxis(raw.astype(np.int32), 2, 0)
    return red << 16 | green << 8 | blue


def _decode_tiff_label(file: Stored) -> np.ndarray:
    """The values in a TIFF: (H, W) of 1, 8 or 16 bits, or uint8 (H, W, channels)."""
    path, data = file
    if not file.is_tiff:
        raise Unreadable(f"{path}: is neither PNG nor TIFF (starts with {data[:4]!r}); expected one of them.")
    expected = f"a label; expected {_TIFF}, black as 0, unturned, one page"
    with decoding(path, expected), Image.open(BytesIO(data), formats=["TIFF"]) as image:
        tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
        formats.check_pixels(tags, len(data))
        turned, inverted = orientation(data) != 1, tags.get(INTERPRETATION) == 0
        if (found := formats.tiff_type(tags)) in ("uint1", "uint8", "uint16"):
            exact = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") or image.mode.startswith("I;16")
            if not exact or turned or inverted or _is_misread(image, tags) or pages(file) > 1:
                raise UnidentifiedImageError("another kind of TIFF")
            return np.asarray(image)
    raise Unreadable(f"{path}: holds {found}; expected ids of 8 or 16 bits. Convert such labels: {_AS_IDS}")


def label_palette(file: Stored) -> dict[int, tuple[int, ...]]:
    """{id: RGB} from the palette of a PNG or TIFF; empty if it has none."""
    if not file.has_end_mark:
        with Image.open(BytesIO(file.data), formats=["TIFF"]) as image:
            levels = bytes(image.getpalette() or ())
    elif file.data[25] != formats.PALETTE:
        return {}
    else:
        levels = bytes(next((chunk[8:-4] for chunk in formats.png_chunks(file.data) if chunk[4:8] == b"PLTE"), b""))
    return {number // 3: tuple(levels[number : number + 3]) for number in range(0, len(levels), 3)}


def pages(file: Stored) -> int:
    """How many pages a TIFF has (see `tiff_pages`), or frames a GIF, WebP or AVIF."""
    with suppress(Exception):
        if file.is_tiff:
            return len(formats.tiff_pages(file.data))
        if not file.has_end_mark:
            return getattr(Image.open(BytesIO(file.data), formats=PHOTOGRAPHS), "n_frames", 1)
    return 1


def _decode_photograph(file: Stored, deep: bool) -> np.ndarray:
    """`decode_values` of a file that is neither PNG nor JPEG, as viewers show it."""
    path, data = file
    known, is_tiff = f"{', '.join(PHOTOGRAPHS)}, with 8 or 16 bits per channel", file.is_tiff
    with decoding(path, f"an image; expected {_TIFF if is_tiff else known}", converts=is_tiff):
        with _opened(data) as stored:
            tags: Mapping[int, Any] = getattr(stored, "tag_v2", {})  # of a TIFF
            formats.check_pixels(tags, len(data))
            if data.startswith(b"MM\0+") or _is_misread(stored, tags):
                raise UnidentifiedImageError("another kind of TIFF")
            image, bits = ImageOps.exif_transpose(stored), tags.get(BITS, (16 if "I" in stored.mode else 8,))[0]
        if image.mode.startswith("I;16") or (image.mode == "I" and stored.format == "PPM"):
            values = np.asarray(image).astype(np.uint16) << (16 - bits)
            values = 65_535 - values if tags.get(INTERPRETATION) == 0 else values
            return np.repeat((values if deep and bits == 16 else (values >> 8).astype(np.uint8))[..., None], 3, axis=2)
        if image.mode in ("I", "F"):
            raise UnidentifiedImageError("the black and white of 32 bits are unknown")
        pixels = np.array(image.convert("RGB"))
        if deep and bits == 16 and image.mode in ("RGB", "RGBA"):
            with _opened(data, lower=True) as stored:
                return pixels.astype(np.uint16) << 8 | np.asarray(ImageOps.exif_transpose(stored).convert("RGB"))
        return pixels


def _opened(data: bytes, lower: bool = False) -> Image.Image:
    """An image whose colours Pillow reads as they are stored.

    It would divide a TIFF's colours by alpha if its tags say that they were multiplied by it. Of 16-bit colours it
    reads the upper eight bits, and with `lower` the lower ones, as if their bytes were in the other order.
    """
    image = Image.open(BytesIO(data), formats=PHOTOGRAPHS)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        native, other = ("L", "B") if sys.byteorder == "little" else ("B", "L")
        for place, tile in enumerate(image.tile):
            arguments: Any = tile.args
            kind = arguments[0].replace("RGBa", "RGBA")
            if lower:
                kind = f"{kind[:-1]}{native if kind[-1] == other else other}"  # the last letter may also be N: native
            image.tile[place] = tile._replace(args=(kind, *arguments[1:]))
    return image


@contextmanager
def decoding(path: Path, expected: str, converts: bool = False) -> Iterator[None]:
    """Context for Pillow, whose errors become Unreadable; ValueError above its limit of pixels: the file is intact.

    `converts`: files of another kind are ValueErrors as well, which advise to convert them.
    """
    try:
        yield
    except Image.DecompressionBombError:
        raise ValueError(
            f"{path}: has more than {MOST_PIXELS // 10**6} megapixels; expected fewer: cut large images, and their "
            f"labels alike, into tiles"
        ) from None
    except MemoryError:
        raise
    except Exception as error:  # readers of rare formats raise whatever Python does for damaged bytes
        if converts and isinstance(error, UnidentifiedImageError):
            advice = "convert it, such as three of its bands to RGB, or restore it if it is damaged"
            raise ValueError(f"{path}: cannot be decoded as {expected}: {advice}.") from error
        raise Unreadable(f"{path}: cannot be decoded as {expected}, undamaged.") from error


def _is_misread(image: Image.Image, tags: Mapping[int, Any]) -> bool:
    """Whether Pillow may misread a TIFF: wrong pixels, only one of several bands, or black where strips are missing.

    Pillow 13 was compared with tifffile over bits, kinds, interpretations, planes, compressions, byte orders, tiles,
    strips, predictors and orientations.
    """
    uncompressed, interpretation = tags.get(COMPRESSION, 1) == 1, tags.get(INTERPRETATION, 0)
    parts = ((right - left) * (bottom - top) for _, (left, top, right, bottom), *_ in getattr(image, "tile", ()))
    return (
        {*tags.get(KIND, (1,))} != {1}
        or (tags.get(PLANES) == 2 and tags.get(CHANNELS, 1) > 1)
        or (uncompressed and interpretation == 6)  # its blocks of subsampled colours
        or (interpretation in (0, 1, 3) and 0 in tags.get(_EXTRA_CHANNELS, ()))
        or (BITS in tags and sum(parts) < image.width * image.height)
    )


def orientation(data: bytes) -> int:
    """The orientation in an image's EXIF or XMP data, 1 to 8, as Pillow finds it; 1 if there is none."""
    found = 1
    with suppress(Exception):  # Pillow raises whatever Python does for damaged EXIF data
        header = formats.png_without(data, formats.PNG_PIXELS) if data.startswith(formats.PNG) else data
        image = Image.open(BytesIO(header), formats=PHOTOGRAPHS)
        found = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)  # a PNG's own method decodes its pixels
    return found if found in range(1, 9) else 1


def _exact(path: Path, data: bytes) -> np.ndarray:
    """The values in a PNG."""
    Stored(path, data).size()  # refuses too many pixels, before they are inflated
    with decoding(path, "a label; expected a PNG"):
        return np.asarray(Image.open(BytesIO(formats.png_pixels_only(data)), formats=["PNG"]))


def _stored(file: Path | Stored, photograph: bool = False) -> Stored:
    return file if isinstance(file, Stored) else read(file, photograph)


def decode_window(data: bytes, window: Window, *colour_types: int) -> np.ndarray | None:
    """Decode a window of an ordinary PNG or JPEG; None if the file is of another kind or better decoded whole.

    Both store rows from top to bottom, so decoding can stop below the window: the header is changed to claim that the
    image ends there. (OpenCV would still inflate the rest of a PNG, and complain about the rest of a JPEG.)
    """
    rows, columns = window
    if data.startswith(formats.PNG):
        nearly_all = rows.stop > _NEARLY_ALL * formats.png_size(data)[1] and data[25] != formats.PALETTE
    with suppress(OSError, SyntaxError, ValueError, Image.DecompressionBombError):  # damaged: see the whole
        if data.startswith(formats.PNG):
            down_to = None if nearly_all else formats.png_down_to(data, rows.stop, colour_types)
        else:
            down_to = formats.jpeg_down_to(data, rows.stop)
        if down_to is None:
            return None
        image = Image.open(BytesIO(down_to), formats=["PNG", "JPEG"])
        return np.asarray(image.crop((columns.start, rows.start, columns.stop, rows.stop)))
    return None
