"""Checks of a whole split: every kind of damage is found, named and counted, and what can be read is counted exactly.

`verify` runs before a training and remembers success; `inspect` is run by hand and decodes all pixels.
"""

import os
import re
import shutil
import threading

import numpy as np
import pytest

import datasets
from datasets import SegmentationDataset, camvid, cityscapes, coco_stuff, index_classes, inspect, time_limit, verify
from datasets.time_limit import reading_limit
from tests import trees


def refusal(dataset: SegmentationDataset, workers: int = 0) -> str:
    with pytest.raises(ValueError) as error:
        verify(dataset, workers)
    return str(error.value)


@pytest.mark.parametrize("kind", trees.SEGMENTATION)
def test_good_data_has_no_problem_and_exact_counts(kind, tmp_path):
    root, seen = trees.SEGMENTATION[kind](tmp_path / "data"), []

    def progress(*counts: int) -> None:
        seen.append(counts)

    for split in ("train", "val", "test"):
        dataset = getattr(datasets, kind)(root, split, strict=False)
        workers = 2 if (kind, split) == ("camvid", "train") else 0
        inspection = inspect(dataset, workers, progress)
        verify(dataset, workers, progress)
        assert seen == 2 * [(done, len(dataset)) for done in range(1, len(dataset) + 1)]
        seen.clear()
        assert inspection.problems == ()
        labels = [dataset.read_label(index) for index in range(len(dataset)) if dataset.files[index].label is not None]
        assert bool(labels) == (split != "test" or kind == "camvid")
        for class_id in range(len(dataset.classes)):
            assert inspection.pixels[class_id] == sum(int((label == class_id).sum()) for label in labels)
            assert inspection.images[class_id] == sum(bool((label == class_id).any()) for label in labels)
        assert inspection.ignored == sum(int((label == 255).sum()) for label in labels)
        assert inspection.pixels.sum() + inspection.ignored == sum(label.size for label in labels)


def test_counts_are_exact_beyond_the_numbers_that_float32_holds(camvid_folders):
    """At 22 megapixels, like the largest photographs of Vistas."""
    label = np.full((4000, 5500), 3, np.uint8)
    label[1234, 567:570] = 7
    trees.write(camvid_folders / "val" / "labels" / "0001TP_000000.png", label)
    (camvid_folders / "val" / "labels" / "0001TP_000001.png").unlink()
    inspection = inspect(camvid(camvid_folders, "val", strict=False), workers=0)
    assert inspection.pixels[[3, 7]].tolist() == [4000 * 5500 - 3, 3] and inspection.pixels.sum() == 4000 * 5500


def in_the_middle(change):
    """Replaces the middle half of a file's bytes."""

    def damage(data: bytes) -> bytes:
        quarter = len(data) // 4
        return data[:quarter] + change(data[quarter:-quarter]) + data[-quarter:]

    return damage


# What `verify` says about it, or None if only decoding finds it.
DAMAGE = {
    "truncated": (lambda data: data[: len(data) // 2], "the (PNG|JPEG) file is truncated"),
    "shorter": (lambda data: data[:-20], "the (PNG|JPEG) file is truncated"),
    "empty": (lambda data: b"", "the file is empty"),
    "replaced": (lambda data: b"<html>not found</html>", "is neither PNG nor JPEG"),
    "zeroed": (in_the_middle(lambda middle: bytes(len(middle))), None),
    "cut": (in_the_middle(lambda middle: b""), None),
    "repeated": (in_the_middle(lambda middle: 2 * middle), None),
    "reversed": (in_the_middle(lambda middle: middle[::-1]), None),
    "one bit flipped": (in_the_middle(lambda middle: bytes([middle[0] ^ 1]) + middle[1:]), None),
}
BOCHUM = "train/bochum/bochum_000000_000019"
FILES = {
    "jpeg image": ("vistas", "training/images/street-000000000000001.jpg", "unreadable image"),
    "png image": ("cityscapes", f"leftImg8bit/{BOCHUM}_leftImg8bit.png", "unreadable image"),
    "label": ("cityscapes", f"gtFine/{BOCHUM}_gtFine_labelIds.png", "unreadable label"),
    "instances": ("cityscapes", f"gtFine/{BOCHUM}_gtFine_instanceIds.png", "unreadable instances"),
    "palette label": ("vistas", "training/labels/street-000000000000001.png", "unreadable label"),
    "unlabelled image": (
        "cityscapes",
        "leftImg8bit/test/berlin/berlin_000001_000019_leftImg8bit.png",
        "unreadable image",
    ),
}


@pytest.mark.parametrize("file", FILES)
def test_finds_damaged_files_and_counts_the_others(file, tmp_path, capfd):
    kind, name, problem = FILES[file]
    root = trees.SEGMENTATION[kind](tmp_path / "data")
    path, split = root / name, "test" if "test" in name else "train"
    data, intact = path.read_bytes(), inspect(getattr(datasets, kind)(root, split), workers=0)
    for damage, (change, complaint) in DAMAGE.items():
        if (file, damage) == ("jpeg image", "one bit flipped"):  # it has no checksums
            continue
        path.write_bytes(change(data))
        dataset = getattr(datasets, kind)(root, split, strict=False)
        inspection = inspect(dataset, workers=0)
        found = [(entry.kind, entry.message.startswith(f"{path}: ")) for entry in inspection.problems]
        assert found == [(problem, True)], damage
        lost = intact.pixels.sum() + intact.ignored - inspection.pixels.sum() - inspection.ignored
        assert (lost > 0) == ("label" in file.split())
        if complaint:
            message = refusal(dataset)
            assert message.startswith(f"{kind}, split '{split}': 1 problem(s) in {len(dataset)} images:\n  {path}: ")
            assert re.search(complaint, message) and message == refusal(dataset)  # failure is not remembered
            with pytest.raises(ValueError, match=complaint) as error:
                [dataset.scored(number) for number in range(len(dataset))]
            assert str(error.value) in message  # reading says the same
    assert capfd.readouterr() == ("", "")  # what decoders print would break the progress bar


def test_finds_sizes_ids_and_files_without_counterparts_in_one_pass(camvid_folders):
    labels, images = camvid_folders / "train" / "labels", camvid_folders / "train" / "images"
    trees.write(labels / "0001TP_000000.png", np.zeros((12, 20), np.uint8))
    trees.write(labels / "0001TP_000001.png", np.full((24, 40), 77, np.uint8))
    message = refusal(camvid(camvid_folders, "train"), workers=2)
    assert "2 problem(s) in 6 images" in message
    assert "0001TP_000000.png: the label is 20x12" in message and "0001TP_000001.png: contains the ids 77" in message
    (labels / "0001TP_000002.png").unlink()
    (images / "0001TP_000003.jpg").unlink()
    problems = inspect(camvid(camvid_folders, "train", strict=False), workers=0).problems
    assert [(kind, message.partition(":")[0]) for kind, message in problems] == [
        ("image without label", str(images / "0001TP_000002.jpg")),
        ("label without image", str(labels / "0001TP_000003.png")),
        ("sizes differ", str(labels / "0001TP_000000.png")),
        ("unknown ids", str(labels / "0001TP_000001.png")),
    ]


def test_instances_of_another_size_are_found(cityscapes_root):
    """They are read only in evaluations, hours after the start."""
    dataset = cityscapes(cityscapes_root, "val")
    trees.write(dataset.files[0].instances, np.zeros((12, 20), np.uint16))
    message = f"{dataset.files[0].instances}: the label is 20x12 pixels and its image {dataset.files[0].image} is 40x24"
    assert message in refusal(dataset)
    (problem,) = inspect(dataset, workers=0).problems
    assert problem.kind == "sizes differ" and problem.message.startswith(message)
    with pytest.raises(ValueError, match=f"^{dataset.files[0].instances}: the label is 20x12"):
        dataset.scored(0)


def test_labels_beyond_the_challenge_are_no_problem(coco_root):
    """The label archive covers all images, but images that are not on the lists may be missing."""
    (coco_root / "train2017" / "000000000025.jpg").unlink()
    assert inspect(coco_stuff(coco_root, "train", strict=False), workers=0).problems == ()
    (problem,) = inspect(coco_stuff(coco_root, "train", lists="full", strict=False), workers=0).problems
    assert problem.kind == "label without image"


def test_an_error_that_nobody_expected_is_a_problem_of_its_file(camvid_folders):
    dataset = camvid(camvid_folders, "train")

    def decode(file, window):
        if "000004" in file.path.name:
            raise RuntimeError("what nobody expected")
        return decode_label(file, window)

    dataset.decode_label, decode_label = decode, dataset.decode_label
    (problem,) = inspect(dataset, workers=0).problems
    assert problem.kind == "unexpected error" and "0001TP_000004.png" in problem.message
    assert "RuntimeError: what nobody expected" in problem.message


@pytest.mark.parametrize("count", [5, 6])
def test_names_five_offenders_in_order_and_counts_the_rest(camvid_folders, count):
    for path in sorted((camvid_folders / "train" / "labels").iterdir())[:count]:
        path.write_bytes(b"")
    message = refusal(camvid(camvid_folders, "train"), workers=2)
    named = [line.split("/")[-1].split(":")[0] for line in message.splitlines() if line.startswith("  /")]
    assert named == [f"0001TP_{index:06d}.png" for index in range(5)]
    assert f"{count} problem(s) in 6 images" in message and message.endswith("\n  … and 1 more") == (count == 6)


def checked_files(dataset) -> int:
    """How many images a call of verify checks."""
    seen = []
    verify(dataset, workers=0, progress=lambda done, total: seen.append(done))
    return len(seen)


def test_success_is_remembered_until_a_file_changes(camvid_folders, tmp_path):
    assert checked_files(camvid(camvid_folders, "train")) == 6
    assert checked_files(camvid(camvid_folders, "train")) == 0
    assert checked_files(camvid(camvid_folders, "val")) == 2
    moved = tmp_path / "elsewhere"
    shutil.move(camvid_folders, moved)
    assert checked_files(camvid(moved, "train")) == 0
    label = moved / "train" / "labels" / "0001TP_000000.png"
    os.utime(label, ns=(0, label.stat().st_mtime_ns + 1))
    assert checked_files(camvid(moved, "train")) == 6


def test_goes_on_without_a_cache_folder(camvid_folders, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    assert checked_files(camvid(camvid_folders, "train")) == checked_files(camvid(camvid_folders, "train")) == 6


@pytest.mark.parametrize("workers, reads_here", [(0, 6), (2, 0)])
def test_no_other_thread_decodes(camvid_folders, monkeypatch, workers, reads_here):
    """A process forked while such a thread ends may inherit OpenCV mutexes that stay locked."""
    dataset, threads = camvid(camvid_folders, "train"), []
    read_label = dataset.read_label
    monkeypatch.setattr(dataset, "read_label", lambda i: threads.append(threading.current_thread()) or read_label(i))
    verify(dataset, workers)
    assert threads == [threading.main_thread()] * reads_here


def hurried(done: int, total: int) -> None:
    """Progress that limits the read after the third image to a tenth of a second, however slow the others were."""
    if done == 3:
        time_limit._limit.seconds = 0.1


@pytest.mark.parametrize("check, workers", [(verify, 0), (inspect, 2)])
def test_an_image_that_blocks_its_reader_is_named(camvid_folders, check, workers):
    image = sorted((camvid_folders / "train" / "images").iterdir())[3]
    image.unlink()
    os.mkfifo(image)
    with pytest.raises(TimeoutError, match=f"^{image}: too late$"), reading_limit(600, "too late"):
        check(camvid(camvid_folders, "train"), workers, progress=hurried)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_label_that_blocks_the_class_index_is_no_fault_of_its_folder(camvid_folders, tmp_path, workers):
    label = sorted((camvid_folders / "train" / "labels").iterdir())[3]
    label.unlink()
    os.mkfifo(label)
    with pytest.raises(TimeoutError, match="^too late$"), reading_limit(600, "too late"):
        index_classes(camvid(camvid_folders, "train"), tmp_path / "index", workers=workers, progress=hurried)
