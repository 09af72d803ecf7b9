"""Predicting any images from a checkpoint alone: which files are written, under which names."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from datasets import vistas
from datasets.reading import decode_image
from engine import build, checkpoint
from engine import config as cfg
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import inference
from scripts.predict import find_images, predict
from tests import trees
from tests.runs import REPOSITORY, composed
from train_seg import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, tuple]:
    """A checkpoint whose data is gone, and the data's palette, which only a file of the data held."""
    folder = tmp_path_factory.mktemp("trained")
    data = trees.vistas(folder / "data")
    overrides = ("data=vistas", f"data.root={data}", "data.base_size=48", "debug=smoke", "trainer.device=cpu")
    train(composed("train_seg", f"run_dir={folder / 'run'}", *overrides))
    palette = vistas(data, "val").palette
    shutil.rmtree(data)
    state = checkpoint.load(folder / "run" / "checkpoints" / "last.pt")
    torch.nn.init.normal_(state["network"]["cls.weight"])  # so few steps predict one class everywhere
    checkpoint.save(folder / "net.pt", {key: value for key, value in state.items() if key != "format"})
    return folder / "net.pt", palette


def run(trained, source: Path, output: Path, *overrides: str) -> list[Path]:
    options = (f"checkpoint={trained[0]}", f'input="{source}"', f"output={output}", "device=cpu")
    return predict(composed("predict", *options, *overrides))


def picture(path: Path, size: tuple[int, int] = (40, 60), index: int = 0) -> np.ndarray:
    pixels = cv2.GaussianBlur(trees.pair(index, [0], size)[0], (0, 0), 4)
    pixels = cv2.normalize(pixels, None, 0, 255, cv2.NORM_MINMAX)
    trees.write(path, pixels)
    return pixels


def relative_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_one_image_from_a_checkpoint_alone(trained, tmp_path):
    """Ids equal the evaluation's, at the image's size. Colours are the data's, although the data is gone."""
    picture(tmp_path / "street.jpg")
    written = run(trained, tmp_path / "street.jpg", tmp_path / "out")
    assert written == [tmp_path / "out" / "ids" / "street.png"]
    assert relative_files(tmp_path / "out") == [
        "classes.json",
        "colour/street.png",
        "ids/street.png",
        "overlays/street.png",
    ]
    ids = cv2.imread(str(written[0]), cv2.IMREAD_UNCHANGED)
    image = decode_image(tmp_path / "street.jpg")

    state = checkpoint.load(trained[0])
    config = cfg.from_plain(state["config"], SegmentationRun)
    network = build.segmentation_network(config, 65)
    network.load_state_dict(state["network"])
    forward = build.forward(config, network, torch.device("cpu"))
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


def test_a_folder_with_odd_images_and_a_broken_one(trained, tmp_path):
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
    (source / ".hidden.png").write_text("not looked at")
    with pytest.raises(ValueError) as error:
        run(trained, source, tmp_path / "out")
    message = str(error.value)
    assert message.startswith("2 of 8 images were not predicted:\n")
    assert f"{source / 'cut.jpg'}: the JPEG file is truncated" in message
    assert f"{source / 'text.png'}: is neither PNG nor JPEG" in message
    names = ["alpha", "colour", "deep", "palette", "süd, b=[1]/cmyk", "süd, b=[1]/gray"]
    for kind in ("ids", "colour", "overlays"):
        assert relative_files(tmp_path / "out" / kind) == [f"{name}.png" for name in names]
        for name in names:
            assert Image.open(tmp_path / "out" / kind / f"{name}.png").size == (60, 40)
    same = {name: decode_image(tmp_path / "out" / "ids" / f"{name}.png").tobytes() for name in names}
    assert same["colour"] == same["alpha"] == same["deep"]


@pytest.mark.parametrize(
    "files, names",
    [
        (("b.png", "a.jpg", "c/a.jpg"), ["a", "b", "c/a"]),
        (("a.jpg", "a.png", "b.png"), ["a.jpg", "a.png", "b.png"]),
        (("a.jpg", "A.png"), ["A.png", "a.jpg"]),  # one file on a case-insensitive filesystem
        (("a.jpg", "a.png", "a.png.png", "a.jpg.jpg"), ["a.jpg", "a.jpg.jpg", "a.png", "a.png.png"]),
        (("a.b.jpg", "a.c.jpg"), ["a.b", "a.c"]),
    ],
)
def test_no_two_images_have_the_same_name(tmp_path, files, names):
    for file in files:
        picture(tmp_path / file)
    found = find_images(tmp_path, tmp_path / "out")
    assert list(found) == names
    assert sorted(found.values()) == sorted(tmp_path / file for file in files)


def test_a_second_run_into_the_input_folder_predicts_the_same_images(trained, tmp_path):
    picture(tmp_path / "a.png")
    first = run(trained, tmp_path, tmp_path)
    before = first[0].read_bytes()
    assert run(trained, tmp_path, tmp_path) == first == [tmp_path / "ids" / "a.png"]
    assert first[0].read_bytes() == before


def test_results_stay_in_the_output(trained, tmp_path):
    picture(tmp_path / "in" / "a.png")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ids").mkdir()
    (tmp_path / "out" / "ids" / "a.png").symlink_to(tmp_path / "elsewhere" / "a.png")
    with pytest.raises(ValueError, match="outside of"):
        run(trained, tmp_path / "in", tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_options_of_evaluation_reach_the_network(trained, tmp_path):
    picture(tmp_path / "a.png", (300, 400))
    kinds = [(), ("window.size=32",), ("tta.scales=[0.7,1.2]", "tta.flip=true"), ("data.base_size=200",)]
    kinds += [("precision=bfloat16",), ("head.pooling_size=[1,1]",)]
    ids = []
    for number, overrides in enumerate(kinds):
        (file,) = run(trained, tmp_path / "a.png", tmp_path / str(number), *overrides)
        ids.append(file.read_bytes())
        assert Image.open(file).size == (400, 300)
    assert len(set(ids)) == len(kinds)


@pytest.mark.parametrize(
    "override, message",
    [
        ("input=/nowhere/at/all.png", "input=/nowhere/at/all.png does not exist"),
        ("window.size=100", "window.size=100: expected a multiple of the network's output stride 8, such as 104"),
        ("tta.scales=[-1]", "tta.scales=[-1.0]: expected a number above 0"),
        ("checkpoint=nowhere.pt", "nowhere.pt does not exist"),
        ("precision=half", "precision=half: expected one of float32, bfloat16"),
    ],
)
def test_wrong_values_are_refused_before_anything_is_written(trained, tmp_path, override, message):
    picture(tmp_path / "a.png")
    with pytest.raises(ValueError, match=re.escape(message)):
        run(trained, tmp_path / "a.png", tmp_path / "out", override)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_images_is_refused(trained, tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(ValueError, match=re.escape(f"input={tmp_path} holds no .png, .jpg, .jpeg files")):
        run(trained, tmp_path, tmp_path / "out")


def test_a_checkpoint_without_colours_takes_those_of_its_data(trained, tmp_path):
    """Checkpoints of earlier versions. If the data is gone too, the error says so."""
    picture(tmp_path / "a.png")
    state = checkpoint.load(trained[0])
    del state["palette"], state["format"]
    checkpoint.save(tmp_path / "old.pt", state)
    with pytest.raises(ValueError, match="old.pt has no colours, and its data cannot be read: data.root=.* is not"):
        run((tmp_path / "old.pt",), tmp_path / "a.png", tmp_path / "out")
    trees.vistas(Path(state["config"]["data"]["root"]))
    run((tmp_path / "old.pt",), tmp_path / "a.png", tmp_path / "old")
    run(trained, tmp_path / "a.png", tmp_path / "new")
    shutil.rmtree(state["config"]["data"]["root"])
    assert (tmp_path / "old/colour/a.png").read_bytes() == (tmp_path / "new/colour/a.png").read_bytes()


def test_the_command_ends_with_1_where_an_image_is_broken(trained, tmp_path):
    picture(tmp_path / "in" / "a.png")
    (tmp_path / "in" / "b.png").write_bytes(b"")
    options = (f"checkpoint={trained[0]}", f"input={tmp_path / 'in'}", f"output={tmp_path / 'out'}", "device=cpu")
    command = [sys.executable, "-m", "scripts.predict", *options]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    assert f"1 of 2 images were not predicted:\n{tmp_path / 'in' / 'b.png'}: the file is empty" in ended.stderr
    assert "predicted 1 of 2 images" in ended.stdout and (tmp_path / "out" / "ids" / "a.png").is_file()
