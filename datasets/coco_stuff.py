"""COCO-Stuff (2017): photographs with 91 stuff classes. Reads either of its two label archives."""

import os
from pathlib import Path

from datasets.class_table import IGNORED, ClassTable, distinct_colours
from datasets.file_list import list_files
from datasets.layout import Layout, read_list
from datasets.row import Images, Row
from datasets.segmentation import SegmentationDataset

LISTS = ("challenge", "full")  # of images

_WITHHELD = "test"
_FIRST_ID = 92  # the first stuff class
_OTHER_ID = 183  # "other", which stands for all things
_THING_IDS = range(1, _FIRST_ID)

# Ids 92-182 in order, so positions are train ids. Source: the official label list.
_CLASSES = tuple(
    """
    banner blanket branch bridge building-other bush cabinet cage cardboard carpet ceiling-other ceiling-tile cloth
    clothes clouds counter cupboard curtain desk-stuff dirt door-stuff fence floor-marble floor-other floor-stone
    floor-tile floor-wood flower fog food-other fruit furniture-other grass gravel ground-other hill house leaves light
    mat metal mirror-stuff moss mountain mud napkin net paper pavement pillow plant-other plastic platform playingfield
    railing railroad river road rock roof rug salad sand sea shelf sky-other skyscraper snow solid-other stairs stone
    straw structural-other table tent textile-other towel tree vegetable wall-brick wall-concrete wall-other wall-panel
    wall-stone wall-tile wall-wood water-other waterdrops window-blind window-other wood
    """.split()
)

_LAYOUT = Layout(
    name="coco_stuff",
    splits=("train", "val", "test"),
    tree="""
DIR/train2017/*.jpg                                  (or DIR/images/train2017/, ...)
DIR/val2017/*.jpg
DIR/test2017/*.jpg                                   for predictions only: it has no labels
DIR/annotations/deprecated-challenge2017/train-ids.txt, val-ids.txt      for lists=challenge
DIR/annotations/stuff_train2017_pixelmaps/*.png      or   DIR/stuffthingmaps/train2017/*.png
DIR/annotations/stuff_val2017_pixelmaps/*.png             DIR/stuffthingmaps/val2017/*.png
""",
    source=(
        "unpack train2017.zip, val2017.zip and stuff_annotations_trainval2017.zip into one folder, then, inside "
        "annotations/, the two stuff_*_pixelmaps.zip (docs/data.md)"
    ),
)


def coco_stuff_classes(stuffthingmaps: bool = False) -> ClassTable:
    """The 91 stuff classes of the paper; things are ignored like unlabelled pixels.

    Pixel maps hold COCO ids: 92-182, 183 = other (all things), 0 = unlabelled. `stuffthingmaps` hold id - 1, with an id
    of its own for each thing (1-91), and 255 for unlabelled pixels.
    Predictions always hold COCO ids. There are no official colours (the palette in the challenge's files is a shuffled
    colour map), so the palette is our own.
    """
    ids = range(_FIRST_ID, _OTHER_ID)
    shift = int(stuffthingmaps)
    things = [coco_id - shift for coco_id in _THING_IDS] if stuffthingmaps else [_OTHER_ID]
    train_ids = {coco_id - shift: train_id for train_id, coco_id in enumerate(ids)}
    return ClassTable(
        names=_CLASSES,
        palette=distinct_colours(len(_CLASSES)),
        official_ids=tuple(ids),
        label_ids={**train_ids, **dict.fromkeys([255 if stuffthingmaps else 0, *things], IGNORED)},
        official_void=0,
    )


def coco_stuff(
    root: str | os.PathLike | None, split: str, lists: str = "challenge", keys: str = ""
) -> SegmentationDataset:
    """One COCO-Stuff split: "train", "val" (5000 images) or "test" (40670 images without labels).

    `lists`: "challenge" selects the 40000 training and 5000 validation images of the 2017 challenge, "full" all images
    in the split's folder (118287 for training). The test split is never restricted. Labels are the challenge's pixel
    maps if they exist, otherwise `stuffthingmaps`; both give the same train ids. `keys`: prefix of option names in
    messages.
    ValueError if the split is unknown, a folder, the list or all images are missing, or a listed image or a label is.
    """
    if lists not in LISTS:
        raise ValueError(f"{keys}lists={lists}: expected one of {', '.join(LISTS)}")
    root = _LAYOUT.check(root, split)
    inside = root / "images" / f"{split}2017"
    folder = inside if inside.is_dir() else root / inside.name
    if split == _WITHHELD and not folder.is_dir():
        raise _LAYOUT.error(f"coco_stuff: the folder {folder} is missing", root, fix=f"unpack test2017.zip in {root}")
    images = _LAYOUT.files(root, folder, (".jpg",), images_of=split)
    if split == _WITHHELD:
        files, _ = _LAYOUT.pair(images, None, root, looked_for="")
        return SegmentationDataset("coco_stuff", split, files, coco_stuff_classes())
    names = _names_on_list(root, split, images, keys) if lists == "challenge" else None
    labels, label_folder, stuffthingmaps = _find_labels(root, split)
    looked_for = f"{label_folder}/NAME.png"
    remarks: tuple[str, ...] = ()
    if names is None:
        files, remarks = _LAYOUT.pair(images, labels, root, looked_for)
    else:
        files = _LAYOUT.pair_listed(names, images, labels, root, looked_for)
    return SegmentationDataset("coco_stuff", split, files, coco_stuff_classes(stuffthingmaps), remarks=remarks)


def _find_labels(root: Path, split: str) -> tuple[dict[str, Path], Path, bool]:
    """Label files by image name, their folder, and whether they are `stuffthingmaps`."""
    name = f"{split}2017"
    pixel_maps = [root / "annotations" / f"stuff_{name}_pixelmaps", root / f"stuff_{name}_pixelmaps"]
    # The archive holds train2017/ and val2017/. Unpacked beside the images, they merge with the image folders.
    parents = (
        root / "stuffthingmaps",
        root / "stuffthingmaps_trainval2017",
        root / "annotations",
        root,
        root / "images",
    )
    stuffthingmaps = [folder / name for folder in parents]
    for folder in (*pixel_maps, *stuffthingmaps):
        labels = list_files(folder, (".png",)) if folder.is_dir() else {}
        if labels:
            return labels, folder, folder in stuffthingmaps
    looked_for = f"{pixel_maps[0]}/*.png and {stuffthingmaps[0]}/*.png"
    raise _LAYOUT.error(f"coco_stuff: no labels for split {split!r}, looked for {looked_for}", root)


def _names_on_list(root: Path, split: str, images: dict[str, Path], keys: str) -> list[str]:
    """Names on the challenge's list of images. ValueError if any are not in `images`."""
    folders = (root / "annotations" / "deprecated-challenge2017", root / "deprecated-challenge2017")
    files = [folder / f"{split}-ids.txt" for folder in folders]
    file = next(filter(Path.is_file, files), None)
    if file is None:
        raise _LAYOUT.error(
            f"coco_stuff: {keys}lists=challenge needs {files[0]}, which is missing",
            root,
            fix=f"give {keys}lists=full to use all images of the folder, or unpack stuff_annotations_trainval2017.zip "
            f"in {root}, which contains the lists",
        )
    names = []
    for line in map(str.strip, read_list(file, "one image id (a number)")):
        if not line.isdecimal():
            raise ValueError(f"{file}: contains {line[:40]!r}; expected one image id (a number) per line")
        names.append(f"{int(line):012d}")
    _LAYOUT.check_list(file, names, images, root)
    return names


def _images(lists: str, **_: object) -> Images:
    return {"train": 118_287 if lists == "full" else 40_000, "val": 5000, "test": 40_670}


COCO_STUFF = Row(coco_stuff, _images, classes=91)
