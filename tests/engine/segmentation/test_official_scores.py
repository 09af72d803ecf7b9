"""Official scores against the official script, or against a count of pixel by pixel on the ids of the files."""

import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from datasets import IGNORED, SegmentationDataset, WholeImages, cityscapes, coco_stuff, vistas
from engine.segmentation.scores import Counts, all_scores
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


def counted(dataset: SegmentationDataset, predictions: list[np.ndarray], images: range | None = None) -> Counts:
    """Predictions of some images (default: all) as an evaluation counts them."""
    counts = Counts(dataset.table)
    images = range(len(dataset)) if images is None else images
    for index, minibatch in zip(images, DataLoader(WholeImages(dataset), sampler=images, batch_size=1), strict=True):
        counts.add(torch.from_numpy(predictions[index])[None], minibatch)
    return counts


def scored(dataset: SegmentationDataset, predictions: list[np.ndarray]) -> dict:
    return all_scores(counted(dataset, predictions), dataset.table)


@pytest.fixture
def streets(tmp_path) -> tuple[SegmentationDataset, list[np.ndarray]]:
    dataset = cityscapes(trees.cityscapes(tmp_path / "data"), "train")
    return dataset, random_predictions(dataset)


def pixel_pairs(dataset: SegmentationDataset, predictions: list[np.ndarray]) -> Counter:
    """How often (value in the label file, value in the prediction file) occurs."""
    pairs = Counter()
    for entry, predicted in zip(dataset.files, predictions, strict=True):
        raw = np.asarray(Image.open(entry.label))  # of a palette the indices
        pairs.update(zip(raw.flatten().tolist(), dataset.table.official(predicted).flatten().tolist(), strict=True))
    return pairs


def close(ours: float | None, theirs: float) -> bool:
    return ours is None if math.isnan(theirs) else abs(ours - theirs) < 1e-12


def test_cityscapes_is_the_official_script(streets, tmp_path, monkeypatch):
    """IoU of every class and their mean, to 1e-12."""
    dataset, predictions = streets
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
    assert close(scores["miou"], official["averageScoreClasses"]) and scores["official"] == {"miou": scores["miou"]}


def test_coco_stuff_by_its_definition(tmp_path):
    """The paper: 91 classes on their own pixels. The challenge: `other` is a class of the labels, never predicted."""
    dataset = coco_stuff(trees.coco_stuff(tmp_path), "val")
    predictions = random_predictions(dataset)
    pairs = pixel_pairs(dataset, predictions)
    names = dict(zip((*range(92, 183), 183), dataset.table.scored, strict=True))

    def ious(rows) -> dict[str, float]:
        """Return the IoU of the classes with labels; pixels of other labels do not count."""
        result = {}
        for row in sorted({truth for truth, _ in pairs if truth in rows}):
            either = sum(count for pair, count in pairs.items() if row in pair and pair[0] in rows)
            result[names[row]] = pairs[row, row] / either
        return result

    scores = scored(dataset, predictions)
    paper, official = ious(range(92, 183)), ious(range(92, 184))
    assert list(scores["iou"]) == list(names.values())[:91] and len(official) == 92
    assert scores["iou"] == pytest.approx(paper, abs=1e-12)
    assert scores["miou"] == pytest.approx(np.mean(list(paper.values())), abs=1e-12)
    assert scores["official"]["iou"] == pytest.approx(official, abs=1e-12)
    assert scores["official"]["miou"] == pytest.approx(np.mean(list(official.values())), abs=1e-12)
    assert scores["official"]["iou"]["other"] == 0


def test_coco_stuff_by_hand_when_a_class_has_no_label(tmp_path):
    """Labels: two pixels of banner (train id 0), one of other (91). Blanket (1) is only predicted."""
    dataset = coco_stuff(trees.coco_stuff(tmp_path), "val")
    counts = Counts(dataset.table)
    labels, predictions = torch.tensor([[[0, 0, 91, 255]]]), torch.tensor([[[0, 2, 1, 1]]])
    counts.add(predictions.byte(), {"label": labels.byte()})
    scores = all_scores(counts, dataset.table)
    # The paper: a thing does not count. Class 2 has a false alarm.
    assert scores["iou"]["banner"] == 1 / 2 and scores["iou"]["blanket"] is None and scores["miou"] == 1 / 4
    assert "other" not in scores["iou"] and scores["pixel_accuracy"] == 1 / 2
    # Officially the thing is a pixel, and blanket, predicted on it, has no label and so no IoU.
    official = scores["official"]
    assert official["iou"]["banner"] == 1 / 2 and official["iou"]["other"] == 0 and official["iou"]["blanket"] is None
    assert official["miou"] == 1 / 4 and official["pixel_accuracy"] == 1 / 3 and official["mean_accuracy"] == 1 / 4
    assert official["frequency_weighted_iou"] == pytest.approx(1 / 2 * 2 / 3)


def test_vistas_is_the_full_matrix_without_the_rows_and_columns_of_void(tmp_path):
    dataset = vistas(trees.vistas(tmp_path), "val")
    predictions = random_predictions(dataset)
    matrix = np.zeros((66, 66), int)
    for (truth, predicted), count in pixel_pairs(dataset, predictions).items():
        matrix[truth, predicted] += count
    assert matrix[65].sum() > 0  # void in the labels
    evaluated = matrix[:65, :65]
    iou = [evaluated[i, i] / (evaluated[i].sum() + evaluated[:, i].sum() - evaluated[i, i]) for i in range(65)]
    scores = scored(dataset, predictions)
    assert list(scores["iou"].values()) == pytest.approx(iou, abs=1e-12)
    assert scores["official"] == {"miou": pytest.approx(np.mean(iou), abs=1e-12)}


def test_counts_of_several_processes_add_up(streets):
    dataset, predictions = streets
    whole = counted(dataset, predictions)
    first, *others = (counted(dataset, predictions, range(rank, len(dataset), 3)) for rank in range(3))
    first.add_up(SimpleNamespace(sum_=lambda own: own + sum(other.cells for other in others)))
    assert torch.equal(first.confusion, whole.confusion)
