"""Checks of a whole split: every kind of damage is found, named and counted, and what can be read is counted exactly.

`verify` runs before a training and remembers success; `inspect` is run by hand and decodes all pixels.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

import datasets
from datasets import (
    ClassificationDataset,
    SegmentationDataset,
    camvid,
    folder,
    image_folder,
    imagenet,
    inspect,
    reading_errors,
    shared_images,
    verify,
)
from datasets.file_list import file_list_of
from tests import trees
from tests.datasets import classification_trees


def relabelled(root: Path, pattern: str, change: Callable[[np.ndarray], np.ndarray]) -> None:
    for path in root.glob(pattern):
        trees.write(path, change(cv2.imread(str(path), cv2.IMREAD_UNCHANGED)))


TRAIN_IDS = "gtFine/train/*/*_labelIds.png"


def train_ids(kind: str) -> Callable[[Path], None]:
    """Replace the labels by train ids, as a dataset's own tool or a user may have done."""
    pattern = {"cityscapes": TRAIN_IDS, "coco_stuff": "stuffthingmaps/train2017/*.png"}[kind]

    def change(root: Path) -> None:
        shutil.rmtree(root / "annotations" / "stuff_train2017_pixelmaps", ignore_errors=True)
        dataset = getattr(datasets, kind)(root, "train", **({"lists": "full"} if kind == "coco_stuff" else {}))
        relabelled(root, pattern, dataset.table.train_ids)

    return change


def cycled(*values: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda label: np.resize(np.array(values, label.dtype), label.shape)


def other_palette(root: Path) -> None:
    label = next((root / "training" / "labels").glob("*.png"))
    trees.write_palette(label, np.asarray(Image.open(label)), [(index, 9, 9) for index in range(66)])


DOUBTS = {  # kind of dataset, what is wrong with its labels, and the doubts about them
    "train ids": (
        "cityscapes",
        train_ids("cityscapes"),
        [
            "no training image shows traffic light, .*, bicycle: check the labels and the classes. They hold 0-18, "
            "255, which look like train ids; expected 7-8, 11-13, 17, 19-28, 31-33$",
            "82% of .* by the dataset's list of classes: their ids are 0-6, 9-10, 14-16, 18, 255",
        ],
    ),
    "a class that no image shows": (
        "camvid",
        lambda root: relabelled(root, "train/labels/*", lambda label: label % 10),
        ["no training image shows bicyclist: check the labels and the classes$"],
    ),
    "an ignored class almost everywhere": (
        "folder",
        lambda root: relabelled(root, "train/labels/*/*", cycled(0, 1, 2, *30 * [3])),
        [],
    ),
    "a palette of another order": (
        "vistas",
        other_palette,
        [r"/street-0*..png: its palette gives the id 0 the colour \(0, 9, 9\), and the dataset's list of classes the "],
    ),
}


def changed(kind: str, change: Callable[[Path], None], root: Path) -> SegmentationDataset:
    folder = trees.SEGMENTATION[kind](root)
    change(folder)
    return getattr(datasets, kind)(folder, "train")


@pytest.mark.parametrize("case", DOUBTS)
def test_labels_that_look_wrong_are_doubted_for_every_dataset(case, tmp_path):
    """They are not refused: small or cleaned copies of a dataset may look like this."""
    kind, change, expected = DOUBTS[case]
    dataset = changed(kind, change, tmp_path / "data")
    for _ in range(2):  # the second time it is remembered
        doubts = verify(dataset, workers=0)
        assert len(doubts) == len(expected) and all(map(re.search, expected, doubts)), doubts
    assert inspect(dataset, workers=0).doubts("training image") == doubts


def refusal(dataset: SegmentationDataset) -> str:
    with pytest.raises(ValueError) as error:
        verify(dataset, workers=0)
    return str(error.value)


UNLABELLED = {  # kind of dataset, what is wrong with its labels, and the message
    "nothing labelled": (
        "cityscapes",
        lambda root: relabelled(root, TRAIN_IDS, cycled(0)),
        "no image shows road, .*, bicycle: check the labels and the classes. 100% of the .*: their ids are 0$",
    ),
    "train ids of stuffthingmaps": (
        "coco_stuff",
        train_ids("coco_stuff"),
        "no image shows banner, .* They hold 0-90, 255, which look like train ids; expected 91-181. 100% of .*",
    ),
}


@pytest.mark.parametrize("case", UNLABELLED)
def test_a_split_in_which_no_pixel_has_a_class_is_refused(case, tmp_path):
    """It trained nothing, and ended in scores that are no numbers."""
    kind, change, expected = UNLABELLED[case]
    dataset = changed(kind, change, tmp_path / "data")
    for _ in range(2):  # the second time it is remembered
        message = refusal(dataset)
        assert re.search(f"^{kind}, split 'train.*': no pixel has a class, .* scored: {expected}", message), message


@pytest.mark.parametrize("kind", trees.SEGMENTATION)
def test_good_data_has_no_problem_and_exact_counts(kind, tmp_path):
    """It is read in a folder of any name, where nothing is written."""
    root, seen = trees.SEGMENTATION[kind](tmp_path / "above" / "Straßen 街 data"), []
    before = trees.contents(root)
    for split in trees.splits_of(kind, root):
        dataset = getattr(datasets, kind)(root, split)
        assert (dataset.name, dataset.split) == (kind, split) and len(dataset) > 1
        workers = 2 if (kind, split) == ("camvid", "train") else 0
        inspection = inspect(dataset, workers, lambda *counts: seen.append(counts))
        assert verify(dataset, workers, lambda *counts: seen.append(counts)) == []
        assert seen == 2 * [(done, len(dataset)) for done in range(1, len(dataset) + 1)]
        seen.clear()
        assert inspection.problems == ()
        labels = [dataset.read_label(index) for index in range(len(dataset)) if dataset.files[index].label is not None]
        assert bool(labels) == dataset.has_labels and (labels or split not in ("train", "val"))
        for class_id in range(len(dataset.classes)):
            assert inspection.by_class[class_id] == sum(int((label == class_id).sum()) for label in labels)
            assert inspection.holding[class_id] == sum(bool((label == class_id).any()) for label in labels)
        assert inspection.by_class[255] == sum(int((label == 255).sum()) for label in labels)
        assert inspection.by_class.sum() == sum(label.size for label in labels)
    assert trees.contents(root) == before


BOCHUM, BERLIN = "train/bochum/bochum_000000_000019", "test/berlin/berlin_000001_000019"
FILES = {
    "jpeg image": ("vistas", "training/images/street-000000000000001.jpg", "unreadable image"),
    "png image": ("cityscapes", f"leftImg8bit/{BOCHUM}_leftImg8bit.png", "unreadable image"),
    "label": ("cityscapes", f"gtFine/{BOCHUM}_gtFine_labelIds.png", "unreadable label"),
    "palette label": ("vistas", "training/labels/street-000000000000001.png", "unreadable label"),
    "unlabelled image": ("cityscapes", f"leftImg8bit/{BERLIN}_leftImg8bit.png", "unreadable image"),
}


@pytest.mark.parametrize("file", FILES)
def test_finds_damaged_files_and_counts_the_others(file, tmp_path, capfd):
    """test_reading.py has the kinds of damage."""
    kind, name, problem = FILES[file]
    root = trees.SEGMENTATION[kind](tmp_path / "data")
    path, split = root / name, "test" if "test" in name else "train"
    intact = inspect(getattr(datasets, kind)(root, split), workers=0)
    path.write_bytes(path.read_bytes()[:-20])
    dataset = getattr(datasets, kind)(root, split)
    inspection = inspect(dataset, workers=0)
    (found_problem,) = inspection.problems
    complaint = f"{path}: the {'JPEG' if file == 'jpeg image' else 'PNG'} file is truncated or damaged"
    assert found_problem.kind == problem and found_problem.message.startswith(complaint)
    assert "Restore the file from the dataset's archive" in found_problem.message
    lost = intact.by_class.sum() - inspection.by_class.sum()
    assert (lost > 0) == ("label" in file.split())
    message = refusal(dataset)
    assert message.startswith(f"{kind}, split '{split}': 1 problem(s) in {len(dataset)} images:\n  {complaint}")
    assert message == refusal(dataset)  # failure is not remembered
    reads = [dataset.__getitem__, dataset.undecoded]
    for read in reads[:1] if file == "unlabelled image" else reads:
        with pytest.raises(ValueError, match=f"{complaint}.* Restore the file from the dataset's") as error:
            [read(number) for number in range(len(dataset))]
        assert str(error.value) in message
    assert capfd.readouterr() == ("", "")  # what decoders print would break the progress bar


def test_copies_of_training_images_are_counted_by_their_bytes(tmp_path, monkeypatch):
    """Each file is read once, by the check; without it only files of a size that both splits have."""
    root = trees.folder(tmp_path / "boards")
    (root / "val/images/a/board.0.jpg").rename(root / "val/images/a/copy.jpg")  # of a training image
    (root / "val/labels/a/board.0.png").rename(root / "val/labels/a/copy.png")
    trees.write(root / "val/images/b/board.1.PNG", trees.pair(99, [0])[0])
    train, val = folder(root, "train"), folder(root, "val")
    assert shared_images(train, val) == 1 and shared_images(train, train) == 6
    assert shared_images(train, val, read_files=False) == 0 and shared_images(train, train, read_files=False) == 6
    photographs = classification_trees.imagenet(tmp_path / "photographs")
    shutil.copy(next(photographs.glob("train/*/*")), next(photographs.glob("val/*")) / "copy.JPEG")
    sorted_train, sorted_val = (image_folder(photographs, split) for split in ("train", "val"))
    assert shared_images(sorted_train, sorted_val) == 1 and shared_images(sorted_train, sorted_val, False) == 0
    for _ in range(2):  # the second time it is remembered
        for split in (train, val, sorted_train, sorted_val):
            split.digests = None
            verify(split, workers=0)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path: pytest.fail(f"{path} was read again"))
            assert shared_images(train, val) == 1 and shared_images(sorted_train, sorted_val) == 1
    pixels, named = np.random.default_rng(0).integers(0, 256, (5, 3, 32, 32), np.uint8), np.array([*"abc"])
    parts = (pixels[:3], pixels[2:])  # in memory
    one_file = file_list_of(root, [root / "classes.json"])  # as for a zip file with both splits
    small = [
        ClassificationDataset("small", split, ("a",), np.zeros(3), one_file, part, named)
        for split, part in zip(("train", "test"), parts, strict=True)
    ]
    assert shared_images(*small) == 1 and [verify(split, workers=0) for split in small] == [[], []]
    assert shared_images(*small) == 1


def checked_files(dataset, workers: int = 0) -> int:
    """How many images a call of `verify` checks."""
    seen = []
    verify(dataset, workers, lambda *counts: seen.append(counts))
    assert seen == [(done, len(dataset)) for done in range(1, len(seen) + 1)]
    return len(seen)


def test_success_is_remembered_until_a_file_changes(camvid_folders, tmp_path, monkeypatch):
    assert [checked_files(camvid(camvid_folders, split)) for split in ("train", "train", "val")] == [6, 0, 2]
    moved = tmp_path / "elsewhere"
    shutil.move(camvid_folders, moved)
    assert checked_files(camvid(moved, "train")) == 0
    label = moved / "train" / "labels" / "0001TP_000000.png"
    os.utime(label, ns=(0, label.stat().st_mtime_ns + 1))
    assert checked_files(camvid(moved, "train")) == 6
    root = classification_trees.imagenet(tmp_path / "imagenet")
    assert [checked_files(imagenet(root, split)) for split in ("train", "train", "val")] == [6, 0, 3]
    os.utime(next((root / "train").glob("*/*")))
    assert checked_files(imagenet(root, "train"), workers=2) == 6
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))  # goes on without a cache folder
    assert checked_files(camvid(moved, "val")) == checked_files(camvid(moved, "val")) == 2


def test_a_file_that_blocks_its_reader_is_named(camvid_folders, monkeypatch):
    """Only its own time counts, however long the files before it take on a busy machine."""
    file = sorted((camvid_folders / "train" / "labels").iterdir())[3]
    file.unlink()
    os.mkfifo(file)
    monkeypatch.setattr("datasets.stored.why_unfit", lambda path: None)  # as a file on a disk that hangs
    named = camvid_folders / "train" / "images" / f"{file.stem}.jpg"
    seen, wait = [], _MultiProcessingDataLoaderIter._try_get_data
    monkeypatch.setattr(
        _MultiProcessingDataLoaderIter,
        "_try_get_data",
        lambda iterator, limit: wait(iterator, limit if len(seen) == 3 else 300),
    )
    with pytest.raises(TimeoutError, match=f"^{named}: no data came for timeout_seconds=1 "), reading_errors(1):
        verify(camvid(camvid_folders, "train"), 2, lambda *counts: seen.append(counts))
