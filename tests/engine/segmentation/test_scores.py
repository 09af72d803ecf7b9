"""Scores against a count by hand; test_official_scores.py has the official Cityscapes script."""

import csv
import math

import numpy as np
import pytest
import torch

from engine.process.distributed import World
from engine.segmentation.scores import Counts, ImageScores, segmentation_scores
from keepless.recompute.step.costs import peak_bytes


def test_the_labelled_pixels_are_counted():
    labels = torch.tensor([[0, 0, 1], [2, 255, 255]], dtype=torch.uint8)
    predictions = torch.tensor([[0, 1, 1], [0, 0, 2]], dtype=torch.uint8)
    counts = Counts(4)
    for _ in range(2):
        counts.add(predictions, labels)
    assert counts.confusion.tolist() == [[2, 2, 0, 0], [0, 2, 0, 0], [2, 0, 0, 0], [0, 0, 0, 0]]
    assert counts.cells.sum() == 8 + 4  # the ignored ones


def test_memory_of_counting_does_not_depend_on_the_classes(deterministic):
    """The evaluations of a run with trainer.deterministic=true use deterministic algorithms."""
    labels = torch.randint(0, 65, (1, 256, 512), dtype=torch.uint8)
    counts = Counts(65)
    peak = peak_bytes(lambda: counts.add(labels.flip(1), labels), "cpu")
    assert peak <= 10 * labels.numel() and counts.cells.sum() == labels.numel()


def test_scores_by_hand():
    counts = torch.tensor([[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    scores = segmentation_scores(counts, ("a", "b", "c", "d"))
    # a: 1 / (1 + 1 + 1); b: 1 / (1 + 0 + 1); c: 0 / 1; d does not occur.
    assert scores["iou"] == {"a": 1 / 3, "b": 1 / 2, "c": 0.0, "d": None}
    assert scores["accuracy"] == {"a": 1 / 2, "b": 1.0, "c": 0.0, "d": None}
    assert scores["miou"] == (1 / 3 + 1 / 2 + 0) / 3
    assert scores["pixel_accuracy"] == 2 / 4
    scores = segmentation_scores(torch.tensor([[1, 1], [0, 0]]), ("a", "b"))  # b is only predicted
    assert scores["iou"] == {"a": 0.5, "b": 0.0} and scores["miou"] == 0.25
    scores = segmentation_scores(torch.zeros(2, 2, dtype=torch.int64), ("a", "b"))
    assert scores["iou"] == {"a": None, "b": None} and math.isnan(scores["miou"])
    big = 2**31 + 1  # exact, though float32 has no such number
    assert segmentation_scores(torch.tensor([[big, 1], [0, 1]]), ("a", "b"))["iou"]["a"] == big / (big + 1)


def test_scores_of_single_images_add_up_to_the_splits_scores(tmp_path):
    """Classes of which an image shows and predicts nothing are left out; ignored pixels do not count."""
    classes = ("sky", 'a, "b"', "wood", "never")
    rng = np.random.default_rng(0)
    images = ImageScores(classes, tmp_path / "images.csv")
    counts = Counts(4)
    for number in range(5):
        label, prediction = rng.integers(0, 3 - number % 2, (2, 6, 7)).astype(np.uint8)
        label[rng.random(label.shape) < 0.2] = 255
        images.add({"name": [f"b/{9 - number}"], "label": torch.tensor(label)[None]}, torch.tensor(prediction)[None])
        counts.add(torch.tensor(prediction), torch.tensor(label))
    unlabelled = {"name": ["a, nothing labelled"], "label": torch.full((1, 6, 7), 255)}
    images.add(unlabelled, torch.tensor(label)[None])
    whole = segmentation_scores(counts.confusion, classes)
    images.write(World())
    first, *rows = csv.DictReader(images.file.read_text().splitlines())
    assert {name: value for name, value in first.items() if "on_" not in name} == {
        **{"name": "a, nothing labelled", "miou_of_image": ""},
        **{f"iou_{name}": "" for name in classes},
    }
    assert [row["name"] for row in rows] == [f"b/{number}" for number in (5, 6, 7, 8, 9)]
    sums = {
        name: [sum(int(row[f"{count}_{name}"]) for row in rows) for count in ("intersection", "union")]
        for name in classes
    }
    shares = {name: intersection / union if union else None for name, (intersection, union) in sums.items()}
    assert shares == whole["iou"]
    iou = [int(rows[1][f"intersection_{name}"]) / int(rows[1][f"union_{name}"]) for name in classes[:2]]
    assert float(rows[1]["miou_of_image"]) == pytest.approx(sum(iou) / 2) and rows[1]["iou_wood"] == ""
    assert float(rows[1]['iou_a, "b"']) == iou[1] and rows[0]["iou_wood"] != "" and whole["iou"]["never"] is None
