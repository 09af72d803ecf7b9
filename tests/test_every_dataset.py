"""Every dataset end to end, on a fake tree in its official layout: two steps, an evaluation, predictions to submit."""

import os
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
from PIL import Image

import train_imagenet
from datasets.imagenet import imagenet
from datasets.row import Row
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint import recorded
from engine.schema.classification import ImageNetData
from engine.schema.keys import choice, key
from engine.schema.segmentation import SegmentationRun
from engine.training import planner
from eval import evaluate
from scripts.verify_data import verify_data
from tests import trees
from tests.choices import forgotten
from tests.datasets import classification_trees
from tests.runs import checked, run_config
from train_seg import train


# What others have of their own, the tests of datasets show; other whole runs train on camvid, cityscapes and folder.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "vistas")) for name in trees.SEGMENTATION]
)
def test_trains_evaluates_and_predicts_its_last_split(name, tmp_path):
    """Evaluating again gives the same numbers, also at the base size of the training."""
    root, base_size = trees.SEGMENTATION[name](tmp_path / "data"), ("data.base_size=48",) if name == "vistas" else ()
    if name == "folder":  # its names need not be UTF-8
        for file in root.glob("*/*/a/board.0.*"):
            file.rename(file.with_name(os.fsdecode(b"caf\xe9") + file.suffix))
    data = (f"data={name}", f"data.root={root}", *base_size)
    results = train(checked("train_seg", f"run_dir={tmp_path / 'run'}", *data, "debug=smoke", "trainer.device=cpu"))
    assert results["dataset"] == name
    assert 0 <= results["miou"] <= 1
    config = recorded.from_plain(results["config"], SegmentationRun).data
    assert assemble.official_classes(config) in (None, len(results["iou"]))
    dataset, (*_, split) = assemble.dataset(config, "val"), trees.splits_of(name, root)
    assert results["images"] == len(dataset) > 1
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")
    assert state["classes"] == list(dataset.classes) and list(map(tuple, state["palette"])) == list(dataset.palette)
    assert state["label_ids"] == list(dataset.label_ids)
    labelled = sum(int((sample.label != 255).sum()) for sample in dataset)
    assert np.sum(results["confusion_matrix"]) == labelled  # each pixel of the full-size labels counts once

    last = (f"checkpoint={tmp_path / 'run/checkpoints/last.pt'}", "workers=0", "device=cpu")
    assert evaluate(checked("eval", *last))["confusion_matrix"] == results["confusion_matrix"]
    dataset = assemble.dataset(config, split)
    if not dataset.has_labels:
        with pytest.raises(ValueError, match=f"^data.split={split}: {name} has no labels .* nothing to score"):
            evaluate(checked("eval", *last, f"data.split={split}"))
    scores = evaluate(checked("eval", *last, f"data.split={split}", f"predictions={tmp_path / 'predictions'}"))
    assert bool(scores) == dataset.has_labels
    files = {str(path.relative_to(tmp_path / "predictions")): path for path in tmp_path.glob("predictions/**/*.png")}
    assert set(files) == {f"{entry.name}.png" for entry in dataset.files} and len(files) == len(dataset)
    for index, entry in enumerate(dataset.files):
        picture = Image.open(files[f"{entry.name}.png"])
        height, width = dataset.read_image(index).shape[:2]
        assert picture.size == (width, height)
        assert set(np.unique(picture)) <= set(dataset.table.official_ids)
        assert picture.mode == ("L" if dataset.prediction_palette is None else "P")
        assert picture.mode == "P" or name not in ("folder", "vistas")
        if picture.mode == "P":
            assert np.array_equal(np.asarray(picture.convert("RGB")), dataset.prediction_palette[np.asarray(picture)])


def test_options_reach_the_dataset_and_messages_name_the_keys_to_change(tmp_path):
    """A split that a dataset does not have is no fault of its folder."""
    with pytest.raises(ValueError) as error:
        assemble.dataset(run_config("run_dir=unused").data, "test")
    assert str(error.value) == "data.split=test: split 'test' is unknown to synthetic; expected one of train, val"
    root = trees.coco_stuff(tmp_path / "coco")
    with pytest.raises(ValueError, match=f"^data.train_split=train: data.root={root}: camvid: the folder "):
        assemble.labelled_splits(run_config("data=camvid", f"data.root={root}", "run_dir=unused").data)
    data = ("data=coco_stuff", f"data.root={root}", "run_dir=unused")
    dataset = assemble.dataset(run_config(*data, "data.lists=full").data, "train")
    assert len(dataset) == 4
    with pytest.raises(ValueError, match="data.lists"):  # an option of another dataset
        checked("train_seg", "data=camvid", "data.lists=full")
    whole = run_config(*data, "data.lists=full", "data.train_split=[train,val]")
    dataset = assemble.dataset(whole.data, ["train", "val"])
    assert len(dataset) == 6 and dataset.split == "train+val"
    crops = run_config(*data, "data.crop_size=20", "data.crop_aspect=1.5", "data.base_size=40")
    assert assemble.training_crops(crops.data, dataset, seed=0)[0, 5]["image"].shape == (3, 20, 30)
    for split in ("[]", "[train,train]", "null"):
        with pytest.raises(ValueError, match="data.train_split=.*: expected a name or a list of different names"):
            run_config(*data, f"data.train_split={split}")


def flowers(root, split, keys=""):
    return replace(imagenet(root, split), name="flowers")


ROW = Row(flowers, {"train": 6, "val": 3}, classes=3)


class Flowers(ImageNetData):
    name: str = "flowers"
    crop_size: int = key(32, above=0)
    crops_per_minibatch: int = key(2, above=0)
    builds: ClassVar[str] = f"{__name__}.ROW"


@pytest.mark.slow
def test_every_command_takes_a_dataset_of_ones_own_for_a_classification(tmp_path):
    """Its function, its row and its choice, without a YAML. tests/test_plugins.py trains and evaluates a segmentation
    on the page's dataset, which lies outside of the repository."""
    with forgotten():
        choice("data")(Flowers)
        data = ("data=flowers", f"data.root={classification_trees.imagenet(tmp_path / 'images of flowers')}")
        run = (f"run_dir={tmp_path / 'run'}", "debug=smoke", "trainer.device=cpu")
        config = checked("train_imagenet", *data, *run)
        planned = replace(config, data=replace(config.data, root=None))  # a plan needs no files
        assert planner.training_images(planned.data) == 6
        assert planner.step_memory(planned, crops=2, crop_size=32).peak > 0
        reports = verify_data(checked("verify_data", *data, "splits=[train,val]", "workers=0"))
        assert [report.problems for report in reports.values()] == [{}, {}]
        assert train_imagenet.train(config)["dataset"] == "flowers"
