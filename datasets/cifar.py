"""CIFAR-10 and CIFAR-100: 32x32 images, kept in memory (Krizhevsky 2009)."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.cifar_files import Batch, read_pickle, read_records
from datasets.classification import ClassificationDataset
from datasets.file_list import listed
from datasets.layout import Layout
from datasets.segmentation import restorable
from datasets.small_pictures import Pictures, in_folders, in_zip

_CIFAR10 = "airplane automobile bird cat deer dog frog horse ship truck"
_CIFAR100 = """
apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can castle
caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin elephant flatfish
forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle
mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy porcupine
possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip turtle wardrobe whale
willow_tree wolf woman worm"""


class _Form(NamedTuple):
    """One form of the official files: their folder, the files of each split, and how to read one."""

    folder: str
    files: dict[str, tuple[str, ...]]
    read: Callable[[Path], Batch]


class _Kind(NamedTuple):
    """CIFAR-10 or CIFAR-100: its classes by label, and its official forms in order of preference."""

    classes: tuple[str, ...]
    forms: tuple[_Form, ...]
    layout: Layout


_FOLDERS = """
or  DIR/train/CLASS/*.png, DIR/test/CLASS/*.png    PNG or JPEG files of 32x32 pixels; CLASS: {classes}
or  DIR/*.zip                                      a zip file of such folders; it may also be given as DIR
"""
_TEN = _Kind(
    tuple(_CIFAR10.split()),
    (
        _Form(
            "cifar-10-batches-py",
            {"train": tuple(f"data_batch_{number}" for number in range(1, 6)), "test": ("test_batch",)},
            partial(read_pickle, label_key="labels", classes=10),
        ),
        _Form(
            "cifar-10-batches-bin",
            {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)},
            partial(read_records, label_bytes=1, classes=10),
        ),
    ),
    Layout(
        name="cifar10",
        splits=("train", "test"),
        tree="""
DIR/cifar-10-batches-py/data_batch_1 … data_batch_5, test_batch
or  DIR/cifar-10-batches-bin/data_batch_1.bin … data_batch_5.bin, test_batch.bin"""
        + _FOLDERS.format(classes="airplane … truck"),
        source="unpack cifar-10-python.tar.gz (docs/data.md)",
    ),
)
_HUNDRED = _Kind(
    tuple(_CIFAR100.split()),
    (
        _Form(
            "cifar-100-python",
            {"train": ("train",), "test": ("test",)},
            partial(read_pickle, label_key="fine_labels", classes=100),
        ),
        _Form(
            "cifar-100-binary",
            {"train": ("train.bin",), "test": ("test.bin",)},
            partial(read_records, label_bytes=2, classes=100),  # the first byte is the coarse label
        ),
    ),
    Layout(
        name="cifar100",
        splits=("train", "test"),
        tree="""
DIR/cifar-100-python/train, test
or  DIR/cifar-100-binary/train.bin, test.bin"""
        + _FOLDERS.format(classes="apple … worm"),
        source="unpack cifar-100-python.tar.gz (docs/data.md)",
    ),
)


def cifar10(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-10: split "train" (50,000 images) or "test" (10,000), 10 classes in the official order.

    `root` holds the dataset in any form that the error for a wrong `root` shows; python pickles come first, then binary
    records, class folders and zip files. The official files may also lie in `root` itself. Images of folders and zip
    files are decoded once and cached until a file's size or time changes. ValueError if the split is unknown, `root`
    holds no form of the dataset, or a file is missing or damaged.
    """
    return _cifar(_TEN, root, split)


def cifar100(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-100: split "train" (50,000 images) or "test" (10,000), 100 fine classes. Otherwise as `cifar10`."""
    return _cifar(_HUNDRED, root, split)


def _cifar(kind: _Kind, root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    layout = kind.layout
    if root is not None and Path(root).suffix.lower() == ".zip" and not Path(root).expanduser().is_dir():
        archive = Path(root).expanduser()
        layout.check(archive.parent, split)
        return _decoded(kind, split, in_zip(archive, split, kind.classes, layout))
    root = layout.check(root, split)
    for form in kind.forms:
        for folder in (root / form.folder, root):
            if any((folder / name).is_file() for names in form.files.values() for name in names):
                return _official(kind, split, form, folder)
    if (root / split).is_dir():
        return _decoded(kind, split, in_folders(root, split, kind.classes, layout))
    archives = sorted(path for path in root.iterdir() if path.suffix.lower() == ".zip" and path.is_file())
    if len(archives) > 1:
        names = ", ".join(path.name for path in archives)
        raise layout.error(f"{layout.name}: {root} holds several zip files: {names}; give one of them", root)
    if not archives:
        looked_for = [root / form.folder for form in kind.forms]
        raise layout.error(
            f"{layout.name}: {root} does not hold the dataset", root, missing=[*looked_for, root / split]
        )
    return _decoded(kind, split, in_zip(archives[0], split, kind.classes, layout))


def _official(kind: _Kind, split: str, form: _Form, folder: Path) -> ClassificationDataset:
    paths = [folder / name for name in form.files[split]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise kind.layout.error(
            f"{kind.layout.name}: {', '.join(missing)} of split {split!r} is missing in {folder}", folder
        )
    with restorable():
        batches = [form.read(path) for path in paths]
    counts = [len(batch.labels) for batch in batches]
    if len({*counts}) > 1:  # records may be cut off between two images
        found = ", ".join(f"{path.name} {count}" for path, count in zip(paths, counts, strict=True))
        raise ValueError(f"{folder}: the files hold different numbers of images ({found}); expected the same in each")
    pixels, labels, names = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    files = listed(folder, paths)
    return ClassificationDataset(kind.layout.name, split, kind.classes, labels, files, pixels, names)


def _decoded(kind: _Kind, split: str, pictures: Pictures) -> ClassificationDataset:
    name, labels, files, names = kind.layout.name, pictures.labels, pictures.files, pictures.names
    return ClassificationDataset(name, split, kind.classes, labels, files, pictures.pixels(f"{name} {split}"), names)
