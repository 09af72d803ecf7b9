"""The loader's benchmark: the rivals make the same crops. No test asserts a time."""

import itertools

import numpy as np
import pytest

from datasets import TrainingCrops, TrainingTransform
from scripts.evidence.loader import OPENCV, OURS, drawn_pairs, opencv, ours
from tests.scripts.evidence.records import measured

TINY = ["small_size=[72,96]", "small_crop_size=48", "png_size=[96,128]", "jpeg_size=[120,160]", "base_size=100"]
TINY += ["crop_size=72", "pictures=2", "rounds=3"]


@pytest.mark.parametrize("suffix, base_size", [(".png", None), (".jpg", None), (".jpg", 100)])
def test_both_pipelines_make_the_same_crops(suffix, base_size, tmp_path):
    pairs = drawn_pairs(tmp_path / "pairs", 2, (96, 128), suffix)
    crops = TrainingCrops(pairs, TrainingTransform((100, 110), base_size=base_size, fill=(0, 0, 0)), seed=0)
    padded, enlarged = 0, 0
    for epoch in range(12):
        key = (epoch, epoch % 2)
        size, _, _ = crops.geometry(key, (96, 128))
        image, label = (tensor.numpy().astype(int) for tensor in ours(crops, key))
        other_image, other_label = (tensor.numpy() for tensor in opencv(crops, key))
        assert other_image.dtype == other_label.dtype == np.uint8 and other_image.shape == (3, 100, 110)
        assert base_size or np.abs(other_image - image).max() <= 2 and np.array_equal(other_label, label)
        padded += size[0] < 100
        enlarged += size[0] >= 96
    assert padded and enlarged


def test_a_tiny_run_compares_every_pipeline(in_process, tmp_path):
    call, text = measured("loader", tmp_path, *TINY)
    of_files = ("small PNG", "PNG", "JPEG", "JPEG, base_size")
    rows = [row for rows in call["items"].values() for row in rows]
    assert [(row["source"], row["pipeline"]) for row in rows] == [*itertools.product(of_files, (OURS, OPENCV))]
    assert all(len(row["times_ms"]) == 3 for row in rows)
    assert "### small PNG: 96x72 pixels, files of " in text
    assert text.count(f"| {OURS} |") == 4 and f"python -m scripts.evidence.loader {TINY[0]}" in text
