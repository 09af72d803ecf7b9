"""What make_classes makes of labels that other programs wrote, and what it says about them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from datasets import folder
from scripts.make_classes import make_classes
from tests import trees
from tests.runs import checked

IDS = np.arange(24 * 40, dtype=np.uint8).reshape(24, 40) % 3  # 0, 1 and 2


def run(root: Path, *keys: str) -> Path:
    return make_classes(checked("make_classes", f"data.root={root}", "workers=0", *keys))


def equal_channels(ids: np.ndarray) -> np.ndarray:
    return np.repeat(ids[..., None], 3, axis=2)


IMAGE = equal_channels(80 * IDS)


def classes_of_two(tmp_path: Path, label: np.ndarray, *keys: str, image: np.ndarray = IMAGE) -> dict:
    """The classes of two images with this label."""
    for split in ("train", "val"):
        trees.write(tmp_path / "own" / split / "images" / "a.png", image)
        trees.write(tmp_path / "own" / split / "labels" / "a.png", label)
    return json.loads(run(tmp_path / "own", *keys).read_text())


def values(*numbers: int) -> np.ndarray:
    """A label with these values, each as often as the others."""
    return np.resize(np.array(numbers, np.uint8), (24, 40))


READINGS = [("ids", "colours"), ("colours", "ids")]
IDS_READ, COLOURS_READ = (f"equal channels: they are read as {a}, with gray={b} as {b}" for a, b in READINGS)
KINDS = {  # a label, the keys, the classes and the entries of the file, and what is printed about it
    "ids in RGB": (equal_channels(IDS), (), 3, 3, (IDS_READ,)),
    "ids in RGB as colours": (equal_channels(values(0, 9, 50)), ("gray=colours",), 3, 3, ()),
    "ids and 255 in RGB": (equal_channels(values(0, 1, 255)), (), 2, 2, (IDS_READ,)),
    "gray colours or ids": (equal_channels(values(1, 5, 9, 150)), (), 4, 4, (COLOURS_READ, "0-2 can hardly be told")),
    "large ids in RGB": (equal_channels(values(1, 5, 9, 150)), ("gray=ids",), 4, 151, ("0, 2-4, 6-8, 10-149",)),
    "black and white in RGB": (equal_channels(values(0, 255)), (), 2, 2, (COLOURS_READ,)),
    "an unseen id": (values(0, 1, 4), (), 3, 5, ("ids that occur nowhere, and are ignored: 2-3\n",)),
    "mostly 255": (values(0, 1, 255, 255, 255), (), 2, 2, ("60% of the pixels have the ignored id 255: if it is a",)),
    "levels up to 255": (values(0, 0, 127, 255), (), 2, 128, ("1-126", "25% of the pixels have the ignored id 255")),
    "255 that counts": (values(0, 128, 255), ("ignored=null",), 3, 256, ("and are ignored: 1-127,",)),
    "another void": (values(0, 1, 2), ("ignored=0",), 2, 3, ()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_classes_are_what_the_values_mean_and_what_is_odd_is_said(kind, tmp_path, capsys):
    label, keys, classes, entries, remarks = KINDS[kind]
    content = classes_of_two(tmp_path, label, *keys)
    printed = [f"{line}\n" for line in capsys.readouterr().out.splitlines() if ":" in line]
    assert len(printed) == len(remarks) and all(map(str.__contains__, printed, remarks)), printed
    assert len(content["classes"]) == entries
    assert (content["classes"][0]["name"] == "void") == ("ignored=0" in keys)  # a name that no training doubts
    train = folder(tmp_path / "own", "train")
    assert len(train.classes) == classes and {*np.unique(train[0].label)} - {255} == {*range(classes)}
    shown = np.array(train.palette, int)
    apart = np.abs(shown[:, None] - shown).max(axis=2) + 255 * np.eye(classes, dtype=int)
    assert apart.min() >= 8  # whatever the labels' colours are


def test_images_of_8_bits_that_are_nearly_black_are_doubted(tmp_path, capsys):
    """Somebody may have cast floats from 0 to 1 to bytes."""
    classes_of_two(tmp_path, IDS, image=equal_channels((IDS > 0).astype(np.uint8)))
    assert "8-bit images use 2 of the 256 levels" in " ".join(capsys.readouterr().out.split())


def test_a_reading_of_gray_is_refused_without_gray_and_so_is_a_single_class(tmp_path):
    with pytest.raises(ValueError, match="number of classes in the labels is 1; expected 2 to 253"):
        classes_of_two(tmp_path, np.dstack([0 * IDS, 0 * IDS, 0 * IDS + 9]))
    with pytest.raises(ValueError, match="gray=ids: no label is in RGB with three equal channels; leave it out"):
        classes_of_two(tmp_path, IDS, "gray=ids")


def test_only_labels_of_an_image_count(tmp_path, capsys):
    """A second folder of colour maps may lie beside the masks. Without a folder of images, all labels count."""
    trees.write(tmp_path / "own/train/labels/colour/a.png", np.dstack([IDS, 9 * IDS, 99 * IDS]))
    assert len(classes_of_two(tmp_path, IDS)["classes"]) == 3
    left_out = f"left out 1 labels without an image: {tmp_path}/own/train/labels/colour/a.png"
    assert left_out in capsys.readouterr().out.replace("\n", "")
    (tmp_path / "own/train/images").rename(tmp_path / "own/train/pictures")
    (tmp_path / "own/classes.json").unlink()
    with pytest.raises(ValueError, match="some labels hold colours, others ids"):
        run(tmp_path / "own")


def test_images_without_a_label_or_of_another_size_are_named(tmp_path, capsys):
    classes_of_two(tmp_path, IDS)
    root = tmp_path / "own"
    for name in ("train/images/b.png", "train/images/c.png", "more/images/d.png", "test/images/e.png"):
        trees.write(root / name, np.zeros((24, 40, 3), np.uint8))
    trees.write(root / "train/labels/c.png", IDS[:, :20].copy())
    capsys.readouterr()
    with pytest.raises(ValueError, match="classes.json is there already; overwrite=true replaces it"):
        classes_of_two(tmp_path, IDS)
    assert len(classes_of_two(tmp_path, IDS, "ignored=0", "overwrite=true")["classes"]) == 3
    printed = capsys.readouterr().out.splitlines()
    without = f"{root}/more/images/d.png, {root}/train/images/b.png"  # a test needs no labels
    assert f"2 images have no label, so no training takes them: {without}" in printed
    assert f"1 labels are of another size than their image: {root}/train/labels/c.png (20x24, 40x24)" in printed


def test_one_of_several_splits_is_not_taken_for_the_dataset(tmp_path):
    classes_of_two(tmp_path, IDS)
    root = tmp_path / "own"
    with pytest.raises(ValueError, match=f"train looks like one of the splits train, val of {root}: give {root}"):
        run(root / "train")
    (root / "train" / "train.txt").write_text("a\n")  # a dataset of its own
    assert run(root / "train") == root / "train" / "classes.json"


def sixty(root: Path, count: int = 60) -> Path:
    """Images of four per place; every twelfth shows a third class."""
    for number in range(count):
        label = np.where(number % 12 == 0, IDS, IDS % 2)
        for kind in ("images", "labels"):
            trees.write(root / kind / f"place{number // 4:02d}" / f"{number}.png", label.astype(np.uint8))
    return root


def lists(root: Path) -> dict[str, list[str]]:
    return {str(path.relative_to(root)): path.read_text().splitlines() for path in sorted(root.rglob("*.txt"))}


def divided(root: Path, *keys: str) -> dict[str, list[str]]:
    """The lists that a command adds; classes.json stays as it is."""
    before, classes = lists(root), (root / "classes.json").read_text() if (root / "classes.json").exists() else None
    run(root, *keys)
    assert classes in (None, (root / "classes.json").read_text())
    return {name: lines for name, lines in lists(root).items() if name not in before}


def test_images_are_divided_into_lists_that_trainings_read(tmp_path, capsys):
    root = sixty(tmp_path)
    trees.write(root / "images" / "without.png", IDS)
    splits = divided(root, "split=[0.7,0.15,0.15]")
    assert {name: len(lines) for name, lines in splits.items()} == {"train.txt": 42, "val.txt": 9, "test.txt": 9}
    assert sorted(sum(splits.values(), [])) == sorted(f"place{n // 4:02d}/{n}" for n in range(60))
    assert [len(folder(root, split)) for split in ("train", "val", "test")] == [42, 9, 9]
    printed = capsys.readouterr().out
    rows = [[word for word in line.split() if word.isdigit()] for line in printed.splitlines() if "class_2" in line]
    assert rows == [["3", "1", "1"]] and "'group=" in printed
    classes = (root / "classes.json").read_text().replace("class_2", "hole")
    (root / "classes.json").write_text(classes)  # somebody has named the classes
    folds = divided(root, "folds=5")
    assert "hole" in capsys.readouterr().out
    rest = {*splits["train.txt"], *splits["val.txt"]}  # test.txt is withheld from all folds
    vals = [folds[f"fold{number}/val.txt"] for number in range(5)]
    assert sorted(map(len, vals)) == [10, 10, 10, 10, 11] and {*sum(vals, [])} == rest
    for number, val in enumerate(vals):
        assert {*folds[f"fold{number}/train.txt"]} == rest - {*val}
        assert len(folder(root, "val", fold=number)) == len(val)


def test_the_seed_and_the_sources_decide_the_lists(tmp_path):
    divisions = []
    by_place = r"group=^(.*?)\d+\D*$"
    for number, keys in enumerate((("folds=3",), ("folds=3",), ("folds=3", "seed=1"), ("folds=6", by_place))):
        divisions.append(divided(sixty(tmp_path / str(number), 24), *keys))
    assert divisions[0] == divisions[1] != divisions[2]
    places = [{line.partition("/")[0] for line in divisions[3][f"fold{number}/val.txt"]} for number in range(6)]
    assert [len(sources) for sources in places] == [1] * 6 and len(set.union(*places)) == 6  # as many lists as sources


def one_is_there(root: Path) -> None:
    (root / "fold1").mkdir()
    (root / "fold1" / "val.txt").symlink_to("nowhere")


def has_new_images(root: Path) -> None:
    divided(root, "split=[0.5,0.5]")
    annotated(root, "later/0")


def of_other_hands(root: Path) -> None:
    has_new_images(root)
    (root / "split.json").write_text("[]")


def has_lost_a_list(root: Path) -> None:
    has_new_images(root)
    (root / "val.txt").unlink()


def has_a_name_of_two_lines(root: Path) -> None:
    for kind in ("images", "labels"):
        trees.write(root / kind / "place00" / "a\nb.png", IDS)


@pytest.mark.parametrize(
    "begun, keys, problem",
    [
        (None, "folds=13", "there are 12 images with labels in .*/images: expected at least 13, one for each list"),
        (None, "folds=4 group=^(place..)", r"there are 3 sources by group=.*: expected at least 4"),
        (None, "folds=2 group=place02/(.*)", "finds no source in 8 of 12 names: place00/0, place00/1"),
        (one_is_there, "folds=2", "own/fold1/val.txt is there already, and no list is replaced"),
        (has_new_images, "split=[0.8,0.2] add=true", r"lists were written with split=\[0.5, 0.5\]: give the same"),
        (has_new_images, "split=[0.5,0.5] group=^(.*)/ add=true", "written with group=null: give the same"),
        (has_new_images, "folds=2 add=true", "folds.json, which says how the lists were made, cannot be read"),
        (
            has_lost_a_list,
            "split=[0.5,0.5] add=true",
            "val.txt is missing: add=true adds images to lists that are there",
        ),
        (has_a_name_of_two_lines, "folds=2", "no list can hold the names of 1 images: rename place00/"),
        (of_other_hands, "split=[0.5,0.5] add=true", "add=true: .*/split.json, which says how .*, cannot be read"),
    ],
)
def test_lists_that_cannot_be_made_or_added_to_leave_everything_as_it_is(begun, keys, problem, tmp_path):
    root = sixty(tmp_path / "own", 12)
    if begun is not None:
        begun(root)
    before = trees.contents(root)
    with pytest.raises(ValueError, match=problem):
        run(root, *keys.split())
    assert trees.contents(root) == before


def annotated(root: Path, *names: str) -> None:
    for name in names:
        trees.write(root / "images" / f"{name}.png", np.zeros((24, 40), np.uint8))
        trees.write(root / "labels" / f"{name}.png", IDS)


def unlisted(root: Path, **options) -> list[str]:
    remarks = folder(root, "train", **options).remarks
    return [remark.partition(" images")[0] for remark in remarks if "are on no list, so nothing uses them" in remark]


def test_without_lists_no_image_is_said_to_be_on_none(tmp_path, capsys):
    annotated(tmp_path, "a", "b")
    trees.write(tmp_path / "images" / "without.png", np.zeros((24, 40), np.uint8))
    run(tmp_path)
    output = capsys.readouterr().out.replace("\n", " ")
    assert "1 images have no label" in output and "on no list" not in output


def test_images_labelled_since_are_added_to_lists(tmp_path, capsys):
    """In the lists' proportions, but never to a test. What is there stays in place, as somebody may have sorted it."""
    root, keys = sixty(tmp_path), ("split=[0.6,0.2,0.2]", "add=true")
    divided(root, keys[0])
    (root / "val.txt").write_text("\n".join(before := lists(root)["val.txt"][::-1]))  # no end of the last line
    assert unlisted(root) == []
    later = [f"later/{number:02d}" for number in range(20)]
    annotated(root, *later)
    trees.write(root / "images" / "without.png", np.zeros((24, 40), np.uint8))
    assert unlisted(root) == ["20"] == unlisted(root)
    run(root, "overwrite=true")
    assert "20 images with labels are on no list" in capsys.readouterr().out.replace("\n", " ")
    old = lists(root)
    run(root, *keys)
    new = lists(root)
    assert new["test.txt"] == old["test.txt"] and new["val.txt"][:12] == before == old["val.txt"]
    assert new["train.txt"][:36] == old["train.txt"] and sorted(new["train.txt"][36:] + new["val.txt"][12:]) == later
    assert [len(new[f"{name}.txt"]) for name in ("train", "val")] == [51, 17] and unlisted(root) == []
    contents = trees.contents(root)
    run(root, *keys)
    assert trees.contents(root) == contents


def test_added_images_join_their_source_and_none_joins_a_test(tmp_path, capsys):
    root, keys = sixty(tmp_path), ("split=[0.6,0.2,0.2]", r"group=^(.*)/")
    places = {name: {line[:7] for line in lines} for name, lines in divided(root, *keys).items()}
    annotated(root, *(f"place{number:02d}/more" for number in range(20)))  # five places are new
    run(root, *keys, "add=true")
    new = lists(root)
    for name, of_list in places.items():
        assert all((f"{place}/more" in new[name]) == (name != "test.txt") for place in of_list)
    assert len(new["train.txt"]) + len(new["val.txt"]) == 48 + 12 + 5 and len(new["test.txt"]) == 12
    assert "3 images are still on no list, such as place" in capsys.readouterr().out.replace("\n", " ")


def test_images_are_added_to_folds(tmp_path):
    root = sixty(tmp_path, 24)
    before = divided(root, "folds=3")
    annotated(root, "later/0", "later/1", "later/2")
    assert unlisted(root, fold=1) == ["3"]
    run(root, "folds=3", "add=true")
    assert unlisted(root, fold=1) == []
    vals = [lists(root)[f"fold{number}/val.txt"] for number in range(3)]
    assert [len(val) for val in vals] == [9, 9, 9] and len({*sum(vals, [])}) == 27
    for name, lines in lists(root).items():
        assert lines[: len(before[name])] == before[name]
        expected = sum((val for number, val in enumerate(vals) if name != f"fold{number}/train.txt"), [])
        assert "val" in name or sorted(lines) == sorted(expected)


def test_lists_of_other_hands_are_added_to_if_their_making_is_written_down(tmp_path):
    root = sixty(tmp_path, 12)
    for name, numbers in (("train", range(8)), ("val", range(8, 12))):
        (root / f"{name}.txt").write_text("".join(f"place{n // 4:02d}/{n}.png\n" for n in numbers))
    annotated(root, "place02/more")
    keys = ("split=[0.7,0.3]", "group=^(.*)/", "add=true")
    with pytest.raises(ValueError, match="if they are as this command makes them, write ({.*}) there") as error:
        run(root, *keys)
    (root / "split.json").write_text(re.search("{.*}", str(error.value))[0])
    run(root, *keys)
    assert lists(root)["val.txt"][4:] == ["place02/more"]
    (root / "val.txt").write_text((root / "val.txt").read_text() + "place00/3\n")
    annotated(root, "place02/further")
    with pytest.raises(ValueError, match="is in train, and place00/3, of the same source, in val: correct the lists"):
        run(root, *keys)


def test_lists_are_for_images_in_one_folder(tmp_path):
    classes_of_two(tmp_path, IDS)
    with pytest.raises(ValueError, match="own/train is a split already: lists are for images in .*own/images alone"):
        run(tmp_path / "own", "split=[0.5,0.5]")
    with pytest.raises(ValueError, match="there are 0 images with labels in .*own/images: expected at least 2"):
        run(tmp_path / "own", "folds=2")


@pytest.mark.parametrize(
    "keys, problem",
    [
        ("split=[0.7,0.2]", "expected two or three shares that add up to 1"),
        ("split=[0.5,0.5] folds=2", r"split=\[0.5, 0.5\] and folds=2: give one of them"),
        ("group=(a)", r"group=\(a\) needs split or folds"),
        ("add=true", "add=true needs the split or folds, and the group, that wrote the lists"),
        ("folds=2 group=a(", "expected a regular expression with a group"),
    ],
)
def test_keys_of_lists_that_do_not_fit_are_refused(keys, problem):
    with pytest.raises(ValueError, match=problem):
        checked("make_classes", "data.root=DIR", *keys.split())
