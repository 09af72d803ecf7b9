"""The class index: exact counts, uniform positions, the same from any number of processes."""

import os
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from datasets import ClassIndex, SegmentationDataset, camvid, index_classes
from datasets.camvid import camvid_classes
from datasets.class_index import index_label
from datasets.items import Draw, TrainingCrops
from datasets.segmentation import Files
from datasets.transforms import TrainingTransform
from tests import trees


def equal(a: ClassIndex, b: ClassIndex) -> bool:
    return np.array_equal(a.counts, b.counts) and np.array_equal(a.places, b.places)


@settings(max_examples=100)
@given(
    size=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    classes=st.integers(1, 12),
    positions=st.integers(1, 40),
    band=st.integers(1, 4000),
    seed=st.integers(0, 99),
)
def test_counts_are_exact_and_positions_lie_in_their_class(size, classes, positions, band, seed):
    rng = np.random.default_rng(seed)
    label = rng.choice([*range(rng.integers(1, classes + 1)), 255], size).astype(np.uint8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.class_index._BAND", band)
        counts, places = index_label(label, classes, positions, rng)
    assert counts.tolist() == [(label == class_id).sum() for class_id in range(classes)]
    index = ClassIndex(tuple(map(str, range(classes))), counts[None], places, positions)
    for class_id in range(classes):
        pixels = [tuple(pixel) for pixel in index.pixels(0, class_id).tolist()]
        assert len(set(pixels)) == len(pixels) == min(counts[class_id], positions)
        assert all(label[pixel] == class_id for pixel in pixels)


def test_every_pixel_of_a_class_is_as_likely(monkeypatch):
    """Pixels of all searched bands are drawn alike."""
    monkeypatch.setattr("datasets.class_index._BAND", 15)  # of 60
    label = np.zeros((6, 10), np.uint8)
    label[::2, 3:] = 1  # 21 pixels
    seen = np.zeros(label.shape, int)
    for seed in range(3000):
        _, places = index_label(label, 2, 5, np.random.default_rng(seed))
        np.add.at(seen, tuple(places[5:].T), 1)
    assert (seen[label == 0] == 0).all()
    expected = 3000 * 5 / 21
    assert np.abs(seen[label == 1] - expected).max() < 5 * expected**0.5


def test_an_image_wider_than_65536_pixels_is_indexed_and_cropped(tmp_path):
    label = np.zeros((2, 70_000), np.uint8)
    label[1, 69_999] = 1
    files = Files("wide", tmp_path / "wide.png", tmp_path / "label.png")
    trees.write(files.label, label)
    trees.write(files.image, np.repeat(label[..., None] * np.uint8(200), 3, axis=2))
    dataset = SegmentationDataset("camvid", "train", [files], camvid_classes())
    index = index_classes(dataset, tmp_path, workers=0)
    assert index.pixels(0, 1).tolist() == [[1, 69_999]] and index.places.dtype == np.uint32
    transform = TrainingTransform((2, 4), scale=(1, 1), flip=0)
    crop = TrainingCrops(dataset, transform, 0)[Draw(0, 0, 0, 1, (1, 69_999))]
    assert crop["label"][1].tolist() == [0, 0, 0, 1] and crop["image"][0, 1].tolist() == [0, 0, 0, 200]


def test_an_image_that_changes_after_it_was_indexed_is_named_with_the_index(camvid_folders, tmp_path):
    dataset = camvid(camvid_folders, "train")
    index = index_classes(dataset, tmp_path, workers=0)
    entry = dataset.files[0]
    trees.write(entry.label, np.zeros((6, 7), np.uint8))
    trees.write(entry.image, np.zeros((6, 7, 3), np.uint8))
    crops = TrainingCrops(dataset, TrainingTransform((8, 8)), 0, index.folder)
    message = f"^{entry.image}: is 7x6 pixels, .* pixel .* {re.escape('(5, 7)')}: .* remove {index.folder} and start"
    with pytest.raises(ValueError, match=message):
        crops[Draw(0, 0, 0, 0, (5, 7))]
    assert crops[Draw(0, 0, 0, 0, (5, 6))]["label"].shape == (8, 8)


def test_the_index_of_a_split(camvid_folders, cache, tmp_path):
    dataset, files = camvid(camvid_folders, "train"), sorted(camvid_folders.rglob("*"))
    index = index_classes(dataset, workers=0)
    assert sorted(camvid_folders.rglob("*")) == files and list(cache.rglob("index.npz"))
    assert index.classes == dataset.classes and len(index) == 6
    assert index.images_with(3).tolist() == [i for i in range(6) if (dataset.read_label(i) == 3).any()]
    state = torch.get_rng_state()
    assert equal(index, index_classes(dataset, tmp_path / "index", workers=2))
    assert torch.equal(torch.get_rng_state(), state)  # the random numbers of a run


def test_an_index_is_read_back_and_made_anew_if_it_is_damaged_or_the_data_changes(camvid_folders, cache, monkeypatch):
    first = index_classes(camvid(camvid_folders, "train"), workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentationDataset, "read_label", lambda *_: pytest.fail("a label was read again"))
        assert equal(index_classes(camvid(camvid_folders, "train"), workers=0), first)
        moved = shutil.copytree(camvid_folders, camvid_folders.with_name("moved"))
        assert equal(index_classes(camvid(moved, "train"), workers=0), first)
    (file,) = cache.rglob("index.npz")
    file.write_bytes(file.read_bytes()[:100])
    assert equal(index_classes(camvid(camvid_folders, "train"), workers=0), first)
    label = camvid_folders / "train" / "labels" / "0001TP_000000.png"
    second_label = camvid_folders / "train" / "labels" / "0001TP_000001.png"
    label.write_bytes(second_label.read_bytes())
    os.utime(label, ns=(1, 1))
    again = index_classes(camvid(camvid_folders, "train"), workers=0)
    assert np.array_equal(again.counts[0], first.counts[1])


def test_what_cannot_be_indexed_says_why(camvid_folders, tmp_path):
    dataset = camvid(camvid_folders, "train")
    (tmp_path / "file").write_text("")
    for options, key in (({}, "folder"), ({"folder_key": "cache.index"}, "cache.index")):
        with pytest.raises(ValueError, match=f"cannot be written to {tmp_path}/file/.*; give {key}=DIR"):
            index_classes(dataset, tmp_path / "file", workers=0, **options)
    bad = dataset.files[1].label
    bad.write_bytes(bad.read_bytes()[:40])
    for workers in (0, 2):
        with pytest.raises(ValueError, match=f"{bad.name}: the PNG file is truncated"):
            index_classes(dataset, tmp_path, workers=workers)
