"""Evaluating a checkpoint: the training's numbers again, official encodings, the official Cityscapes script."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from datasets import WholeImages, synthetic
from datasets.camvid import camvid_classes
from engine import build, checkpoint
from engine import config as cfg
from engine.schema import keys
from engine.schema.evaluation import Evaluation
from engine.segmentation.inference import predict
from eval import evaluate
from tests import trees
from tests.official import cityscapes_script
from tests.runs import REPOSITORY, SHORT, composed, run_config
from train_seg import train


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A network trained just long enough to predict more than one class."""
    path = tmp_path_factory.mktemp("run")
    options = [option for option in SHORT if "evaluate_images" not in option]
    train(composed("train_seg", f"run_dir={path}", *options, "trainer.steps=60", "optim.lr=0.02"))
    return path


def evaluate_run(run_dir: Path, *overrides: str) -> dict:
    return evaluate(
        composed("eval", f"checkpoint={run_dir / 'checkpoints' / 'last.pt'}", "workers=0", "device=cpu", *overrides)
    )


def test_gives_the_numbers_of_the_training(run_dir, tmp_path):
    trained = json.loads((run_dir / "results.json").read_text())
    results = evaluate_run(run_dir, f"results={tmp_path / 'again.json'}")
    assert results["confusion_matrix"] == trained["confusion_matrix"]
    assert results["miou"] == trained["miou"] and results["images"] == 40
    assert json.loads((tmp_path / "again.json").read_text()) == results


def test_other_evaluations_have_results_of_their_own():
    config = run_config()

    def file(checkpoint_path="run/checkpoints/last.pt", *overrides):
        options = cfg.typed(composed("eval", f"checkpoint={checkpoint_path}", *overrides), Evaluation)
        return str(options.default_results_file(config))

    assert file() == file("run/checkpoints/last.pt", "data.split=val", "precision=float32") == "run/results.json"
    assert file("run/checkpoints/best.pt") == "run/results_best.json"
    assert file("run/checkpoints/last.pt", "data.split=test") == "run/results_test.json"
    assert file("run/checkpoints/last.pt", "data.root=elsewhere/streets") == "run/results_streets.json"
    assert file("somewhere/net.pt", "precision=bfloat16") == "somewhere/results_net_bfloat16.json"
    assert file("run/checkpoints/last.pt", "head.pooling_size=[3,5]") == "run/results_pooling3x5.json"
    assert file("run/checkpoints/last.pt", "data.antialias=false") == "run/results_aliased.json"
    assert file("run/checkpoints/last.pt", "data.antialias=true") == "run/results.json"
    assert file("run/checkpoints/last.pt", "tta.scales=[1]", "tta.flip=false") == "run/results.json"
    assert file("run/checkpoints/last.pt", "tta.scales=[0.7,1,1.2]") == "run/results_scales0.7-1-1.2.json"
    views = ("window.size=64", "window.overlap=0.5", "tta.flip=true")
    assert file("run/checkpoints/last.pt", *views) == "run/results_window64_overlap0.5_flip.json"


def test_what_an_evaluation_changes_reaches_the_network_and_the_results(run_dir, tmp_path):
    plain = json.loads((run_dir / "results.json").read_text())
    pooled = evaluate_run(run_dir, "head.pooling_size=[2,2]", f"results={tmp_path / 'a.json'}")
    half = evaluate_run(run_dir, "precision=bfloat16", f"results={tmp_path / 'b.json'}")
    small = {
        antialias: evaluate_run(run_dir, "data.base_size=96", *key, f"results={tmp_path / 'c.json'}")
        for antialias, key in ((True, []), (False, ["data.antialias=false"]))
    }
    assert all(results["config"]["data"]["antialias"] == antialias for antialias, results in small.items())
    assert small[True]["confusion_matrix"] != small[False]["confusion_matrix"]
    assert pooled["config"]["head"]["pooling_size"] == [2, 2]
    assert half["config"]["trainer"]["precision"] == "bfloat16"
    assert plain["confusion_matrix"] not in (pooled["confusion_matrix"], half["confusion_matrix"])


def test_windows_and_views_reach_the_network_and_the_results(run_dir, tmp_path):
    plain = json.loads((run_dir / "results.json").read_text())
    assert plain["views"] == {"window": None, "overlap": 0.25, "scales": [1.0], "flip": False}
    fitting = evaluate_run(run_dir, "window.size=256", f"results={tmp_path / 'a.json'}")
    windows = evaluate_run(run_dir, "window.size=64", "window.overlap=0.5", f"results={tmp_path / 'b.json'}")
    views = evaluate_run(run_dir, "tta.scales=[0.7,1,1.2]", "tta.flip=true", f"results={tmp_path / 'c.json'}")
    assert fitting["confusion_matrix"] == plain["confusion_matrix"]
    assert plain["confusion_matrix"] not in (windows["confusion_matrix"], views["confusion_matrix"])
    assert json.loads((tmp_path / "b.json").read_text())["views"]["window"] == 64
    assert json.loads((tmp_path / "c.json").read_text())["views"]["scales"] == [0.7, 1.0, 1.2]
    pixels = np.sum(plain["confusion_matrix"])
    assert np.sum(windows["confusion_matrix"]) == np.sum(views["confusion_matrix"]) == pixels


def test_batches_reach_the_network(run_dir, tmp_path, monkeypatch):
    """40 images of one size, each counted once; too large a batch is named with its key."""
    sizes = []

    def predicted(forward, images, *arguments):
        sizes.append(len(images))
        return predict(forward, images, *arguments)

    plain = json.loads((run_dir / "results.json").read_text())
    monkeypatch.setattr("engine.segmentation.evaluation.predict", predicted)
    batched = evaluate_run(run_dir, "batch_size=16", f"results={tmp_path / 'a.json'}")
    assert sizes == [16, 16, 8] and batched["images"] == 40
    assert np.sum(batched["confusion_matrix"]) == np.sum(plain["confusion_matrix"])
    assert batched["miou"] == pytest.approx(plain["miou"], abs=1e-3)  # scores of two classes may round otherwise
    monkeypatch.setattr("engine.segmentation.inference._predict", _needs_too_much)
    fewer = "16 images of .* were evaluated. batch_size=8 roughly halves it; eval.py"
    for size, advice in ((16, fewer), (1, "an image of .* was evaluated. eval.py")):
        with pytest.raises(MemoryError, match=advice):
            evaluate_run(run_dir, f"batch_size={size}", f"results={tmp_path / 'b.json'}")


def _needs_too_much(*_) -> torch.Tensor:
    raise torch.OutOfMemoryError("CUDA out of memory")


_LARGE = """
import resource, sys
from eval import evaluate
from tests.runs import composed
results = evaluate(composed("eval", *sys.argv[1:]))
print(sum(map(sum, results["confusion_matrix"])), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


@pytest.mark.slow
@pytest.mark.parametrize("views", [(), ("tta.scales=[0.7,1,1.2]", "tta.flip=true")], ids=["one", "six"])
def test_20_megapixels_take_less_than_3_gib(tmp_path, views):
    """The whole process, with PyTorch, the picture and its scores."""
    config = run_config("experiment=camvid/resnext_small", f"data.root={tmp_path}")
    network = build.segmentation_network(config, classes=11)
    state = {"task": "segmentation", "network": network.state_dict(), "step": 0, "config": cfg.plain(config)}
    checkpoint.save(tmp_path / "net.pt", {**state, "classes": list(camvid_classes().names)})
    image, label = trees.pair(0, list(range(11)), size=(3888, 5184))
    trees.write(tmp_path / "val" / "images" / "large.jpg", image)
    trees.write(tmp_path / "val" / "labels" / "large.png", label)
    options = (f"checkpoint={tmp_path / 'net.pt'}", "workers=0", "device=cpu", "window.size=1024", *views)
    command = [sys.executable, "-c", _LARGE, *options]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=1200)
    pixels, peak_gib = map(float, ended.stdout.split()[-2:])
    assert pixels == 3888 * 5184 and peak_gib < 3


def test_the_confusion_matrix_has_a_picture_beside_the_results(run_dir):
    picture = cv2.imread(str(run_dir / "results_confusion.png"))
    assert min(picture.shape[:2]) > 700


@pytest.mark.parametrize(
    "override, message",
    [
        ("precision=fp64", "precision=fp64: expected one of float32, bfloat16"),
        ("device=tpu", "device=tpu: expected one of auto, cpu, cuda"),
        ("overlay_images=-2", "overlay_images=-2: expected a number above 0"),
        ("head.pooling_size=[]", "head.pooling_size"),
        ("head.pooling_size=[30]", "head.pooling_size=[30]: expected 2 numbers: height, width"),
        ("overlay_images=2", "overlay_images=2 needs overlays=DIR"),
        ("data.root=/nowhere/at/all", "data.root=/nowhere/at/all is not a folder"),
        ("data.split=nights", "nights"),
        ("window.size=100", "window.size=100: expected a multiple of the network's output stride 8, such as 104"),
        ("window.overlap=1", "window.overlap=1.0: expected 0 or more, at most 0.9"),
        ("window.overlap=0.5", "window.overlap=0.5 needs window.size=PIXELS"),
        ("tta.scales=[]", "tta.scales=[]: expected a number above 0"),
        ("batch_size=0", "batch_size=0: expected a number above 0"),
        ("tta.scales=[1,0]", "tta.scales=[1.0, 0.0]: expected a number above 0"),
    ],
)
def test_wrong_values_are_refused(run_dir, override, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        evaluate_run(run_dir, override)


def test_a_bad_file_is_named_before_anything_is_predicted(run_dir, tmp_path):
    image = synthetic(tmp_path / "streets", "val").files[-1].image
    image.write_bytes(image.read_bytes()[:200])
    with pytest.raises(ValueError, match=image.name):
        evaluate_run(run_dir, f"data.root={tmp_path / 'streets'}", f"predictions={tmp_path / 'predictions'}")
    assert not (tmp_path / "predictions").exists()


def test_predictions_are_official_and_score_the_same_in_the_official_script(run_dir, tmp_path, monkeypatch):
    """Scores agree to 1e-12 on the files that eval.py wrote, for labels with instances."""
    root = tmp_path / "streets"
    for entry in synthetic(root, "val").files:
        label = cv2.imread(str(entry.label), cv2.IMREAD_UNCHANGED)
        trees.write(entry.label.with_name(f"{entry.name}_gtFine_instanceIds.png"), trees.instance_ids(label))
    # After a short training the network predicts no cars or people; this classifier does.
    state = checkpoint.load(run_dir / "checkpoints" / "last.pt")
    torch.manual_seed(0)
    state["network"]["cls.weight"].normal_()
    del state["format"]
    checkpoint.save(tmp_path / "net.pt", state)
    options = ("workers=0", "device=cpu", f"data.root={root}", f"predictions={tmp_path / 'predictions'}")
    results = evaluate(composed("eval", f"checkpoint={tmp_path / 'net.pt'}", *options))

    dataset = synthetic(root, "val")
    written = cv2.imread(str(tmp_path / "predictions" / f"{dataset.files[0].name}.png"), cv2.IMREAD_UNCHANGED)
    assert written.dtype == np.uint8 and written.shape == dataset[0].label.shape
    official = cityscapes_script(dataset, tmp_path / "predictions", monkeypatch)
    ours = results["official"]
    for by_name, theirs in (
        (results["iou"], official["classScores"]),
        (ours["iiou"], official["classInstScores"]),
        (ours["category_iou"], official["categoryScores"]),
        (ours["category_iiou"], official["categoryInstScores"]),
        (
            {key: ours[key] for key in ("miou", "mean_iiou", "mean_category_iou", "mean_category_iiou")},
            {
                **{"miou": official["averageScoreClasses"], "mean_iiou": official["averageScoreInstClasses"]},
                "mean_category_iou": official["averageScoreCategories"],
                "mean_category_iiou": official["averageScoreInstCategories"],
            },
        ),
    ):
        for name, value in by_name.items():
            assert np.isnan(theirs[name]) if value is None else abs(theirs[name] - value) < 1e-12, name
        assert sum(bool(value) for value in by_name.values()) >= 2, by_name  # or nothing would be compared
    assert ours["miou"] == results["miou"]


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
    state["classes"], state["palette"] = state["classes"][:-1], state["palette"][:-1]
    del state["format"]
    checkpoint.save(tmp_path / "other.pt", state)
    with pytest.raises(ValueError, match="18 classes.*has 19"):
        evaluate(composed("eval", f"checkpoint={tmp_path / 'other.pt'}"))


@pytest.mark.parametrize("key, value", [("palette", [[0, 0, 300]] * 19), ("network", [1]), ("config", {})])
def test_a_malformed_checkpoint_is_named(run_dir, tmp_path, key, value):
    state = checkpoint.load(run_dir / "checkpoints" / "last.pt")
    torch.save({**state, key: value}, tmp_path / "other.pt")
    with pytest.raises(ValueError, match=f"^checkpoint {tmp_path / 'other.pt'}.*(expected|configuration)"):
        evaluate(composed("eval", f"checkpoint={tmp_path / 'other.pt'}"))


def test_a_path_in_square_brackets_is_evaluated(run_dir, tmp_path, capsys):
    path = tmp_path / "[x] [/y]" / "lr=1,bs=2" / "checkpoints" / "last.pt"
    path.parent.mkdir(parents=True)
    path.hardlink_to(run_dir / "checkpoints" / "last.pt")
    evaluate(composed("eval", keys.override("checkpoint", path), "workers=0", "device=cpu"))
    assert (path.parents[1] / "results.json").is_file()
    assert f"results: {path.parents[1] / 'results.json'}" in capsys.readouterr().out


def _killed(self, index):
    os.kill(os.getpid(), signal.SIGKILL)


def _hangs(self, index):
    time.sleep(1000)


@pytest.mark.parametrize(
    "fault, error, message",
    [
        (_killed, ChildProcessError, "a process that reads images died: .* use fewer workers\\.$"),
        (_hangs, TimeoutError, "no data came for timeout_seconds=1 seconds: .* raise timeout_seconds\\.$"),
    ],
)
def test_a_lost_worker_is_a_message(run_dir, monkeypatch, fault, error, message):
    monkeypatch.setattr(WholeImages, "__getitem__", fault)
    with pytest.raises(error, match=f"^{message}") as raised:
        evaluate_run(run_dir, "workers=1", "timeout_seconds=1")
    assert "data." not in str(raised.value) and "resume" not in str(raised.value)


def test_a_missing_checkpoint_is_named():
    with pytest.raises(ValueError, match="nowhere.pt does not exist"):
        evaluate(composed("eval", "checkpoint=nowhere.pt"))
    with pytest.raises(ValueError, match="checkpoint has no value: give checkpoint="):
        evaluate(composed("eval"))
