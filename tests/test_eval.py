"""Evaluating a checkpoint: the training's own numbers again, official encodings, the official Cityscapes script."""

import json
from pathlib import Path

import cv2
import numpy as np
import pytest

from datasets import synthetic
from engine import checkpoint
from eval import default_results_file, evaluate
from tests.runs import SHORT, composed
from train_seg import train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A network trained just long enough to predict more than one class."""
    path = tmp_path_factory.mktemp("run")
    options = [option for option in SHORT if "evaluate_images" not in option]
    train(composed("train_seg", f"run_dir={path}", *options, "trainer.steps=60", "optim.lr=0.02"))
    return path


def evaluate_run(run_dir: Path, *overrides: str) -> dict:
    return evaluate(composed("eval", f"checkpoint={run_dir / 'checkpoints' / 'last.pt'}", "workers=0", *overrides))


def test_gives_the_numbers_of_the_training(run_dir, tmp_path):
    trained = json.loads((run_dir / "results.json").read_text())
    results = evaluate_run(run_dir, f"results={tmp_path / 'again.json'}")
    assert results["confusion_matrix"] == trained["confusion_matrix"]
    assert results["miou"] == trained["miou"] and results["images"] == 40
    assert json.loads((tmp_path / "again.json").read_text()) == results


def test_other_checkpoints_and_splits_have_results_of_their_own(run_dir):
    def file(name, split):
        return default_results_file(Path("run/checkpoints") / name, split, "val")

    assert file("last.pt", "val") == Path("run/results.json")
    assert file("best.pt", "val") == Path("run/results_best.json")
    assert file("last.pt", "test") == Path("run/results_test.json")
    assert default_results_file(Path("somewhere/net.pt"), "val", "val") == Path("somewhere/results_net.json")


def test_predictions_are_official_and_score_the_same_in_the_official_script(run_dir, tmp_path):
    """Equal to 1e-12, class by class, on the files that eval.py wrote."""
    scripts = pytest.importorskip("cityscapesscripts.evaluation.evalPixelLevelSemanticLabeling")
    results = evaluate_run(run_dir, f"predictions={tmp_path / 'predictions'}", f"results={tmp_path / 'results.json'}")
    dataset = synthetic(None, "val")
    predictions = [str(tmp_path / "predictions" / dataset.prediction_filename(entry.name)) for entry in dataset.files]
    truths = [str(entry.label) for entry in dataset.files]

    written = cv2.imread(predictions[0], cv2.IMREAD_UNCHANGED)
    assert written.dtype == np.uint8 and written.shape == dataset[0].label.shape
    scripts.args.evalInstLevelScore = False
    scripts.args.JSONOutput = False
    scripts.args.quiet = True
    official = scripts.evaluateImgLists(predictions, truths, scripts.args)
    for name, iou in results["iou"].items():
        theirs = official["classScores"][name]
        assert np.isnan(theirs) if iou is None else abs(theirs - iou) < 1e-12, name
    assert abs(official["averageScoreClasses"] - results["miou"]) < 1e-12
    assert results["miou"] > 0.02 and sum(bool(iou) for iou in results["iou"].values()) >= 3  # not all one class


def test_overlays_show_image_truth_and_prediction(run_dir, tmp_path):
    evaluate_run(
        run_dir, f"overlays={tmp_path / 'overlays'}", "overlay_images=3", f"results={tmp_path / 'results.json'}"
    )
    files = sorted((tmp_path / "overlays").rglob("*.png"))
    assert len(files) == 3
    dataset = synthetic(None, "val")
    picture = cv2.cvtColor(cv2.imread(str(files[0])), cv2.COLOR_BGR2RGB)
    image, label, _ = dataset[0]
    height, width = label.shape
    assert picture.shape == (height, 3 * width, 3)
    assert np.array_equal(picture[:, :width], image)
    truth = picture[:, width : 2 * width].astype(float)
    expected = np.where((label == 255)[..., None], image, 0.6 * dataset.colour(label) + 0.4 * image)
    assert np.abs(truth - expected).max() <= 1


def test_a_checkpoint_of_other_classes_is_refused(run_dir, tmp_path):
    state = checkpoint.load(run_dir / "checkpoints" / "last.pt")
    state["classes"] = state["classes"][:-1]
    del state["format"]
    checkpoint.save(tmp_path / "other.pt", state)
    with pytest.raises(ValueError, match="18 classes.*has 19"):
        evaluate(composed("eval", f"checkpoint={tmp_path / 'other.pt'}"))


def test_a_missing_checkpoint_is_named():
    with pytest.raises(ValueError, match="nowhere.pt does not exist"):
        evaluate(composed("eval", "checkpoint=nowhere.pt"))
    with pytest.raises(ValueError, match="checkpoint has no value: give checkpoint="):
        evaluate(composed("eval"))
