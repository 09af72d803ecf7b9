"""The trainings on compressed copies of CIFAR-10. None is run here."""

import numpy as np
import pytest

from datasets import cifar10
from scripts.evidence import jpeg_quality
from tests.datasets.classification_trees import cifar10_python
from tests.scripts.evidence.records import measured


def test_trainings_see_compressed_copies_of_the_images_with_their_labels(monkeypatch, tmp_path):
    cifar10_python(tmp_path / "cifar")
    seen = []

    def train(values):
        splits = [cifar10(values.data.root, split) for split in ("train", "test")]
        for split, copies in zip(("train", "test"), splits, strict=True):
            np.testing.assert_array_equal(copies.labels, cifar10(tmp_path / "cifar", split).labels)
        seen.append((values.seed, splits[1].pixels.astype(float) - cifar10(tmp_path / "cifar", "test").pixels))
        return {"top1": 0.25}

    monkeypatch.setattr("train_imagenet.train", train)
    options = [f"root={tmp_path / 'cifar'}", "qualities=[10,100]", "seed=3"]
    result, text = measured("jpeg_quality", jpeg_quality.run, tmp_path, *options)
    worst, best = (row["mean_square_error"] for row in result["rows"])
    assert 0 < best < worst and "| 10 | " in text and "| 25.00 |" in text
    assert [seed for seed, _ in seen] == [3, 3] and np.square(seen[0][1]).mean() > np.square(seen[1][1]).mean()
    with pytest.raises(ValueError, match=r"qualities=\[0\]: expected numbers from 1 to 100"):
        measured("jpeg_quality", jpeg_quality.run, tmp_path, options[0], "qualities=[0]")
