"""Windows of image files: exactly the pixels of the whole image, without decoding the rows below."""

import itertools
import os
import struct
import zlib
from functools import partial
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import EpsImagePlugin, Image, ImageOps

from datasets.file_formats import png_chunks
from datasets.layout import read_json, read_list
from datasets.reading import decode_image, decode_label, decode_mask, decode_values, image_size
from datasets.stored import read as stored
from tests import trees
from tests.datasets.classification_trees import encoded

HEIGHT, WIDTH = 75, 53
# The first row, the last, all rows, and windows that end at any row of a JPEG's blocks of 8 or 16 rows.
WINDOWS = [(slice(start, stop), slice(5, 48)) for start, stop in [(0, 1), (74, 75), (0, 75)]] + [
    (slice(stop - 9, stop), slice(0, 53)) for stop in range(9, 75)
]


def read_size(path: Path, turned: bool = False) -> tuple[int, int]:
    return image_size(stored(path, photograph=turned), turned, 3)


def photograph() -> np.ndarray:
    noise = np.random.default_rng(0).integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    return cv2.GaussianBlur(noise, (0, 0), 1.5)


def labels(ids: int = 66) -> np.ndarray:
    return np.random.default_rng(1).integers(0, ids, (HEIGHT, WIDTH), dtype=np.uint8)


def saved(path: Path, image: Image.Image, **options) -> Path:
    image.save(path, "JPEG" if path.suffix == ".jpg" else "PNG", **options)
    return path


def palette(ids: int) -> Image.Image:
    image = Image.fromarray(labels(ids))
    image.putpalette([value for i in range(ids) for value in (i, 255 - i, 7)])
    return image


TURNED = Image.Exif()
TURNED[0x0112] = 6  # by 90 degrees; labels match the pixels as stored
IMAGES = {
    "png": ("x.png", "RGB", {}),
    "png with alpha": ("x.png", "RGBA", {}),
    "gray png": ("x.png", "L", {}),
    "palette png": ("x.png", "P", {}),
    "jpeg 4:4:4": ("x.jpg", "RGB", {"subsampling": 0}),
    "jpeg 4:2:2": ("x.jpg", "RGB", {"subsampling": 1}),
    "jpeg 4:2:0": ("x.jpg", "RGB", {"subsampling": 2}),
    "jpeg with restarts": ("x.jpg", "RGB", {"restart_marker_rows": 1}),
    "jpeg with a comment": ("x.jpg", "RGB", {"comment": b"\xff\xd8\xff\xc0" * 9}),
    "progressive jpeg": ("x.jpg", "RGB", {"progressive": True}),
    "gray jpeg": ("x.jpg", "L", {}),
    "jpeg that viewers turn": ("x.jpg", "RGB", {"exif": TURNED}),
    "cmyk jpeg": ("x.jpg", "CMYK", {}),
}


LABELS = {
    "palette": (palette(66), {}),
    "palette of 4 bits": (palette(16), {"bits": 4}),
    "palette of 1 bit": (palette(2), {"bits": 1}),
    "gray": (Image.fromarray(labels()), {}),
    "palette in one chunk": (palette(66), {"compress_level": 0}),
}


def image_of(kind: str, folder: Path) -> Path:
    name, mode, options = IMAGES[kind]
    return saved(folder / name, Image.fromarray(photograph()).convert(mode), **options)


@pytest.mark.parametrize("kind", [*IMAGES, *LABELS])
def test_a_window_equals_its_part_of_the_whole(kind, tmp_path, capfd):
    if kind in IMAGES:
        path, decode = image_of(kind, tmp_path), decode_image
        expected = decode(path)
        assert expected.shape == (HEIGHT, WIDTH, 3) and read_size(path) == (WIDTH, HEIGHT)
    else:
        image, options = LABELS[kind]
        path, decode = saved(tmp_path / "x.png", image, **options), decode_label
        expected = np.asarray(image)
        assert np.array_equal(decode(path), expected)
    for window in WINDOWS:
        assert np.array_equal(decode(path, window), expected[window]), window
    assert capfd.readouterr().err == ""  # where libraries complain about rows below the window


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_what_lies_below_a_window_is_not_decoded(suffix, tmp_path, capfd):
    rows = np.random.default_rng(0).integers(0, 256, (400, 300, 3), dtype=np.uint8)
    path = saved(tmp_path / f"x{suffix}", Image.fromarray(rows))
    whole = decode_image(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + bytes(len(data) // 2 - 20) + data[-20:])
    if suffix == ".png":  # with the right checksums
        pixels = b"".join(piece[8:-4] for piece in png_chunks(data) if piece[4:8] == b"IDAT")
        pixels = pixels[: len(pixels) // 2] + bytes(len(pixels) // 2)
        path.write_bytes(data[:33] + chunk(b"IDAT", pixels) + chunk(b"IEND", b""))
    top = slice(0, 150), slice(0, 300)
    assert np.array_equal(decode_image(path, top), whole[top])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    "content, complaint",
    [
        (None, "cannot be read (No such file or directory); expected a readable file"),
        (b"", "the file is empty"),
        (b"\x89PNG\r\n\x1a\n", "the PNG file is truncated"),
        (b"\x89PNG\r\n\x1a\n" + b"\0\0\0\0IEND\xaeB`\x82", "the PNG file is truncated or damaged"),
        (b"\xff\xd8\xff\xe0\xff\xff\xff", "the JPEG file is truncated"),
        (b"\xff\xd8" + b"\xff" * 20 + b"\xff\xd9", "cannot be decoded as an image"),
    ],
)
def test_files_that_are_no_image_are_named(content, complaint, tmp_path):
    """Such a file may be no part of a dataset: advice about its archive comes from there (test_checks.py)."""
    path = tmp_path / "x.png"
    if content is not None:
        path.write_bytes(content)
    part = slice(0, 4), slice(0, 4)
    for read in (read_size, decode_image, partial(decode_image, window=part), decode_label):
        with pytest.raises(ValueError) as error:
            read(path)
        assert str(error.value).startswith(f"{path}: ") and "archive" not in str(error.value)
        if read is not decode_label:
            assert str(error.value).startswith(f"{path}: {complaint}")


# (first quarter, middle, last quarter) -> a damaged PNG; a JPEG has no checksums
DAMAGE = {
    "zeroed": lambda head, middle, tail: head + bytes(len(middle)) + tail,
    "cut": lambda head, middle, tail: head + tail,
    "repeated": lambda head, middle, tail: head + 2 * middle + tail,
    "one bit flipped": lambda head, middle, tail: head + bytes([middle[0] ^ 1]) + middle[1:] + tail,
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_within_a_png_is_found(damage, tmp_path):
    path = saved(tmp_path / "x.png", Image.fromarray(photograph()))
    data = path.read_bytes()
    quarter = len(data) // 4
    path.write_bytes(damage(data[:quarter], data[quarter:-quarter], data[-quarter:]))
    with pytest.raises(ValueError, match=f"{path}: the PNG file is truncated or damaged"):
        stored(path)


KINDS = {0: (1, 2, 4, 8, 16), 2: (8, 16), 3: (1, 2, 4, 8), 4: (8, 16), 6: (8, 16)}  # depths by PNG colour type
CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}
PASSES = {  # first row and column, and steps, by interlacing
    0: [(0, 0, 1, 1)],
    1: [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)],
}


@pytest.mark.parametrize("interlaced", PASSES)
@pytest.mark.parametrize("colour_type", KINDS)
def test_pixels_of_a_png_that_end_early_are_found_although_checksums_are_right(colour_type, interlaced, tmp_path):
    """Pillow leaves missing rows black, and black is a class. Bytes behind the pixels do no harm and hide nothing."""
    path, height, width = tmp_path / "x.png", 9, 5
    everything = slice(0, height), slice(0, width)
    for depth in KINDS[colour_type]:
        rows = [
            1 + (len(range(column, width, across)) * depth * CHANNELS[colour_type] + 7) // 8
            for row, column, down, across in PASSES[interlaced]
            for _ in range(row, height, down)
            if column < width
        ]
        header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, interlaced)
        before = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"PLTE", bytes(768)) * (colour_type == 3)
        is_mask = (depth, colour_type) in {(1, 0), (8, 0), (16, 0), *((bits, 3) for bits in KINDS[3]), (8, 4), (8, 6)}
        reads = [decode_image, decode_mask] if is_mask else [decode_image]
        sizes = (rows[0], sum(rows[:-1]), sum(rows) - 1, sum(rows), sum(rows) + 100)
        for length, behind in itertools.product(sizes, (b"", b"behind")):
            pixels = zlib.compress(bytes(length)) + behind
            for (cut, window), read in itertools.product(((-3, []), (None, []), (None, [everything])), reads):
                parts = (pixels[:cut], b"", pixels[cut:] if cut else b"")
                path.write_bytes(before + b"".join(chunk(b"IDAT", part) for part in parts) + chunk(b"IEND", b""))
                if length < sum(rows):
                    with pytest.raises(ValueError, match=f"{path}: cannot be decoded"):
                        read(path, *window)
                elif read is decode_image or colour_type in (0, 3):  # others are transparent
                    assert not read(path, *window).any()


def test_labels_of_other_bits_and_channels_are_refused(tmp_path):
    """Decoders stretch the 0 … 15 of 4 bits to 0 … 255, and some of these are other classes."""
    path = tmp_path / "x.png"
    header = chunk(b"IHDR", b"\0\0\0\x28" + b"\0\0\0\x18" + bytes([4, 0, 0, 0, 0]))  # 40x24, 4 bits, grayscale
    rows = chunk(b"IDAT", zlib.compress((b"\0" + bytes(20)) * 24))
    for data, kind in (
        (encoded(np.zeros((24, 40, 3), np.uint8), "PNG"), "8 bits and colour type 2"),
        (encoded(np.zeros((24, 40), np.uint16), "PNG"), "16 bits and colour type 0"),
        (b"\x89PNG\r\n\x1a\n" + header + rows + chunk(b"IEND", b""), "4 bits and colour type 0"),
    ):
        path.write_bytes(data)
        for window in ((), ((slice(0, 4), slice(0, 4)),)):
            with pytest.raises(ValueError, match=f"{path}: is a PNG of {kind}; expected one 8-bit class id"):
                decode_label(path, *window)


def test_more_pixels_than_pillow_opens_are_refused_from_the_header(tmp_path):
    path = saved(tmp_path / "x.jpg", Image.fromarray(photograph()))
    data = path.read_bytes()
    size = data.index(HEIGHT.to_bytes(2, "big") + WIDTH.to_bytes(2, "big"))
    path.write_bytes(data[:size] + b"\xff\xff\x40\x00" + data[size + 4 :])
    with pytest.raises(ValueError, match=f"{path}: has more than 178 megapixels; expected fewer: cut"):
        read_size(path)
    label = saved(tmp_path / "x.png", palette(66))
    data = label.read_bytes()
    label.write_bytes(data[:8] + chunk(b"IHDR", b"\0\1\0\0" + b"\0\1\0\0" + data[24:29]) + data[33:])
    with pytest.raises(ValueError, match=f"{label}: has more than 178 megapixels; expected fewer: cut"):
        decode_label(label)


@pytest.mark.parametrize("suffix", [".png", ".jpg"])
def test_whatever_byte_of_a_header_is_damaged_the_error_names_the_file(suffix, tmp_path):
    path = saved(tmp_path / f"x{suffix}", palette(66) if suffix == ".png" else Image.fromarray(photograph()))
    data = path.read_bytes()
    for place in range(8, 700, 5):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x80]) + data[place + 1 :])
        for read in (read_size, decode_label if suffix == ".png" else lambda path: decode_image(path, WINDOWS[0])):
            try:
                read(path)
            except ValueError as error:
                assert str(error).startswith(f"{path}: "), (place, error)


def chunk(kind: bytes, content: bytes) -> bytes:
    return len(content).to_bytes(4, "big") + kind + content + zlib.crc32(kind + content).to_bytes(4, "big")


def with_thumbnail(data: bytes) -> bytes:
    """A JPEG with another one in its EXIF segment, as cameras write it."""
    thumbnail = b"Exif\0\0" + cv2.imencode(".jpg", photograph()[:16, :16])[1].tobytes()
    return data[:2] + b"\xff\xe1" + (len(thumbnail) + 2).to_bytes(2, "big") + thumbnail + data[2:]


BEHIND = (
    bytes(9000),
    b"\0\0\0\x18ftypmp42" + np.random.default_rng(2).bytes(9000),  # a film
    cv2.imencode(".jpg", photograph())[1].tobytes() + bytes(9000),
)


@pytest.mark.parametrize("kind", ["png", "jpeg 4:2:0", "jpeg with restarts", "progressive jpeg", "gray jpeg"])
def test_only_bytes_up_to_the_end_mark_count(kind, tmp_path, capfd):
    """Panoramas and motion photos have bytes behind it. A thumbnail's end mark is not the image's."""
    path = image_of(kind, tmp_path)
    whole = decode_image(path)
    data = path.read_bytes() if kind == "png" else with_thumbnail(path.read_bytes())
    for cut in [*range(4, len(data), 17), len(data) - 2, len(data) - 1]:
        path.write_bytes(data[:cut])
        for read in (read_size, decode_image):
            with pytest.raises(ValueError, match=f"{path}: (.* truncated|cannot be decoded)"):
                read(path)
    capfd.readouterr()
    for behind, count in itertools.product(BEHIND, (0, 1, 5000, None)):
        path.write_bytes(data + behind[:count])
        assert read_size(path) == (WIDTH, HEIGHT)
        assert np.array_equal(decode_image(path), whole)
        assert np.array_equal(decode_image(path, WINDOWS[40]), whole[WINDOWS[40]])
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind, at_end", [(b"zTXt", False), (b"iCCP", False), (b"iCCP", True)])
def test_chunks_that_are_too_large_for_pillow_are_left_out(kind, at_end, tmp_path):
    added = b"comment\0\0" + zlib.compress(bytes(2_000_000))

    def enlarged(name: str, image: Image.Image) -> Path:
        data = saved(tmp_path / name, image).read_bytes()
        (tmp_path / name).write_bytes(with_chunk(data, kind, added, at_end))
        with pytest.raises(ValueError, match="MAX_TEXT"):
            Image.open(tmp_path / name).load()
        return tmp_path / name

    path = enlarged("image.png", Image.fromarray(photograph()))
    assert read_size(path) == (WIDTH, HEIGHT)
    assert np.array_equal(decode_image(path), photograph())
    assert np.array_equal(decode_image(path, WINDOWS[9]), photograph()[WINDOWS[9]])
    for name, image in (("palette.png", palette(66)), ("gray.png", Image.fromarray(labels()))):
        path = enlarged(name, image)
        assert read_size(path) == (WIDTH, HEIGHT)
        assert np.array_equal(decode_label(path), labels())
        assert np.array_equal(decode_label(path, WINDOWS[9]), labels()[WINDOWS[9]])


def tiff(
    values: np.ndarray, order: str = "<", bits: int = 0, interpretation: int = 0, planes: int = 1, **options
) -> bytes:
    """A TIFF file of `values`, (H, W, channels) or with planes=2 (channels, H, W).

    `options`: kind, extra, rows_per_strip, tile (its side), compression, predictor, parts (encoded strips or tiles),
    start (where the pixels are said to be).
    """
    height, width, channels = values.shape if planes == 1 else np.moveaxis(values, 0, 2).shape
    stored = values.astype(values.dtype.newbyteorder(order))
    parts = options.get("parts") or [part.tobytes() for part in (stored if planes == 2 else [stored])]
    if bits == 12:
        parts = [bytes.fromhex("".join(f"{level:03x}" for level in values.flat))]
    *places, _ = itertools.accumulate(map(len, parts), initial=options.get("start", 8))
    data, lengths, tile = b"".join(parts), [*map(len, parts)], options.get("tile", 0)
    tags = {
        **{256: [width], 257: [height], 258: channels * [bits or 8 * values.itemsize]},
        **{259: [options.get("compression", 1)], 262: [interpretation], 277: [channels], 284: [planes]},
        **{317: [options.get("predictor", 1)], 338: options.get("extra", []), 339: options.get("kind", [1])},
    }
    strips = {273: places, 278: [options.get("rows_per_strip", height)], 279: lengths}
    tags |= {322: [tile], 323: [tile], 324: places, 325: lengths} if tile else strips
    tags, entries, beyond = {tag: numbers for tag, numbers in sorted(tags.items()) if numbers}, b"", b""
    for tag, numbers in tags.items():
        packed = struct.pack(f"{order}{len(numbers)}I", *numbers)
        if len(numbers) > 1:
            place = 8 + len(data) + 2 + 12 * len(tags) + 4 + len(beyond)
            packed, beyond = struct.pack(f"{order}I", place), beyond + packed
        entries += struct.pack(f"{order}HHI", tag, 4, len(numbers)) + packed
    head = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + beyond


BYTES = np.random.default_rng(2).integers(0, 256, (5, 6, 4), dtype=np.uint8)
DEEP = BYTES.astype(np.uint16) * 256 + 200
PLANES = np.moveaxis(DEEP[..., :3], 2, 0)
RIGHT = {  # a TIFF and its pixels, (H, W, 1 or 3)
    "RGB": (tiff(BYTES[..., :3], interpretation=2), BYTES[..., :3]),
    "RGB of 16 bits, big-endian": (tiff(DEEP[..., :3], ">", interpretation=2), BYTES[..., :3]),
    "RGB and another band": (tiff(BYTES, interpretation=2, extra=[0]), BYTES[..., :3]),
    "RGB that alpha was multiplied with": (tiff(BYTES, interpretation=2, extra=[1]), BYTES[..., :3]),
    "RGB of 16 bits and such alpha": (tiff(DEEP, ">", interpretation=2, extra=[1]), BYTES[..., :3]),
    "RGB, such alpha and a band": (tiff(BYTES[..., [0, 1, 2, 3, 0]], interpretation=2, extra=[1, 0]), BYTES[..., :3]),
    "gray": (tiff(BYTES[..., :1], interpretation=1), BYTES[..., :1]),
    "gray and alpha": (tiff(BYTES[..., :2], interpretation=1, extra=[2]), BYTES[..., :1]),
    "gray, 0 is white": (tiff(BYTES[..., :1]), 255 - BYTES[..., :1]),
    "gray of 16 bits, 0 is white": (tiff(65535 - DEEP[..., :1]), BYTES[..., :1]),
    "gray of 12 bits": (tiff(DEEP[..., :1] >> 4, bits=12, interpretation=1), BYTES[..., :1]),
}
REFUSED = {  # TIFFs that Pillow does not open, or misreads
    "planes": tiff(PLANES.astype(np.uint8), interpretation=2, planes=2),
    "alpha in planes": tiff(np.moveaxis(BYTES, 2, 0).copy(), interpretation=2, planes=2, extra=[1]),
    "BigTIFF, big-endian": struct.pack(">2sHHHQQQ", b"MM", 43, 8, 0, 16, 0, 0),
    "signed": tiff(BYTES[..., :1], interpretation=1, kind=[2]),
    "floats": tiff(BYTES[..., :1].astype(np.float32), interpretation=1, kind=[3]),
    "32 bits": tiff(BYTES[..., :1].astype(np.uint32), interpretation=1),
    "four bands": tiff(BYTES, interpretation=1, extra=[0, 0, 0]),
    "nine bands": tiff(np.dstack([BYTES[..., :3]] * 3), interpretation=2, extra=6 * [0]),
    "subsampled YCbCr": tiff(BYTES[..., :3], interpretation=6),
    "14 bits": tiff(DEEP[..., :1], bits=14, interpretation=1),
    "a strip is missing": tiff(BYTES[..., :1], interpretation=1, rows_per_strip=3),
}


@pytest.mark.parametrize("kind", [*RIGHT, *REFUSED])
def test_a_tiff_is_read_as_it_was_written_or_refused_with_what_is_expected(kind, tmp_path):
    """Pillow opens some kinds without an error and gives other pixels, as a comparison with tifffile showed."""
    path = tmp_path / "x.tif"
    path.write_bytes(RIGHT[kind][0] if kind in RIGHT else REFUSED[kind])
    if kind in RIGHT:
        assert np.array_equal(decode_image(path, turned=True), np.broadcast_to(RIGHT[kind][1], (5, 6, 3)))
        return
    message = f"^{path}: cannot be decoded as an image; expected a TIFF of gray, RGB, CMYK or a palette, .*: convert it"
    for read in (partial(decode_image, turned=True), partial(read_size, turned=True)):
        with pytest.raises(ValueError, match=message):
            read(path)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_levels_of_16_bit_images_lie_between_two_values(channels, order, tmp_path):
    """The rest is clipped. A PNG's and a TIFF's values are the same, in a window too."""
    values = np.random.default_rng(3).integers(0, 65536, (9, 7, channels), dtype=np.uint16)
    seen = np.broadcast_to(values[..., :3], (9, 7, 3)).astype(int)
    kind = {"interpretation": 1 if channels == 1 else 2, "extra": [2] * (channels == 4)}
    (tmp_path / "x.tif").write_bytes(tiff(values, order, **kind))
    trees.write(tmp_path / "x.png", values[..., [2, 1, 0, 3][:channels]] if channels > 1 else values)
    window = slice(2, 8), slice(1, 5)
    for path, (low, high) in itertools.product(tmp_path.iterdir(), ((0, 65535), (0, 4095), (51241, 52181), (7, 8))):
        expected = seen >> 8 if high == 65535 else (seen.clip(low, high) - low) / (high - low) * 256
        expected = np.floor(expected).clip(0, 255).astype(np.uint8)
        for part in ((slice(None), slice(None)), window):
            assert np.array_equal(decode_image(path, part, turned=True, range16=(low, high)), expected[part]), path
        assert np.array_equal(decode_values(stored(path, photograph=True)), seen)
    shallow = image_of("png", tmp_path)
    assert decode_values(stored(shallow)).dtype == np.uint8
    assert np.array_equal(decode_image(shallow, range16=(0, 4095)), photograph())


def test_gray_photographs_of_other_formats_become_rgb(tmp_path):
    gray = BYTES[..., 0].copy()
    eight, sixteen = Image.fromarray(gray), Image.fromarray(gray.astype(np.uint16) * 257)
    for name, image in {"a.tga": Image.merge("LA", [eight, eight]), "b.png": sixteen, "c.pgm": sixteen}.items():
        image.save(tmp_path / name)
        assert np.array_equal(decode_image(tmp_path / name, turned=True), np.dstack([gray] * 3)), name


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_photographs_are_turned_as_viewers_show_them(suffix, tmp_path):
    """A dataset's images are not: its labels match the stored pixels."""
    path = tmp_path / f"a{suffix}"
    image, exif = Image.fromarray(photograph()), Image.Exif()
    image.save(path)
    stored = decode_image(path, turned=True)
    for exif[0x0112] in range(1, 9):  # the EXIF orientation
        image.save(path, exif=exif)
        expected = Image.fromarray(stored)
        expected.getexif().update(exif)
        assert np.array_equal(decode_image(path, turned=True), ImageOps.exif_transpose(expected)), dict(exif)
        if suffix in (".jpg", ".png"):
            assert np.array_equal(decode_image(path), stored)


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    """Pillow would run Ghostscript on a file with EPS content, whatever its name."""
    for name in ("Ghostscript", "has_ghostscript"):
        monkeypatch.setattr(EpsImagePlugin, name, lambda *_, **__: pytest.fail("Ghostscript was asked for"))
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg", "EPS")
    with pytest.raises(ValueError, match="photo.jpg: cannot be decoded as an image; expected AVIF, BMP, "):
        decode_image(tmp_path / "photo.jpg", turned=True)


def test_photographs_cut_short_are_named(tmp_path):
    image = Image.fromarray(photograph())
    for suffix in (".bmp", ".gif", ".jp2", ".jpg", ".png", ".tif", ".webp"):
        path = tmp_path / f"a{suffix}"
        image.save(path)
        data = path.read_bytes()
        for share in (0, 0.01, 0.5, 0.95):
            path.write_bytes(data[: int(share * len(data))])
            with pytest.raises(ValueError) as error:
                decode_image(path, turned=True)
            assert str(error.value).startswith(f"{path}: ") and "archive" not in str(error.value)


@pytest.mark.parametrize("kind", ["pipe", "device", "huge", "folder"])
def test_only_regular_files_of_at_most_4_gib_are_read(kind, tmp_path):
    """Nobody waits for a pipe, and no memory is filled: a sparse file of a terabyte takes no room on the disk."""
    path = tmp_path / "a\x1b[2J\n.png"
    {
        "pipe": lambda: os.mkfifo(path),
        "device": lambda: path.symlink_to("/dev/zero"),
        "huge": lambda: path.touch() or os.truncate(path, 2**32 + 1),
        "folder": path.mkdir,
    }[kind]()
    reason = "has 4,294,967,297 bytes; expected at most" if kind == "huge" else "is a folder, pipe or device; expected"
    for read in (decode_image, decode_label, decode_mask, partial(decode_image, turned=True), read_list, read_json):
        with pytest.raises(ValueError, match=reason) as error:
            read(path, "a name") if read is read_list else read(path)
        assert read in (read_list, read_json) or str(error.value).startswith(rf"{tmp_path}/a\x1b[2J\n.png: ")


def with_chunk(png: bytes, kind: bytes, content: bytes, late: bool) -> bytes:
    place = len(png) - 12 if late else 33  # before its end mark, or behind its header
    return png[:place] + chunk(kind, content) + png[place:]


PROFILE = f"\nexif\n{len(TURNED.tobytes()):8}\n{TURNED.tobytes().hex()}\n".encode()
XMP = b'<rdf:Description tiff:Orientation="6"/>'
TURNING = {
    "eXIf": (b"eXIf", TURNED.tobytes()[6:]),
    "zTXt": (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(PROFILE)),
    "XMP": (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + XMP),
}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", TURNING)
def test_an_orientation_counts_wherever_pillow_finds_it(kind, late, tmp_path):
    """An image is read as predict reads one that Pillow opened; a label is refused."""
    for name, pixels in (("image", photograph()), ("label", photograph()[..., 0] % 3)):
        Image.fromarray(pixels).save(file := BytesIO(), "PNG")
        (tmp_path / f"{name}.png").write_bytes(with_chunk(file.getvalue(), *TURNING[kind], late))
    expected = np.asarray(ImageOps.exif_transpose(Image.open(tmp_path / "image.png")))
    assert np.array_equal(decode_image(tmp_path / "image.png", turned=True), expected)
    assert expected.shape != photograph().shape
    with pytest.raises(ValueError, match="label.png: has an EXIF orientation"):
        decode_mask(tmp_path / "label.png")


@pytest.mark.parametrize("hidden", [False, True])
def test_all_see_the_first_image_of_an_animated_png(hidden, tmp_path):
    """OpenCV skips one that is not part of the animation; crops are read by Pillow."""
    first, *further = (Image.fromarray(np.roll(photograph(), step, axis=0)) for step in (0, 5, 9))
    first.save(tmp_path / "a.png", save_all=True, append_images=further, default_image=hidden)
    window = slice(2, 9), slice(3, 8)
    for turned in (False, True):
        assert np.array_equal(decode_image(tmp_path / "a.png", turned=turned), np.asarray(first))
        assert np.array_equal(decode_image(tmp_path / "a.png", window, turned), np.asarray(first)[window])


def test_pages_of_the_first_one_s_size_count(tmp_path):
    page, thumbnail = Image.fromarray(photograph()), Image.fromarray(photograph()[::2, ::2].copy())
    resized = thumbnail.resize(page.size)
    for suffix, further, count in ((".tif", [page, page], 3), (".tif", [thumbnail], 1), (".gif", [resized], 2)):
        page.save(tmp_path / f"a{suffix}", save_all=True, append_images=further)
        assert stored(tmp_path / f"a{suffix}", photograph=True).page_count == count
    page.save(tmp_path / "a.png")
    assert stored(tmp_path / "a.png").page_count == 1
    ids = Image.fromarray(photograph()[..., 0] % 3)
    ids.save(tmp_path / "label.tif", save_all=True, append_images=[ids.resize((2, 2))])  # a label beside its thumbnail
    assert np.array_equal(decode_mask(tmp_path / "label.tif"), np.asarray(ids))
    ids.save(tmp_path / "label.tif", save_all=True, append_images=[ids])
    with pytest.raises(ValueError, match="label.tif: .*one page"):
        decode_mask(tmp_path / "label.tif")
