"""CamVid: 480x360 street scenes, 11 classes (Brostow et al. 2008; classes and splits as in SegNet)."""

import os

from datasets.class_table import ClassTable
from datasets.layout import Layout
from datasets.row import Row
from datasets.segmentation import SegmentationDataset

_UNLABELLED = 11
_SUFFIXES = (".png", ".jpg", ".jpeg")

# name: RGB, in the order of the label values.
_CLASSES = {
    "sky": (128, 128, 128),
    "building": (128, 0, 0),
    "pole": (192, 192, 128),
    "road": (128, 64, 128),
    "pavement": (60, 40, 222),
    "tree": (128, 128, 0),
    "sign": (192, 128, 128),
    "fence": (64, 64, 128),
    "car": (64, 0, 128),
    "pedestrian": (64, 64, 0),
    "bicyclist": (0, 128, 192),
}

_LAYOUT = Layout(
    name="camvid",
    splits=("train", "val", "test"),
    tree="""
DIR/train/images/*.jpg    or    DIR/train/*.png
DIR/train/labels/*.png          DIR/trainannot/*.png
DIR/val/...                     DIR/val/*.png, DIR/valannot/*.png
DIR/test/...                    DIR/test/*.png, DIR/testannot/*.png
""",
    source="download CamVid with the 11-class labels (docs/data.md)",
)


def camvid_classes() -> ClassTable:
    """The 11 classes. Label value 11 (unlabelled) is ignored.

    There is no official prediction format: predictions hold label values.
    """
    count = len(_CLASSES)
    return ClassTable(
        names=tuple(_CLASSES),
        palette=tuple(_CLASSES.values()),
        official_ids=tuple(range(count)),
        label_ids={**{train_id: train_id for train_id in range(count)}, _UNLABELLED: 255},
        official_void=_UNLABELLED,
    )


def camvid(root: str | os.PathLike | None, split: str) -> SegmentationDataset:
    """One CamVid split: "train" (367 images), "val" (101) or "test" (233), in either common layout.

    ValueError if the split is unknown, a folder or all images are missing, or an image has no label.
    """
    root = _LAYOUT.check(root, split)
    if (root / split / "images").is_dir():
        image_folder, label_folder = root / split / "images", root / split / "labels"
    else:
        image_folder, label_folder = root / split, root / f"{split}annot"
    images = _LAYOUT.files(root, image_folder, _SUFFIXES, images_of=split)
    labels = _LAYOUT.files(root, label_folder, (".png",))
    files, remarks = _LAYOUT.pair(images, labels, root, looked_for=f"{label_folder}/NAME.png")
    fix = (
        "Labels in 32 colours are the original release's: take the 11-class version (docs/data.md, CamVid), or "
        "data=folder after scripts.make_classes. Restore other files from the archive of the 11-class version."
    )
    return SegmentationDataset("camvid", split, files, camvid_classes(), label_fix=fix, remarks=remarks)


CAMVID = Row(camvid, {"train": 367, "val": 101, "test": 233}, classes=11)
