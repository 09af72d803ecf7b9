import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import cv2
import numpy as np
import pytest

from datasets import shapes, synthetic
from datasets.streets import draw_street
from tests import trees

SMALL = (2, 1)
PRESENT = {
    *("road", "sidewalk", "building", "fence", "pole", "traffic light", "traffic sign"),
    *("vegetation", "terrain", "sky", "person", "car"),
}


def test_written_in_the_official_layout_and_read_as_such(tmp_path):
    (tmp_path / "streets").mkdir()  # an empty folder is used
    dataset = synthetic(tmp_path / "streets", "train", images=SMALL)
    assert (dataset.name, dataset.split, len(dataset)) == ("synthetic", "train", 2)
    assert len(synthetic(tmp_path / "streets", "val", images=SMALL)) == 1
    city = tmp_path / "streets/leftImg8bit/train/drawnburg"
    assert (city / "drawnburg_000000_000000_leftImg8bit.png").is_file()
    sample = dataset[0]
    assert sample.image.shape == (128, 256, 3) and sample.label.shape == (128, 256) and len(dataset.classes) == 19
    pictures = [value for key, value in trees.contents(tmp_path / "streets").items() if "leftImg8bit" in key]
    assert len(set(pictures)) == len(pictures) == 3  # the splits do not share any
    other_sample = synthetic(tmp_path / "other seed", "train", images=(1, 1), seed=1)[0]
    assert not np.array_equal(sample.image, other_sample.image)


def test_written_once_into_the_cache(cache):
    dataset = synthetic(None, "train", images=(1, 1))
    first = dataset.files[0].image
    assert cache in first.parents and "inplace-abn-segmentation" in str(first)
    before = first.stat().st_mtime_ns
    assert synthetic(None, "val", images=(1, 1)).files[0].image.parents[2] == first.parents[2]
    assert first.stat().st_mtime_ns == before


def write(root: str) -> int:
    return len(synthetic(root, "train", images=SMALL))


def test_two_processes_may_start_at_once(tmp_path):
    root = tmp_path / "streets"
    with ProcessPoolExecutor(2, mp_context=get_context("fork")) as pool:
        assert list(pool.map(write, [str(root)] * 2)) == [2, 2]
    write(str(tmp_path / "alone"))
    assert trees.contents(root) == trees.contents(tmp_path / "alone")
    assert {entry.name for entry in tmp_path.iterdir()} == {"streets", "alone"}  # no partial output remains


def test_classes_are_present_and_large_enough_to_learn():
    table_of = synthetic(None, "train", images=(1, 1)).table
    images_with = np.zeros(19, int)
    for index in range(24):
        label = table_of.train_ids(draw_street(np.random.default_rng([9, index]))[1])
        for train_id in np.unique(label[label != 255]):
            images_with[train_id] += 1
            regions = cv2.connectedComponentsWithStats((label == train_id).astype(np.uint8))[2][1:]
            assert regions[:, cv2.CC_STAT_AREA].max() >= 12 or train_id not in (5, 6, 7, 11, 13)
        assert (label == 255).mean() < 0.12  # void: bonnet, frame, bins
    names = {name for name, count in zip(table_of.names, images_with, strict=True) if count}
    assert names == PRESENT
    assert images_with[images_with > 0].min() >= 8


def test_what_it_does_not_write_is_refused_by_name(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (tmp_path / "boards" / "train" / "images").mkdir(parents=True)
    (mine / "thesis.txt").write_text("")
    synthetic(tmp_path / "streets", "train", images=(1, 1))
    other_settings = (
        f"{tmp_path}/streets holds .* written with .*'train': 1.*expected .*'train': 2.*Choose another folder"
    )
    for root, split, message in (
        (mine, "train", f"^{mine} exists.*Choose another folder, or give none"),
        (tmp_path / "boards", "train", "If it holds images of your own, choose the dataset folder."),
        (tmp_path / "streets", "train", f"^{other_settings}"),
        (None, "test", "split 'test'.*train, val"),
        (mine / "thesis.txt" / "below", "train", f"cannot be written to {mine}/thesis.txt/below .*Give another folder"),
    ):
        with pytest.raises(ValueError, match=message):
            synthetic(root, split, images=SMALL)
    assert [entry.name for entry in mine.iterdir()] == ["thesis.txt"]
    assert json.loads((tmp_path / "streets" / "synthetic-streets.json").read_text())["train"] == 1


def test_shapes_take_no_folder():
    with pytest.raises(ValueError, match="^shapes are synthetic, not read from DIR: give no folder$"):
        shapes("DIR", "val")
