"""Cityscapes, fine annotations: 2048x1024 street scenes, 19 classes, read from the official archives as unpacked."""

import os
from pathlib import Path

from datasets.layout import Layout, list_files
from datasets.segmentation import ClassTable, Files, SegmentationDataset

IMAGES = {"train": 2975, "val": 500, "test": 1525}  # in the official splits

_IMAGE_SUFFIX = "_leftImg8bit.png"
_LABEL_SUFFIX = "_gtFine_labelIds.png"
_WITHHELD = "test"  # its published label files are placeholders

# name: (id in label and prediction files, RGB). The order is the train id. Source: the official label table.
_CLASSES = {
    "road": (7, (128, 64, 128)),
    "sidewalk": (8, (244, 35, 232)),
    "building": (11, (70, 70, 70)),
    "wall": (12, (102, 102, 156)),
    "fence": (13, (190, 153, 153)),
    "pole": (17, (153, 153, 153)),
    "traffic light": (19, (250, 170, 30)),
    "traffic sign": (20, (220, 220, 0)),
    "vegetation": (21, (107, 142, 35)),
    "terrain": (22, (152, 251, 152)),
    "sky": (23, (70, 130, 180)),
    "person": (24, (220, 20, 60)),
    "rider": (25, (255, 0, 0)),
    "car": (26, (0, 0, 142)),
    "truck": (27, (0, 0, 70)),
    "bus": (28, (0, 60, 100)),
    "train": (31, (0, 80, 100)),
    "motorcycle": (32, (0, 0, 230)),
    "bicycle": (33, (119, 11, 32)),
}

_LAYOUT = Layout(
    name="cityscapes",
    splits=tuple(IMAGES),
    tree=f"""
DIR/leftImg8bit/train/CITY/CITY_SEQ_FRAME{_IMAGE_SUFFIX}
DIR/leftImg8bit/val/...
DIR/leftImg8bit/test/...
DIR/gtFine/train/CITY/CITY_SEQ_FRAME{_LABEL_SUFFIX}
DIR/gtFine/val/...
""",
    source="unpack leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip into one folder (docs/data.md)",
)


def cityscapes_classes() -> ClassTable:
    """The 19 evaluated classes; of ids 0-33 the others, and 255 (licence plates, -1 in the table), are ignored."""
    ids = [class_id for class_id, _ in _CLASSES.values()]
    ignored = dict.fromkeys([*range(34), 255], 255)
    return ClassTable(
        names=tuple(_CLASSES),
        palette=tuple(colour for _, colour in _CLASSES.values()),
        official_ids=tuple(ids),
        label_ids={**ignored, **{class_id: train_id for train_id, class_id in enumerate(ids)}},
        official_void=0,
    )


def cityscapes(root: str | os.PathLike | None, split: str, strict: bool = True) -> SegmentationDataset:
    """Cityscapes' split "train" (2975 images), "val" (500) or "test" (1525, without labels).

    Names are CITY_SEQ_FRAME. Labels are the `labelIds` files, mapped to train ids while reading; predictions are
    regular ids at full size, under any name that starts with the image's. Raises ValueError where the folder, the
    split, an image's label (`strict`) or every image is missing.
    """
    root = _LAYOUT.check(root, split)
    images = _in_cities(root, root / "leftImg8bit" / split, _IMAGE_SUFFIX, "leftImg8bit_trainvaltest.zip")
    _LAYOUT.require_any(images, root, looked_for=f"{root / 'leftImg8bit' / split}/*/*{_IMAGE_SUFFIX}", split=split)
    if split == _WITHHELD:
        files = [Files(name=name, image=path, label=None) for name, path in images.items()]
    else:
        labels = _in_cities(root, root / "gtFine" / split, _LABEL_SUFFIX, "gtFine_trainvaltest.zip")
        looked_for = f"{root / 'gtFine' / split}/CITY/NAME{_LABEL_SUFFIX}"
        files = _LAYOUT.pair(images, labels, root, looked_for, strict)
    return SegmentationDataset(name="cityscapes", split=split, files=files, table=cityscapes_classes())


def _in_cities(root: Path, folder: Path, suffix: str, archive: str) -> dict[str, Path]:
    if not folder.is_dir():
        raise _LAYOUT.error(f"cityscapes: the folder {folder} is missing", root, archives=(archive,))
    found = {}
    for city in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        found.update(list_files(city, (suffix,)))
    return found
