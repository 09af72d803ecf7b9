"""Accuracy on original images and on their JPEG copies. Nothing is trained here."""

import json

import numpy as np
import pytest

from datasets import cifar10
from scripts.evidence import jpeg_originals
from tests.datasets.classification_trees import cifar_folders
from tests.scripts.evidence.records import measured


@pytest.fixture
def options(tmp_path):
    """The options of a measurement whose originals are the copies, but darker by three levels."""
    root = cifar_folders(tmp_path / "copies")
    found = {}
    for split in ("train", "test"):
        images = cifar10(root, split)
        found[f"{split}_images"] = np.maximum(images.pixels, 3).transpose(0, 2, 3, 1) - 3
        found |= {f"{split}_labels": images.labels, f"{split}_names": [f"{split}/{name}" for name in images.names]}
    np.savez(tmp_path / "originals.npz", **found)
    return [f"root={root}", f"originals={tmp_path / 'originals.npz'}", "folds=2"]


@pytest.fixture
def seen(monkeypatch):
    """What trainings were given: their data, and how long they were to last. They end at once."""
    found = []

    def train(values):
        shown = {split: cifar10(values.data.root, split) for split in ("train", "test")}
        found.append(shown | {"steps": [*values.lr_schedule.get("steps", []), values.trainer.steps]})
        return {"top1": 0.5 + 0.01 * len(found)}

    monkeypatch.setattr("train_imagenet.train", train)
    return found


def test_both_trainings_of_a_fold_see_the_same_images(options, seen, tmp_path):
    result, text = measured("jpeg_originals", jpeg_originals.run, tmp_path, *options)
    rows = [(row["fold"], row["images"]) for row in result["trainings"]]
    assert rows == [(fold, images) for fold in (0, 1) for images in ("originals", "copies")]
    assert "give -1.0 ± 0.0 (standard error over folds) points more than copies" in text
    for originals, copies in (seen[:2], seen[2:]):
        for split in ("train", "test"):
            np.testing.assert_array_equal(originals[split].labels, copies[split].labels)
            np.testing.assert_array_equal(originals[split].pixels, np.maximum(copies[split].pixels, 3) - 3)
    tested = [len(splits["test"]) for splits in seen[::2]]
    assert sum(tested) == sum(result["images"].values())


def test_a_stopped_measurement_goes_on_with_other_qualities_and_the_schedule_of_its_recipe(options, seen, tmp_path):
    more = [*options, "qualities=[100,1]", "recipe=revnet/cifar10_resnet32", "steps=40"]
    result, _ = measured("jpeg_originals", jpeg_originals.run, tmp_path, *more)
    whole, file = len(result["trainings"]), tmp_path / "record.json"
    assert whole == len(seen) == 8 and all(shown["steps"] == [20, 30, 40] for shown in seen)
    original, _, fine, coarse = (shown["test"].pixels.astype(float) for shown in seen[:4])
    assert 0 < np.square(fine - original).mean() < np.square(coarse - original).mean()
    file.write_text(json.dumps(result | {"trainings": result["trainings"][:3]}))
    result, _ = measured("jpeg_originals", jpeg_originals.run, tmp_path, *more)
    assert len(result["trainings"]) == whole and len(seen) == 2 * whole - 3


def test_originals_without_their_copy_are_refused(options, monkeypatch, tmp_path):
    file = tmp_path / "originals.npz"
    known = dict(np.load(file))
    for name, value, message in (
        ("train_names", np.array(["train/cat/none.png"] * len(known["train_names"])), "no copy named train/cat/none"),
        ("train_labels", known["train_labels"] + 1, "has another label"),
    ):
        np.savez(file, **known | {name: value})
        with pytest.raises(ValueError, match=message):
            measured("jpeg_originals", jpeg_originals.run, tmp_path, *options)
