"""Images of any number of channels: exactly what their files store, or a refusal with both numbers."""

import io
import json
import re
import struct
import zlib
from functools import partial
from itertools import chain, product
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from datasets import TrainingCrops, TrainingTransform
from datasets.folder import folder
from datasets.levels import mean_and_deviation
from datasets.reading import (
    EVERYTHING,
    decode_image,
    decode_mask,
    decode_values,
    further_channels,
    image_size,
    levels_of,
)
from datasets.segmentation import picture
from datasets.stored import read as read_file
from datasets.verify import inspect, verify
from tests import trees
from tests.datasets.test_reading import chunk, tiff

SIZE = HEIGHT, WIDTH = 21, 34
WINDOW = slice(3, 15), slice(4, 30)


def values(channels: int, dtype=np.uint8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, np.iinfo(dtype).max + 1, (*SIZE, channels), dtype=dtype)


def write_channels(path: Path, pixels: np.ndarray, **options) -> Path:
    """A file of an image's channels: an array, pages, an interleaved TIFF or a PNG, by its suffixes."""
    channels = pixels.shape[2]
    if path.suffix == ".npy":
        np.save(path, pixels, **options)
    elif path.suffixes == [".pages", ".tif"]:
        first, *further_pages = [Image.fromarray(plane) for plane in np.moveaxis(pixels, 2, 0).copy()]
        first.save(path, save_all=True, append_images=further_pages, **options)
    elif path.suffix == ".tif":
        colours = 3 if "rgb" in path.name else 1
        kind = {"interpretation": 2 if colours == 3 else 1, "extra": (channels - colours) * [0]}
        path.write_bytes(tiff(pixels, **kind))
    elif channels == 2:  # which OpenCV does not write, nor Pillow with 16 bits
        raw = b"".join(b"\0" + row.tobytes() for row in pixels.astype(pixels.dtype.newbyteorder(">")))
        header = struct.pack(">IIBBBBB", WIDTH, HEIGHT, 8 * pixels.itemsize, 4, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(raw)), (b"IEND", b""))
        path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*part) for part in parts))
    else:
        cv2.imwrite(str(path), pixels[..., [2, 1, 0, 3]] if channels == 4 else pixels)
    return path


FORMS = [
    *[("x.png", channels) for channels in (1, 2, 4)],
    *[("x.tif", channels) for channels in (1, 2, 4, 6, 20)],
    *[("x.pages.tif", channels) for channels in (2, 4, 6)],
    *[("x.npy", channels) for channels in (1, 2, 3, 6, 64)],
]


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("name, channels", FORMS)
def test_channels_are_read_as_they_are_stored(name, channels, dtype, tmp_path):
    """A window is a part of the whole; the values of 16 bits have one range, or one for each channel."""
    stored = values(channels, dtype)
    path = write_channels(tmp_path / name, stored)
    ranges = [(100 * place, 60_000 - 400 * place) for place in range(channels)]
    for range16 in ((0, 65535), (1000, 5000), [*chain(*ranges)]):
        expected = stored
        if dtype == np.uint16:
            pairs = ranges if len(range16) > 2 else channels * [range16]
            expected = np.stack([levels_of(*pair)[stored[..., place]] for place, pair in enumerate(pairs)], axis=2)
        read = partial(decode_image, path, turned=True, range16=range16, channels=channels)
        assert np.array_equal(read(), expected) and np.array_equal(read(WINDOW), expected[WINDOW])
        assert read(WINDOW).flags.c_contiguous
    file = read_file(path, True)
    assert image_size(file, True, channels) == (WIDTH, HEIGHT) and file.channels == channels
    assert decode_values(file, channels=channels).dtype == dtype


def compressed(pixels: np.ndarray, order: str, predictor: bool, tile: bool) -> bytes:
    """An interleaved TIFF with deflated strips of 8 rows, or tiles of 16x16 pixels."""
    parts = []
    down, across = (16, 16) if tile else (8, WIDTH)
    for y, x in product(range(0, HEIGHT, down), range(0, WIDTH, across)):
        part = pixels[y : y + down, x : x + across]
        if tile:
            part = np.pad(part, [(0, down - part.shape[0]), (0, across - part.shape[1]), (0, 0)])
        if predictor:
            part = np.concatenate([part[:, :1], part[:, 1:] - part[:, :-1]], axis=1)
        parts.append(zlib.compress(part.astype(part.dtype.newbyteorder(order)).tobytes()))
    kind = {"compression": 8, "interpretation": 1, "extra": (pixels.shape[2] - 1) * [0], "predictor": 1 + predictor}
    return tiff(pixels, order, parts=parts, rows_per_strip=8, tile=16 * tile, **kind)


@pytest.mark.parametrize("order", "<>")
@pytest.mark.parametrize("tile", [False, True])
@pytest.mark.parametrize("predictor", [False, True])
def test_compressed_tiffs_have_the_same_channels(predictor, tile, order, tmp_path):
    """A comparison with tifffile over bits, compressions, tiles, strips, predictors and orders found no difference."""
    for dtype in (np.uint8, np.uint16):
        stored = values(5, dtype)
        (tmp_path / "x.tif").write_bytes(compressed(stored, order, predictor, tile))
        expected = stored if dtype == np.uint8 else (stored >> 8).astype(np.uint8)
        assert np.array_equal(decode_image(tmp_path / "x.tif", turned=True, channels=5), expected)


def test_cmyk_is_read_as_stored_and_gray_with_white_as_0_is_turned(tmp_path):
    stored = values(4)
    (tmp_path / "cmyk.tif").write_bytes(tiff(stored, interpretation=5))
    assert np.array_equal(decode_image(tmp_path / "cmyk.tif", channels=4), stored)
    Image.fromarray(stored, "CMYK").save(tmp_path / "cmyk.jpg")
    with pytest.raises(ValueError, match=r"cmyk.jpg: is stored as CMYK; expected a PNG, a TIFF"):
        decode_image(tmp_path / "cmyk.jpg", channels=4)
    (tmp_path / "white.tif").write_bytes(tiff(stored[..., :1]))
    assert np.array_equal(decode_image(tmp_path / "white.tif", channels=1), 255 - stored[..., :1])
    Image.fromarray(stored).save(tmp_path / "x.webp", lossless=True, exact=True)
    assert np.array_equal(decode_image(tmp_path / "x.webp", channels=4), stored)


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("turn", range(1, 9))
def test_orientations_turn_all_channels(turn, suffix, tmp_path):
    stored, exif = values(4), Image.Exif()
    exif[0x0112] = turn
    Image.fromarray(stored).save(tmp_path / f"x{suffix}", exif=exif)
    image = decode_image(tmp_path / f"x{suffix}", turned=True, channels=4)
    assert np.array_equal(image[..., :3], decode_image(tmp_path / f"x{suffix}", turned=True))
    assert image.shape[:2] == (SIZE if turn < 5 else SIZE[::-1])
    assert image_size(read_file(tmp_path / f"x{suffix}", True), True, 4) == image.shape[1::-1]
    fourth = Image.fromarray(stored[..., 3])
    fourth.save(tmp_path / f"gray{suffix}", exif=exif)
    assert np.array_equal(image[..., 3], decode_image(tmp_path / f"gray{suffix}", turned=True)[..., 0])


def test_one_channel_takes_gray_and_equal_colours(tmp_path):
    gray = values(1)
    for suffix in (".png", ".jpg", ".bmp", ".tif", ".webp"):
        Image.fromarray(np.repeat(gray, 3, axis=2)).save(tmp_path / f"rgb{suffix}")
        Image.fromarray(gray[..., 0]).save(tmp_path / f"gray{suffix}")
        for name in (f"rgb{suffix}", f"gray{suffix}"):
            if suffix != ".webp":  # whose colours are rounded
                image = decode_image(tmp_path / name, turned=True, channels=1)
                assert np.array_equal(image, decode_image(tmp_path / name, turned=True)[..., :1]), name
    Image.fromarray(values(3)).save(tmp_path / "colour.png")
    with pytest.raises(ValueError, match=r"colour.png: has 3 channels that differ, expected 1: gray, or RGB of equal"):
        decode_image(tmp_path / "colour.png", turned=True, channels=1)
    with pytest.raises(ValueError, match="has 3 channels, expected 1"):  # of which the first page alone would be read
        decode_image(write_channels(tmp_path / "x.pages.tif", values(3)), channels=1)


def text(path: Path) -> None:
    np.save(path, np.array([["a"]], dtype=object), allow_pickle=True)


def cut(path: Path, by: int = 9) -> None:
    write_channels(path, values(4))
    path.write_bytes(path.read_bytes()[:-by])


def rows(path: Path, channels: int = 5) -> None:
    """What programs make of an array (H, W, channels) that is said to be pages."""
    write_channels(path, np.moveaxis(values(channels), 0, 2))


palette = partial(trees.write_palette, indices=values(1)[..., 0], colours=[(7, 9, 8)] * 256)
TIFF = "cannot be decoded as an image.*; expected a TIFF of unsigned integers of 8 or 16 bits, its channels interleaved"
REFUSED = {
    "three for four": (
        "x.png",
        lambda path: write_channels(path, values(3)),
        4,
        "has 3 channels, expected 4: train with channels=3, if all images have as many; or convert",
    ),
    "a photograph": ("x.jpg", lambda path: write_channels(path, values(3)), 4, "has 3 channels, expected 4"),
    "pages": ("x.pages.tif", lambda path: write_channels(path, values(3)), 4, "has 3 channels, expected 4"),
    "bands": ("x.tif", lambda path: write_channels(path, values(6)), 4, "has 6 channels, expected 4"),
    "a palette": ("x.png", palette, 1, "has a palette, whose indices are no channel"),
    "a GIF": ("x.gif", lambda path: Image.fromarray(values(3)).save(path), 4, "has a palette"),
    "floats": ("x.npy", lambda path: np.save(path, np.zeros((4, 5, 6))), 6, "is an array .4, 5, 6. of float64; exp"),
    "objects": ("x.npy", text, 2, "is an array .1, 1. of object; expected an array .H, W, channels. of uint8 or"),
    "a cut array": ("x.npy", cut, 4, "cannot be decoded as an image; expected an array .*, undamaged"),
    "channels first": ("x.npy", lambda path: np.save(path, np.moveaxis(values(5), 2, 0)), 5, "5 long: store .H, W, ch"),
    "such of another number": ("x.npy", lambda path: np.save(path, values(5).T), 3, "its first axis is 5 long: store"),
    "rows as pages": ("x.pages.tif", rows, 5, f"has {HEIGHT} pages of {WIDTH}x5, so the rows .* store its channels, s"),
    "such of six": ("x.pages.tif", partial(rows, channels=6), 4, f"has {HEIGHT} pages of {WIDTH}x6, so the rows"),
    "no array": ("x.npy", lambda path: path.write_text("version https://git-lfs"), 4, "begins with b.versio., as no a"),
    "an empty file": ("x.npy", lambda path: path.write_bytes(b""), 4, "cannot be read .*expected an array"),
    "a cut TIFF": ("x.tif", partial(cut, by=400), 4, f"{TIFF}.*undamaged"),
    "planes": ("x.tif", lambda path: path.write_bytes(tiff(values(5), interpretation=1, planes=2)), SIZE[0], TIFF),
    "signed": ("x.tif", lambda path: path.write_bytes(tiff(values(5), interpretation=1, kind=[2])), 5, "holds int8.;"),
    "32 bits": ("x.tif", lambda path: write_channels(path, values(5, np.uint32)), 5, "holds uint32"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_other_files_are_refused_by_name_with_what_is_expected(kind, tmp_path):
    name, write, channels, message = REFUSED[kind]
    write(tmp_path / name)
    with pytest.raises(ValueError, match=f"^{re.escape(str(tmp_path / name))}: .*{message}"):
        decode_image(tmp_path / name, turned=True, channels=channels)


def test_only_the_rows_that_are_needed_are_read_from_an_array(tmp_path, monkeypatch):
    """Also of an array with the other byte order; of one in the order of columns all are."""
    stored, path, read = values(6, np.uint16), tmp_path / "x.npy", []

    class Counted(io.FileIO):
        def read(self, size=-1):
            read.append(super().read(size))
            return read[-1]

    for array in (stored, np.asfortranarray(stored), stored.astype(">u2")):
        np.save(path, array)
        assert np.array_equal(decode_image(path, channels=6), stored >> 8)
        monkeypatch.setattr("datasets.stored.open", Counted, raising=False)
        file = read_file(path, True)
        assert image_size(file, True, 6) == (WIDTH, HEIGHT) and sum(map(len, read)) < 500
        assert np.array_equal(decode_image(file, WINDOW, channels=6), stored[WINDOW] >> 8)
        assert np.isfortran(array) or len(read[-1]) == 12 * WIDTH * 12
        monkeypatch.undo()
        read.clear()


@pytest.mark.parametrize("seen", [0, 1])
@pytest.mark.parametrize("window", [EVERYTHING, WINDOW])
def test_an_array_that_becomes_shorter_is_refused_by_name(window, seen, tmp_path, monkeypatch):
    """Also if it does so after its size was `seen`: a map of the file would end the process."""
    path = write_channels(tmp_path / "x.npy", values(6))
    file, length = read_file(path, True), len(path.read_bytes())
    path.write_bytes(path.read_bytes()[: 128 + 4 * 6 * WIDTH])

    class Before(io.FileIO):
        def seek(self, place, whence=io.SEEK_SET):
            return max(super().seek(place, whence), seen * length)

    monkeypatch.setattr("datasets.stored.open", Before, raising=False)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}: cannot be decoded as an image; expected an array"):
        decode_image(file, window, channels=6)


@pytest.mark.parametrize("start", [0, 208])
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5])
def test_a_tiff_whose_pixels_are_not_in_the_file_is_refused(channels, start, tmp_path):
    """Left out (0), or cut: they would begin where others lie, and end behind the file's end."""
    interpretation = 2 if channels == 3 else 1
    for compression in (1, 8):
        pixels = tiff(values(channels), interpretation=interpretation, start=start, compression=compression)
        (tmp_path / "x.tif").write_bytes(pixels)
        with pytest.raises(ValueError, match=r"x.tif: cannot be decoded as an image; expected a TIFF .*, undamaged"):
            decode_image(tmp_path / "x.tif", turned=True, channels=channels)
    if channels == 1:
        with pytest.raises(ValueError, match=r"x.tif: cannot be decoded as a label; expected a TIFF .*, undamaged"):
            decode_mask(tmp_path / "x.tif")


# --- datasets


def dataset_folder(root: Path, name: str, channels: int, dtype=np.uint8, images: int = 4) -> Path:
    """A dataset of one split and two classes."""
    for number in range(images):
        path = root / "train" / "images" / f"{number}{name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        write_channels(path, values(channels, dtype, number))
        label = np.random.default_rng(number).integers(0, 2, SIZE, np.uint8)
        trees.write(root / "train" / "labels" / f"{path.stem}.png", label)
    (root / "classes.json").write_text(json.dumps({"classes": [{"name": "a"}, {"name": "b"}]}))
    return root


@pytest.mark.parametrize("name, channels", [(".png", 1), (".tif", 2), (".png", 4), (".npy", 5), (".pages.tif", 6)])
def test_crops_treat_all_channels_alike(name, channels, tmp_path):
    """Each channel of a crop is what it is in a crop of an image that has it three times, padding too."""
    root, fill = dataset_folder(tmp_path, name, channels), [float(20 * number + 7) for number in range(channels)]
    dataset, of_colours = folder(root, "train", channels=channels), TrainingTransform((24, 40), scale=(0.4, 2.0))
    transform = TrainingTransform((24, 40), scale=(0.4, 2.0), fill=tuple(fill))
    crops = TrainingCrops(dataset, transform, seed=3)
    for key in [(epoch, image) for epoch in range(4) for image in range(len(dataset))]:
        crop = crops[key]
        assert crop["image"].shape == (channels, 24, 40) and crop["image"].is_contiguous()
        image, label, _ = dataset[key[1]]
        for number, level in enumerate(fill):
            of_colours.fill = (level,) * 3
            gray = np.repeat(image[..., number : number + 1], 3, axis=2)
            expected, its_label = of_colours(gray, label, np.random.default_rng([3, *key]))
            assert np.array_equal(crop["image"][number], expected[..., 0])
            assert np.array_equal(crop["label"], its_label)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_split_is_checked_and_its_channels_are_measured(dtype, tmp_path):
    dataset = folder(dataset_folder(tmp_path / "data", ".npy", 5, dtype), "train", channels=5)
    assert verify(dataset) == [] == verify(dataset) and inspect(dataset, 0).problems == ()
    images = np.stack([dataset[number].image for number in range(len(dataset))]) / 255
    mean, std = mean_and_deviation(dataset)
    assert np.allclose(mean, images.mean(axis=(0, 1, 2)), atol=1e-4)
    assert np.allclose(std, images.std(axis=(0, 1, 2)), atol=1e-4)
    of_four = folder(tmp_path / "data", "train", channels=4)
    with pytest.raises(ValueError, match=r"4 problem\(s\) in 4 images:\n.*0.npy: has 5 channels, expected 4"):
        verify(of_four)
    with pytest.raises(ValueError, match=r"4 problem\(s\) in 4 images:\n.*0.npy: has 5 channels, expected 3"):
        verify(folder(tmp_path / "data", "train"))


@pytest.mark.parametrize(
    "name, channels, expected",
    [
        (".png", 4, "images have 4 channels, of which one besides gray or red, green and blue varies"),
        (".pages.tif", 4, "only the first is read: export each as an image, or three as RGB"),
        (".png", 3, None),
    ],
)
def test_what_three_channels_leave_out_is_said_once(name, channels, expected, tmp_path):
    root = dataset_folder(tmp_path / "data", name, channels)
    for doubts in (verify(folder(root, "train", keys="data.")), verify(folder(root, "train", keys="data."))):
        assert [expected in sentence for sentence in doubts] == [True] * (expected is not None)


def test_alpha_that_is_the_same_everywhere_is_not_named(tmp_path):
    pixels = values(4)
    pixels[..., 3] = 255
    assert further_channels(read_file(write_channels(tmp_path / "x.png", pixels), True)) == 0
    pixels[5, 5, 3] = 254
    assert further_channels(read_file(write_channels(tmp_path / "x.png", pixels), True)) == 4
    (tmp_path / "cmyk.tif").write_bytes(tiff(values(4), interpretation=5))
    assert further_channels(read_file(tmp_path / "cmyk.tif", True)) == 4


def test_pictures_show_three_channels_or_one(tmp_path):
    for channels, shown, places in [
        (3, None, [0, 1, 2]),
        (6, None, [0, 1, 2]),
        (2, None, [0, 0, 0]),
        (1, None, [0, 0, 0]),
        (6, [4, 3, 2], [3, 2, 1]),
        (6, [5], [4, 4, 4]),
        (3, [3, 2, 1], [2, 1, 0]),
    ]:
        assert np.array_equal(picture(values(channels), shown), values(channels)[..., places])
