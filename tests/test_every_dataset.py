"""Every dataset end to end, on a fake tree in its official layout: two steps, an evaluation, predictions to submit."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.configuration import config as cfg
from engine.schema.segmentation import SegmentationRun
from eval import evaluate
from tests import trees
from tests.datasets import classification_trees
from tests.runs import REPOSITORY, checked, run_config
from train_seg import train


# What others have of their own, the tests of datasets show; other whole runs train on camvid, cityscapes and folder.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "vistas")) for name in trees.SEGMENTATION]
)
def test_trains_evaluates_and_predicts_the_test_split(name, tmp_path):
    """Evaluating again gives the same numbers, also at the base size of the training."""
    root, base_size = trees.SEGMENTATION[name](tmp_path / "data"), ("data.base_size=48",) if name == "vistas" else ()
    if name == "folder":  # its names need not be UTF-8
        for file in root.glob("*/*/a/board.0.*"):
            file.rename(file.with_name(os.fsdecode(b"caf\xe9") + file.suffix))
    data = (f"data={name}", f"data.root={root}", *base_size)
    results = train(checked("train_seg", f"run_dir={tmp_path / 'run'}", *data, "debug=smoke", "trainer.device=cpu"))
    assert results["dataset"] == name and results["images"] == 2
    assert 0 <= results["miou"] <= 1
    config = cfg.from_plain(results["config"], SegmentationRun).data
    assert len(results["iou"]) == assemble.official_classes(config) or name == "folder"
    dataset = assemble.dataset(config, "val")
    state = checkpoint.load(tmp_path / "run" / "checkpoints" / "last.pt")
    assert state["classes"] == list(dataset.classes) and list(map(tuple, state["palette"])) == list(dataset.palette)
    assert state["label_ids"] == list(dataset.label_ids)
    labelled = sum(int((sample.label != 255).sum()) for sample in dataset)
    assert np.sum(results["confusion_matrix"]) == labelled  # each pixel of the full-size labels counts once

    last = (f"checkpoint={tmp_path / 'run/checkpoints/last.pt'}", "workers=0", "device=cpu")
    assert evaluate(checked("eval", *last))["confusion_matrix"] == results["confusion_matrix"]
    dataset = assemble.dataset(config, "test")
    if not dataset.has_labels:
        with pytest.raises(ValueError, match=f"^data.split=test: {name} has no labels .* nothing to score: choose one"):
            evaluate(checked("eval", *last, "data.split=test"))
    scores = evaluate(checked("eval", *last, "data.split=test", f"predictions={tmp_path / 'predictions'}"))
    assert bool(scores) == dataset.has_labels
    files = {str(path.relative_to(tmp_path / "predictions")): path for path in tmp_path.glob("predictions/**/*.png")}
    assert set(files) == {f"{entry.name}.png" for entry in dataset.files} and len(files) == 2
    for index, entry in enumerate(dataset.files):
        written = Image.open(files[f"{entry.name}.png"])
        height, width = dataset.read_image(index).shape[:2]
        assert written.size == (width, height)
        assert set(np.unique(written)) <= set(dataset.table.official_ids)
        assert written.mode == ("P" if name in ("folder", "vistas") else "L")
        if written.mode == "P":
            assert np.array_equal(np.asarray(written.convert("RGB")), dataset.prediction_palette[np.asarray(written)])


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
    both = assemble.dataset(run_config(*data, "data.lists=full", "data.train_split=[train,val]").data, ["train", "val"])
    assert len(both) == 6 and both.split == "train+val"
    crops = run_config(*data, "data.crop_size=20", "data.crop_aspect=1.5", "data.base_size=40")
    assert assemble.training_crops(crops.data, both, seed=0)[0, 5]["image"].shape == (3, 20, 30)
    for split in ("[]", "[train,train]", "null"):
        with pytest.raises(ValueError, match="data.train_split=.*: expected a name or a list of different names"):
            run_config(*data, f"data.train_split={split}")


MADE_UP = {  # name: the dataset that it renames, the registry that it joins, its row
    "leaves": ("camvid", "FOR_SEGMENTATION", 'Row(leaves, {"train": 6, "val": 2}, classes=11)'),
    "flowers": ("imagenet", "FOR_CLASSIFICATION", 'Row(flowers, {"train": 6, "val": 3}, classes=3)'),
}
CODE = """
from dataclasses import replace
from datasets.{base} import {base}


def {name}(root, split, **options):
    return replace({base}(root, split, **options), name="{name}")
"""
DEFAULTS = "defaults:\n  - /schema/data/{name}\n\nname: {name}\ncrop_size: 32\ncrops_per_minibatch: 2\n"
TRY = """
import importlib, sys
from dataclasses import replace
from engine.training import planner
from engine.configuration.command_line import checked
from scripts.verify_data import verify_data

for entry, task, name, root in (argument.split("=") for argument in sys.argv[1:]):
    train = importlib.import_module(entry).train
    data = (f"data={name}", f"data.root={root}")
    config = checked(entry, *data, f"run_dir=runs/{name}", "debug=smoke", "trainer.device=cpu")
    planned = replace(config, data=replace(config.data, root=None))  # a plan needs no files
    assert planner.training_images(planned.data) == 6
    assert planner.step_memory(planned, crops=2, crop_size=32).peak > 0
    reports = verify_data(checked("verify_data", *data, "splits=[train,val]", "workers=0"))
    assert [own["problems"] for own in reports.values()] == [{}, {}]
    assert train(config)["dataset"] == name
"""


@pytest.mark.slow
def test_a_dataset_is_one_file_one_row_and_its_defaults(tmp_path):
    """The recipe of docs/extending.md is followed in a copy: no other file needs to name a dataset."""
    for room in ("configs", "datasets", "engine", "keepless", "models", "scripts"):
        shutil.copytree(REPOSITORY / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    for entry in REPOSITORY.glob("*.py"):
        shutil.copy(entry, tmp_path)
    registry = tmp_path / "datasets" / "registry.py"
    for name, (base, rows, row) in MADE_UP.items():
        (tmp_path / "datasets" / f"{name}.py").write_text(CODE.format(name=name, base=base))
        text = registry.read_text().replace("\nSplit = ", f"from datasets.{name} import {name}\n\nSplit = ", 1)
        registry.write_text(re.sub(rf"({rows}: .* = {{\n)", rf'\1    "{name}": {row},\n', text))
        (tmp_path / "configs" / "data" / f"{name}.yaml").write_text(DEFAULTS.format(name=name))
    tried = (
        f"train_seg=segmentation=leaves={trees.camvid_annot(tmp_path / 'images of leaves')}",
        f"train_imagenet=classification=flowers={classification_trees.imagenet(tmp_path / 'images of flowers')}",
    )
    done = subprocess.run([sys.executable, "-c", TRY, *tried], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
