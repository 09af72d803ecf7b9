"""ImageNet (ILSVRC 2012): 1000 classes in class folders. Any other tree of class folders works too."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from datasets.class_names import ORDERS, check_names, sort_by_number
from datasets.classification import ClassificationDataset
from datasets.file_list import class_folders, composed, is_hidden, list_classes, readable
from datasets.layout import PHOTOGRAPHS, Layout, first_of, remarks_on
from datasets.row import Images, Row

_SUFFIXES = (".jpeg", ".jpg", ".png")
_SORT_FLAT = """move each image into a folder named after its class, val/WNID/NAME.JPEG. With Kaggle's edition:
    tail -n +2 LOC_val_solution.csv | tr , ' ' | while read name wnid rest; do
      mkdir -p val/$wnid && mv val/$name.JPEG val/$wnid/; done
With the original archives, put ILSVRC2012_img_val.tar and ILSVRC2012_devkit_t12.tar.gz into DIR, remove val, and run
    python -c 'import torchvision; torchvision.datasets.ImageNet("DIR", "val")'"""

_TREE = """
DIR/train/CLASS/*.JPEG    CLASS: n01440764 … in ImageNet, any names in your own data
DIR/val/CLASS/*.JPEG      the same classes; .jpg, .jpeg and .png files, in lower or upper case
"""
_LAYOUT = Layout(
    name="imagenet",
    splits=("train", "val"),
    tree=_TREE,
    source="unpack ILSVRC2012_img_train.tar, each class's archive in it into its own folder, and the "
    "validation images into folders of the same names",
)
_OWN = Layout(
    name="image_folder",
    splits=("train", "val", "test"),
    tree="""
DIR/train/CLASS/*         CLASS: any name; PNG, JPEG, TIFF, BMP, WebP, …
DIR/val/CLASS/*           the same classes
""",
    source="move each image into the folder of its class, in DIR/train and DIR/val",
)


def imagenet(
    root: str | os.PathLike | None, split: str, class_order: str | None = None, keys: str = ""
) -> ClassificationDataset:
    """The class folders in `root`/`split`: split "train" (1,281,167 images) or "val" (50,000).

    A label is the position of the folder's name among the sorted names. `class_order`: "text" (default) or "numbers",
    which sorts 2 before 10. All existing splits must have the same classes; a folder may be empty. `keys`: prefix of
    the option's name in messages.
    ValueError if the split or order is unknown, a folder or all images are missing, the splits have different classes,
    a folder's name cannot be a class's, or images lie outside the class folders.
    """
    return _open_class_folders(_LAYOUT, root, split, class_order, keys)


def image_folder(
    root: str | os.PathLike | None, split: str, class_order: str | None = None, keys: str = ""
) -> ClassificationDataset:
    """Like `imagenet`, for other images: split "train", "val" or "test", with EXIF orientation applied.

    ValueError also if there is only one class.
    """
    dataset = _open_class_folders(_OWN, root, split, class_order, keys)
    if len(dataset.classes) == 1:
        raise ValueError(
            f"image_folder: {dataset.files.root} holds one class folder, {dataset.classes[0]}, which leaves nothing to "
            "learn; expected a folder for each of two classes or more"
        )
    return replace(dataset, turned=True)


def _open_class_folders(
    layout: Layout, root: str | os.PathLike | None, split: str, class_order: str | None, keys: str
) -> ClassificationDataset:
    """The class folders of a split in `imagenet`'s or `image_folder`'s layout. Arguments and errors: see `imagenet`."""
    if class_order not in (None, *ORDERS):
        raise ValueError(f"{keys}class_order={class_order}: expected one of {', '.join(ORDERS)}")
    root = layout.check(root, split)
    folder = root / split
    if not folder.is_dir():
        alike = [name for name in class_folders(root) if name.lower().startswith(split) and name not in layout.splits]
        fix = f"rename {root / alike[0]} to {split}" if alike else None
        raise layout.error(f"{layout.name}: the folder {folder} is missing", root, fix)
    suffixes = _SUFFIXES if layout is _LAYOUT else PHOTOGRAPHS
    classes = class_folders(folder)
    if class_order == "numbers":
        places = {name: place for place, name in enumerate(sort_by_number(map(composed, classes)))}
        classes = tuple(sorted(classes, key=lambda name: places[composed(name)]))
    _check_outside(layout, root, folder, suffixes, has_classes=bool(classes))
    names = tuple(map(composed, classes))
    check_names(enumerate(names), f"{layout.name}: {folder}: ")
    _check_classes(layout, root, split, names)
    files, labels, left_out = list_classes(folder, classes, suffixes)
    if not len(files):
        looked_for = f"{folder}/*/**/*{{{','.join(suffixes)}}}"
        raise layout.error(f"{layout.name}: no images in split {split!r}, looked for {looked_for}", root)
    return ClassificationDataset(layout.name, split, names, labels, files, remarks=remarks_on((), left_out))


def _check_outside(layout: Layout, root: Path, folder: Path, suffixes: tuple[str, ...], has_classes: bool) -> None:
    """ValueError if a split's `folder` holds images outside of its class folders, of which it may have none."""
    with os.scandir(folder) as entries:
        outside = [entry.name for entry in entries if entry.is_file() and not is_hidden(entry.name)]
    images = [name for name in outside if name.lower().endswith(suffixes)]
    if images:
        place = "beside" if has_classes else "without"
        raise layout.error(
            f"{layout.name}: {folder} holds {len(images)} images {place} class folders, such as "
            f"{readable(min(images))}; expected images only in class folders",
            root,
            fix=_SORT_FLAT if layout is _LAYOUT else None,
        )


def _check_classes(layout: Layout, root: Path, split: str, names: Sequence[str]) -> None:
    """ValueError if another split has other classes than `split`, whose classes have these names."""
    for other in layout.splits:
        other_names = [*map(composed, class_folders(root / other))] if (root / other).is_dir() else []
        if not other_names:  # a split may have no classes
            continue
        alone = {split: sorted({*names} - {*other_names}), other: sorted({*other_names} - {*names})}
        differences = [f"{len(some)} only in {name} ({first_of(some)})" for name, some in alone.items() if some]
        if differences:
            raise layout.error(
                f"{layout.name}: the splits have different classes: {' and '.join(differences)}; expected the same",
                root,
                fix="complete the splits; a class without images needs an empty folder",
            )


def _own_splits(root: str | None, **_: object) -> Images:
    return {split: None for split in _OWN.splits if (_OWN.top(root) / split).is_dir()}


IMAGENET = Row(imagenet, {"train": 1_281_167, "val": 50_000}, classes=1000)
IMAGE_FOLDER = Row(image_folder, _own_splits, classes=None)
