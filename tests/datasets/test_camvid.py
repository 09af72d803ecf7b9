import shutil

import cv2
import numpy as np
import pytest

from datasets import camvid


def test_both_layouts_hold_the_same_labels(camvid_folders, camvid_annot):
    for split, count in (("train", 6), ("val", 2), ("test", 2)):
        ours, common = camvid(camvid_folders, split), camvid(camvid_annot, split)
        assert len(ours) == len(common) == count
        for a, b in zip(ours, common, strict=True):
            assert a.name == b.name
            assert np.array_equal(a.label, b.label)
            assert a.image.shape == b.image.shape == (24, 40, 3)


def test_classes_and_ignored_value(camvid_folders):
    dataset = camvid(camvid_folders, "train")
    assert dataset.classes == (
        *("sky", "building", "pole", "road", "pavement", "tree"),
        *("sign", "fence", "car", "pedestrian", "bicyclist"),
    )
    raw = cv2.imread(str(dataset.files[0].label), cv2.IMREAD_UNCHANGED)
    assert 11 in raw
    assert np.array_equal(dataset[0].label, np.where(raw == 11, 255, raw))
    assert np.array_equal(dataset.encode_prediction(dataset[0].label), raw)


def test_channels_are_rgb(camvid_annot):
    dataset = camvid(camvid_annot, "val")
    assert np.array_equal(dataset[0].image[..., ::-1], cv2.imread(str(dataset.files[0].image)))


@pytest.mark.parametrize("root", [None, "", "/nowhere/camvid"])
def test_missing_root_names_the_folder_the_layout_and_the_fix(root):
    with pytest.raises(ValueError) as error:
        camvid(root, "train")
    problem = f"{root} is not an existing folder." if root else "no folder is given; camvid needs the folder that holds"
    message = str(error.value)
    assert message.startswith(problem)
    assert "DIR/train/images/*.jpg" in message and "DIR/trainannot/*.png" in message
    assert "\nFix: download CamVid" in message
    assert message.endswith(" and give the folder at the top of this layout.")


def test_unknown_split_names_the_known_ones(camvid_folders):
    with pytest.raises(ValueError, match="split 'validation'.*train, val, test"):
        camvid(camvid_folders, "validation")


def test_missing_split_folder_says_what_is_there(camvid_folders):
    shutil.rmtree(camvid_folders / "val")
    with pytest.raises(ValueError) as error:
        camvid(camvid_folders, "val")
    assert str(camvid_folders / "val") in str(error.value)
    assert "test/, train/" in str(error.value)


def test_missing_label_folder(camvid_annot):
    shutil.rmtree(camvid_annot / "valannot")
    with pytest.raises(ValueError, match="valannot is missing"):
        camvid(camvid_annot, "val")


def test_no_images_says_where_it_looked(camvid_folders):
    for path in (camvid_folders / "val" / "images").iterdir():
        path.unlink()
    with pytest.raises(ValueError) as error:
        camvid(camvid_folders, "val")
    assert "no images in split 'val'" in str(error.value)
    assert str(camvid_folders / "val" / "images" / "*.png") in str(error.value)


def test_image_without_label_is_named_and_counted(camvid_folders):
    for index in (1, 4):
        (camvid_folders / "train" / "labels" / f"0001TP_{index:06d}.png").unlink()
    with pytest.raises(ValueError) as error:
        camvid(camvid_folders, "train")
    message = str(error.value)
    assert "2 of 6 images have no label: 0001TP_000001, 0001TP_000004" in message
    assert str(camvid_folders / "train" / "labels") in message
