"""Every dataset end to end, on a fake tree in its official layout: two steps, an evaluation, predictions to submit."""

import json

import cv2
import numpy as np
import pytest
from hydra.errors import ConfigCompositionException
from PIL import Image

from engine import build
from engine import config as cfg
from engine.schema.segmentation import SegmentationRun
from eval import evaluate
from tests import trees
from tests.runs import composed, run_config
from train_seg import train

TREES = {
    "camvid": trees.camvid_folders,
    "cityscapes": trees.cityscapes,
    "coco_stuff": trees.coco_stuff,
    "vistas": trees.vistas,
}

OFFICIAL = {
    "camvid": set(),
    "cityscapes": {
        "miou",
        *(mean + score for mean in ("", "mean_") for score in ("category_iou", "iiou", "category_iiou")),
    },
    "coco_stuff": {"miou", "iou", "pixel_accuracy", "mean_accuracy", "frequency_weighted_iou"},
    "vistas": {"miou"},
}

CLASSES = {"camvid": 11, "cityscapes": 19, "coco_stuff": 91, "vistas": 65}


@pytest.fixture(params=TREES)
def trained(request, tmp_path) -> tuple[str, dict]:
    """The dataset's name and the results of `debug=smoke`; the tree is in tmp_path / "data", the run in "run"."""
    root = TREES[request.param](tmp_path / "data")
    overrides = (f"data={request.param}", f"data.root={root}", "debug=smoke", "trainer.device=cpu")
    base_size = ("data.base_size=48",) if request.param == "vistas" else ()
    return request.param, train(composed("train_seg", f"run_dir={tmp_path / 'run'}", *overrides, *base_size))


def test_trains_evaluates_and_predicts_the_test_split(trained, tmp_path):
    name, results = trained
    assert results["dataset"] == name and results["images"] == 2 and len(results["iou"]) == CLASSES[name]
    assert 0 <= results["miou"] <= 1
    assert set(results["official"]) == OFFICIAL[name]
    dataset = build.dataset(cfg.from_plain(results["config"], SegmentationRun).data, "val")
    labelled = sum(int((sample.label != 255).sum()) for sample in dataset)
    assert np.sum(results["confusion_matrix"]) == labelled  # each pixel of the full-size labels counts once

    overrides = ("data.split=test", f"predictions={tmp_path / 'predictions'}", "workers=0", "device=cpu")
    scores = evaluate(composed("eval", f"checkpoint={tmp_path / 'run/checkpoints/last.pt'}", *overrides))
    dataset = build.dataset(cfg.from_plain(results["config"], SegmentationRun).data, "test")
    assert bool(scores) == dataset.has_labels
    files = {path.name: path for path in (tmp_path / "predictions").iterdir()}
    assert set(files) == {dataset.prediction_filename(entry.name) for entry in dataset.files} and len(files) == 2
    for index, entry in enumerate(dataset.files):
        file = files[dataset.prediction_filename(entry.name)]
        written = Image.open(file)
        height, width = dataset.read_image(index).shape[:2]
        assert written.size == (width, height)
        assert set(np.unique(written)) <= set(dataset.table.official_ids)
        if name == "vistas":
            assert written.mode == "P"
            colours = np.array([label["color"] for label in trees.vistas_config()["labels"]], np.uint8)
            assert np.array_equal(np.asarray(written.convert("RGB")), colours[np.asarray(written)])
        else:
            assert written.mode == "L" and cv2.imread(str(file), cv2.IMREAD_UNCHANGED).ndim == 2


def test_options_of_coco_stuff_reach_the_dataset(tmp_path):
    root = trees.coco_stuff(tmp_path / "data")
    data = ("data=coco_stuff", f"data.root={root}", "run_dir=unused")
    config = run_config(*data, "data.lists=full", "data.other_class=true")
    dataset = build.dataset(config.data, "train")
    assert len(dataset) == 4 and dataset.classes[-1] == "other" and len(dataset.classes) == 92
    with pytest.raises(ConfigCompositionException, match="data.lists"):  # an option of another dataset
        composed("train_seg", "data=camvid", "data.lists=full")
    with pytest.raises(ValueError, match="data.lists=half: expected one of challenge, full"):
        run_config(*data, "data.lists=half")


def test_evaluation_at_another_resolution(tmp_path):
    """`data.base_size` of eval.py replaces the training's; labels keep their size, results get their own file."""
    root = trees.vistas(tmp_path / "data")
    overrides = ("data=vistas", f"data.root={root}", "debug=smoke", "trainer.device=cpu", "data.base_size=48")
    trained = train(composed("train_seg", f"run_dir={tmp_path / 'run'}", *overrides))
    checkpoint = f"checkpoint={tmp_path / 'run/checkpoints/last.pt'}"
    again = evaluate(composed("eval", checkpoint, "workers=0", "device=cpu"))
    larger = evaluate(composed("eval", checkpoint, "workers=0", "device=cpu", "data.base_size=64"))
    views = ("window.size=32", "tta.scales=[0.7,1,1.2]", "tta.flip=true")
    others = evaluate(composed("eval", checkpoint, "workers=0", "device=cpu", *views))
    assert again["confusion_matrix"] == trained["confusion_matrix"]
    assert larger["confusion_matrix"] != trained["confusion_matrix"]
    pixels = np.sum(trained["confusion_matrix"])
    assert np.sum(larger["confusion_matrix"]) == np.sum(others["confusion_matrix"]) == pixels
    written = json.loads((tmp_path / "run" / "results_base64.json").read_text())
    assert written["config"]["data"]["base_size"] == 64
