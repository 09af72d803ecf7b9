import os
import shutil
import threading

import cv2
import numpy as np
import pytest

from datasets import camvid, cityscapes, index_classes, inspect, verify
from datasets.time_limit import reading_limit


def problems(root, **options) -> str:
    with pytest.raises(ValueError) as error:
        verify(camvid(root, "train"), **options)
    return str(error.value)


def test_good_data_passes_and_reports_progress(camvid_folders, camvid_annot, cityscapes_root):
    seen = []
    verify(camvid(camvid_folders, "train"), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]
    verify(camvid(camvid_annot, "val"))
    verify(cityscapes(cityscapes_root, "val"))
    verify(cityscapes(cityscapes_root, "test"))  # no labels: only the images


@pytest.mark.parametrize(
    "folder, file, damage, complaint",
    [
        ("images", "0001TP_000003.jpg", lambda data: data[:-20], "truncated"),
        ("images", "0001TP_000003.jpg", lambda data: b"", "empty"),
        ("images", "0001TP_000003.jpg", lambda data: data[:2] + data[-2:], "no readable image header"),
        ("labels", "0001TP_000003.png", lambda data: data[:-20], "truncated"),
        ("labels", "0001TP_000003.png", lambda data: b"GIF89a", "neither PNG nor JPEG"),
    ],
)
def test_finds_damaged_files(camvid_folders, folder, file, damage, complaint):
    path = camvid_folders / "train" / folder / file
    path.write_bytes(damage(path.read_bytes()))
    message = problems(camvid_folders)
    assert "1 problem(s) in 6 images" in message and str(path) in message and complaint in message


def test_finds_foreign_ids_and_sizes(camvid_folders):
    labels = camvid_folders / "train" / "labels"
    cv2.imwrite(str(labels / "0001TP_000001.png"), np.full((24, 40), 77, np.uint8))
    cv2.imwrite(str(labels / "0001TP_000002.png"), np.zeros((12, 20), np.uint8))
    message = problems(camvid_folders, workers=2)
    assert "2 problem(s)" in message
    assert "0001TP_000001.png: contains the ids 77" in message and "0001TP_000002.png: the label is 20x12" in message


def test_looks_at_files_of_instances_too(cityscapes_root):
    """They are read only in evaluations, hours after the start."""
    files = cityscapes(cityscapes_root, "val").files
    verify(cityscapes(cityscapes_root, "val"))
    cv2.imwrite(str(files[0].instances), np.zeros((12, 20), np.uint16))
    files[1].instances.write_bytes(files[1].instances.read_bytes()[:-20])
    for check in (verify, lambda dataset: inspect(dataset, workers=0)):
        try:
            found = check(cityscapes(cityscapes_root, "val"))
        except ValueError as error:
            message = str(error)
        else:
            message = "\n".join(problem.message for problem in found.problems)
        assert f"{files[0].instances}: the label is 20x12" in message
        assert f"{files[1].instances}: the PNG file is truncated" in message


def test_names_five_offenders_in_order_and_counts_the_rest(camvid_folders):
    for path in (camvid_folders / "train" / "labels").iterdir():
        path.write_bytes(b"")
    message = problems(camvid_folders, workers=2)
    named = [line.split("/")[-1].split(":")[0] for line in message.splitlines() if line.startswith("  /")]
    assert named == [f"0001TP_{index:06d}.png" for index in range(5)]
    assert "6 problem(s) in 6 images" in message and "and 1 more" in message


def test_agrees_with_reading(camvid_folders):
    path = camvid_folders / "train" / "images" / "0001TP_000000.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError) as error:
        camvid(camvid_folders, "train")[0]
    assert str(error.value) in problems(camvid_folders)


def checked_files(dataset) -> int:
    """How many images a call of verify checks."""
    seen = []
    verify(dataset, progress=lambda done, total: seen.append(done))
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


@pytest.mark.parametrize("workers, reads_here", [(0, 6), (2, 0)])
def test_no_other_thread_decodes(camvid_folders, monkeypatch, workers, reads_here):
    """A process forked while such a thread ends may inherit OpenCV mutexes that stay locked."""
    dataset, threads = camvid(camvid_folders, "train"), []
    read_label = dataset.read_label
    monkeypatch.setattr(dataset, "read_label", lambda i: threads.append(threading.current_thread()) or read_label(i))
    verify(dataset, workers)
    assert threads == [threading.main_thread()] * reads_here


def test_failure_is_not_remembered(camvid_folders):
    (camvid_folders / "train" / "labels" / "0001TP_000000.png").write_bytes(b"")
    assert problems(camvid_folders) == problems(camvid_folders)


def test_goes_on_without_a_cache_folder(camvid_folders, tmp_path, monkeypatch):
    (tmp_path / "occupied").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "occupied"))
    assert checked_files(camvid(camvid_folders, "train")) == 6
    assert checked_files(camvid(camvid_folders, "train")) == 6


def test_names_and_sizes_of_files_show_what_changed_and_not_where_they_lie(camvid_folders, tmp_path):
    names, sizes = camvid(camvid_folders, "train").names_and_sizes()
    moved = tmp_path / "moved"
    shutil.copytree(camvid_folders, moved)  # with other times
    assert camvid(moved, "train").names_and_sizes() == (names, sizes)
    image = min((moved / "train" / "images").iterdir())
    image.write_bytes(image.read_bytes() + b"0")
    assert camvid(moved, "train").names_and_sizes()[0] == names != camvid(moved, "train").names_and_sizes()[1] != sizes
    for folder in ("images", "labels"):
        (file,) = (moved / "train" / folder).glob(f"{image.stem}.*")
        file.rename(file.with_stem("other"))
    assert camvid(moved, "train").names_and_sizes()[0] != names


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("check", [verify, inspect])
def test_an_image_that_blocks_its_reader_is_named(camvid_folders, check, workers):
    image = sorted((camvid_folders / "train" / "images").iterdir())[3]
    image.unlink()
    os.mkfifo(image)
    with pytest.raises(TimeoutError, match=f"^{image}: too late$"), reading_limit(0.5, "too late"):
        check(camvid(camvid_folders, "train"), workers)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_label_that_blocks_the_class_index_is_no_fault_of_its_folder(camvid_folders, tmp_path, workers):
    label = sorted((camvid_folders / "train" / "labels").iterdir())[3]
    label.unlink()
    os.mkfifo(label)
    with pytest.raises(TimeoutError, match="^too late$"), reading_limit(0.5, "too late"):
        index_classes(camvid(camvid_folders, "train"), tmp_path / "index", workers=workers)
