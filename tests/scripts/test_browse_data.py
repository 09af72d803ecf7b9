"""The sheets show what a training sees: the same crops with their labels or classes."""

import os

import cv2
import numpy as np
import pytest

from datasets import camvid, minibatches_per_epoch
from engine import assemble
from engine.process.console import make_console
from engine.process.distributed import World
from scripts.browse_data import browse, panels, sheet, training_minibatches
from tests import trees
from tests.datasets import classification_trees
from tests.runs import checked, classification_config, run_config

# Labels are noise: scales of 1 and above keep every pixel visible.
CROPS = ("data.crop_size=30", "data.scale=[1,2]", "data.crops_per_minibatch=4", "data.workers=0")
JITTER = tuple(f"data.colour_jitter.{name}=0.3" for name in ("brightness", "contrast", "saturation", "hue"))


@pytest.mark.parametrize("data, options", [("camvid", (*JITTER, "sampler=class_uniform")), ("image_folder", ())])
def test_shows_the_crops_of_a_training(tmp_path, data, options):
    root = tmp_path / "data"
    (trees.camvid_folders if data == "camvid" else classification_trees.imagenet)(root)
    crops = CROPS if data == "camvid" else ("data.crop_size=32", "data.resize=40", *CROPS[2:])
    overrides = (f"data={data}", f"data.root={root}", "seed=3", *crops, *options)
    browsed = checked("browse_data", *overrides, f"out={tmp_path / 'pages'}", "epoch=2", "count=7")
    if data == "camvid":
        run = run_config(*overrides)
        dataset = assemble.dataset(run.data, "train")
        index = assemble.class_index(run, dataset, World(), lambda done, total: None)
        start = 2 * minibatches_per_epoch(len(dataset), 4)
        seen = [*assemble.training_loader(run, dataset, start + 2, World(), index=index)][start:]
    else:
        run = classification_config(*overrides)
        dataset, _ = assemble.classified_splits(run.data)
        start = 2 * minibatches_per_epoch(len(dataset), 4)
        seen = [*assemble.classified_crops(run, dataset, start + 2, World())][start:]
    shown = list(panels(training_minibatches(browsed, dataset, make_console()), dataset))
    assert len(shown) == 8  # whole minibatches
    assert data == "camvid" or len(browse(browsed)) == 1
    for number, (title, shown_crop, ids) in enumerate(shown):
        minibatch, place = seen[number // 4], number % 4
        crop, name = minibatch["image"][place].permute(1, 2, 0).numpy(), minibatch["name"][place]
        label = minibatch["label"][place]
        assert np.array_equal(shown_crop[:, : crop.shape[1]], crop)
        assert np.array_equal(ids, label) and shown_crop.shape[1] == crop.shape[1] * (2 if data == "camvid" else 1)
        assert title == (name if data == "camvid" else f"{name}\n{dataset.classes[label]}")


def test_classification_has_no_class_uniform_sampling():
    with pytest.raises(ValueError, match="sampler=class_uniform is for segmentation"):
        checked("browse_data", "data=cifar10", "sampler=class_uniform", "out=x")


def test_writes_pages_of_eight_and_the_legend_names_what_occurs(tmp_path):
    """Names need not be UTF-8."""
    root = trees.camvid_folders(tmp_path / "data")
    for file in root.glob("train/*/0001TP_000002.*"):
        file.rename(file.with_name(os.fsdecode(b"caf\xe9") + file.suffix))
    data = ("data=camvid", f"data.root={root}", *CROPS)
    assert browse(checked("browse_data", *data, f"out={tmp_path / 'pages'}", "count=1"))
    for folder in (root / "train" / "images" / "new", root / "train" / "labels"):
        with pytest.raises(ValueError, match=f"^out={folder} (lies in .*, the images|holds labels) of (a|the) dataset"):
            browse(checked("browse_data", *data, f"out={folder}"))
    pages = browse(checked("browse_data", *data, f"out={tmp_path / 'pages'}", "epoch=3", "count=9"))  # again
    assert [path.name for path in pages] == ["page_000.png", "page_001.png"]
    full, last = (cv2.imread(str(path)) for path in pages)
    assert full.shape[0] > 2 * last.shape[0] > 400 and full.shape[1] == last.shape[1]  # one row of crops on the last
    page = [("a", np.zeros((1, 8, 3), np.uint8), np.array([[3, 3, 10, 255]], np.uint8))]
    (legend,) = sheet(page, camvid(root, "train")).legends
    assert [text.get_text() for text in legend.get_texts()] == ["road", "bicyclist"]
    (axes, *_) = sheet([("$a $b caf\\udce9", *page[0][1:])], camvid(root, "train")).axes
    assert not axes.title.get_parse_math() and "$a" in axes.get_title("left")
