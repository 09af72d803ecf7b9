import cv2
import numpy as np

from datasets import camvid
from tests import trees


def test_both_layouts_hold_the_same_labels(camvid_folders, tmp_path):
    annot = trees.camvid_annot(tmp_path / "annot")
    for split, count in (("train", 6), ("val", 2), ("test", 2)):
        ours, common = camvid(camvid_folders, split), camvid(annot, split)
        assert len(ours) == len(common) == count
        for a, b, entry in zip(ours, common, common.files, strict=True):
            assert a.name == b.name and np.array_equal(a.label, b.label) and a.image.shape == (24, 40, 3)
            assert np.array_equal(b.image[..., ::-1], cv2.imread(str(entry.image)))  # RGB


def test_classes_and_ignored_value(camvid_folders):
    dataset = camvid(camvid_folders, "train")
    assert dataset.classes == (
        *("sky", "building", "pole", "road", "pavement", "tree"),
        *("sign", "fence", "car", "pedestrian", "bicyclist"),
    )
    raw = cv2.imread(str(dataset.files[0].label), cv2.IMREAD_UNCHANGED)
    assert 11 in raw
    assert np.array_equal(dataset[0].label, np.where(raw == 11, 255, raw))
    assert np.array_equal(dataset.table.official(dataset[0].label), raw)
    ids = np.array([[0, 8, 255]], np.uint8)  # ignored pixels are black
    assert dataset.table.colour(ids).tolist() == [[[128, 128, 128], [64, 0, 128], [0, 0, 0]]]
