import shutil

import cv2
import numpy as np
import pytest

from datasets import coco_stuff
from datasets.coco_stuff import coco_stuff_classes
from tests import trees


def test_classes_equal_the_official_list_and_have_distinct_colours():
    """Ids and names at both ends and around every place where a slip would shift them."""
    table = coco_stuff_classes()
    by_id = dict(zip(table.official_ids, table.names, strict=True))
    assert sorted(by_id) == list(range(92, 183))
    official = {
        **{92: "banner", 93: "blanket", 96: "building-other", 103: "ceiling-tile", 106: "clouds", 112: "door-stuff"},
        **{118: "floor-wood", 124: "grass", 130: "light", 133: "mirror-stuff", 145: "playingfield", 149: "road"},
        **{157: "sky-other", 164: "structural-other", 169: "tree", 173: "wall-other", 178: "water-other"},
        **{179: "waterdrops", 180: "window-blind", 181: "window-other", 182: "wood"},
    }
    assert official.items() <= by_id.items()
    assert list(by_id.values()) == sorted(set(table.names))  # the official order is alphabetical
    palette = np.array(table.palette, int)
    assert palette.shape == (91, 3) and palette.min() >= 0 and palette.max() == 255
    distance = np.abs(palette[:, None] - palette[None]).max(axis=2) + 255 * np.eye(91, dtype=int)
    assert distance.min() > 8 and palette.max(axis=1).min() > 100  # also from black, the colour of ignored pixels
    assert np.array_equal(palette, coco_stuff_classes(stuffthingmaps=True).palette)


def test_both_label_archives_give_the_same_labels(tmp_path):
    """The off-by-one: stuffthingmaps hold the id minus one, and their things are the challenge's `other`."""
    challenge = trees.coco_stuff(tmp_path / "challenge", stuffthingmaps=False)
    everything = trees.coco_stuff(tmp_path / "stuffthingmaps", pixel_maps=False)
    for split, count in (("train", 3), ("val", 2)):
        from_pixel_maps, from_thing_maps = (coco_stuff(root, split) for root in (challenge, everything))
        assert len(from_pixel_maps) == len(from_thing_maps) == count
        for a, b, entry in zip(from_pixel_maps, from_thing_maps, from_pixel_maps.files, strict=True):
            assert a.name == b.name and np.array_equal(a.label, b.label)
            stored = tmp_path / "stuffthingmaps/stuffthingmaps" / f"{split}2017" / entry.label.name
            ids = cv2.imread(str(stored), -1).astype(int) + 1
            expected = np.where((ids >= 92) & (ids <= 182), ids - 92, 255)
            assert np.array_equal(a.label, expected)


def test_labels_of_one_archive_in_the_place_of_the_other_are_refused(coco_root):
    """The other table would shift every class by one."""
    pixel_maps = coco_root / "annotations" / "stuff_val2017_pixelmaps"
    stuffthingmaps = coco_root / "stuffthingmaps" / "val2017"
    pixel_maps.rename(coco_root / "aside")
    shutil.move(stuffthingmaps, pixel_maps)
    with pytest.raises(ValueError, match="ids 16, 90, 91, 255, which are not.*expected only 0, 92-183"):
        coco_stuff(coco_root, "val")[0]
    shutil.rmtree(pixel_maps)
    (coco_root / "aside").rename(stuffthingmaps)
    with pytest.raises(ValueError, match="ids 182, 183, which are not.*expected only 0-181, 255"):
        coco_stuff(coco_root, "val")[0]


def test_lists_are_the_challenge_or_everything(coco_root):
    def names(split, **options):
        return [int(sample.name) for sample in coco_stuff(coco_root, split, **options)]

    assert names("train") == names("train", lists="challenge") == [9, 30, 34]
    assert names("train", lists="full") == [9, 25, 30, 34]
    whole = coco_stuff(coco_root, "train", lists="full")
    assert [sample.label.shape for sample in whole] == list(trees.COCO_SIZES)
    assert names("val") == names("val", lists="full") == [139, 285]
    with pytest.raises(ValueError, match="^lists=all: expected one of challenge, full"):
        names("train", lists="all")
    (file,) = coco_root.rglob("train-ids.txt")
    file.write_text(f"{file.read_text()}\n34\n")  # lines count as often as they stand
    assert names("train") == [9, 30, 34, 34]


def test_a_list_that_does_not_fit_is_an_error(coco_root):
    file = coco_root / "annotations" / "deprecated-challenge2017" / "train-ids.txt"
    for content, message in (
        (b"9\n77\n78\n", "2 of its 3 images, such as 000000000077, are missing"),
        (b"9\nabc\n", "contains 'abc'; expected one image id"),
        (b"", "the list is empty; expected one image id"),
        ("9\n30\n".encode("utf-16"), "cannot be read .*; expected text in UTF-8"),
    ):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=f"train-ids.txt: {message}"):
            coco_stuff(coco_root, "train")
    file.write_text("9\n30\n", encoding="utf-8-sig")
    assert len(coco_stuff(coco_root, "train")) == 2
    file.unlink()
    needed = r"(?s) lists=challenge needs [^\n]*train-ids.txt, which is missing.*Fix: give lists=full"
    with pytest.raises(ValueError, match=needed):
        coco_stuff(coco_root, "train")
    assert len(coco_stuff(coco_root, "train", lists="full")) == 4


@pytest.mark.parametrize("parent", ["stuffthingmaps_trainval2017", "annotations", "images", "."])
def test_stuffthingmaps_are_found_where_people_unpack_them(tmp_path, parent):
    """They may share the folders of the images."""
    root = trees.coco_stuff(tmp_path / "coco", pixel_maps=False)
    expected = [sample.label for sample in coco_stuff(root, "val")]
    (root / "stuffthingmaps").rename(tmp_path / "aside")
    if parent != ".":
        for split in ("train2017", "val2017", "test2017"):
            shutil.move(root / split, root / "images" / split)
    shutil.copytree(tmp_path / "aside", root / parent, dirs_exist_ok=True)
    labels = [sample.label for sample in coco_stuff(root, "val")]
    assert len(labels) == 2 and all(map(np.array_equal, labels, expected))
