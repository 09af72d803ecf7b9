"""CIFAR as torchvision reads it, and as pictures in a zip file."""

import os
import shutil
import zipfile
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from datasets import cifar10, cifar100, verify
from tests.datasets import classification_trees as trees
from tests.datasets.classification_trees import CIFAR10, encoded, photograph, write


def test_official_files_are_read_whole_or_not_at_all(tmp_path, monkeypatch):
    """torchvision compares all checksums first, so no pickle of somebody else is ever executed."""
    root = trees.cifar10_python(tmp_path / "data", monkeypatch)
    train, test = cifar10(root, "train"), cifar10(root, "test")
    assert train.classes == tuple(CIFAR10) and CIFAR10[0] == "airplane" and CIFAR10[9] == "truck"
    assert (train.name, train.split, len(train), len(test)) == ("cifar10", "train", 10, 2)
    pixels, labels = (np.concatenate(parts) for parts in zip(*(trees.batch(n, 2, 10) for n in range(5)), strict=True))
    assert train.pixels.dtype == np.uint8 and np.array_equal(train.pixels.reshape(-1, 3072), pixels)
    assert train.labels.tolist() == labels.tolist() and train.label(7) == 7
    assert len({train.image_name(number) for number in range(10)}) == 10
    verify(train)  # images in memory have been read
    before = train.names_and_sizes()
    shutil.copytree(root, tmp_path / "moved")
    os.utime(tmp_path / "moved/cifar-10-batches-py/data_batch_1", (1, 1))  # times do not count
    assert cifar10(tmp_path / "moved", "train").names_and_sizes() == before != test.names_and_sizes()
    file = root / "cifar-10-batches-py" / "data_batch_1"
    for change in (lambda: write(file, file.read_bytes()[:-1] + b"x"), file.unlink):
        change()
        with pytest.raises(ValueError, match=f"cifar10: a file in {file.parent} is missing or damaged"):
            cifar10(root, "test")


def test_cifar100_has_fine_labels(tmp_path, monkeypatch):
    train = cifar100(trees.cifar100_python(tmp_path, monkeypatch), "train")
    assert train.labels.tolist() == [30, 31, 32, 33, 34, 35] and list(train.classes) == trees.CIFAR100
    assert np.array_equal(train.pixels.reshape(-1, 3072), trees.batch(0, 6, 20)[0])
    zipped = cifar100(trees.cifar_zip(tmp_path / "hundred.zip", trees.CIFAR100), "train")
    assert zipped.labels.tolist() == [label for label in range(100) for _ in range(2)]


@pytest.mark.parametrize("form, kind", [("zip", "JPEG"), ("folder of zip", "PNG"), ("zip with a folder", "PNG")])
def test_zip_files(tmp_path, form, kind):
    above = "cifar/" if form == "zip with a folder" else ""
    archive = trees.cifar_zip(tmp_path / "data" / "pictures.zip", kind=kind, above=above)
    root = archive.parent if form == "folder of zip" else archive
    stored = trees.pictures(CIFAR10, kind)
    train, test = cifar10(root, "train"), cifar10(root, "test")
    assert train.labels.tolist() == [label for label in range(10) for _ in range(2)] and len(test) == 10
    for number in range(20):
        name = train.image_name(number)
        expected = np.asarray(Image.open(BytesIO(stored[f"train/{name}"]))).transpose(2, 0, 1)
        assert name.startswith(CIFAR10[number // 2]) and np.array_equal(train.pixels[number], expected)


@pytest.mark.parametrize(
    "data, message",
    [
        (encoded(photograph(0, (32, 33)), "PNG"), "has 33x32 pixels; expected 32x32"),
        (encoded(photograph(0, (32, 32)), "PNG")[:-9], "the PNG file is truncated"),
    ],
)
def test_damaged_pictures_are_named(tmp_path, data, message):
    archive = tmp_path / "pictures.zip"
    with zipfile.ZipFile(archive, "w") as content:
        for name, picture in trees.pictures(CIFAR10, "PNG").items():
            content.writestr(name, data if name == "train/cat/0000.png" else picture)
    with pytest.raises(ValueError, match=f"^{archive}/train/cat/0000.png: {message}.* Restore the file"):
        cifar10(archive, "train")


def test_damaged_zip_files_are_named(tmp_path):
    archive = trees.cifar_zip(tmp_path / "pictures.zip")
    data = archive.read_bytes()
    with zipfile.ZipFile(archive) as content:
        start = content.getinfo("train/cat/0001.png").header_offset + 1000
    archive.write_bytes(data[:start] + bytes([data[start] ^ 255]) + data[start + 1 :])
    with pytest.raises(ValueError, match=f"^{archive}/train/cat/0001.png: cannot be unpacked .*CRC-32"):
        cifar10(archive, "train")
    archive.write_bytes(data[:-100])
    with pytest.raises(ValueError, match="none.zip: cannot be unpacked .*No such file"):
        cifar10(tmp_path / "none.zip", "train")
    with pytest.raises(ValueError, match=f"^{archive}: cannot be unpacked"):
        cifar10(archive, "train")


def test_other_contents_are_named_with_both_forms(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="3 class folders in .*hundred.zip, expected 10"):
        cifar10(trees.cifar_zip(tmp_path / "above" / "hundred.zip", trees.CIFAR100[:3]), "train")
    (tmp_path / "empty").mkdir()
    neither = r"holds neither the dataset nor a zip file; [^$]*cifar-10-batches-py/data_batch_1[^$]*DIR/\*.zip"
    with pytest.raises(ValueError, match=neither):
        cifar10(tmp_path / "empty", "train")
    for name in ("one.zip", "two.zip"):
        trees.cifar_zip(tmp_path / name)
    with pytest.raises(ValueError, match="holds one.zip, two.zip; expected one of them"):
        cifar10(tmp_path, "train")
