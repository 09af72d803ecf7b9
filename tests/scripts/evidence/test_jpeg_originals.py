"""Accuracy on original images and on their JPEG copies. Nothing is trained here."""

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


def test_both_trainings_of_a_fold_see_the_same_images(options, monkeypatch, tmp_path):
    seen = []

    def train(values):
        seen.append({split: cifar10(values.data.root, split) for split in ("train", "test")})
        return {"top1": 0.5 + 0.01 * len(seen)}

    monkeypatch.setattr("train_imagenet.train", train)
    result, text = measured("jpeg_originals", jpeg_originals.run, tmp_path, *options)
    assert [row["fold"] for row in result["trainings"]] == [0, 1] and "-1.0 ± 0.0 points" in text
    for originals, copies in (seen[:2], seen[2:]):
        for split in ("train", "test"):
            np.testing.assert_array_equal(originals[split].labels, copies[split].labels)
            np.testing.assert_array_equal(originals[split].pixels, np.maximum(copies[split].pixels, 3) - 3)
    tested = [len(splits["test"]) for splits in seen[::2]]
    assert sum(tested) == sum(result["images"].values())


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
