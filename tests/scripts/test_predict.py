"""Predicting any images from a checkpoint alone: which files are written, under which names."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image, ImageOps

from datasets import vistas
from datasets.reading import decode_image, decode_photograph
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.configuration import config as cfg
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import inference
from scripts.predict import find_images, predict
from tests import trees
from tests.runs import REPOSITORY, composed, run_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, tuple]:
    """A checkpoint whose data is gone, and the data's palette, which only a file of the data held."""
    folder = tmp_path_factory.mktemp("trained")
    config = run_config("data=vistas", f"data.root={trees.vistas(folder / 'data')}", "data.base_size=48")
    dataset = vistas(folder / "data", "val")
    torch.manual_seed(0)
    network = assemble.segmentation_network(config, 65)
    torch.nn.init.normal_(network.cls.weight)  # or it might predict one class everywhere
    state = {"task": "segmentation", "step": 2, "config": cfg.plain(config), "network": network.state_dict()}
    state |= {"classes": list(dataset.classes), "palette": [list(colour) for colour in dataset.palette]}
    checkpoint.save(folder / "net.pt", state)
    shutil.rmtree(folder / "data")
    return folder / "net.pt", dataset.palette


def run(trained, source: Path, output: Path, *overrides: str) -> list[Path]:
    options = (f"checkpoint={trained[0]}", f'input="{source}"', f"output={output}", "device=cpu")
    return predict(composed("predict", *options, *overrides))


def picture(path: Path, size: tuple[int, int] = (40, 60), index: int = 0) -> np.ndarray:
    pixels = cv2.GaussianBlur(trees.pair(index, [0], size)[0], (0, 0), 4)
    pixels = cv2.normalize(pixels, None, 0, 255, cv2.NORM_MINMAX)
    trees.write(path, pixels)
    return pixels


def test_the_example_in_python_runs(trained):
    (example,) = re.findall(r"(?ms)^```python\n(.*?)^```", (REPOSITORY / "docs/training.md").read_text())
    ran: dict = {}
    exec(example.replace("RUN_DIR", str(trained[0])), ran)
    assert ran["logits"].shape == (1, 65, 240, 320) and not ran["forward"].network.training


def relative_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_one_image_from_a_checkpoint_alone(trained, tmp_path):
    """Ids equal the evaluation's, at the image's size. Colours are the data's, although the data is gone."""
    picture(tmp_path / "street.jpg")
    written = run(trained, tmp_path / "street.jpg", tmp_path / "out")
    assert written == [tmp_path / "out" / "ids" / "street.png"]
    pictures = [f"{kind}/street.png" for kind in ("colour", "ids", "overlays")]
    assert relative_files(tmp_path / "out") == ["classes.json", *pictures]
    ids = cv2.imread(str(written[0]), cv2.IMREAD_UNCHANGED)
    image = decode_image(tmp_path / "street.jpg")

    state = checkpoint.load(trained[0])
    config = cfg.from_plain(state["config"], SegmentationRun)
    network = assemble.segmentation_network(config, 65)
    network.load_state_dict(state["network"])
    forward = assemble.forward(config, network, torch.device("cpu"))
    views = inference.Views(base_size=config.data.base_size)
    expected = inference.predict(forward, torch.from_numpy(image).permute(2, 0, 1)[None], views)[0]
    assert ids.dtype == np.uint8 and np.array_equal(ids, expected) and len(np.unique(ids)) > 1

    colours = np.array(trained[1], np.uint8)[ids]
    assert np.array_equal(decode_image(tmp_path / "out" / "colour" / "street.png"), colours)
    overlay = decode_image(tmp_path / "out" / "overlays" / "street.png").astype(float)
    assert np.abs(overlay - (0.6 * colours + 0.4 * image)).max() <= 1
    classes = json.loads((tmp_path / "out" / "classes.json").read_text())
    assert [entry["id"] for entry in classes] == list(range(65)) and classes[7]["name"] == "Class 7"
    assert [tuple(entry["colour"]) for entry in classes] == list(trained[1])


def test_a_folder_with_odd_images_and_a_broken_one(trained, tmp_path, capsys):
    """Readable images are predicted; the others are named at the end."""
    source = tmp_path / "Straßen 街"
    pixels = picture(source / "colour.png")
    sub = source / "süd, b=[1]"
    sub.mkdir()
    gray = Image.fromarray(pixels[..., 0])
    gray.save(sub / "gray.JPG")
    Image.fromarray(pixels).convert("CMYK").save(sub / "cmyk.jpeg")
    gray.convert("P").save(source / "palette.png")
    trees.write(source / "alpha.png", np.dstack([pixels, pixels[..., 0]]))
    trees.write(source / "deep.png", pixels.astype(np.uint16) * 257)
    (source / "cut.jpg").write_bytes((sub / "cmyk.jpeg").read_bytes()[:300])
    (source / "text.png").write_text("no image")
    (source / "notes.txt").write_text("not looked at")
    (sub / "film.mp4").write_text("not looked at")
    (source / ".hidden.png").write_text("not looked at")
    with pytest.raises(ValueError) as error:
        run(trained, source, tmp_path / "out")
    message = str(error.value)
    assert message.startswith("2 of 8 images were not predicted:\n")
    assert "archive" not in message  # advice for datasets
    skipped = f"skipped 2 file(s) without an image's suffix: {Path('notes.txt')}, {Path('süd, b=[1]/film.mp4')}\n"
    assert capsys.readouterr().out.count(skipped) == 1
    assert f"{source / 'cut.jpg'}: the JPEG file is truncated" in message
    assert f"{source / 'text.png'}: cannot be decoded as an image" in message
    names = ["alpha", "colour", "deep", "palette", "süd, b=[1]/cmyk", "süd, b=[1]/gray"]
    for kind in ("ids", "colour", "overlays"):
        assert relative_files(tmp_path / "out" / kind) == [f"{name}.png" for name in names]
        for name in names:
            assert Image.open(tmp_path / "out" / kind / f"{name}.png").size == (60, 40)
    same = {name: decode_image(tmp_path / "out" / "ids" / f"{name}.png").tobytes() for name in names}
    assert same["colour"] == same["alpha"] == same["deep"]


@pytest.mark.parametrize("suffix", [".jpg", ".png", ".webp", ".tif"])
def test_photographs_are_turned_as_viewers_show_them(suffix, tmp_path):
    """A dataset's images are not: its labels match the stored pixels."""
    path = tmp_path / f"a{suffix}"
    image, exif = Image.fromarray(picture(tmp_path / "b.png")), Image.Exif()
    image.save(path)
    stored = decode_photograph(path)
    for exif[0x0112] in range(1, 9):  # the EXIF orientation
        image.save(path, exif=exif)
        expected = Image.fromarray(stored)
        expected.getexif().update(exif)
        assert np.array_equal(decode_photograph(path), ImageOps.exif_transpose(expected)), dict(exif)
        if suffix in (".jpg", ".png"):
            assert np.array_equal(decode_image(path), stored)


def test_every_usual_format_is_predicted(trained, tmp_path, capsys):
    formats = [".bmp", ".gif", ".j2k", ".jfif", ".mpo", ".ppm", ".qoi", ".tga", ".tif", ".TIFF", ".webp"]
    pixels = picture(tmp_path / "in" / "a.png")[..., ::-1]
    for number, suffix in enumerate(formats):
        Image.fromarray(pixels).save(tmp_path / "in" / f"{number:02d}{suffix}", "JPEG" if suffix == ".mpo" else None)
    frames = [Image.fromarray(pixels[..., 0]), Image.new("L", (60, 40))]
    frames[0].save(tmp_path / "in" / "film.gif", save_all=True, append_images=frames[1:])
    written = run(trained, tmp_path / "in", tmp_path / "out")
    assert "skipped" not in capsys.readouterr().out
    assert [path.stem for path in written] == [*(f"{number:02d}" for number in range(len(formats))), "a", "film"]
    assert all(Image.open(path).size == (60, 40) for path in written)
    lossless = [number for number, suffix in enumerate(formats) if suffix in (".bmp", ".ppm", ".qoi", ".tga", ".tif")]
    assert {written[number].read_bytes() for number in lossless} == {written[-2].read_bytes()}
    assert np.array_equal(decode_photograph(tmp_path / "in" / "film.gif")[..., 0], pixels[..., 0])  # the first frame


def tiff(levels: np.ndarray, bits: int, interpretation: int) -> bytes:
    """A little-endian TIFF file of gray levels: 16 bits each, or 12, which Pillow cannot write."""
    data = levels.astype("<u2").tobytes()
    if bits == 12:
        data = bytes.fromhex("".join("".join(f"{level:03x}" for level in row) for row in levels))
    height, width = levels.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: interpretation, 273: 8, 277: 1, 278: height}
    entries = b"".join(struct.pack("<HHII", tag, 3, 1, value) for tag, value in (tags | {279: len(data)}).items())
    return b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags) + 1) + entries + bytes(4)


def test_gray_photographs_become_rgb(tmp_path):
    gray = picture(tmp_path / "b.png")[..., 0]
    eight, sixteen = Image.fromarray(gray), Image.fromarray(gray.astype(np.uint16) * 257)
    both = Image.merge("LA", [eight, eight])
    for mode, image, suffix in (
        *(("I;16", sixteen, ".tif"), ("L", eight, ".tif")),
        *(("LA", both, ".tga"), ("I;16", sixteen, ".png")),
    ):
        path = tmp_path / f"{mode}{suffix}"
        image.save(path)
        assert Image.open(path).mode == mode
        assert np.array_equal(decode_photograph(path), np.dstack([gray] * 3)), path
    sixteen.save(tmp_path / "sixteen.pgm")
    assert np.array_equal(decode_photograph(tmp_path / "sixteen.pgm"), np.dstack([gray] * 3))
    for bits, black in ((12, 0), (16, 65535)):
        levels = np.array([[0, 255 << bits - 8], [128 << bits - 8, 0]], np.uint16)
        (tmp_path / "levels.tif").write_bytes(tiff(abs(black - levels.astype(np.int32)), bits, 0 if black else 1))
        assert np.array_equal(decode_photograph(tmp_path / "levels.tif")[..., 0], [[0, 255], [128, 0]]), (bits, black)
    Image.fromarray(gray.astype(np.float32)).save(path.with_suffix(".tif"))  # its black and white are unknown
    with pytest.raises(ValueError, match="I;16.tif: has pixels of Pillow's mode 'F'; expected 8 or 16"):
        decode_photograph(path.with_suffix(".tif"))


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    """Pillow would run Ghostscript on a file with EPS content, whatever its name."""
    for name in ("Ghostscript", "has_ghostscript"):
        monkeypatch.setattr(EpsImagePlugin, name, lambda *_, **__: pytest.fail("Ghostscript was asked for"))
    Image.new("RGB", (8, 8)).save(tmp_path / "photo.jpg", "EPS")
    with pytest.raises(ValueError, match="photo.jpg: cannot be decoded as an image; expected AVIF, BMP, "):
        decode_photograph(tmp_path / "photo.jpg")


def test_photographs_cut_short_are_named(tmp_path):
    image = Image.fromarray(picture(tmp_path / "b.png"))
    for suffix in (".bmp", ".gif", ".jp2", ".jpg", ".png", ".tif", ".webp"):
        path = tmp_path / f"a{suffix}"
        image.save(path)
        data = path.read_bytes()
        for share in (0, 0.01, 0.5, 0.95):
            path.write_bytes(data[: int(share * len(data))])
            with pytest.raises(ValueError) as error:
                decode_photograph(path)
            assert str(error.value).startswith(f"{path}: ") and "archive" not in str(error.value)


def test_the_command_ends_with_1_where_an_image_is_broken_and_names_files_that_are_not_utf_8(trained, tmp_path):
    """Old archives hold such names. The output's name has the same bytes; messages escape them."""
    folder, name = tmp_path / "in", os.fsdecode(b"caf\xe9")
    picture(folder / "a.png").tobytes()
    (folder / "a.png").rename(folder / f"{name}.png")
    (folder / f"{name} 2.png").write_bytes(b"")
    (folder / f"{name}.txt").write_text("")
    options = (f"checkpoint={trained[0]}", f"input={folder}", f"output={tmp_path / 'out'}", "device=cpu")
    command = [sys.executable, "-m", "scripts.predict", *options]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}
    ended = subprocess.run(command, cwd=REPOSITORY, env=strict, capture_output=True, timeout=300)
    assert b"1 of 2 images were not predicted:\n%b/caf\\udce9 2.png: the file is empty" % bytes(folder) in ended.stderr
    assert ended.returncode == 1 and b"Traceback" not in ended.stderr
    assert b"skipped 1 file(s) without an image's suffix: caf\\udce9.txt\n" in ended.stdout
    assert b"predicted 1 of 2 images" in ended.stdout
    assert [path.name for path in (tmp_path / "out" / "ids").iterdir()] == [f"{name}.png"]


@pytest.mark.parametrize(
    "files, names",
    [
        (("b.png", "a.jpg", "c/a.jpg"), ["a", "b", "c/a"]),
        (("a.jpg", "a.png", "b.png", "c/a.png"), ["a.jpg", "a.png", "b", "c/a"]),
        (("a.jpg", "A.png"), ["A.png", "a.jpg"]),  # one file on a case-insensitive filesystem
        (("a.jpg", "a.png", "a.png.png", "a.jpg.jpg"), ["a.jpg", "a.jpg.jpg", "a.png", "a.png.png"]),
        (("a.jpg", "a.png", "A.PNG.png", "a.png.png.jpg"), ["A.PNG.png", "a.jpg", "a.png", "a.png.png.jpg"]),
        (("a.b.jpg", "a.c.jpg"), ["a.b", "a.c"]),
    ],
)
def test_no_two_images_have_the_same_name(tmp_path, files, names):
    for file in files:
        trees.write(tmp_path / file, np.zeros((1, 1, 3), np.uint8))
    found = find_images(tmp_path, tmp_path / "out")
    assert list(found) == names
    assert sorted(found.values()) == sorted(tmp_path / file for file in files)


def test_a_second_run_into_the_input_folder_predicts_the_same_images(trained, tmp_path):
    """Results stay in the output."""
    picture(tmp_path / "a.png")
    first = run(trained, tmp_path, tmp_path)
    before = first[0].read_bytes()
    assert run(trained, tmp_path, tmp_path) == first == [tmp_path / "ids" / "a.png"]
    assert first[0].read_bytes() == before
    (tmp_path / "elsewhere").mkdir()
    first[0].unlink()
    first[0].symlink_to(tmp_path / "elsewhere" / "a.png")
    with pytest.raises(ValueError, match="outside of"):
        run(trained, tmp_path, tmp_path)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_options_of_evaluation_reach_the_network(trained, tmp_path):
    picture(tmp_path / "a.png", (150, 200))
    kinds = [(), ("window.size=32",), ("tta.scales=[0.7,1.2]", "tta.flip=true"), ("data.base_size=100",)]
    kinds += [("precision=bfloat16",), ("head.pooling_size=[1,1]",)]
    ids = []
    for number, overrides in enumerate(kinds):
        (file,) = run(trained, tmp_path / "a.png", tmp_path / str(number), *overrides)
        ids.append(file.read_bytes())
        assert Image.open(file).size == (200, 150)
    assert len(set(ids)) == len(kinds)


def test_wrong_values_are_refused_before_anything_is_written(trained, tmp_path):
    picture(tmp_path / "a.png")
    (tmp_path / "empty").mkdir()
    for override, message in (
        ("input=/nowhere/at/all.png", "input=/nowhere/at/all.png does not exist"),
        (f"input={tmp_path / 'empty'}", "empty holds no image, such as .png"),
        ("window.size=100", "window.size=100: expected a multiple of the network's output stride 8, such as 104"),
        ("tta.scales=[-1]", "tta.scales=[-1.0]: expected a number above 0"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(trained, tmp_path / "a.png", tmp_path / "out", override)
        assert not (tmp_path / "out").exists()
