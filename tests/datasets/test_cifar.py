import os
import pickle
import shutil
import zipfile
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from datasets import cifar10, cifar100, verify
from datasets.file_list import listed
from tests.datasets import classification_trees as trees
from tests.datasets.classification_trees import CIFAR10, as_python2, encoded, photograph, write


def decoded(cache) -> list:
    return sorted((cache / "inplace-abn-segmentation" / "decoded").glob("*.npz"))


@pytest.mark.parametrize("tree, suffix", [(trees.cifar10_python, ""), (trees.cifar10_binary, ".bin")])
@pytest.mark.parametrize("inside", [False, True], ids=["above", "inside"])
def test_cifar10_official_files(tmp_path, tree, suffix, inside):
    """`root` may also be the unpacked folder itself."""
    root = tree(tmp_path / "data")
    if inside:
        (root,) = root.iterdir()
    train, test = cifar10(root, "train"), cifar10(root, "test")
    assert train.classes == tuple(CIFAR10) and CIFAR10[0] == "airplane" and CIFAR10[9] == "truck"
    assert (train.name, train.split, len(train), len(test)) == ("cifar10", "train", 10, 2)
    pixels, labels = (np.concatenate(parts) for parts in zip(*(trees.batch(n, 2, 10) for n in range(5)), strict=True))
    assert train.pixels.dtype == np.uint8 and np.array_equal(train.pixels.reshape(-1, 3072), pixels)
    assert train.labels.tolist() == labels.tolist() and train.label(7) == 7
    names = [train.image_name(number) for number in range(10)]
    assert len({*names}) == 10
    assert names[1] == ("data_batch_1.bin/00001" if suffix else "picture_s_000001.png")
    verify(train)  # images in memory have been read
    next(root.rglob(f"data_batch_1{suffix}")).unlink()
    with pytest.raises(ValueError, match=f"cifar10: data_batch_1{suffix} of split 'train' is missing in"):
        cifar10(root, "train")
    assert len(cifar10(root, "test")) == 2


@pytest.mark.parametrize("form", ["cifar-100-python", "cifar-100-binary"])
def test_cifar100_has_fine_labels(tmp_path, form):
    trees.cifar100(tmp_path / "all")
    shutil.move(tmp_path / "all" / form, tmp_path / "data" / form)
    train = cifar100(tmp_path / "data", "train")
    assert len(train.classes) == 100 and list(train.classes) == sorted({*train.classes})
    assert train.labels.tolist() == [30, 31, 32, 33, 34, 35] and train.classes[30] == "dolphin"
    assert np.array_equal(train.pixels.reshape(-1, 3072), trees.batch(0, 6, 20)[0])
    repeats = form == "cifar-100-python"  # the fake pickle has one name
    assert len({train.image_name(number) for number in range(6)}) == (1 if repeats else 6)
    folders = cifar100(trees.cifar_folders(tmp_path / "folders", trees.CIFAR100), "train")
    assert folders.labels.tolist() == [label for label in range(100) for _ in range(2)]


@pytest.mark.parametrize(
    "form, kind", [("folders", "PNG"), ("zip", "JPEG"), ("folder of zip", "PNG"), ("zip with a folder", "PNG")]
)
def test_class_folders_and_zip_files(tmp_path, cache, form, kind):
    if form == "folders":
        root = trees.cifar_folders(tmp_path / "data", kind=kind)
    else:
        above = "cifar/" if form == "zip with a folder" else ""
        archive = trees.cifar_zip(tmp_path / "data" / "pictures.zip", kind=kind, above=above)
        root = archive.parent if form == "folder of zip" else archive
    stored = trees.pictures(CIFAR10, kind)
    for _ in range(2):
        train, test = cifar10(root, "train"), cifar10(root, "test")
        assert train.labels.tolist() == [label for label in range(10) for _ in range(2)] and len(test) == 10
        for number in range(20):
            name = train.image_name(number)
            expected = np.asarray(Image.open(BytesIO(stored[f"train/{name}"]))).transpose(2, 0, 1)
            assert name.startswith(CIFAR10[number // 2]) and np.array_equal(train.pixels[number], expected)
        assert len(decoded(cache)) == 2  # one for each split


def test_decoded_pictures_are_cached_until_the_file_changes_and_rebuilt_when_damaged(tmp_path, cache, monkeypatch):
    archive = trees.cifar_zip(tmp_path / "pictures.zip")
    expected = cifar10(archive, "train").pixels
    (kept,) = decoded(cache)
    with monkeypatch.context() as patch:
        patch.setattr("datasets.cifar_files.decode_image", None)  # decoding again would fail
        assert np.array_equal(cifar10(archive, "train").pixels, expected)
    data = kept.read_bytes()
    middle = len(data) // 2
    for damaged in (data[:middle], data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :], b""):
        kept.write_bytes(damaged)
        assert np.array_equal(cifar10(archive, "train").pixels, expected) and kept.read_bytes() == data
    os.utime(archive, ns=(0, archive.stat().st_mtime_ns + 1))
    assert np.array_equal(cifar10(archive, "train").pixels, expected) and len(decoded(cache)) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(write(tmp_path / "occupied", b"")))  # goes on without a cache folder
    assert np.array_equal(cifar10(archive, "train").pixels, expected)


class Evil:
    def __reduce__(self):
        return os.system, ("touch executed",)


@pytest.mark.parametrize(
    "content, protocol", [({"data": Evil()}, 0), (Evil(), 2), ({"labels": [1], "data": np.array([Evil()])}, 4)]
)
def test_a_pickle_that_would_execute_code_is_refused_and_not_executed(tmp_path, monkeypatch, content, protocol):
    root = trees.cifar10_python(tmp_path)
    monkeypatch.chdir(tmp_path)
    path = write(root / "cifar-10-batches-py" / "test_batch", pickle.dumps(content, protocol))
    with pytest.raises(ValueError, match=f"{path}: the pickle asks for posix.system, which could execute code"):
        cifar10(root, "test")
    assert not (tmp_path / "executed").exists()
    pickle.loads(path.read_bytes())
    assert (tmp_path / "executed").exists()  # so it would have been


def test_pickles_of_python_3_and_keys_of_bytes_are_read(tmp_path):
    """Some copies were written again."""
    root = trees.cifar10_python(tmp_path)
    expected = cifar10(root, "test")
    pixels, labels = trees.batch(5, 2, 10)
    for content in ({"data": pixels, "labels": labels}, {b"data": pixels, b"labels": labels}):
        for protocol in (2, 4):
            write(root / "cifar-10-batches-py" / "test_batch", pickle.dumps(content, protocol))
            test = cifar10(root, "test")
            assert np.array_equal(test.pixels, expected.pixels) and test.labels.tolist() == expected.labels.tolist()


def pickled(**changes) -> bytes:
    pixels, labels = trees.batch(5, 2, 10)
    return as_python2({"labels": labels, "data": pixels, **changes})


def asking_for(wanted: str) -> bytes:
    """A pickle of two short strings, module and name, and the object that they name."""
    module, _, name = wanted.partition(".")
    return f"\x80\x04\x8c{chr(len(module))}{module}\x8c{chr(len(name))}{name}\x93.".encode("latin1")


FOREIGN = ("numpy.load", "numpy.ndarray.getattr", "builtins.eval", "builtins.getattr", "builtins.__import__")
PICKLES = [
    *((asking_for(wanted), f"the pickle asks for {wanted}, which could execute code") for wanted in FOREIGN),
    # numpy's constructors without the content that follows them in a real file.
    (b"cnumpy\nndarray\n((I2\nI3072\ntR.", "cannot be read as a pickle"),
    (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I2\nI3072\ntVB\ntR.",
        r"the pickle asks for an array \(2, 3072\) without content",
    ),
    (pickled()[:-900], "cannot be read as a pickle, so it is damaged or truncated"),
    (b"", "cannot be read as a pickle"),
    (b"GIF89a", "cannot be read as a pickle"),
    (as_python2([1, 2]), "holds a list; expected a dictionary with data and labels"),
    (pickled(data=None), '"data" is NoneType; expected uint8'),
    (pickled(data=np.zeros((2, 3072))), r'"data" is float64 \(2, 3072\); expected uint8 \(images, 3072\)'),
    (pickled(data=np.zeros((2, 3071), np.uint8)), r'"data" is uint8 \(2, 3071\)'),
    (pickled(labels=[1]), '"labels" does not hold one integer for each of 2 images'),
    (pickled(labels=[3, 10]), "image 1 has the label 10; expected 0 to 9. 1 of 2 labels are out of range"),
    (pickled(labels=[-1, 3]), "image 0 has the label -1; expected 0 to 9"),
]


def test_damaged_pickles_are_named(tmp_path):
    root = trees.cifar10_python(tmp_path)
    for data, message in PICKLES:
        path = write(root / "cifar-10-batches-py" / "test_batch", data)
        with pytest.raises(ValueError, match=f"{path}: {message}.*Restore the file from the dataset's archive"):
            cifar10(root, "test")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: data[:-1], "/data_batch_3.bin: has 6145 bytes, .* truncated; expected records of 3073 bytes"),
        (lambda data: b"", "/data_batch_3.bin: has 0 bytes, so it is empty or truncated"),
        (lambda data: b"\x0a" + data[1:], "/data_batch_3.bin: image 0 has the label 10; expected 0 to 9"),
        (lambda data: data[:3073], r": .* different numbers of images \(data_batch_1.bin 2, .* data_batch_3.bin 1,"),
    ],
)
def test_damaged_records_are_named(tmp_path, change, message):
    folder = trees.cifar10_binary(tmp_path) / "cifar-10-batches-bin"
    path = folder / "data_batch_3.bin"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^{folder}{message}"):
        cifar10(tmp_path, "train")


@pytest.mark.parametrize(
    "name, data, message",
    [
        ("train/cat/0000.png", encoded(photograph(0, (32, 33)), "PNG"), "has 33x32 pixels; expected 32x32"),
        ("train/cat/0000.png", encoded(photograph(0, (32, 32)), "PNG")[:-9], "the PNG file is truncated"),
    ],
)
@pytest.mark.parametrize("packed", [True, False], ids=["zip", "folders"])
def test_damaged_pictures_are_named(tmp_path, cache, name, data, message, packed):
    root = trees.cifar_folders(tmp_path / "data")
    write(root / name, data)
    where = root
    if packed:
        where = tmp_path / "pictures.zip"
        with zipfile.ZipFile(where, "w") as archive:
            for path in sorted(root.rglob("*.png")):
                archive.write(path, path.relative_to(root))
    with pytest.raises(ValueError, match=f"^{where}/{name}: {message}.* Restore the file"):
        cifar10(where, "train")
    assert decoded(cache) == []


def test_damaged_zip_files_are_named(tmp_path):
    archive = trees.cifar_zip(tmp_path / "pictures.zip")
    data = archive.read_bytes()
    with zipfile.ZipFile(archive) as content:
        start = content.getinfo("train/cat/0001.png").header_offset + 1000
    archive.write_bytes(data[:start] + bytes([data[start] ^ 255]) + data[start + 1 :])
    with pytest.raises(ValueError, match=f"^{archive}/train/cat/0001.png: cannot be unpacked .*CRC-32"):
        cifar10(archive, "train")
    archive.write_bytes(data[:-100])
    with pytest.raises(ValueError, match="none.zip: cannot be read as a zip file .*No such file"):
        cifar10(tmp_path / "none.zip", "train")
    with pytest.raises(ValueError, match=f"^{archive}: cannot be read as a zip file"):
        cifar10(archive, "train")


def test_foreign_and_missing_classes_are_named(tmp_path):
    root = trees.cifar_folders(tmp_path / "data")
    (root / "train" / "cat").rename(root / "train" / "kitten")
    with pytest.raises(ValueError, match="wrong class folders in .*/train: no cat; unknown kitten"):
        cifar10(root, "train")
    with pytest.raises(ValueError, match="wrong class folders in .*hundred.zip: no airplane, automobile, .*; unknown"):
        cifar10(trees.cifar_zip(tmp_path / "hundred.zip", trees.CIFAR100[:3]), "train")
    for path in (root / "test" / "dog").iterdir():
        path.unlink()
    with pytest.raises(ValueError, match="no pictures in .*/test of dog"):
        cifar10(root, "test")


def test_a_folder_without_the_dataset_shows_all_forms(tmp_path):
    with pytest.raises(ValueError, match="does not hold the dataset") as error:
        cifar10(tmp_path, "train")
    forms = ("cifar-10-batches-py/data_batch_1", "cifar-10-batches-bin/data_batch_1.bin", "DIR/train/CLASS", "*.zip")
    for form in forms:
        assert form in str(error.value)
    write(tmp_path / "cifar-10-python.tar.gz", b"")
    with pytest.raises(ValueError, match="Still packed: .*cifar-10-python.tar.gz"):
        cifar10(tmp_path, "train")
    with pytest.raises(ValueError, match="split 'val' is unknown to cifar100; expected one of train, test"):
        cifar100(tmp_path, "val")
    for name in ("one.zip", "two.zip"):
        trees.cifar_zip(tmp_path / name)
    with pytest.raises(ValueError, match="holds several zip files: one.zip, two.zip"):
        cifar10(tmp_path, "train")
    (tmp_path / "above").mkdir()
    trees.cifar10_python(tmp_path / "above" / "data")
    with pytest.raises(ValueError, match="Fix: give .*/above/data, which holds cifar-10-batches-py"):
        cifar10(tmp_path / "above", "train")


def test_names_and_sizes_are_the_files(tmp_path, monkeypatch):
    root = trees.cifar10_binary(tmp_path / "data")
    before = cifar10(root, "train").names_and_sizes()
    shutil.copytree(root, tmp_path / "moved")
    os.utime(next((tmp_path / "moved").rglob("*.bin")), (1, 1))  # times do not count
    assert cifar10(tmp_path / "moved", "train").names_and_sizes() == before
    trees.cifar10_binary(tmp_path / "moved", images=4)
    after = cifar10(tmp_path / "moved", "train").names_and_sizes()
    assert after[0] == before[0] and after[1] != before[1]
    monkeypatch.chdir(tmp_path)
    assert listed(Path("data"), [Path("data/a")]).name(0) == listed(Path(), [Path("a")]).name(0) == "a"
