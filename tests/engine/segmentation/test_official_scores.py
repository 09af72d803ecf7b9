"""Official scores against the official script, or against a count of pixel by pixel on the ids of the files."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from datasets import IGNORED, SegmentationDataset, WholeImages, cityscapes, coco_stuff, vistas
from engine.segmentation.scores import Counts, segmentation_scores
from tests import trees


def random_predictions(dataset: SegmentationDataset) -> list[np.ndarray]:
    """Train ids, uint8 (H, W), of every image: of the class in two pixels of three, else of any but the first class."""
    rng = np.random.default_rng(0)
    predictions = []
    for sample in dataset:
        any_class = rng.integers(1, len(dataset.classes), sample.label.shape)
        right = (rng.random(sample.label.shape) < 2 / 3) & (sample.label != IGNORED)
        predictions.append(np.where(right, sample.label, any_class).astype(np.uint8))
    return predictions


def scored(dataset: SegmentationDataset, predictions: list[np.ndarray]) -> dict:
    """The scores of predictions, counted as an evaluation counts them."""
    counts = Counts(len(dataset.classes))
    for predicted, minibatch in zip(predictions, DataLoader(WholeImages(dataset), batch_size=1), strict=True):
        counts.add(torch.from_numpy(predicted)[None], minibatch["label"])
    return segmentation_scores(counts.confusion, dataset.classes)


def pixel_pairs(dataset: SegmentationDataset, predictions: list[np.ndarray]) -> Counter:
    """How often (value in the label file, value in the prediction file) occurs."""
    pairs = Counter()
    for entry, predicted in zip(dataset.files, predictions, strict=True):
        raw = np.asarray(Image.open(entry.label))  # of a palette the indices
        pairs.update(zip(raw.flatten().tolist(), dataset.table.official(predicted).flatten().tolist(), strict=True))
    return pairs


def close(ours: float | None, official: float) -> bool:
    return ours is None if math.isnan(official) else abs(ours - official) < 1e-12


def test_cityscapes_is_the_official_script(tmp_path, monkeypatch):
    """IoU of every class and their mean, to 1e-12."""
    dataset = cityscapes(trees.cityscapes(tmp_path / "data"), "train")
    predictions = random_predictions(dataset)
    script = pytest.importorskip("cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling")
    for option, value in {"evalInstLevelScore": False, "JSONOutput": False, "quiet": True}.items():
        monkeypatch.setattr(script.args, option, value)
    files = [tmp_path / "predictions" / f"{entry.name}.png" for entry in dataset.files]
    for file, predicted in zip(files, predictions, strict=True):
        trees.write(file, dataset.table.official(predicted))
    official = script.evaluateImgLists([*map(str, files)], [str(entry.label) for entry in dataset.files], script.args)
    scores = scored(dataset, predictions)
    for name in dataset.classes:
        assert close(scores["iou"][name], official["classScores"][name])
    assert close(scores["miou"], official["averageScoreClasses"])


@pytest.mark.parametrize(
    "find, make, ids, unscored",
    [(coco_stuff, trees.coco_stuff, range(92, 183), 183), (vistas, trees.vistas, range(65), 65)],
)
def test_classes_are_counted_on_their_own_pixels(find, make, ids, unscored, tmp_path):
    """COCO-Stuff leaves out the pixels of things, as its paper does. Vistas leaves out those of void."""
    dataset = find(make(tmp_path), "val")
    predictions = random_predictions(dataset)
    all_pairs = pixel_pairs(dataset, predictions)
    assert any(truth == unscored for truth, _ in all_pairs)
    pairs = {pair: count for pair, count in all_pairs.items() if pair[0] in ids}
    iou = [pairs[row, row] / sum(count for pair, count in pairs.items() if row in pair) for row in ids]
    scores = scored(dataset, predictions)
    assert list(scores["iou"].values()) == pytest.approx(iou, abs=1e-12)
    assert scores["miou"] == pytest.approx(np.mean(iou), abs=1e-12)
