import json

import numpy as np
import pytest

from datasets import vistas
from tests import trees


def labels(root, split: str) -> list[np.ndarray]:
    return [sample.label for sample in vistas(root, split)]


def test_both_folder_styles_hold_the_same_labels(tmp_path):
    """The versioned style also holds labels of v2.0, which are not read."""
    plain, versioned = trees.vistas(tmp_path / "a"), trees.vistas(tmp_path / "b", versioned=True)
    for split, count in (("train", 3), ("val", 2)):
        plain_labels, versioned_labels = labels(plain, split), labels(versioned, split)
        assert len(plain_labels) == len(versioned_labels) == count
        assert all(map(np.array_equal, plain_labels, versioned_labels))
        assert [label.shape for label in plain_labels] == list(trees.VISTAS_SIZES[:count])


def test_labels_and_predictions_are_palette_indices_and_classes_come_from_the_config_file(vistas_root):
    dataset = vistas(vistas_root, "train")
    config = json.loads((vistas_root / "config.json").read_text())["labels"]
    assert dataset.classes == tuple(label["readable"] for label in config[:65])
    assert dataset.palette == tuple(tuple(label["color"]) for label in config[:65])
    _, raw = trees.pair(0, list(range(66)), trees.VISTAS_SIZES[0])
    assert 65 in raw
    assert np.array_equal(dataset[0].label, np.where(raw == 65, 255, raw))
    trees.write(dataset.files[0].label, raw)  # grayscale labels are indices too
    assert np.array_equal(dataset[0].label, np.where(raw == 65, 255, raw))
    dataset = vistas(vistas_root, "test")
    assert dataset.table.official(np.array([[0, 64, 255]], np.uint8)).tolist() == [[0, 64, 65]]
    palette = dataset.prediction_palette
    assert palette.shape == (256, 3) and palette.dtype == np.uint8
    assert palette[:65].tolist() == [list(colour) for colour in dataset.palette] and not palette[65:].any()


def test_labels_that_are_not_evaluated_need_not_be_the_last(vistas_root):
    config = trees.vistas_config()
    config["labels"][3]["evaluate"] = False
    (vistas_root / "config.json").write_text(json.dumps(config))
    dataset = vistas(vistas_root, "val")
    assert len(dataset.classes) == 64 and dataset.classes[3] == "Class 4"
    _, raw = trees.pair(0, list(range(66)), trees.VISTAS_SIZES[0])
    assert set(dataset[0].label[raw == 3]) == {255} and set(dataset[0].label[raw == 4]) == {3}
    assert dataset.table.official(np.array([[2, 3, 63]], np.uint8)).tolist() == [[2, 4, 64]]


@pytest.mark.parametrize(
    "name, config",
    [
        ("config_v2.0.json", trees.vistas_config(124, version=2.0)),
        ("config.json", trees.vistas_config(120, version="v2.0")),  # in words
        ("config.json", trees.vistas_config(124)),  # under another name
        ("config.json", None),  # labels of v2.0 alone
    ],
)
def test_v2_is_refused_by_name(vistas_root, name, config):
    if config is None:
        (vistas_root / "training" / "v2.0").mkdir()
        (vistas_root / "training" / "labels").rename(vistas_root / "training" / "v2.0" / "labels")
    else:
        (vistas_root / "config.json").unlink()
        (vistas_root / name).write_text(json.dumps(config))
    with pytest.raises(ValueError, match="Mapillary Vistas v2.0.*; expected"):
        vistas(vistas_root, "train")


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"labels": []}', '{"labels": [{"readable": "Bird"}]}'),
        '{"labels": [{"readable": "Bird", "evaluate": true, "color": [300, 2, 1]}]}',
        '{"labels": [{"readable": "Bird", "evaluate": true, "color": [1, 2]}]}',
    ],
)
def test_a_broken_config_file_is_named(vistas_root, content):
    (vistas_root / "config.json").write_text(content)
    with pytest.raises(ValueError, match="config.json: .*expected.*Restore the file"):
        vistas(vistas_root, "train")
