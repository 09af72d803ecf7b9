"""Cityscapes, fine annotations: 2048x1024 street scenes, 19 classes. Reads the unpacked official archives."""

import os

from datasets.class_table import ClassTable
from datasets.layout import Layout
from datasets.row import Row
from datasets.segmentation import SegmentationDataset

_IMAGE_SUFFIX = "_leftImg8bit.png"
_LABEL_SUFFIX = "_gtFine_labelIds.png"
_WITHHELD = "test"  # its published label files are placeholders

# name: (id in label and prediction files, RGB), in the order of train ids. Source: the official label table.
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
_IDS = tuple(class_id for class_id, _ in _CLASSES.values())

_LAYOUT = Layout(
    name="cityscapes",
    splits=("train", "val", "test"),
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
    """The 19 evaluated classes. Other ids up to 33 are ignored, and so is 255 (licence plates, officially -1)."""
    ignored = dict.fromkeys([*range(34), 255], 255)
    return ClassTable(
        names=tuple(_CLASSES),
        palette=tuple(colour for _, colour in _CLASSES.values()),
        official_ids=_IDS,
        label_ids={**ignored, **{class_id: train_id for train_id, class_id in enumerate(_IDS)}},
        official_void=0,
    )


def cityscapes(root: str | os.PathLike | None, split: str) -> SegmentationDataset:
    """One Cityscapes split: "train" (2975 images), "val" (500) or "test" (1525, without labels).

    Names are CITY_SEQ_FRAME. Labels come from the `labelIds` files and are mapped to train ids on reading. Prediction
    files hold regular ids at full size, and their names start with the image's. ValueError if the split is unknown, a
    folder or all images are missing, or an image has no label.
    """
    root = _LAYOUT.check(root, split)
    image_folder = root / "leftImg8bit" / split
    images = _LAYOUT.files(root, image_folder, (_IMAGE_SUFFIX,), images_of=split, deep=True)  # CITY/NAME
    label_folder = root / "gtFine" / split
    labels = None if split == _WITHHELD else _LAYOUT.files(root, label_folder, (_LABEL_SUFFIX,), deep=True)
    files, remarks = _LAYOUT.pair(images, labels, root, f"{label_folder}/CITY/NAME{_LABEL_SUFFIX}")
    files = [entry._replace(name=entry.name.rpartition("/")[2]) for entry in files]
    return SegmentationDataset("cityscapes", split, files, cityscapes_classes(), remarks=remarks)


CITYSCAPES = Row(cityscapes, {"train": 2975, "val": 500, "test": 1525}, classes=19)
