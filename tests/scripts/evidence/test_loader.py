"""The loader's benchmark: the rivals make the same crops. No test asserts a time."""

import itertools

import numpy as np
import pytest

from datasets import TrainingCrops, TrainingTransform
from scripts.evidence.loader import (
    OPENCV,
    OURS,
    V2,
    drawn_pairs,
    of_pairs,
)
from tests.scripts.evidence.records import measured

TINY = ["small_size=[72,96]", "small_crop_size=48", "png_size=[96,128]", "jpeg_size=[120,160]", "base_size=100"]
TINY += ["crop_size=72", "pictures=2", "rounds=3"]


@pytest.mark.parametrize("suffix, base_size", [(".png", None), (".jpg", None), (".jpg", 100)])
def test_all_pipelines_make_the_same_crops(suffix, base_size, tmp_path):
    pairs = drawn_pairs(tmp_path / "pairs", 2, (96, 128), suffix)
    crops = TrainingCrops(pairs, TrainingTransform((100, 110), base_size=base_size, fill=(0, 0, 0)), seed=0)
    pipelines, padded, enlarged = of_pairs(crops), 0, 0
    for epoch in range(12):
        key = (epoch, epoch % 2)
        size, _, _ = crops.geometry(key, (96, 128))
        image, label = (tensor.numpy().astype(int) for tensor in pipelines[OURS](key))
        for name in (OPENCV, V2):
            other_image, other_label = (tensor.numpy() for tensor in pipelines[name](key))
            assert other_image.dtype == other_label.dtype == np.uint8 and other_image.shape == (3, 100, 110)
            if name == OPENCV or size[0] >= 96:  # where the image shrinks, transforms.v2 antialiases
                assert np.abs(other_image - image).max() <= 2
            # Where a position lies between two pixels, torch may choose the other one.
            assert (other_label != label).mean() < (0.02 if name == V2 else 1e-9)
        padded += size[0] < 100
        enlarged += size[0] >= 96
    assert padded and enlarged


def test_where_crops_shrink_a_lot_ours_are_closest_to_the_rival_that_antialiases(tmp_path):
    pairs = drawn_pairs(tmp_path / "pairs", 2, (120, 160), ".jpg")
    pipelines = of_pairs(TrainingCrops(pairs, TrainingTransform((24, 24), (0.3, 0.5), base_size=100), seed=0))
    for epoch in range(12):
        ours, *others = (pipelines[name]((epoch, epoch % 2))[0].numpy().astype(int) for name in (OURS, V2, OPENCV))
        antialiased, aliased = (np.abs(other - ours).mean() for other in others)
        assert antialiased < 0.8 * aliased


def test_a_tiny_run_compares_every_pipeline(in_process, tmp_path):
    call, text = measured("loader", tmp_path, *TINY)
    of_files = ("small PNG", "PNG", "JPEG", "JPEG, base_size")
    rows = [row for rows in call["items"].values() for row in rows]
    assert [(row["source"], row["pipeline"]) for row in rows] == [*itertools.product(of_files, (OURS, OPENCV, V2))]
    assert all(len(row["times_ms"]) == 3 for row in rows)
    assert "### small PNG: 96x72 pixels, files of " in text
    assert text.count(f"| {OURS} |") == 4 and f"python -m scripts.evidence.loader {TINY[0]}" in text
