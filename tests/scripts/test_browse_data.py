"""The pages show what a training sees: the same crops, the pixels they were drawn for, and their classes."""

import zipfile

import cv2
import numpy as np
import pytest

from datasets import camvid, minibatches_per_epoch
from engine import assemble
from engine.configuration import config as configuration
from engine.console import make_console
from engine.distributed import World
from scripts import browse_data
from scripts.browse_data import BrowseData, browse, legend, sheet, training_crops
from tests import trees
from tests.datasets import classification_trees
from tests.runs import classification_config, composed, run_config

JITTER = tuple(f"data.colour_jitter.{name}=0.3" for name in ("brightness", "contrast", "saturation", "hue"))
# Labels are noise: scales of 1 and above keep every pixel visible.
CROPS = ("data.crop_size=30", "data.scale=[1,2]", "data.crops_per_minibatch=4", "data.workers=0")


@pytest.mark.parametrize("sampler, options", [("uniform", JITTER), ("class_uniform", ())])
def test_shows_the_crops_of_a_training(tmp_path, sampler, options):
    root = trees.camvid_folders(tmp_path / "data")
    overrides = ("data=camvid", f"data.root={root}", f"sampler={sampler}", "seed=3", *CROPS, *options)
    run = run_config(*overrides)
    dataset = assemble.dataset(run.data, "train")
    steps_per_epoch = minibatches_per_epoch(len(dataset), 4)
    index = assemble.class_index(run, dataset, World(), lambda done, total: None)
    seen = assemble.training_loader(run, dataset, total_steps=9, world=World(), index=index)
    seen = list(seen)[2 * steps_per_epoch :]
    browsed = composed("browse_data", *overrides, f"out={tmp_path}", "epoch=2", "count=7")
    shown = list(training_crops(configuration.typed(browsed, BrowseData), dataset, make_console()))
    assert len(shown) == 8  # whole minibatches; the pages show the first 7
    for number, crop in enumerate(shown):
        minibatch, place = seen[number // 4], number % 4
        assert np.array_equal(crop.image, minibatch["image"][place].permute(1, 2, 0))
        assert np.array_equal(crop.label, minibatch["label"][place])
        assert crop.epoch == 2 + number // (4 * steps_per_epoch)
        name, facts = crop.title.split("\n")
        assert name == minibatch["name"][place]
        assert facts.endswith(f"{100 * (crop.label == 255).mean():.1f} % ignored")
        if sampler == "uniform":
            assert crop.pixel is None and "drawn for" not in facts
        else:
            assert f", drawn for {dataset.classes[crop.label[crop.pixel]]}, " in facts
    assert {"mirrored" in crop.title for crop in shown} == {True, False}


@pytest.mark.parametrize(
    "data, options", [("image_folder", ("data.resize=40",)), ("cifar10", ("data.val_split=test",))]
)
def test_shows_the_crops_of_a_classification_beside_their_images(tmp_path, data, options):
    """Images of several sizes in files, and in memory."""
    root = tmp_path / "data"
    if data == "cifar10":
        zipfile.ZipFile(classification_trees.cifar_zip(root / "cifar.zip")).extractall(root)
    else:
        classification_trees.imagenet(root)
    small = ("data.crop_size=32", "data.crops_per_minibatch=4", "data.workers=0", "seed=3")
    overrides = (f"data={data}", f"data.root={root}", *small, *options)
    run = classification_config(*overrides)
    dataset, _ = assemble.classified_splits(run.data)
    steps_per_epoch = minibatches_per_epoch(len(dataset), 4)
    seen = [*assemble.classified_crops(run, dataset, 4 * steps_per_epoch, World())][2 * steps_per_epoch :]
    browsed = composed("browse_data", *overrides, f"out={tmp_path / 'pages'}", "epoch=2", "count=7")
    shown = list(training_crops(configuration.typed(browsed, BrowseData), dataset, make_console()))
    for number, crop in enumerate(shown):
        minibatch, place = seen[number // 4], number % 4
        assert np.array_equal(crop.image, minibatch["image"][place].permute(1, 2, 0))
        name, label = minibatch["name"][place], dataset.classes[minibatch["label"][place]]
        assert crop.title == f"{name}\n{label}" and name.startswith(label)
        original = cv2.imread(str(next(root.rglob(f"train/{name}"))))[..., ::-1]
        height, width = (32 * length // max(original.shape[:2]) for length in original.shape[:2])
        top, left = (32 - height) // 2, (32 - width) // 2
        inside = crop.beside[top : top + height, left : left + width].astype(int)
        usual = cv2.resize(original, (width, height), interpolation=cv2.INTER_AREA)
        assert crop.beside.shape == (32, 32, 3) and (crop.beside == 255).all(axis=2).sum() >= 32**2 - height * width
        assert abs(inside - usual).mean() < 4
    assert len(shown) == 8 and len(browse(browsed)) == 1
    with pytest.raises(ValueError, match="sampler=class_uniform is for segmentation"):
        configuration.typed(composed("browse_data", *overrides, "sampler=class_uniform", "out=x"), BrowseData)


def test_the_image_that_takes_the_place_of_an_unreadable_one_is_shown(tmp_path):
    keys = ("data.on_error=skip", "data.workers=0", "count=8", f"out={tmp_path / 'pages'}")
    streets = trees.camvid_folders(tmp_path / "streets")
    photographs = classification_trees.imagenet(tmp_path / "photographs")
    for data, root in (("camvid", streets), ("image_folder", photographs)):
        damaged = next(
            path for path in sorted(root.rglob("*")) if path.suffix in (".png", ".JPEG") and "train" in str(path)
        )
        damaged.write_bytes(b"damaged")
        crops = CROPS if data == "camvid" else ("data.crop_size=32", "data.resize=40", "data.crops_per_minibatch=4")
        config = composed("browse_data", f"data={data}", f"data.root={root}", *crops, *keys)
        config = configuration.typed(config, BrowseData)
        dataset = browse_data.training_split(config.data)
        titles = [crop.title for crop in training_crops(config, dataset, make_console())]
        assert len(titles) == 8 and not any(title.startswith(damaged.name) for title in titles)


def test_writes_pages_of_eight_and_says_of_which_epochs(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(browse_data, "sheet", lambda *page: titles.append(page[-1]) or sheet(*page))
    root = trees.camvid_folders(tmp_path / "data")
    data = ("data=camvid", f"data.root={root}", "sampler=class_uniform", *CROPS)
    written = browse(composed("browse_data", *data, f"out={tmp_path / 'pages'}", "epoch=3", "count=9"))
    assert [path.name for path in written] == ["page_000.png", "page_001.png"]
    full, last = (cv2.imread(str(path)) for path in written)
    assert full.shape[0] > 2 * last.shape[0] > 400 and full.shape[1] == last.shape[1]  # one row of crops on the last
    # An epoch has one minibatch of four crops.
    assert titles == [f"camvid train, class_uniform sampling, seed 0, {of}" for of in ("epochs 3 to 4", "epoch 5")]


def test_the_legend_names_what_occurs(tmp_path):
    dataset = camvid(trees.camvid_folders(tmp_path), "train")
    patches = legend([np.array([[3, 3, 3, 255]], np.uint8), np.array([[3, 0, 10, 0]], np.uint8)], dataset)
    named = ["road 50.0 %", "sky 25.0 %", "bicyclist 12.5 %", "ignored 12.5 %"]
    assert [patch.get_label() for patch in patches] == named
    for patch, class_id in zip(patches, (3, 0, 10), strict=False):
        assert np.allclose(np.multiply(patch.get_facecolor()[:3], 255), dataset.palette[class_id])
