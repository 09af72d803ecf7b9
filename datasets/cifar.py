"""CIFAR-10 and CIFAR-100: 32x32 images, kept in memory (Krizhevsky 2009)."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from datasets.cifar_files import Batch, in_folders, in_zip, read_pickle, read_records
from datasets.classification import ClassificationDataset
from datasets.file_list import listed
from datasets.layout import Layout
from datasets.segmentation import restorable

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
    files: dict[str, list[str]]
    read: Callable[[Path], Batch]


# In order of preference.
_TEN = (
    _Form(
        "cifar-10-batches-py",
        {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]},
        partial(read_pickle, label_key="labels", classes=10),
    ),
    _Form(
        "cifar-10-batches-bin",
        {"train": [f"data_batch_{number}.bin" for number in range(1, 6)], "test": ["test_batch.bin"]},
        partial(read_records, label_bytes=1, classes=10),
    ),
)
_HUNDRED = (
    _Form(
        "cifar-100-python",
        {"train": ["train"], "test": ["test"]},
        partial(read_pickle, label_key="fine_labels", classes=100),
    ),
    _Form(
        "cifar-100-binary",
        {"train": ["train.bin"], "test": ["test.bin"]},
        partial(read_records, label_bytes=2, classes=100),  # the first byte is the coarse label
    ),
)


def cifar10(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-10: split "train" (50,000 images) or "test" (10,000), 10 classes in the official order.

    `root` holds the dataset in any form that the error for a wrong `root` shows; python pickles come first, then binary
    records, class folders and zip files. The official files may also lie in `root` itself. Images of folders and zip
    files are decoded once and cached until a file's size or time changes. ValueError if the split is unknown, `root`
    holds no form of the dataset, or a file is missing or damaged.
    """
    return _cifar("cifar10", tuple(_CIFAR10.split()), _TEN, root, split)


def cifar100(root: str | os.PathLike | None, split: str) -> ClassificationDataset:
    """CIFAR-100: split "train" (50,000 images) or "test" (10,000), 100 fine classes. Otherwise as `cifar10`."""
    return _cifar("cifar100", tuple(_CIFAR100.split()), _HUNDRED, root, split)


def _cifar(
    name: str, classes: tuple[str, ...], forms: tuple[_Form, ...], root: str | os.PathLike | None, split: str
) -> ClassificationDataset:
    layout = _layout(name, classes, forms)
    if root is not None and Path(root).suffix.lower() == ".zip" and not Path(root).expanduser().is_dir():
        archive = Path(root).expanduser()
        layout.check(archive.parent, split)
        return in_zip(archive, split, classes, layout)
    root = layout.check(root, split)
    for form in forms:
        for folder in (root / form.folder, root):
            if any((folder / name).is_file() for names in form.files.values() for name in names):
                return _official(layout, split, classes, form, folder)
    if (root / split).is_dir():
        return in_folders(root, split, classes, layout)
    archives = sorted(path for path in root.iterdir() if path.suffix.lower() == ".zip" and path.is_file())
    if len(archives) > 1:
        names = ", ".join(path.name for path in archives)
        raise layout.error(f"{name}: {root} holds several zip files: {names}; give one of them", root)
    if not archives:
        missing = [*(root / form.folder for form in forms), root / split]
        raise layout.error(f"{name}: {root} does not hold the dataset", root, missing=missing)
    return in_zip(archives[0], split, classes, layout)


def _layout(name: str, classes: tuple[str, ...], forms: tuple[_Form, ...]) -> Layout:
    python, binary = (f"DIR/{form.folder}/{', '.join(sum(form.files.values(), []))}" for form in forms)
    return Layout(
        name=name,
        splits=("train", "test"),
        tree=f"""
{python}
or  {binary}
or  DIR/train/CLASS/*.png, DIR/test/CLASS/*.png    PNG or JPEG, 32x32 pixels; CLASS: {classes[0]} … {classes[-1]}
or  DIR/*.zip                                      a zip file of such folders; it may also be given as DIR
""",
        source=f"unpack cifar-{len(classes)}-python.tar.gz (docs/data.md)",
    )


def _official(layout: Layout, split: str, classes: tuple[str, ...], form: _Form, folder: Path) -> ClassificationDataset:
    paths = [folder / name for name in form.files[split]]
    missing = [path.name for path in paths if not path.is_file()]
    if missing:
        raise layout.error(f"{layout.name}: {', '.join(missing)} of split {split!r} is missing in {folder}", folder)
    with restorable():
        batches = [form.read(path) for path in paths]
    counts = [len(batch.labels) for batch in batches]
    if len({*counts}) > 1:  # records may be cut off between two images
        found = ", ".join(f"{path.name} {count}" for path, count in zip(paths, counts, strict=True))
        raise ValueError(f"{folder}: the files hold different numbers of images ({found}); expected the same in each")
    pixels, labels, names = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return ClassificationDataset(layout.name, split, classes, labels, listed(folder, paths), pixels, names)
