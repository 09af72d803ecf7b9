"""The report of a full check: exact counts, every kind of problem with its first files, the exit status."""

import json
import re
from pathlib import Path

import pytest

from datasets import folder, index_classes
from scripts.verify_data import SplitReport, verify_data
from tests import trees
from tests.datasets import classification_trees
from tests.runs import checked


def verified(tmp_path: Path, *overrides: str, workers: int = 0) -> dict[str, SplitReport]:
    """{split: its report}, which is also what the file holds."""
    out = tmp_path / "reports" / "report.json"
    reports = verify_data(checked("verify_data", *overrides, f"workers={workers}", f"out={out}"))
    record = json.loads(out.read_text())
    assert record["splits"] == {split: report.record() for split, report in reports.items()} and record["environment"]
    assert record["problems"] == sum(report.problem_count for report in reports.values())
    return reports


def test_complete_data_has_exact_counts_and_no_problem(tmp_path, capsys):
    root = trees.folder(tmp_path / "data")
    reports = verified(tmp_path, "data=folder", f"data.root={root}", "splits=[train,val]")
    assert list(reports) == ["train", "val"]
    for split, images in (("train", 6), ("val", 2)):
        report = reports[split]
        assert report.images == images and report.official_images is None and report.problems == {}
        index = index_classes(folder(root, split), tmp_path, workers=0)
        assert [counts["pixels"] for counts in report.classes.values()] == index.counts.sum(axis=0).tolist()
        assert [counts["labels"] for counts in report.classes.values()] == (index.counts > 0).sum(axis=0).tolist()
        assert report.ignored_pixels == images * 24 * 40 - index.counts.sum() and report.doubts == []
    assert re.findall(r"class .* pixels .* share % .* (\w+) ", capsys.readouterr().out) == ["labels", "labels"]
    (tmp_path / "notes.json").write_text("{}")
    with pytest.raises(ValueError, match="out=.*notes.json"):  # before anything is read
        verify_data(checked("verify_data", "data=folder", f"data.root={root}", f"out={tmp_path / 'notes.json'}"))


def test_every_problem_is_reported(tmp_path, capsys):
    root = trees.cityscapes(tmp_path / "data")
    for path in (root / "leftImg8bit" / "val").rglob("*.png"):
        path.write_bytes(b"")
    for path in (root / "leftImg8bit" / "test").rglob("*.png"):
        path.unlink()
    for number in range(7):
        image, _ = trees.pair(number, [0])
        path = f"train/aachen/aachen_{number:06d}_000020"
        trees.write(root / f"leftImg8bit/{path}_leftImg8bit.png", image[:12])
        trees.write(root / f"gtFine/{path}_gtFine_labelIds.png", image[..., 0] % 34)
    reports = verified(tmp_path, "data=cityscapes", f"data.root={root}", workers=1)
    assert {
        split: {kind: len(messages) for kind, messages in reports[split].problems.items()} for split in reports
    } == {
        "train": {"number of images": 1, "sizes differ": 7},
        "val": {"number of images": 1, "unreadable image": 2},
        "test": {"split cannot be opened": 1},
    }
    differ = reports["train"].problems["sizes differ"]
    assert all("is 40x12; expected the same size. Restore the file" in message for message in differ)
    printed = capsys.readouterr().out
    assert "expected 2975, found 11" in printed and "expected 500, found 2" in printed
    lines = printed.splitlines()
    assert lines[lines.index("train: sizes differ, 7:") + 6] == "  … and 2 more"
    assert "no images in split 'test'" in printed and "Expected layout" not in printed


@pytest.mark.parametrize("lists, train", [("challenge", (3, 40000)), ("full", (4, 118287))])
def test_official_numbers_depend_on_the_list_and_splits_may_be_chosen(tmp_path, lists, train):
    root = trees.coco_stuff(tmp_path / "data")
    reports = verified(tmp_path, f"data.root={root}", "data=coco_stuff", f"data.lists={lists}", "splits=[test,train]")
    numbers = {split: (report.images, report.official_images) for split, report in reports.items()}
    assert numbers == {"test": (2, 40670), "train": train}


def test_images_of_a_classification_are_decoded_too(tmp_path, capsys):
    """Other classes than ImageNet's 1000 have no official number of images."""

    def kinds(*overrides: str) -> list[list[str]]:
        return [list(report.problems) for report in verified(tmp_path, *overrides).values()]

    root = classification_trees.imagenet(tmp_path / "data")
    assert kinds("data=imagenet", f"data.root={root}") == [[], []]
    damaged = next((root / "train").rglob("*.JPEG"))
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert kinds("data=imagenet", f"data.root={root}") == [["unreadable image"], []]
    assert str(damaged) in capsys.readouterr().out
    for file in damaged.parent.iterdir():
        file.unlink()
    kinds("data=image_folder", f"data.root={root}")
    assert f"train: no image of train shows {damaged.parent.name}: check the labels" in capsys.readouterr().out
    zipped = classification_trees.cifar_zip(tmp_path / "cifar.zip")
    assert kinds("data=cifar10", f"data.root={zipped}", "splits=[test]") == [["number of images"]]
    assert "expected 10000, found" in capsys.readouterr().out
