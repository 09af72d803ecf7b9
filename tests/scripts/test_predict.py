"""Predicting any images from a checkpoint alone: which files are written, under which names."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from datasets import vistas
from datasets.label_names import LabelNames
from datasets.reading import decode_image
from engine.checkpoint import files as checkpoint
from engine.prediction import open_network
from engine.process.console import log_to, make_console
from engine.segmentation import inference
from scripts.predict import find_images, is_labelled, predict, result_names
from tests import trees
from tests.checkpoints import saved
from tests.runs import REPOSITORY, checked, classification_config, ended, run_config


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, tuple]:
    """A checkpoint whose data is gone, and the data's palette, which only a file of the data held."""
    folder = tmp_path_factory.mktemp("trained")
    config = run_config("data=vistas", f"data.root={trees.vistas(folder / 'data')}", "data.base_size=48")
    dataset = vistas(folder / "data", "val")
    saved(folder / "net.pt", config, dataset.classes, palette=[list(colour) for colour in dataset.palette])
    shutil.rmtree(folder / "data")
    return folder / "net.pt", dataset.palette


def run(trained, source: Path, output: Path, *overrides: str) -> list[Path]:
    options = (f"checkpoint={trained[0]}", f'input="{source}"', f"output={output}", "device=cpu")
    return predict(checked("predict", *options, *overrides))


@pytest.fixture(scope="module")
def classifier(tmp_path_factory) -> Path:
    """A checkpoint of a classification network for images of any size."""
    file = tmp_path_factory.mktemp("classifier") / "net.pt"
    body = ("body=resnext_tiny", "body.base_channels=[8,8,16]", "body.stem_channels=8")
    config = classification_config("data=image_folder", "data.crop_size=48", "data.resize=64", "data.root=gone", *body)
    saved(file, config, ["bee", "cat", "dog"])
    return file


@pytest.mark.parametrize("views", [(), ("window.size=32", "tta.flip=true"), ("tta.scales=[0.7,1.2]",)])
def test_probabilities_agree_with_the_predictions(trained, views, tmp_path):
    trees.picture(tmp_path / "a.png", (50, 72))
    (plain,) = run(trained, tmp_path / "a.png", tmp_path / "plain", *views)
    (ids,) = run(trained, tmp_path / "a.png", tmp_path / "out", "probabilities=true", *views)
    assert ids.read_bytes() == plain.read_bytes()
    probabilities = np.load(tmp_path / "out" / "probabilities" / "a.npy")
    assert probabilities.dtype == np.float16 and probabilities.shape == (65, 50, 72)
    assert np.abs(probabilities.astype(float).sum(axis=0) - 1).max() < 0.01
    of_predicted = np.take_along_axis(probabilities, np.asarray(Image.open(ids)).astype(int)[None], axis=0)[0]
    assert np.array_equal(of_predicted, probabilities.max(axis=0))  # 16 bits make ties


def test_a_classifier_writes_the_likeliest_classes_of_each_image(classifier, tmp_path):
    """`open_network` in Python gives the same classes."""
    for number, size in enumerate([(64, 90), (200, 48), (20, 30)]):
        trees.picture(tmp_path / "in" / f"{number}.jpg", size, number)
    (tmp_path / "in" / "cut.jpg").write_bytes(b"no image")
    with pytest.raises(ValueError, match="1 of 4 images were not predicted:\n.*cut.jpg"):
        run((classifier,), tmp_path / "in", tmp_path / "out", "top_k=2", f"report={tmp_path / 'page.html'}")
    assert re.findall("<h2>(.*?)</h2>", (tmp_path / "page.html").read_text()) == ["0.jpg", "1.jpg", "2.jpg"]
    rows = [line.split(",") for line in (tmp_path / "out" / "predictions.csv").read_text().splitlines()]
    assert rows[0] == ["image", "class1", "probability1", "class2", "probability2"]
    assert [row[0] for row in rows[1:]] == ["0.jpg", "1.jpg", "2.jpg"]

    network = open_network(classifier)
    for row in rows[1:]:
        expected = network.probabilities(tmp_path / "in" / row[0])
        order = expected.argsort()[::-1]
        assert row[1::2] == [network.classes[number] for number in order[:2]]
        assert np.allclose([float(share) for share in row[2::2]], expected[order[:2]], atol=1e-5)
    with pytest.raises(ValueError, match="window.size=64 is for segmentation, and checkpoint .* is for classification"):
        run((classifier,), tmp_path / "in", tmp_path / "out", "window.size=64")


def relative_files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_one_image_from_a_checkpoint_alone(trained, tmp_path):
    """The ids are what `open_network` predicts, at the size of the image. The checkpoint has the dataset's colours."""
    trees.picture(tmp_path / "street.jpg")
    files = run(trained, tmp_path / "street.jpg", tmp_path / "out", f"report={tmp_path / 'page.html'}")
    assert files == [tmp_path / "out" / "ids" / "street.png"]
    pictures = [f"{kind}/street.png" for kind in ("colour", "ids", "overlays")]
    assert relative_files(tmp_path / "out") == ["classes.json", *pictures]
    ids = cv2.imread(str(files[0]), cv2.IMREAD_UNCHANGED)
    image = decode_image(tmp_path / "street.jpg")
    expected = open_network(trained[0]).predict(image)
    assert ids.dtype == np.uint8 and np.array_equal(ids, expected) and len(np.unique(ids)) > 1

    colours = np.array(trained[1], np.uint8)[ids]
    assert np.array_equal(decode_image(tmp_path / "out" / "colour" / "street.png"), colours)
    name, share = re.findall("<td>([^<]*)</td>.*?<td>(.*?)%</td>", (tmp_path / "page.html").read_text())[-1]
    rarest = np.bincount(ids.reshape(-1))[np.unique(ids)].min() / ids.size
    assert abs(float(share) / 100 - rarest) < 6e-4 and name in checkpoint.load(trained[0])["classes"]
    overlay = decode_image(tmp_path / "out" / "overlays" / "street.png").astype(float)
    assert np.abs(overlay - (0.6 * colours + 0.4 * image)).max() <= 1
    classes = json.loads((tmp_path / "out" / "classes.json").read_text())
    assert [row["id"] for row in classes] == list(range(65)) and classes[7]["name"] == "Class 7"
    assert [tuple(row["colour"]) for row in classes] == list(trained[1])


def test_ids_are_numbered_as_in_the_labels(trained, tmp_path):
    """eval.py writes the same ids, and classes.json lists them. What lies in the output is no input of a second run."""
    state, ids = checkpoint.load(trained[0]), []
    for label_ids in ([*range(65)], [3 * number for number in range(65)]):
        checkpoint.save(tmp_path / "net.pt", {**state, "label_ids": label_ids})
        folder = tmp_path / f"ids {label_ids[1]}"
        trees.picture(folder / "a.png")
        for _ in range(2):
            (file,) = run((tmp_path / "net.pt",), folder, folder)
        ids.append(np.asarray(Image.open(file)))
        classes = json.loads((folder / "classes.json").read_text())
        assert [row.pop("id") for row in classes] == label_ids and {*classes[0]} == {"name", "colour"}
    assert np.array_equal(ids[1], 3 * ids[0]) and ids[1].any()


def test_a_folder_is_predicted_without_its_broken_and_hidden_files(trained, tmp_path, capsys):
    source, sub = tmp_path / "Straßen 街", "süd, b=[1]"
    for name in ("colour.png", f"{sub}/gray.png"):
        trees.picture(source / name)
    (source / sub / "gray.png").rename(source / sub / "gray.JPG")
    (source / "cut.png").write_bytes((source / "colour.png").read_bytes()[:300])
    (source / "@eaDir").mkdir()  # of a network disk
    (source / "gone.png").symlink_to(source / "elsewhere.png")
    (tmp_path / "linked").mkdir()
    trees.picture(tmp_path / "linked" / "more.png")
    (source / "link").symlink_to(tmp_path / "linked")
    (source / sub / "circle").symlink_to(source)
    (source / "itself").symlink_to("itself")
    for name in ("text.png", "notes.txt", f"{sub}/film.mp4", ".hidden.png", "@eaDir/thumb.jpg"):
        (source / name).write_text("no image")
    with pytest.raises(ValueError) as error:
        run(trained, source, tmp_path / "out")
    first, *lines = str(error.value).splitlines()
    assert first == "3 of 6 images were not predicted:" and "archive" not in str(error.value)  # advice for datasets
    assert lines[0].startswith(f"{source / 'cut.png'}: the PNG file is truncated")
    assert lines[1].startswith(f"{source / 'gone.png'}: cannot be read (No such file")
    assert lines[2].startswith(f"{source / 'text.png'}: cannot be decoded as an image")
    skipped = f"skipped 3 file(s) without an image's suffix: itself, notes.txt, {Path(sub) / 'film.mp4'}\n"
    assert capsys.readouterr().out.count(skipped) == 1
    for kind in ("ids", "colour", "overlays"):
        assert relative_files(tmp_path / "out" / kind) == ["colour.png", "link/more.png", f"{sub}/gray.png"]
        assert Image.open(tmp_path / "out" / kind / "colour.png").size == (60, 40)


def test_an_error_while_a_file_is_written_names_it_and_ends_the_command(trained, tmp_path):
    """The images before it are complete, and none after it has a file."""
    for name in "abcdefgh":
        trees.picture(tmp_path / "in" / f"{name}.png")
    (tmp_path / "out" / "colour" / "c.png").mkdir(parents=True)
    with pytest.raises(OSError, match=re.escape(f"'{tmp_path / 'out' / 'colour' / 'c.png'}'")):
        run(trained, tmp_path / "in", tmp_path / "out")
    pictures = [f"{kind}/{name}.png" for kind in ("colour", "ids", "overlays") for name in "ab"]
    assert relative_files(tmp_path / "out") == sorted(["classes.json", "ids/c.png", *pictures])


@pytest.mark.parametrize("range16", [(0, 65_535), (1000, 1255), (0, 500)])
def test_16_bit_images_are_predicted_with_the_range_of_the_training(range16, tmp_path, capsys):
    """Here one level is one value: the same pictures in 8 bits are predicted alike."""
    keys = ("data.base_size=48", f"data.range16=[{range16[0]},{range16[1]}]")
    config = run_config("data=vistas", "data.root=gone", *keys)
    saved(tmp_path / "net.pt", config, ["a", "b"], palette=[[0, 0, 0], [9, 9, 9]])
    shallow = trees.picture(tmp_path / "in" / "8.png")
    trees.write(tmp_path / "in" / "16.png", shallow.astype(np.uint16) + 1000)
    files = run((tmp_path / "net.pt",), tmp_path / "in", tmp_path / "out")
    same = Image.open(files[0]).tobytes() == Image.open(files[1]).tobytes()
    printed, source = " ".join(capsys.readouterr().out.split()), tmp_path / "in"
    is_named = f"16-bit images in {source} use {2 if range16[1] > 500 else 1} of the 256" in printed
    assert (same, is_named) == ((True, False) if range16[0] else (False, True))
    clipped = "and have up to 100% of an image's pixels outside of 0 to 500, made black or white: if the training had"
    assert (clipped in printed) == (range16[1] == 500)
    network = open_network(tmp_path / "net.pt")
    assert np.array_equal(network.predict(tmp_path / "in" / "16.png"), np.asarray(Image.open(files[0])))


def test_every_usual_format_is_found(tmp_path):
    formats = [".bmp", ".gif", ".j2k", ".jfif", ".mpo", ".ppm", ".qoi", ".tga", ".tif", ".TIFF", ".webp"]
    pixels = trees.picture(tmp_path / "a.png")[..., ::-1]
    for number, suffix in enumerate(formats):
        Image.fromarray(pixels).save(tmp_path / f"{number:02d}{suffix}", "JPEG" if suffix == ".mpo" else None)
    for name in ("a", "b"):
        np.save(tmp_path / f"{name}.npy", pixels)  # an image, unless another has its name
    images = find_images(tmp_path, tmp_path / "out")
    assert [*images] == [*(f"{number:02d}" for number in range(len(formats))), "a", "b"]
    assert images["a"].suffix == ".png" and images.pop("b").suffix == ".npy"
    assert all(decode_image(file, turned=True).shape == (40, 60, 3) for file in images.values())


def test_the_command_ends_with_1_where_an_image_is_broken_and_names_files_that_are_not_utf_8(trained, tmp_path):
    """Old archives hold such names. The output's name has the same bytes; messages escape them."""
    folder, name = tmp_path / "in", os.fsdecode(b"caf\xe9")
    trees.picture(folder / "a.png")
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
def test_no_two_images_have_the_same_name(files, names):
    assert result_names(sorted(map(Path, files))) == names


def test_every_image_is_predicted_however_long_its_name_is(trained, tmp_path):
    """A file's name has at most 255 bytes, not characters. Its cut name does not depend on other images."""
    xs, roads, folder = 251 * "x", 62 * "🛣" + "abc", tmp_path / "in"
    images = [f"{xs}.jpg", f"{xs}.png", f"{roads}.jpg", f"{roads}.png", f"a/{xs}.jpg", f"a/{xs.upper()}.png", "z.jpg"]
    names = [Path(name) for name in result_names([*map(Path, images)])]
    assert len({str(name).casefold() for name in names}) == len(images)
    assert [len(f"{name.name}.png".encode()) for name in names] == [255, 255, 253, 253, 255, 255, 5]
    assert [name.parent for name in names] == [Path(image).parent for image in images]
    assert result_names([*map(Path, images[:2])]) == [*map(str, names[:2])]

    for image in images[2:4]:
        trees.picture(folder / image, (20, 30))
    (folder / (alone := 255 * "y")).touch()  # without a suffix, but it can be given by name
    run(trained, folder, tmp_path / "out", "probabilities=true")
    kinds = [file.partition("/")[0] for file in relative_files(tmp_path / "out")]
    assert [kinds.count(kind) for kind in ("colour", "ids", "overlays", "probabilities")] == 4 * [2]
    (name,) = find_images(folder / alone, tmp_path / "out")
    assert name.startswith(230 * "y") and len(name) == 251


@pytest.mark.parametrize("kind", ["ids", "colour", "overlays", "probabilities"])
def test_pictures_are_replaced_only_beside_a_list_of_this_command(trained, kind, tmp_path):
    """The list is classes.json. Others have labels in folders of these names; a link may lead to them, too."""
    image, labels, out = tmp_path / "in" / "a.png", tmp_path / "labels", tmp_path / "out"
    trees.picture(image)
    trees.picture(labels / "deep" / ("b.png" if kind == "probabilities" else "b.PNG"))
    out.mkdir()
    (out / kind).symlink_to(labels)
    with pytest.raises(ValueError, match=f"^output={out} holds {kind}/deep/b.*, which might be replaced"):
        run(trained, image, out)
    assert relative_files(out) == [] and relative_files(labels) == [f"deep/{path.name}" for path in labels.rglob("b*")]
    (out / kind).unlink()
    (out / "classes.json").write_text('["road", "sky"]')
    with pytest.raises(ValueError, match=f"^output={out} has a dataset's classes.json, which would be lost"):
        run(trained, image, out)
    (out / "classes.json").unlink()
    run(trained, image, out)
    (out / "classes.json").unlink()
    with pytest.raises(ValueError, match="holds ids/a.png"):
        run(trained, image, out)


def test_reports_and_tables_of_others_are_not_replaced(trained, classifier, tmp_path):
    trees.picture(tmp_path / "in" / "a.png")
    page, table = tmp_path / "page.html", tmp_path / "out" / "predictions.csv"
    for _ in range(2):
        run((classifier,), tmp_path / "in", tmp_path / "out", f"report={page}")
        run(trained, tmp_path / "in", tmp_path / "segmented", f"report={page}")
    for file, network in ((page, trained), (trained[0], trained), (table, (classifier,))):
        before = file.read_bytes()
        if file != trained[0]:
            file.write_bytes(before := b"<!doctype html>\nmine")
        with pytest.raises(ValueError, match=f"={file} (was not written by this command|is the input)"):
            run(network, tmp_path / "in", tmp_path / "out", f"report={page if file == table else file}")
        assert file.read_bytes() == before
        page.unlink(missing_ok=True)


@pytest.mark.slow
def test_a_signal_leaves_whole_pictures_and_the_same_command_works_again(trained, tmp_path):
    for number in range(12):
        trees.picture(tmp_path / "in" / f"{number}.png", (200, 300))
    words = (f"checkpoint={trained[0]}", f"input={tmp_path / 'in'}", f"output={tmp_path / 'out'}", "device=cpu")
    started = subprocess.Popen([sys.executable, "-m", "scripts.predict", *words], cwd=REPOSITORY)
    while started.poll() is None and not [*(tmp_path / "out").rglob("*.png")]:
        time.sleep(0.01)
    started.terminate()
    started.wait()
    for path in (tmp_path / "out").rglob("*.png"):
        Image.open(path).load()
    assert len(run(trained, tmp_path / "in", tmp_path / "out")) == 12
    assert len(relative_files(tmp_path / "out")) == 1 + 3 * 12


def test_what_is_no_regular_file_is_counted_as_skipped(trained, tmp_path, capsys):
    trees.picture(tmp_path / "in" / "a.png")
    os.mkfifo(tmp_path / "in" / "pipe\n.png")
    os.mkfifo(tmp_path / "in" / "pipe")
    (tmp_path / "in" / "device.jpg").symlink_to("/dev/zero")
    (tmp_path / "in" / "huge.tif").touch()
    os.truncate(tmp_path / "in" / "huge.tif", 2**40)
    assert len(run(trained, tmp_path / "in", tmp_path / "out")) == 1
    printed = capsys.readouterr().out
    named = r"skipped 3 file(s) that are no regular files of at most 4 GiB: device.jpg, huge.tif, pipe\n.png"
    assert named in printed and "skipped 1 file(s) without an image's suffix: pipe" in printed
    with pytest.raises(ValueError, match=r"pipe\n.png is a folder, pipe or device; expected a regular file"):
        find_images(tmp_path / "in" / "pipe\n.png", tmp_path / "out")


def test_wrong_values_are_refused_before_anything_is_written(trained, tmp_path):
    """Among the images of a dataset, predictions would be images without a label, and block the next training."""
    trees.picture(tmp_path / "data" / "images" / "a.png")
    (tmp_path / "data" / "labels").mkdir()
    (tmp_path / "empty").mkdir()
    image, classes = tmp_path / "data" / "images" / "a.png", tmp_path / "data" / "classes.json"
    classes.write_text('\n{"classes": []}')
    before = trees.contents(tmp_path)
    for override, message in (
        ("input=/nowhere/at/all.png", "input=/nowhere/at/all.png does not exist"),
        (f"input={tmp_path / 'empty'}", "empty holds no image, such as .png"),
        (f"output={tmp_path / 'data/images/new'}", f"lies in {tmp_path / 'data/images'}, the images of a dataset"),
        (f"report={tmp_path}", f"report={tmp_path} is a folder: give another file"),
        (f"report={image}", f"report={image} is the input: give another file"),
        (f"output={tmp_path / 'data'}", f"output={tmp_path / 'data'} has a dataset's classes.json, which would be"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            run(trained, tmp_path / "data/images", tmp_path / "out", override)
        assert trees.contents(tmp_path) == before
    assert run(trained, tmp_path / "data" / "images", tmp_path / "data" / "predicted")


def test_folders_of_images_are_known_by_the_names_of_the_training(tmp_path):
    names = LabelNames("ann_dir", image_folder="img_dir")
    for folder in ("img_dir", "ann_dir", "other"):
        (tmp_path / folder).mkdir()
    assert [is_labelled(tmp_path / folder, names) for folder in ("img_dir", "ann_dir", "other")] == [True, False, False]
    assert not is_labelled(tmp_path / "img_dir", LabelNames())


@pytest.mark.parametrize(
    "label_folder, suffix, names",
    [
        ("labels", "", LabelNames()),
        ("masks", "_mask", LabelNames("labels", "_mask")),
        ("truth", "", LabelNames("truth")),
        ("images", "_gt", LabelNames("images", "_gt")),
    ],
)
def test_labels_beside_their_images_are_left_out_and_counted(label_folder, suffix, names, tmp_path, capsys):
    """In the root of a dataset. What has no image of its name is an image, and so is a folder of labels by itself."""
    for split in ("train", "val/deep"):
        trees.picture(tmp_path / split / "images" / "place" / "a.jpg")
        trees.picture(tmp_path / split / label_folder / "place" / f"a{suffix}.png")
    trees.picture(tmp_path / "train" / "labels" / "other.png")
    log_to(make_console(), None)
    names_of_images = find_images(tmp_path, tmp_path / "out", labels=names)
    images = ["train/images/place/a", "val/deep/images/place/a"]
    assert sorted(names_of_images) == sorted([*images, "train/labels/other"])
    left_out = f"train/{label_folder}/place/a{suffix}.png, val/deep/{label_folder}/place/a{suffix}.png"
    assert f"skipped 2 file(s) that are labels of images: {left_out}" in capsys.readouterr().out.replace("\n", " ")
    alone = find_images(tmp_path / "train" / label_folder, tmp_path / "out")
    assert f"place/a{suffix}" in alone


def test_predictions_of_other_classes_are_not_written_over(trained, tmp_path):
    trees.picture(tmp_path / "a.png", (50, 72))
    out = tmp_path / "out"
    run(trained, tmp_path / "a.png", out)
    run(trained, tmp_path / "a.png", out)
    saved(
        tmp_path / "net.pt",
        run_config("data=folder"),
        ["leaf", "stem"],
        palette=[[0, 0, 0], [9, 9, 9]],
        label_ids=[0, 1],
    )
    before = (out / "classes.json").read_bytes()
    with pytest.raises(
        ValueError, match="holds another network's predictions, of the classes .*; this network has leaf, stem"
    ):
        run((tmp_path / "net.pt",), tmp_path / "a.png", out)
    assert (out / "classes.json").read_bytes() == before


def test_images_that_are_too_large_are_put_aside_with_the_cure(trained, tmp_path, monkeypatch):
    """Too large for a picture, by their headers, or for the network."""
    for name, side in (("a", 60), ("b", 90), ("c", 50), ("d", 70)):
        trees.picture(tmp_path / "in" / f"{name}.png", (side, 72))
    monkeypatch.setattr("datasets.stored.MOST_PIXELS", 80 * 72)
    overlay = predict.__globals__["overlay"]

    def short_of_memory(image, colours):
        if len(image) == 60:
            raise MemoryError("out of memory")
        return overlay(image, colours)

    def predicted_in_little_memory(forward, images, *views, **options):
        if images.shape[2] == 70:
            raise MemoryError("out of memory while an image of 70x72 pixels was evaluated")
        return predicted(forward, images, *views, **options)

    predicted = inference.predict
    monkeypatch.setattr(inference, "predict", predicted_in_little_memory)
    monkeypatch.setitem(predict.__globals__, "overlay", short_of_memory)
    with pytest.raises(ValueError, match="3 of 4 images were not predicted") as error:
        run(trained, tmp_path / "in", tmp_path / "out")
    assert "b.png: has more than 0 megapixels; expected fewer: cut large images" in str(error.value)
    assert "a.png: out of memory: cut it into tiles, or use smaller windows" in str(error.value)
    assert "d.png: out of memory while an image of 70x72 pixels was evaluated: cut it into" in str(error.value)
    assert [file.name for file in (tmp_path / "out" / "ids").iterdir()] == ["c.png"]
