"""The report of a full check: exact counts, every kind of problem with its first files, the exit status."""

import json
import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest

from datasets import index_classes, synthetic
from scripts.verify_data import verify_data
from tests import trees
from tests.datasets import classification_trees
from tests.runs import REPOSITORY, composed


def run(*overrides: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "scripts.verify_data", *overrides]
    strict = {**os.environ, "PYTHONIOENCODING": "utf-8:strict"}  # as in most locales
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", env=strict, timeout=300)


def test_complete_data_is_a_success_with_exact_counts(tmp_path):
    completed = run("data=synthetic", f"out={tmp_path / 'report.json'}")
    assert completed.returncode == 0 and completed.stderr == "", completed.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["problems"] == 0 and list(report["splits"]) == ["train", "val"] and report["environment"]
    for split, images in (("train", 200), ("val", 40)):
        found = report["splits"][split]
        assert found["images"] == found["official_images"] == images and found["problems"] == {}
        index = index_classes(synthetic(None, split), tmp_path, workers=0)
        assert [column["pixels"] for column in found["classes"].values()] == index.counts.sum(axis=0).tolist()
        assert [column["labels"] for column in found["classes"].values()] == (index.counts > 0).sum(axis=0).tolist()
        assert found["ignored_pixels"] == images * 256 * 128 - index.counts.sum()
        assert {*index.absent()} == {*synthetic(None, split).table.absent} and found["doubts"] == []
    assert re.findall(r"class .* pixels .* share % .* (\w+) ", completed.stdout) == ["labels", "labels"]


def test_every_problem_is_reported(tmp_path, capsys):
    root, report = trees.cityscapes(tmp_path / "data"), tmp_path / "reports" / "report.json"
    for path in (root / "leftImg8bit" / "val").rglob("*.png"):
        path.write_bytes(b"")
    for path in (root / "leftImg8bit" / "test").rglob("*.png"):
        path.unlink()
    for number in range(7):
        image, _ = trees.pair(number, [0])
        path = f"train/aachen/aachen_{number:06d}_000020"
        trees.write(root / f"leftImg8bit/{path}_leftImg8bit.png", image[:12])
        trees.write(root / f"gtFine/{path}_gtFine_labelIds.png", image[..., 0] % 34)
    verify_data(composed("verify_data", "data=cityscapes", f"data.root={root}", f"out={report}", "workers=1"))
    printed, splits = capsys.readouterr().out, json.loads(report.read_text())["splits"]
    counts = {split: {kind: len(found) for kind, found in splits[split]["problems"].items()} for split in splits}
    assert counts == {
        "train": {"number of images": 1, "sizes differ": 7},
        "val": {"number of images": 1, "unreadable image": 2},
        "test": {"split cannot be opened": 1},
    }
    assert "expected 2975, found 11" in printed and "expected 500, found 2" in printed
    lines = printed.splitlines()
    start = lines.index("train: sizes differ, 7:")
    named = [line.partition(":")[0].rpartition("/")[2] for line in lines[start + 1 : start + 6]]
    assert named == [f"aachen_{number:06d}_000020_gtFine_labelIds.png" for number in range(5)]
    assert lines[start + 6] == "  … and 2 more"
    assert "no images in split 'test'" in printed and "Expected layout" not in printed


def test_fixes_for_own_images_are_said_once_per_kind_of_problem(tmp_path, capsys):
    root = trees.folder(tmp_path / "boards")
    for file in sorted((root / "train/images").rglob("*.jpg"))[:2]:
        file.write_bytes(b"")
    for file in (root / "val/labels").rglob("*.png"):
        trees.write(file, np.full((24, 40), 9, np.uint8))
    verify_data(composed("verify_data", "data=folder", f"data.root={root}", "workers=0"))
    printed = capsys.readouterr().out
    fix = "Restore the file from the dataset's archive, or your own image"
    assert len(re.findall(f"^  {fix}", printed, re.MULTILINE)) == printed.count(fix) == 1
    assert printed.count("Labels hold ids, ") == 1


def test_file_names_that_are_not_utf_8_are_reported(tmp_path):
    """On the screen with escapes, in the file so that Python's JSON gives the name back. The command fails."""
    root = trees.camvid_folders(tmp_path / "data")
    name = os.fsdecode(b"caf\xe9")
    path = root / "train" / "images" / f"{name}.jpg"
    (path.parent / "0001TP_000002.jpg").rename(path)
    (root / "train/labels/0001TP_000002.png").rename(root / f"train/labels/{name}.png")
    path.write_bytes(b"")
    completed = run("data=camvid", f"data.root={root}", f"out={tmp_path / 'report.json'}", "workers=1")
    assert completed.returncode == 1 and completed.stderr == "", completed.stderr
    assert f"  {path.parent}/caf\\udce9.jpg: the file is empty; expected " in completed.stdout
    found = json.loads((tmp_path / "report.json").read_text())["splits"]["train"]["problems"]
    assert found["unreadable image"][0].startswith(f"{path}: the file is empty")


def test_each_split_says_how_to_open_it(tmp_path, capsys):
    """The layout is shown only where no split can be opened."""
    reports = verify_data(composed("verify_data", "data=vistas", f"data.root={tmp_path}", "workers=0"))
    assert [[*report["problems"]] for report in reports.values()] == 3 * [["split cannot be opened"]]
    assert capsys.readouterr().out.count("Expected layout of vistas") == 1
    root = trees.coco_stuff(tmp_path / "data", pixel_maps=False)
    shutil.rmtree(root / "annotations")
    reports = verify_data(composed("verify_data", "data=coco_stuff", f"data.root={root}", "workers=0"))
    assert [bool(report["images"]) for report in reports.values()] == [False, False, True]
    printed = capsys.readouterr().out
    assert printed.count("  Fix: give data.lists=full to use all images of the folder, or unpack") == 2
    assert "Expected layout" not in printed


def test_official_numbers_depend_on_the_list_and_splits_may_be_chosen(tmp_path):
    root = trees.coco_stuff(tmp_path / "data")
    data = ("verify_data", "data=coco_stuff", f"data.root={root}", "workers=0")
    numbers = {}
    for lists in ("challenge", "full"):
        reports = verify_data(composed(*data, f"data.lists={lists}", "splits=[test,train]"))
        numbers[lists] = {split: (own["images"], own["official_images"]) for split, own in reports.items()}
    assert numbers["challenge"] == {"test": (2, 40670), "train": (3, 40000)}
    assert numbers["full"] == {"test": (2, 40670), "train": (4, 118287)}


def test_a_file_that_blocks_its_reader_ends_the_command(tmp_path):
    label = next(trees.cityscapes(tmp_path / "data").rglob("gtFine/train/*/*labelIds.png"))
    label.unlink()
    os.mkfifo(label)
    keys = ("data=cityscapes", f"data.root={tmp_path / 'data'}", "data.timeout_seconds=1", "workers=1")
    with pytest.raises(TimeoutError, match="no data came for data.timeout_seconds=1 seconds"):
        verify_data(composed("verify_data", *keys))


def test_images_of_a_classification_are_decoded_too(tmp_path, capsys):
    """Other classes than ImageNet's 1000 have no official number of images."""

    def check(*overrides: str) -> list[list[str]]:
        reports = verify_data(composed("verify_data", *overrides, "workers=0", f"out={tmp_path / 'report.json'}"))
        assert json.loads((tmp_path / "report.json").read_text())["splits"] == reports
        return [list(report["problems"]) for report in reports.values()]

    root = classification_trees.imagenet(tmp_path / "data")
    assert check("data=imagenet", f"data.root={root}") == [[], []]
    damaged = next((root / "train").rglob("*.JPEG"))
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert check("data=imagenet", f"data.root={root}") == [["unreadable image"], []]
    assert str(damaged) in capsys.readouterr().out
    for file in damaged.parent.iterdir():
        file.unlink()
    verify_data(composed("verify_data", "data=image_folder", f"data.root={root}", "workers=0"))
    assert f"train: no image of train shows {damaged.parent.name}: check the labels" in capsys.readouterr().out
    zipped = classification_trees.cifar_zip(tmp_path / "cifar.zip")
    assert check("data=cifar10", f"data.root={zipped}", "splits=[test]") == [["number of images"]]
    assert "expected 10000, found" in capsys.readouterr().out
