"""Predicting any images from a checkpoint alone: which files are written, under which names."""

import json
import os
import re
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image

from datasets import centre_crop, vistas
from datasets.reading import decode_image, decode_photograph
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.configuration import config as cfg
from engine.prediction import open_network
from engine.prediction.opening import predictor
from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Prediction
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import inference
from keepless import InPlaceABN
from scripts.predict import find_images, predict
from tests import trees
from tests.runs import REPOSITORY, classification_config, composed, ended, run_config


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


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """A checkpoint of a classification network for images of any size."""
    file = tmp_path_factory.mktemp("classifier") / "net.pt"
    body = ("body=resnext_tiny", "body.base_channels=[8,8,16]", "body.stem_channels=8")
    config = classification_config("data=image_folder", "data.crop_size=48", "data.resize=64", "data.root=gone", *body)
    torch.manual_seed(0)
    network = assemble.classification_network(config, 3)
    state = {"task": "classification", "step": 2, "config": cfg.plain(config), "network": network.state_dict()}
    checkpoint.save(file, {**state, "classes": ["bee", "cat", "dog"]})
    return file


def test_the_example_in_python_runs(trained, tmp_path, monkeypatch):
    """It predicts what scripts.predict writes; an array and a Pillow image are the same image as their file."""
    picture(tmp_path / "street.jpg")
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"(?ms)^```python\n(from engine.*?)^```", (REPOSITORY / "docs" / "tour.md").read_text())
    ran: dict = {}
    exec(example.replace('"RUN"', repr(str(trained[0]))), ran)
    (written,) = run(trained, tmp_path / "street.jpg", tmp_path / "out")
    assert np.array_equal(ran["ids"], np.asarray(Image.open(written)))
    network = ran["network"]
    assert np.array_equal(network.predict(decode_image(tmp_path / "street.jpg")), ran["ids"])
    gray = decode_image(tmp_path / "street.jpg")[..., 0]
    assert np.array_equal(network.predict(gray), network.predict(Image.fromarray(gray)))
    assert not network.training and not {type(module) for module in network.modules()} & {InPlaceABN}
    for wrong in (gray.astype(float), gray[..., None], Image.fromarray(gray.astype(np.float32)), None):
        with pytest.raises(ValueError, match="expected pixels of 8 bits, as a uint8 array"):
            network.predict(wrong)


@pytest.mark.parametrize("views", [(), ("window.size=32", "tta.flip=true"), ("tta.scales=[0.7,1.2]",)])
def test_probabilities_are_those_of_the_predictions(trained, views, tmp_path):
    picture(tmp_path / "a.png", (50, 72))
    (plain,) = run(trained, tmp_path / "a.png", tmp_path / "plain", *views)
    (ids,) = run(trained, tmp_path / "a.png", tmp_path / "out", "probabilities=true", *views)
    assert ids.read_bytes() == plain.read_bytes()
    found = np.load(tmp_path / "out" / "probabilities" / "a.npy")
    assert found.dtype == np.float16 and found.shape == (65, 50, 72)
    assert np.abs(found.astype(float).sum(axis=0) - 1).max() < 0.01
    taken = np.take_along_axis(found, np.asarray(Image.open(ids)).astype(int)[None], axis=0)[0]
    assert np.array_equal(taken, found.max(axis=0))  # 16 bits make ties


def test_a_classifier_writes_the_likeliest_classes_of_each_image(classifier, tmp_path):
    """Of the crop that an evaluation sees, computed here in float64, whatever the image's size."""
    for number, size in enumerate([(64, 90), (200, 48), (20, 30)]):
        picture(tmp_path / "in" / f"{number}.jpg", size, number)
    (tmp_path / "in" / "cut.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match="1 of 4 images were not predicted:\n.*cut.jpg"):
        run((classifier,), tmp_path / "in", tmp_path / "out", "top_k=2", f"report={tmp_path / 'page.html'}")
    assert re.findall("<h2>(.*?)</h2>", (tmp_path / "page.html").read_text()) == ["0.jpg", "1.jpg", "2.jpg"]
    rows = [line.split(",") for line in (tmp_path / "out" / "predictions.csv").read_text().splitlines()]
    assert rows[0] == ["image", "class1", "probability1", "class2", "probability2"]
    assert [row[0] for row in rows[1:]] == ["0.jpg", "1.jpg", "2.jpg"]

    state = checkpoint.load(classifier)
    config = cfg.from_plain(state["config"], ClassificationRun)
    network = assemble.classification_network(config, 3)
    network.load_state_dict(state["network"])
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in (config.data.mean, config.data.std))
    opened, ten = open_network(classifier), open_network(classifier, Prediction(device="cpu", view="ten_crop"))
    for row in rows[1:]:
        image = decode_image(tmp_path / "in" / row[0])
        crop = centre_crop(64, 48)(torch.from_numpy(image).movedim(2, 0))
        expected = network.double().eval()(((crop - mean) / std).double()[None])[0].softmax(0)
        order = expected.argsort(descending=True)
        assert row[1::2] == [state["classes"][number] for number in order[:2]]
        assert np.allclose([float(share) for share in row[2::2]], expected[order[:2]].detach(), atol=1e-5)
        assert opened.predict(image) == order[0]
        assert not np.allclose(ten.probabilities(image), opened.probabilities(image), atol=1e-6)
    with pytest.raises(ValueError, match="window.size=64 is for segmentation, and checkpoint .* is for classification"):
        run((classifier,), tmp_path / "in", tmp_path / "out", "window.size=64")


def test_a_mean_image_is_subtracted_as_in_an_evaluation():
    config = classification_config("data=cifar10", "data.mean_image=true", "data.mean=[0,0,0]", "body=resnet32_cifar")
    mean = torch.rand(3, 32, 32, dtype=torch.float64) * 255
    forward = assemble.forward(config, torch.nn.Identity(), torch.device("cpu"))
    state = {"classes": ["a", "b"], "mean_image": mean}
    images = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    found = predictor(config, Prediction(), state, forward)(images)
    expected = forward(torch.from_numpy((images.numpy() - mean.numpy()).astype(np.float32)))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


def test_norms_compile_nothing(trained, tmp_path, monkeypatch):
    """Inductor would compile them for every size of an image: 10 seconds each."""
    for number, size in enumerate([(40, 60), (48, 64)]):
        picture(tmp_path / "in" / f"{number}.png", size)
    monkeypatch.setattr("keepless.norms.backends.CompiledBackend", lambda: pytest.fail("a compiled norm"))
    assert len(run(trained, tmp_path / "in", tmp_path / "out")) == 2


def relative_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_one_image_from_a_checkpoint_alone(trained, tmp_path):
    """Ids equal the evaluation's, at the image's size. Colours are the data's, although the data is gone."""
    picture(tmp_path / "street.jpg")
    written = run(trained, tmp_path / "street.jpg", tmp_path / "out", f"report={tmp_path / 'page.html'}")
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
    name, share = re.findall("<td>([^<]*)</td>.*?<td>(.*?)%</td>", (tmp_path / "page.html").read_text())[-1]
    rarest = np.bincount(ids.reshape(-1))[np.unique(ids)].min() / ids.size
    assert abs(float(share) / 100 - rarest) < 6e-4 and name in checkpoint.load(trained[0])["classes"]
    overlay = decode_image(tmp_path / "out" / "overlays" / "street.png").astype(float)
    assert np.abs(overlay - (0.6 * colours + 0.4 * image)).max() <= 1
    classes = json.loads((tmp_path / "out" / "classes.json").read_text())
    assert [entry["id"] for entry in classes] == list(range(65)) and classes[7]["name"] == "Class 7"
    assert [tuple(entry["colour"]) for entry in classes] == list(trained[1])


def test_ids_are_numbered_as_in_the_labels(trained, tmp_path):
    """As eval.py writes them, and as classes.json lists them."""
    picture(tmp_path / "a.png")
    state, found = checkpoint.load(trained[0]), []
    for own in ([*range(65)], [3 * number for number in range(65)]):
        checkpoint.save(tmp_path / "net.pt", {**state, "label_ids": own})
        (file,) = run((tmp_path / "net.pt",), tmp_path / "a.png", tmp_path / "out")
        found.append(np.asarray(Image.open(file)))
        classes = json.loads((tmp_path / "out" / "classes.json").read_text())
        assert [entry.pop("id") for entry in classes] == own and {*classes[0]} == {"name", "colour"}
    assert np.array_equal(found[1], 3 * found[0]) and found[1].any()


def test_a_folder_is_predicted_without_its_broken_and_hidden_files(trained, tmp_path, capsys):
    """Those are named at the end."""
    source, sub = tmp_path / "Straßen 街", "süd, b=[1]"
    for name in ("colour.png", f"{sub}/gray.png"):
        picture(source / name)
    (source / sub / "gray.png").rename(source / sub / "gray.JPG")
    (source / "cut.png").write_bytes((source / "colour.png").read_bytes()[:300])
    (source / "@eaDir").mkdir()  # of a network disk
    for name in ("text.png", "notes.txt", f"{sub}/film.mp4", ".hidden.png", "@eaDir/thumb.jpg"):
        (source / name).write_text("no image")
    with pytest.raises(ValueError) as error:
        run(trained, source, tmp_path / "out")
    first, *lines = str(error.value).splitlines()
    assert first == "2 of 4 images were not predicted:" and "archive" not in str(error.value)  # advice for datasets
    assert lines[0].startswith(f"{source / 'cut.png'}: the PNG file is truncated")
    assert lines[1].startswith(f"{source / 'text.png'}: cannot be decoded as an image")
    skipped = f"skipped 2 file(s) without an image's suffix: {Path('notes.txt')}, {Path(sub) / 'film.mp4'}\n"
    assert capsys.readouterr().out.count(skipped) == 1
    for kind in ("ids", "colour", "overlays"):
        assert relative_files(tmp_path / "out" / kind) == ["colour.png", f"{sub}/gray.png"]
        assert Image.open(tmp_path / "out" / kind / "colour.png").size == (60, 40)


def test_every_usual_format_is_found(tmp_path):
    formats = [".bmp", ".gif", ".j2k", ".jfif", ".mpo", ".ppm", ".qoi", ".tga", ".tif", ".TIFF", ".webp"]
    pixels = picture(tmp_path / "a.png")[..., ::-1]
    for number, suffix in enumerate(formats):
        Image.fromarray(pixels).save(tmp_path / f"{number:02d}{suffix}", "JPEG" if suffix == ".mpo" else None)
    found = find_images(tmp_path, tmp_path / "out")
    assert [*found] == [*(f"{number:02d}" for number in range(len(formats))), "a"]
    assert all(decode_photograph(file).shape == (40, 60, 3) for file in found.values())


def test_the_command_ends_with_1_where_an_image_is_broken_and_names_files_that_are_not_utf_8(trained, tmp_path):
    """Old archives hold such names. The output's name has the same bytes; messages escape them."""
    folder, name = tmp_path / "in", os.fsdecode(b"caf\xe9")
    picture(folder / "a.png")
    (folder / "a.png").rename(folder / f"{name}.png")
    (folder / f"{name} 2.png").write_bytes(b"")
    (folder / f"{name}.txt").write_text("")
    options = (f"checkpoint={trained[0]}", f"input={folder}", f"output={tmp_path / 'out'}", "device=cpu")
    error, printed = ended("scripts.predict", tmp_path / "printed", *options)
    assert str(error).startswith(f"error: 1 of 2 images were not predicted:\n{folder}/{name} 2.png: the file is empty")
    assert "skipped 1 file(s) without an image's suffix: caf\\udce9.txt\n" in printed
    assert "predicted 1 of 2 images" in printed
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
    """Among the images of a dataset, predictions would be images without a label, and block the next training."""
    picture(tmp_path / "data" / "images" / "a.png")
    (tmp_path / "data" / "labels").mkdir()
    (tmp_path / "empty").mkdir()
    before = relative_files(tmp_path)
    for override, message in (
        ("input=/nowhere/at/all.png", "input=/nowhere/at/all.png does not exist"),
        (f"input={tmp_path / 'empty'}", "empty holds no image, such as .png"),
        ("window.size=100", "window.size=100: expected a multiple of the network's output stride 8, such as 104"),
        ("tta.scales=[-1]", "tta.scales=[-1.0]: expected a number above 0"),
        (f"output={tmp_path / 'data/images'}", f"lies in {tmp_path / 'data/images'}, the images of a dataset"),
        (f"output={tmp_path / 'data/images/new'}", f"lies in {tmp_path / 'data/images'}, the images of a dataset"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(trained, tmp_path / "data/images", tmp_path / "out", override)
        assert relative_files(tmp_path) == before
    assert run(trained, tmp_path / "data" / "images", tmp_path / "data" / "predicted")
