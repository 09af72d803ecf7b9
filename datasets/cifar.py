"""CIFAR-10 and CIFAR-100: 32x32 images, kept in memory (Krizhevsky 2009).

torchvision reads the official files. Pictures in a zip file are decoded at each start, which takes some seconds.
"""

import os
import zipfile
import zlib
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from datasets.class_names import check_names
from datasets.classification import ClassificationDataset
from datasets.file_list import file_list_of, is_hidden
from datasets.layout import Layout
from datasets.reading import decode_image
from datasets.row import Row
from datasets.segmentation import restorable
from datasets.stored import Unreadable, complete_file

_SUFFIXES = (".jpg", ".jpeg", ".png")


def cifar10(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-10: split "train" (50,000 images) or "test" (10,000), 10 classes in the official, alphabetical order.

    `root` holds the unpacked python version, or a zip file of class folders, which may also be `root` itself.
    ValueError if the split is unknown, `root` holds neither, or a file is missing or damaged.
    """
    return _open_cifar("CIFAR10", 10, root, split)


def cifar100(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-100: split "train" (50,000 images) or "test" (10,000), 100 fine classes. Otherwise like `cifar10`."""
    return _open_cifar("CIFAR100", 100, root, split)


def _open_cifar(name: str, classes: int, root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """See `cifar10`. `name`: torchvision's; `classes`: how many it has."""
    from torchvision import datasets  # few runs need it

    reader = getattr(datasets, name)
    layout = Layout(
        name=name.lower(),
        splits=("train", "test"),
        tree=f"""
DIR/{reader.base_folder}/{", ".join(file for file, _ in reader.train_list + reader.test_list)}
or  DIR/*.zip    a zip file of train/CLASS/*.png, test/CLASS/*.png (or JPEG), 32x32 pixels; it may also be given as DIR
""",
        source=f"unpack {reader.filename} (docs/data.md)",
    )
    path = Path(os.path.expanduser(root or ""))
    is_zip = path.suffix.lower() == ".zip" and not path.is_dir()
    root = layout.check(path.parent if is_zip else root, split)
    if not is_zip and (root / reader.base_folder).is_dir():
        return _read_official(root, split, reader, layout)
    inside = sorted(file for file in root.iterdir() if file.suffix.lower() == ".zip" and file.is_file())
    archives = [path] if is_zip else inside
    if len(archives) != 1:
        contents = ", ".join(archive.name for archive in archives) or "neither the dataset nor a zip file"
        raise layout.error(f"{layout.name}: {root} holds {contents}; expected one of them", root)
    return _read_zip(archives[0], split, classes, layout)


def _read_official(root: Path, split: str, reader: Any, layout: Layout) -> ClassificationDataset:
    """The files that `reader`, torchvision's dataset, finds in `root`."""
    folder = root / reader.base_folder
    is_test = split == "test"
    files = [folder / file for file, _ in (reader.test_list if is_test else reader.train_list)]
    try:
        stored = reader(root, train=not is_test)
    except (RuntimeError, OSError):  # it verifies the checksums of all files before it reads one
        raise layout.error(f"{layout.name}: a file in {folder} is missing or damaged", root) from None
    pixels = np.ascontiguousarray(stored.data.transpose(0, 3, 1, 2))
    names = np.array([f"{split}/{number:05d}" for number in range(len(pixels))])
    labels = np.array(stored.targets, np.int64)
    return ClassificationDataset(
        layout.name, split, tuple(stored.classes), labels, file_list_of(root, files), pixels, names
    )


@restorable()
def _read_zip(archive: Path, split: str, classes: int, layout: Layout) -> ClassificationDataset:
    """The pictures that the zip file calls …/`split`/CLASS/NAME."""
    member = archive  # then the picture that is being read
    try:
        with zipfile.ZipFile(archive) as content:
            # By class and name, whatever lies above the class folders.
            paths = (PurePosixPath(name) for name in content.namelist() if _is_picture(name, split))
            pictures = sorted((path.parent.name, path.name, str(path)) for path in paths)
            names = sorted({class_name for class_name, _, _ in pictures})
            if len(names) != classes:
                raise layout.error(f"{layout.name}: {len(names)} class folders in {archive}, expected {classes}")
            check_names(enumerate(names), f"{archive}: ")
            pixels = np.empty((len(pictures), 3, 32, 32), np.uint8)
            for number, (_, _, name) in enumerate(pictures):
                member = archive / name
                pixels[number] = _picture_pixels(member, content.read(name))
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
        raise Unreadable(f"{member}: cannot be unpacked ({error}); expected an intact zip file.") from None
    labels = np.array([names.index(class_name) for class_name, _, _ in pictures], np.int64)
    titles = np.array([f"{class_name}/{file}" for class_name, file, _ in pictures])
    files = file_list_of(archive.parent, [archive])
    return ClassificationDataset(layout.name, split, tuple(names), labels, files, pixels, titles)


def _picture_pixels(path: Path, data: bytes) -> np.ndarray:
    """The pixels of a picture, uint8 (3, 32, 32) RGB. Unreadable, which names `path`: it is of another size or kind."""
    planes = decode_image(complete_file(path, data)).transpose(2, 0, 1)
    if planes.shape != (3, 32, 32):
        raise Unreadable(f"{path}: has {planes.shape[2]}x{planes.shape[1]} pixels; expected 32x32.")
    return planes


def _is_picture(name: str, split: str) -> bool:
    """Whether a file of a zip file is a picture …/`split`/CLASS/NAME, and nothing of its path is hidden."""
    *folders, file = PurePosixPath(name).parts
    is_picture = len(folders) >= 2 and folders[-2] == split and file.lower().endswith(_SUFFIXES)
    return is_picture and not any(map(is_hidden, (*folders, file)))


CIFAR10 = Row(cifar10, {"train": 50_000, "test": 10_000}, classes=10)
CIFAR100 = Row(cifar100, {"train": 50_000, "test": 10_000}, classes=100)
