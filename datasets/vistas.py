"""Mapillary Vistas, research edition v1.2: street photographs of up to 22 megapixels, 65 classes."""

import os
from pathlib import Path

from datasets.class_names import check_names
from datasets.class_table import ClassTable, rgb
from datasets.layout import Layout, read_json
from datasets.row import Row
from datasets.segmentation import RESTORE, SegmentationDataset

_FOLDERS = {"train": "training", "val": "validation", "test": "testing"}
_WITHHELD = "test"
_V2_LABELS = 124

_LAYOUT = Layout(
    name="vistas",
    splits=tuple(_FOLDERS),
    tree="""
DIR/config.json                      or    DIR/config_v1.2.json
DIR/training/images/*.jpg                  DIR/training/images/*.jpg
DIR/training/labels/*.png                  DIR/training/v1.2/labels/*.png
DIR/validation/...                         DIR/validation/...
DIR/testing/images/*.jpg                   DIR/testing/images/*.jpg
""",
    source="unpack the archive of Mapillary Vistas v1.2, or of v2.0, which contains v1.2 (docs/data.md)",
)


def vistas_classes(config: Path) -> ClassTable:
    """The classes that the dataset's config file marks as evaluated, in its order; the others are ignored.

    Label values and official ids are positions in the file's list. ValueError for v2.0 or a malformed file.
    """
    try:
        content = read_json(config)
        labels = [(str(entry["readable"]), rgb(entry["color"]), entry["evaluate"]) for entry in content["labels"]]
        version = str(content.get("version")).lstrip("v")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{config}: cannot be read as a config file of Mapillary Vistas ({type(error).__name__}: {error}); "
            'expected JSON with "labels", a list of {"readable": name, "color": [three numbers from 0 to 255], '
            f'"evaluate": true or false, ...}}. {RESTORE}'
        ) from None
    if version.startswith("2") or len(labels) == _V2_LABELS:
        raise _LAYOUT.error(
            f"vistas: {config} belongs to Mapillary Vistas v2.0 ({len(labels)} labels); expected v1.2 (65 classes and "
            "Unlabeled), which the v2.0 archive also contains",
            config.parent,
        )
    ids = [position for position, (_, _, evaluated) in enumerate(labels) if evaluated]
    names = tuple(labels[position][0] for position in ids)
    check_names(enumerate(names), f"{config}: ")
    if not 0 < len(set(names)) == len(names) or len(labels) > 250:
        raise ValueError(
            f"{config}: {len(names)} of {len(labels)} labels are evaluated, under {len(set(names))} different names; "
            f"expected the 66 labels of Mapillary Vistas v1.2. {RESTORE}"
        )
    ignored = dict.fromkeys(range(len(labels)), 255)
    return ClassTable(
        names=names,
        palette=tuple(labels[position][1] for position in ids),
        official_ids=tuple(ids),
        label_ids={**ignored, **{position: train_id for train_id, position in enumerate(ids)}},
        official_void=next((position for position, label in enumerate(labels) if not label[2]), 255),
        coloured_predictions=True,
        label_palette={position: colour for position, (_, colour, _) in enumerate(labels)},
    )


def vistas(root: str | os.PathLike | None, split: str) -> SegmentationDataset:
    """One Vistas split: "train" (18000 images), "val" (2000) or "test" (5000, without labels), in either folder style.

    Labels are palette indices. Predictions are positions in the config file's list, as PNGs with its palette.
    ValueError if the split is unknown, a folder, the config file or all images are missing, the data is v2.0, or an
    image has no label.
    """
    root = _LAYOUT.check(root, split)
    folder = root / _FOLDERS[split]
    images = _LAYOUT.files(root, folder / "images", (".jpg",), images_of=split)
    configs = [root / name for name in ("config_v1.2.json", "config.json", "config_v2.0.json")]
    config = next(filter(Path.is_file, configs), None)  # the last one is refused by name
    if config is None:
        raise _LAYOUT.error(f"vistas: neither {root / 'config.json'} nor config_v1.2.json exists", root)
    table = vistas_classes(config)
    labels = None
    if split != _WITHHELD:
        versioned = folder / "v1.2"
        if not versioned.is_dir() and not (folder / "labels").is_dir() and (folder / "v2.0").is_dir():
            raise _LAYOUT.error(f"vistas: {folder} has only labels of Mapillary Vistas v2.0; expected v1.2", root)
        labels = _LAYOUT.files(root, (versioned if versioned.is_dir() else folder) / "labels", (".png",))
    files, remarks = _LAYOUT.pair(images, labels, root, f"{folder}/labels/NAME.png and v1.2/labels/NAME.png")
    return SegmentationDataset("vistas", split, files, table, remarks=remarks)


VISTAS = Row(vistas, {"train": 18_000, "val": 2000, "test": 5000}, classes=65)
