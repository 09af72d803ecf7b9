"""Decodes images and labels, with the checks that decoders leave out. Every error names the file and its fault."""

import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError

from datasets import file_formats as formats
from datasets import tiff
from datasets.stored import COLOURS, EXPECTED_TIFF, SWAPS_SIDES, Stored, Unreadable, check_area, decoding, read

_NEARLY_ALL = 0.9  # of a PNG's rows: OpenCV decodes all rows faster than Pillow decodes this many
# Kinds of PNGs: depth, colour type. Decoders stretch gray of 2 and 4 bits.
_LABELS = {(8, formats.GRAY), *((depth, formats.PALETTE) for depth in (1, 2, 4, 8))}
_MASKS = {(1, formats.GRAY), (16, formats.GRAY), (8, formats.GRAY_ALPHA), (8, formats.COLOUR_ALPHA)}
_TIFF = "a TIFF of gray, RGB, CMYK or a palette, with unsigned integers of 8 or 16 bits, channels interleaved"
_AS_IDS = (  # a command; what is no id becomes a value above 255, which is refused
    'python -c "import numpy, sys; from PIL import Image; [Image.fromarray(numpy.asarray(Image.open(file))'
    ".astype('uint16')).save(file) for file in sys.argv[1:]]\" LABELS/*.tif"
)

Window = tuple[slice, slice]  # rows and columns, each with start and stop
EVERYTHING: Window = slice(None), slice(None)
# The two values of 16-bit images that become black and white, or two for each channel, one after the other.
Range16 = Sequence[int]
ALL_16 = 0, 65_535


def decode_image(
    file: Path | Stored,
    window: Window = EVERYTHING,
    turned: bool = False,
    range16: Range16 = ALL_16,
    channels: int = COLOURS,
) -> np.ndarray:
    """Decode an image to levels, uint8 (H, W, channels). ValueError: the file is of another kind, or Unreadable.

    Three channels are RGB: of a PNG or JPEG, or an array. Gray is copied to three channels, and alpha is dropped.
    `turned`: read all formats of `PILLOW_FORMATS` (the first frame or page), and rotate by EXIF orientation, as viewers
    do. Otherwise the orientation is ignored, because published labels match the pixels as stored.
    Images of other numbers are `turned`, and their channels are as stored. One channel: gray in any format, or RGB
    whose channels are equal. Others: PNG with alpha, TIFF (interleaved, or pages that are channels; CMYK too), arrays,
    and formats that Pillow opens with an alpha channel.
    `range16`: the values of 16-bit images, lowest and highest, between which the 256 levels lie, or these two for each
    channel; others are clipped. By default 16-bit values keep their upper eight bits.
    Rows far below `window` are not decoded.
    """
    stored = _read_if_path(file, photograph=turned or channels != COLOURS)
    is_deep = channels != COLOURS or tuple(range16) != ALL_16
    return as_levels(decode_values(stored, window, turned, channels, is_deep), range16)


def image_size(file: Stored, turned: bool, channels: int) -> tuple[int, int]:
    """(width, height) of an image of a number of channels. ValueError: see `decode_image`."""
    if not file.has_windows:
        height, width, _ = decode_image(file, turned=turned, channels=channels).shape
        return width, height
    if channels != COLOURS or file.format == "array":
        file.check_channels(channels)
    return file.size(turned)


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
        further = decode_values(file, channels=count)[..., 1 if count == 2 else COLOURS :]
    except ValueError:  # of a kind that is read as RGB only
        return 0
    return count if (further != further[:1, :1]).any() else 0


def pairs_of(range16: Range16, channels: int) -> list[tuple[int, int]]:
    """The two values of each channel."""
    pairs = [*zip(range16[::2], range16[1::2], strict=True)]
    return pairs * channels if len(pairs) == 1 else pairs


def as_levels(values: np.ndarray, range16: Range16) -> np.ndarray:
    """The levels of values (H, W, C), uint8 and contiguous; of 8 bits the values. `range16`: see `decode_image`."""
    if values.dtype == np.uint8:
        return np.ascontiguousarray(values)
    if len(range16) == 2:
        return levels_of(*range16)[np.ascontiguousarray(values)]
    planes = zip(np.moveaxis(values, 2, 0), pairs_of(range16, values.shape[2]), strict=True)
    return np.stack([levels_of(*pair)[plane] for plane, pair in planes], axis=2)


@cache
def levels_of(low: int, high: int) -> np.ndarray:
    """The level of each 16-bit value, uint8 (65536,). Of the whole range it is, as in all decoders, the upper byte."""
    scaled = (np.arange(65_536).clip(low, high) - low) * 256
    return (scaled >> 16 if (low, high) == ALL_16 else scaled // (high - low)).clip(0, 255).astype(np.uint8)


def decode_values(
    file: Stored, window: Window = EVERYTHING, turned: bool = True, channels: int = COLOURS, is_deep: bool = True
) -> np.ndarray:
    """The values of an image before they become 256 levels, uint8 or, of 16 bits, uint16 (H, W, channels).

    Without `is_deep`, RGB of 16 bits keeps its upper eight bits, which is faster. Other arguments and errors: see
    `decode_image`.
    """
    if channels != COLOURS or file.format == "array":
        file.check_channels(channels)
    if file.format == "array":
        return file.array_pixels(*window)
    if channels == 1:
        return _decode_gray(file, window)
    if channels != COLOURS and file.format == "TIFF":
        return _decode_tiff(file)[window]
    if channels != COLOURS and file.format != "PNG":
        return _decode_alpha(file)[window]
    if turned and not file.is_png_or_jpeg:
        return _decode_photograph(file, is_deep)[window]
    orientation = file.orientation if turned or channels != COLOURS else 1
    if orientation == 1 and window != EVERYTHING:  # a turned image's rows are not the file's
        colour_types = (formats.COLOUR,) if channels == COLOURS else (formats.GRAY_ALPHA, formats.COLOUR_ALPHA)
        crop = _decode_window(file, window, *colour_types)  # none of 16 bits, which are decoded whole
        if crop is not None:
            return crop
    return _upright(_decode_png_or_jpeg(file, channels, is_deep), orientation)[window]


def _decode_gray(file: Stored, window: Window) -> np.ndarray:
    """One channel (H, W, 1) of a gray image, or of RGB whose channels are equal."""
    colours = decode_values(file, window)
    gray = colours[..., :1]
    if (colours != gray).any():
        raise ValueError(f"{file.path}: has 3 channels that differ, expected 1: gray, or RGB of equal channels.")
    return gray


def _decode_png_or_jpeg(file: Stored, channels: int, is_deep: bool) -> np.ndarray:
    """The pixels of a PNG or JPEG as stored: RGB, of two channels gray and alpha, of four also RGB and alpha."""
    if channels == COLOURS:
        flags = cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION | (cv2.IMREAD_ANYDEPTH if is_deep else 0)
    else:
        flags = cv2.IMREAD_UNCHANGED
        file.size()  # refuses too many pixels before they are inflated
    image = None
    data = file.still_data
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error as error:
        if error.code == cv2.Error.StsNoMem:
            raise MemoryError(f"out of memory while an image of {len(data):,} bytes was decoded") from error
    if image is None:
        raise Unreadable(f"{file.path}: cannot be decoded as an image; expected a PNG or JPEG, undamaged.")
    if channels == COLOURS:
        return image
    return image[..., [2, 1, 0, 3] if channels == 4 else [0, 3]]  # OpenCV gives blue, green, red, alpha


def _decode_alpha(file: Stored) -> np.ndarray:
    """The channels of an image with alpha that is neither PNG nor TIFF. ValueError: it has other ones."""
    with decoding(file.path, "an image"), Image.open(BytesIO(file.data), formats=formats.PILLOW_FORMATS) as image:
        pixels = np.asarray(ImageOps.exif_transpose(image))
        mode = image.mode
    if mode not in ("LA", "RGBA"):
        raise ValueError(f"{file.path}: is stored as {mode}; expected a PNG, {EXPECTED_TIFF}, or .npy.")
    return pixels


def _decode_tiff(file: Stored) -> np.ndarray:
    """The channels of all pages, uint8 or uint16 (H, W, channels)."""
    first_page = file.tiff_pages[0]
    if not tiff.are_read_as_stored(file.tiff_pages):
        problem = f"cannot be decoded as an image (it holds {tiff.type_of(first_page)})"
        raise ValueError(f"{file.path}: {problem}; expected {EXPECTED_TIFF}: convert it.")
    with decoding(file.path, f"an image; expected {EXPECTED_TIFF}"):
        check_area(first_page[tiff.WIDTH], first_page[tiff.HEIGHT])
        pixels = np.concatenate([tiff.decode_page(file.data, tags) for tags in file.tiff_pages], axis=2)
    return _upright(pixels, first_page.get(tiff.ORIENTATION, 1))


def _decode_photograph(file: Stored, is_deep: bool) -> np.ndarray:
    """The RGB values of a file that is neither PNG nor JPEG, as viewers show it."""
    is_tiff = file.format == "TIFF"
    expected = _TIFF if is_tiff else f"{', '.join(formats.PILLOW_FORMATS)}, with 8 or 16 bits per channel"
    with decoding(file.path, f"an image; expected {expected}", converts=is_tiff):
        with _open_image(file.data) as opened:
            tags: tiff.Tags = getattr(opened, "tag_v2", {})  # of a TIFF
            tiff.check_pixels(tags, len(file.data))
            if file.data.startswith(b"MM\0+") or tiff.is_misread(opened, tags):
                raise UnidentifiedImageError("another kind of TIFF")
            image = ImageOps.exif_transpose(opened)
            bits = tags.get(tiff.BITS, (16 if "I" in opened.mode else 8,))[0]
        if image.mode.startswith("I;16") or (image.mode == "I" and opened.format == "PPM"):
            values = _gray_of_16_bits(image, bits, is_inverted=tags.get(tiff.INTERPRETATION) == 0)
            gray = values if is_deep and bits == 16 else (values >> 8).astype(np.uint8)
            return np.repeat(gray[..., None], COLOURS, axis=2)
        if image.mode in ("I", "F"):
            raise UnidentifiedImageError("the black and white of 32 bits are unknown")
        if is_deep and bits == 16 and image.mode in ("RGB", "RGBA"):  # of which Pillow reads the upper eight bits
            return _upright(tiff.decode_page(file.data, tags)[..., :COLOURS], file.orientation)
        return np.array(image.convert("RGB"))


def _gray_of_16_bits(image: Image.Image, bits: int, is_inverted: bool) -> np.ndarray:
    """The values of a gray image whose file has 9 to 16 bits, uint16 (H, W), as if it had 16. 0 is black."""
    values = np.asarray(image).astype(np.uint16) << (16 - bits)
    return 65_535 - values if is_inverted else values


def _open_image(data: bytes) -> Image.Image:
    """An image whose colours Pillow reads as they are stored.

    It would divide a TIFF's colours by alpha if its tags say that they were multiplied by it.
    """
    image = Image.open(BytesIO(data), formats=formats.PILLOW_FORMATS)
    if isinstance(image, TiffImagePlugin.TiffImageFile):
        for place, tile in enumerate(image.tile):
            arguments: Any = tile.args
            image.tile[place] = tile._replace(args=(arguments[0].replace("RGBa", "RGBA"), *arguments[1:]))
    return image


def _upright(image: np.ndarray, orientation: int) -> np.ndarray:
    """An image (H, W, C) rotated as an EXIF orientation says."""
    if orientation == 1:
        return image
    image = image.swapaxes(0, 1) if orientation in SWAPS_SIDES else image
    row_step = -1 if orientation in (3, 4, 7, 8) else 1
    column_step = -1 if orientation in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(image[::row_step, ::column_step])


def _decode_window(file: Stored, window: Window, *colour_types: int) -> np.ndarray | None:
    """Decode a window of an ordinary PNG or JPEG; None if the file is of another kind or better decoded whole.

    Both store rows from top to bottom, so decoding can stop below the window: the header is changed to claim that the
    image ends there. (OpenCV would still inflate the rest of a PNG, and complain about the rest of a JPEG.)
    """
    rows, columns = window
    is_plain_png = file.png_kind is not None and file.png_kind[1] != formats.PALETTE
    if is_plain_png and rows.stop > _NEARLY_ALL * formats.png_size(file.data)[1]:
        return None
    with suppress(OSError, SyntaxError, ValueError, zlib.error, Image.DecompressionBombError):  # damaged: see the whole
        if file.format == "PNG":
            down_to = formats.png_down_to(file.data, rows.stop, colour_types)
        else:
            down_to = formats.jpeg_down_to(file.data, rows.stop)
        if down_to is None:
            return None
        image = Image.open(BytesIO(down_to), formats=["PNG", "JPEG"])
        return np.asarray(image.crop((columns.start, rows.start, columns.stop, rows.stop)))
    return None


def decode_label(file: Path | Stored, window: Window = EVERYTHING) -> np.ndarray:
    """Decode a label file to uint8 (H, W); palette PNGs give indices. ValueError if the file holds anything else.

    Rows far below `window` are not decoded.
    """
    stored = _read_if_path(file)
    if stored.png_kind is None:
        raise Unreadable(
            f"{stored.path}: is a JPEG, which changes values; expected a PNG (docs/data.md, Labels of other kinds, has "
            f"a program)."
        )
    if stored.png_kind not in _LABELS:
        depth, colour_type = stored.png_kind
        expected = "one 8-bit class id per pixel (not a colour picture)"
        raise Unreadable(f"{stored.path}: is a PNG of {depth} bits and colour type {colour_type}; expected {expected}.")
    if window != EVERYTHING:
        crop = _decode_window(stored, window, formats.GRAY, formats.PALETTE)
        if crop is not None:
            return crop
    return _decode_exact(stored)[window]


def decode_mask(file: Path | Stored, window: Window = EVERYTHING) -> np.ndarray:
    """Decode a label of the user's own images, (H, W): uint8 ids, or int32 0xRRGGBB if it holds colours.

    Reads what `decode_label` does, PNGs with one bit per pixel (ids 0 and 1), 16-bit gray with ids up to 255, RGB,
    alpha if it is opaque, and the same as TIFFs. ValueError if the file holds anything else, or has an EXIF
    orientation, which is applied to images only.
    """
    stored = _read_if_path(file, photograph=True)
    if stored.is_png_or_jpeg and stored.orientation > 1:
        raise Unreadable(f"{stored.path}: has an EXIF orientation, but labels are read as stored; expected none.")
    if not stored.is_png_or_jpeg:
        return _ids_or_colours(_decode_tiff_label(stored)[window], stored.path)
    if stored.png_kind == (8, formats.COLOUR):
        return _ids_or_colours(decode_image(stored, window), stored.path)
    if stored.png_kind in _MASKS:
        return _ids_or_colours(_decode_exact(stored)[window], stored.path)
    return decode_label(stored, window)


def _ids_or_colours(raw: np.ndarray, path: Path) -> np.ndarray:
    """The pixels of a label, see `decode_mask`, from its values, (H, W) or (H, W, channels).

    Unreadable: a value is above 255, or a pixel is not opaque.
    """
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
    if file.format != "TIFF":
        raise Unreadable(f"{file.path}: is neither PNG nor TIFF (starts with {file.data[:4]!r}); expected one of them.")
    expected = f"a label; expected {_TIFF}, black as 0, unturned, one page"
    with decoding(file.path, expected), Image.open(BytesIO(file.data), formats=["TIFF"]) as image:
        tags: tiff.Tags = getattr(image, "tag_v2", {})
        tiff.check_pixels(tags, len(file.data))
        value_type = tiff.type_of(tags)
        if value_type in ("uint1", "uint8", "uint16"):
            is_exact = image.mode in ("1", "L", "LA", "P", "RGB", "RGBA") or image.mode.startswith("I;16")
            is_inverted = tags.get(tiff.INTERPRETATION) == 0
            is_turned = file.orientation != 1
            if not is_exact or is_turned or is_inverted or tiff.is_misread(image, tags) or file.page_count > 1:
                raise UnidentifiedImageError("another kind of TIFF")
            return np.asarray(image)
    raise Unreadable(f"{file.path}: holds {value_type}; expected ids of 8 or 16 bits. Convert such labels: {_AS_IDS}")


def label_palette(file: Stored) -> dict[int, tuple[int, ...]]:
    """{id: RGB} from the palette of a PNG or TIFF; empty if it has none."""
    levels = b""
    if not file.is_png_or_jpeg:
        with Image.open(BytesIO(file.data), formats=["TIFF"]) as image:
            levels = bytes(image.getpalette() or ())
    elif file.png_kind is not None and file.png_kind[1] == formats.PALETTE:
        levels = bytes(next((chunk[8:-4] for chunk in formats.png_chunks(file.data) if chunk[4:8] == b"PLTE"), b""))
    return {start // 3: tuple(levels[start : start + 3]) for start in range(0, len(levels), 3)}


def _decode_exact(file: Stored) -> np.ndarray:
    """The values in a PNG."""
    file.size()  # refuses too many pixels before they are inflated
    with decoding(file.path, "a label; expected a PNG"):
        return np.asarray(Image.open(BytesIO(formats.png_pixels_only(file.data)), formats=["PNG"]))


def _read_if_path(file: Path | Stored, photograph: bool = False) -> Stored:
    return file if isinstance(file, Stored) else read(file, photograph)
