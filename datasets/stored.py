"""What an image file is: its format, size, channels, pages and orientation. Only an array's pixels are read."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from PIL import ExifTags, Image, TiffImagePlugin, UnidentifiedImageError

from datasets import file_formats as formats
from datasets import tiff
from datasets.file_list import readable, why_unfit

MOST_PIXELS = 2 * 89_478_485  # above this, Pillow refuses to open an image
COLOURS, MOST_CHANNELS = 3, 64  # channels of an RGB image; of an image, see `decode_image`
ARRAY_SUFFIX = ".npy"  # of images that are arrays
EXPECTED_TIFF = (
    "a TIFF of unsigned integers of 8 or 16 bits, its channels interleaved or each a page, without JPEG inside"
)
EXPECTED_ARRAY = "an array (H, W, channels) of uint8 or uint16"
SWAPS_SIDES = (5, 6, 7, 8)  # EXIF orientations that swap width and height
_PNG_OR_JPEG = "an image; expected a PNG or JPEG"
_ARRAY_MARK = b"\x93NUMPY"  # first bytes of an array


class Unreadable(ValueError):
    """A file is missing, damaged, or not of the expected kind."""


class ArrayHeader(NamedTuple):
    """The header of a .npy file that holds an image."""

    shape: tuple[int, int, int]  # (H, W, channels)
    dtype: np.dtype
    by_columns: bool  # its pixels are in the order of columns
    start: int  # where they begin, in bytes


@dataclass(frozen=True, eq=False)
class Stored:
    """A file that has been read, and what it is.

    `path`: for messages. `data`: its bytes (PNG and JPEG: checked to be complete). `array_path`: the path of an array,
    of which `data` is only the beginning.
    """

    path: Path
    data: bytes
    array_path: Path | None = None

    @cached_property
    def format(self) -> str:
        """PNG, JPEG, TIFF or array, by its first bytes; "" for the others of `PILLOW_FORMATS`."""
        start = bytes(self.data[:6])
        if start.startswith(formats.PNG):
            return "PNG"
        if start.startswith(formats.JPEG):
            return "JPEG"
        if start[:4] in TiffImagePlugin.PREFIXES:
            return "TIFF"
        return "array" if self.array_path is not None else ""

    @property
    def is_png_or_jpeg(self) -> bool:
        """Whether it can be checked to be complete without decoding its pixels."""
        return self.format in ("PNG", "JPEG")

    @property
    def may_have_16_bits(self) -> bool:
        """Whether its values may have 16 bits, as far as its header tells."""
        return self.png_kind[0] == 16 if self.png_kind is not None else self.format != "JPEG"

    @property
    def has_windows(self) -> bool:
        """Whether its size can be read, and a part of it decoded, without decoding all pixels."""
        return self.format in ("PNG", "JPEG", "array")

    @property
    def png_kind(self) -> tuple[int, int] | None:
        """Depth and colour type of a PNG; None for other formats."""
        return (self.data[24], self.data[25]) if self.format == "PNG" else None

    @property
    def still_data(self) -> bytes:
        """Its bytes without a PNG's animation: OpenCV skips a first image that the animation does not show."""
        is_animated = self.format == "PNG" and b"acTL" in self.data
        return formats.png_without(self.data, formats.PNG_ANIMATION) if is_animated else self.data

    @cached_property
    def orientation(self) -> int:
        """The orientation in its EXIF or XMP data, 1 to 8, as Pillow finds it; 1 if there is none."""
        orientation = 1
        with suppress(Exception):  # Pillow raises whatever Python does for damaged EXIF data
            header = formats.png_without(self.data, formats.PNG_PIXELS) if self.format == "PNG" else self.data
            image = Image.open(BytesIO(header), formats=formats.PILLOW_FORMATS)
            # A PNG's own method decodes its pixels.
            orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation, 1)
        return orientation if orientation in range(1, 9) else 1

    @cached_property
    def tiff_pages(self) -> list[tiff.Tags]:
        """The tags of a TIFF's pages, see `tiff.pages_of`."""
        with decoding(self.path, f"an image; expected {EXPECTED_TIFF}"):
            return tiff.pages_of(self.data)

    @property
    def page_count(self) -> int:
        """How many pages a TIFF has (see `tiff_pages`), or frames a GIF, WebP or AVIF."""
        with suppress(Exception):
            if self.format == "TIFF":
                return len(self.tiff_pages)
            if not self.is_png_or_jpeg:
                return getattr(Image.open(BytesIO(self.data), formats=formats.PILLOW_FORMATS), "n_frames", 1)
        return 1

    def pages_if_one_is_read(self, channels: int) -> int:
        """Number of pages if the first alone is read as an image of so many channels. 1 if all are read."""
        return 1 if channels != COLOURS and self.format == "TIFF" else self.page_count

    @cached_property
    def array_header(self) -> ArrayHeader:
        """The header of an array. ValueError: the file holds no image, or ends early."""
        header = None
        with decoding(self.path, f"an image; expected {EXPECTED_ARRAY}"), self._open_array() as stream:
            version = np.lib.format.read_magic(stream)
            read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, by_columns, dtype = read_header[version](stream)
            is_image = dtype.newbyteorder("=") in (np.uint8, np.uint16) and len(shape) in (2, 3) and min(shape) > 0
            if is_image:
                height, width, channels = (*shape, 1)[:3]
                check_area(width, height)
                header = ArrayHeader((height, width, channels), dtype, by_columns, start=stream.tell())
                if stream.seek(0, SEEK_END) < header.start + height * width * channels * dtype.itemsize:
                    raise ValueError("it ends early")
        if header is None:  # not raised above, where it would be reported as damage
            raise ValueError(f"{self.path}: is an array {shape} of {dtype}; expected {EXPECTED_ARRAY}.")
        return header

    def array_pixels(self, rows: slice, columns: slice) -> np.ndarray:
        """The pixels of an array in a window, uint8 or uint16 (H, W, channels).

        Only the rows of the window are read, unless the array is in the order of columns. They are not mapped: a file
        that becomes shorter meanwhile would end the process. ValueError: it holds something else, or ends early.
        """
        (height, width, channels), dtype, by_columns, start = self.array_header
        first, last = (0, height) if by_columns else rows.indices(height)[:2]
        row_bytes = width * channels * dtype.itemsize
        with decoding(self.path, f"an image; expected {EXPECTED_ARRAY}"), self._open_array() as stream:
            stream.seek(start + first * row_bytes)
            pixels = np.frombuffer(stream.read((last - first) * row_bytes), dtype)  # too few do not have this shape
            pixels = pixels.reshape((last - first, width, channels), order="F" if by_columns else "C")
            return pixels[rows if by_columns else slice(None), columns].astype(dtype.newbyteorder("="), order="C")

    def _open_array(self) -> BinaryIO:
        """The stream of an array's bytes, at its beginning."""
        assert self.array_path is not None, self.path
        return open(self.array_path, "rb")

    @cached_property
    def channels(self) -> int:
        """The number of channels that it stores; of a TIFF, in all pages. ValueError: it has a palette."""
        if self.format == "array":
            return self.array_header.shape[2]
        if self.png_kind is not None:
            colour_type = self.png_kind[1]
            count = None if colour_type == formats.PALETTE else formats.CHANNELS_OF_PNG.get(colour_type)
        elif self.format == "TIFF":
            has_palette = tiff.PALETTE in [tags.get(tiff.INTERPRETATION) for tags in self.tiff_pages]
            count = None if has_palette else sum(map(tiff.channels_of, self.tiff_pages))
        else:
            with decoding(self.path, f"an image; expected {', '.join(formats.PILLOW_FORMATS)}"):
                bands = Image.open(BytesIO(self.data), formats=formats.PILLOW_FORMATS).getbands()
            count = None if "P" in bands else len(bands)
        if count is None:
            raise ValueError(f"{self.path}: has a palette, whose indices are no channel: convert it to gray or RGB.")
        return count

    def check_channels(self, channels: int) -> None:
        """ValueError if it has another number of channels; one may be stored as three equal ones of one page."""
        if self.channels == channels:
            return
        has_one_page = self.format != "TIFF" or len(self.tiff_pages) == 1
        if channels == 1 and self.channels == COLOURS and has_one_page:
            return
        training = f"train with channels={self.channels}, if all images have as many; or convert this one"
        fix = self._axes_fix(channels) or training
        stored = "1 channel" if self.channels == 1 else f"{self.channels} channels"
        raise ValueError(f"{self.path}: has {stored}, expected {channels}: {fix}.")

    def _axes_fix(self, channels: int) -> str:
        """What to do if the axes of an array, or of a TIFF's pages, seem to be in another order; "" if not."""
        if self.format == "array":
            first, *further = self.array_header.shape
            if first == channels or first < min(further):
                return (
                    f"its first axis is {first} long: store (H, W, channels), as numpy.moveaxis(array, 0, 2) gives it"
                )
        elif self.format == "TIFF" and len(self.tiff_pages) > 1:
            page_count = len(self.tiff_pages)
            height, width = (self.tiff_pages[0][tag] for tag in (tiff.HEIGHT, tiff.WIDTH))
            if width == channels or width < min(height, page_count):
                return (
                    f"it has {page_count} pages of {height}x{width}, so the rows of an array (H, W, channels) became "
                    "pages: store its channels, such as with tifffile.imwrite(FILE, array, photometric='minisblack', "
                    "planarconfig='contig')"
                )
        return ""

    def size(self, turned: bool = False) -> tuple[int, int]:
        """(width, height) of a PNG, JPEG or array, from its header. `turned`: see `decode_image`.

        Unreadable if the header is damaged; ValueError above Pillow's limit, 178 megapixels.
        """
        if self.format == "array":
            height, width, _ = self.array_header.shape
            return width, height
        with decoding(self.path, _PNG_OR_JPEG):
            if self.format == "PNG":
                width, height = formats.png_size(self.data)
            else:
                width, height = Image.open(BytesIO(self.data), formats=["JPEG"]).size
            check_area(width, height)
        return (height, width) if turned and self.orientation in SWAPS_SIDES else (width, height)


def read(path: Path, photograph: bool = False) -> Stored:
    """Read a file. Unreadable if it is missing, incomplete or, unless it is a `photograph`, neither PNG nor JPEG.

    Also unless it is a regular file of at most 4 GiB: a pipe would be waited for, and a device may never end.
    Of arrays only what is used is read, when it is.
    """
    why = why_unfit(path)
    if why is not None:
        raise Unreadable(f"{readable(path)}: {why}.")
    if path.suffix.lower() == ARRAY_SUFFIX:
        return _unread_array(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        why = f"cannot be read ({error.strerror or error}); expected a readable file"
        raise Unreadable(f"{readable(path)}: {why}.") from None
    return complete_file(path, data, photograph)


def _unread_array(path: Path) -> Stored:
    """An array of which only the first bytes are read."""
    try:
        with open(path, "rb") as stream:
            mark = stream.read(len(_ARRAY_MARK))
        if mark != _ARRAY_MARK:
            raise ValueError(f"it begins with {mark!r}, as no array of NumPy")
    except (OSError, ValueError) as error:
        raise Unreadable(f"{readable(path)}: cannot be read ({error}); expected {EXPECTED_ARRAY}.") from None
    return Stored(Path(readable(path)), mark, array_path=path)


def complete_file(path: Path, data: bytes, photograph: bool = False) -> Stored:
    """A file whose bytes have been read. Unreadable as in `read`: decoders would fill missing parts without a word.

    A PNG is complete if all its chunks have the right checksums, a JPEG if it has its end mark.
    """
    file = Stored(Path(readable(path)), data)
    if not (file.is_png_or_jpeg or (data and photograph)):
        problem = f"is neither PNG nor JPEG (starts with {data[:4]!r})" if data else "the file is empty"
        raise Unreadable(f"{file.path}: {problem}; expected a PNG or JPEG.")
    is_whole = {"PNG": formats.png_is_intact, "JPEG": formats.jpeg_has_end}.get(file.format)
    if is_whole is not None and not is_whole(data):
        raise Unreadable(f"{file.path}: the {file.format} file is truncated or damaged; expected an intact one.")
    return file


def check_area(width: int, height: int) -> None:
    """DecompressionBombError, as of Pillow, if an image has too many pixels: see `decoding`."""
    if width * height > MOST_PIXELS:
        raise Image.DecompressionBombError


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
