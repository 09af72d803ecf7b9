"""Own images: the files of a split, the labels that are allowed, and the messages about others."""

import json
import re
import shutil
import subprocess
import sys
import unicodedata
from functools import partial
from io import BytesIO
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from datasets import (
    ClassTable,
    SegmentationDataset,
    folder,
    image_folder,
    index_classes,
    inspect,
    shared_images,
    verify,
)
from datasets.class_list import distinct_palette, folder_classes, lookalikes
from datasets.class_table import UnknownIds
from datasets.file_list import class_folders
from datasets.folder import folder_labels, folder_splits
from datasets.label_names import LabelNames
from datasets.reading import decode_image
from datasets.segmentation import join_splits
from datasets.splitting import sources_of
from scripts.make_classes import make_classes
from tests import trees
from tests.runs import checked


@pytest.fixture
def root(tmp_path) -> Path:
    return trees.folder(tmp_path / "boards")


def flat(root: Path) -> Path:
    """Images and labels of all splits in one folder each, below `root`."""
    for folder_of_kind in root.glob("*/*"):
        split, kind = folder_of_kind.relative_to(root).parts
        (root / kind).mkdir(exist_ok=True)
        folder_of_kind.rename(root / kind / split)
        if not [*(root / split).iterdir()]:
            (root / split).rmdir()
    return root


def names(dataset) -> list[str]:
    return [entry.name for entry in dataset.files]


def test_images_are_paired_with_labels_by_their_paths(root):
    train = folder(root, "train")
    assert names(train) == ["a/board.0", "a/board.2", "a/board.4", "b/board.1", "b/board.3", "b/board.5"]
    for entry in train.files:
        assert entry.image.relative_to(root / "train/images").with_suffix("").as_posix() == entry.name
        assert entry.label == root / "train/labels" / f"{entry.name}.png"
    assert folder_splits(root) == ["train", "val", "test"]
    table = train.table  # "scale" is class 3, which is ignored
    assert (table.names, table.official_ids, table.palette[0]) == (("wood", "bark", "rot"), (0, 1, 2), (120, 80, 40))
    assert len({*table.palette}) == 3 and table.label_ids == {0: 0, 1: 1, 2: 2, 3: 255, 255: 255}
    assert np.array_equal(train.table.colour(train[0].label)[train[0].label == 0][0], (120, 80, 40))


def test_an_ignored_class_between_trained_ones_numbers_the_labels_differently(root):
    before = folder(root, "train")
    *trained, ignored = trees.FOLDER["classes"]
    moved = {"classes": [trained[0], ignored, *trained[1:]], "ignored": [255, 1]}
    (root / "classes.json").write_text(json.dumps(moved))
    after = folder(root, "train")
    assert after.classes == before.classes and after.names_and_sizes() == before.names_and_sizes()
    assert after.numbering != before.numbering == folder(trees.folder(root.parent / "copy"), "train").numbering


LAYOUTS = {  # the labels' folder, and what their names add to their images'
    "train/masks": ("masks", ""),
    "img_mask.png": ("labels", "_mask"),
    "train/masks/img_label.png": ("masks", "_label"),
    "train/images/img_mask.png": ("images", "_mask"),
}


@pytest.mark.parametrize("kind", ["folders", "lists"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_labels_lie_where_two_options_say_and_the_error_names_them(root, layout, kind):
    label_folder, suffix = LAYOUTS[layout]
    before = folder(root, "train")
    labels = [sample.label for sample in before]
    if kind == "lists":
        (root / "train.txt").write_text("".join(f"train/{name}\n" for name in names(before)))
        flat(root)
    for file in [*root.rglob("labels/**/*.png")]:
        where = "/".join(label_folder if part == "labels" else part for part in file.relative_to(root).parts)
        (root / where).parent.mkdir(parents=True, exist_ok=True)
        file.rename((root / where).with_name(f"{file.stem}{suffix}.png"))
    for place in root.rglob("labels"):
        if label_folder != "labels":
            shutil.rmtree(place)
    above = root / "train" if kind == "folders" else root
    options = [f"data.label_folder={label_folder}"] * (label_folder != "labels")
    options += [f"data.label_suffix={suffix}"] * bool(suffix)
    with pytest.raises(ValueError, match=f"{above / label_folder} holds labels such as .*: give {' '.join(options)}"):
        folder(root, "train", keys="data.")
    dataset = folder(root, "train", label_folder=label_folder, label_suffix=suffix)
    assert [entry.name.removeprefix("train/") for entry in dataset.files] == names(before)
    assert all(entry.label.stem == f"{entry.image.stem}{suffix}" for entry in dataset.files)
    assert all(np.array_equal(sample.label, label) for sample, label in zip(dataset, labels, strict=True))
    (root / "classes.json").unlink()
    assert len(list_classes(root, *options)["classes"]) == 4


def test_options_of_labels_that_lead_elsewhere_are_refused(root):
    for name in ("..", "/tmp", "a/b", ""):
        with pytest.raises(ValueError, match=f"label_folder={name}: expected the name of a folder, such as masks"):
            folder(root, "train", label_folder=name)
    with pytest.raises(ValueError, match="data.label_folder=images needs data.label_suffix"):
        folder(root, "train", label_folder="images", keys="data.")


@pytest.mark.parametrize(
    "suffix, write",
    [
        (".png", lambda path, ids: trees.write(path, ids.astype(np.uint16))),
        (".tif", lambda path, ids: Image.fromarray(ids).save(path)),
        (".tiff", lambda path, ids: Image.fromarray(ids.astype(np.uint16)).save(path, compression="tiff_lzw")),
        (".tif", lambda path, ids: trees.write_palette(path, ids, [(7, 9, 8)] * 256)),
    ],
    ids=["16-bit PNG", "TIFF", "16-bit TIFF", "TIFF with a palette"],
)
def test_labels_of_16_bits_and_tiffs_hold_the_same_ids(root, suffix, write):
    before = folder(root, "train")
    expected = [before[index].label for index in range(2)]
    for entry in before.files:
        ids = cv2.imread(str(entry.label), cv2.IMREAD_UNCHANGED)
        entry.label.unlink()
        write(entry.label.with_suffix(suffix), ids)
    after, window = folder(root, "train"), (slice(3, 11), slice(5, 30))
    for index, label in enumerate(expected):
        assert np.array_equal(after[index].label, label)
        assert np.array_equal(after.undecoded(index)[1][window], label[window])
    verify(after, workers=0)
    assert len(list_classes(root)["classes"]) == 4


def test_splits_may_be_lists(root):
    flat(root)
    (root / "train.txt").write_text("\n train/b/board.1\r\ntrain/a/board.0.jpg \n\ntest/a/board.0\n")
    with pytest.raises(ValueError, match="1 of 3 images have no label: test/a/board.0"):
        folder(root, "train")
    (root / "train.txt").write_text("./train/b/board.1\ntrain/a/board.0.jpg\n")  # as find prints them
    (root / "test.txt").write_text("test/a/board.0")
    (root / "both.txt").write_text("train/a/board.0\n")
    assert names(folder(root, "train")) == ["train/a/board.0", "train/b/board.1"]
    assert shared_images(folder(root, "train"), folder(root, "both")) == 1
    (root / "both.txt").write_text("train/b/board.1\ntrain/a/board.0\n./train/b/board.1\ntrain/b/board.1.PNG\n")
    repeated = folder(root, "both")  # lines count as often as they stand
    assert names(repeated) == ["train/a/board.0", *3 * ["train/b/board.1"]]
    assert shared_images(folder(root, "train"), repeated) == 4
    assert index_classes(repeated, root / "index", workers=0).images_with(0).tolist() == [0, 1, 2, 3]
    (root / "both.txt").unlink()
    assert not folder(root, "test").has_labels and folder_splits(root) == ["train", "test"]
    with pytest.raises(ValueError, match=f"neither the folder {root}/val/images nor the list {root}/val.txt exists"):
        folder(root, "val")
    (root / "val.txt").write_text("train/a/board.0\ntrain/a/board.7\n")
    with pytest.raises(ValueError, match=f"{root}/val.txt: 1 of its 2 images, such as train/a/board.7, are missing"):
        folder(root, "val")


def test_a_fold_has_lists_of_its_own_and_the_test_of_all(root):
    shutil.copytree(root / "train", alone := root.parent / "alone")
    with pytest.raises(ValueError, match=f"Fix: let python -m scripts.make_classes data.root={alone} split=.* folds=5"):
        folder(alone, "train")
    flat(root)
    for name, lines in (("test", "test/a/board.0"), ("fold0/train", "train/a/board.0"), ("fold0/val", "val/a/board.0")):
        (root / f"{name}.txt").parent.mkdir(exist_ok=True)
        (root / f"{name}.txt").write_text(lines)
    train, val, test = (folder(root, split, fold=0) for split in folder_splits(root, 0))
    assert names(train) == ["train/a/board.0"] and names(val) == ["val/a/board.0"] and names(test) == ["test/a/board.0"]
    assert folder_splits(root) == ["fold0/train", "fold0/val", "test"] and train.split == "fold0/train"
    assert names(folder(root, "fold0/val", fold=1)) == names(val)  # of another fold than the training's
    for fold in (None, 1):
        with pytest.raises(
            ValueError, match=r"Fix: give data.fold=0, or another .* \(eval.py: data.split=fold0/val\); or give"
        ):
            folder(root, "train", fold=fold, keys="data.")


def test_a_split_given_as_the_folder_names_the_folder_above(root):
    with pytest.raises(ValueError, match=f"Fix: give data.root={root}, the folder above"):
        folder(root / "train", "train", keys="data.")


def test_splits_that_are_joined_hold_all_images_of_each(root):
    parts = [folder(root, split) for split in ("train", "val")]
    both_splits = join_splits(parts)
    assert both_splits.split == "train+val" and names(both_splits) == names(parts[0]) + names(parts[1])
    assert np.array_equal(both_splits[7].label, parts[1][1].label)
    counts = [index_classes(part, root / "index", workers=0).counts for part in (*parts, both_splits)]
    assert np.array_equal(np.concatenate(counts[:2]), counts[2])
    above = root.parent  # of two datasets
    second_root = trees.folder(above / "other")
    shutil.copy(second_root / "classes.json", above)
    splits = "boards/test boards/train boards/val other/test other/train other/val"
    assert folder_splits(above) == splits.split()
    assert not folder(above, "boards/test").has_labels
    far = join_splits([folder(above, "boards/train"), folder(above, "other/val")])
    assert names(far) == names(both_splits) and far.split == "boards/train+other/val"
    second_root = folder(second_root, "val")
    second_root.table = ClassTable(("wood",), ((0, 0, 0),), (0,), {0: 0})
    with pytest.raises(ValueError, match="splits train and val of folder number the classes differently"):
        join_splits([parts[0], second_root])


WRONG_CLASSES = {
    "{": "JSONDecodeError",
    '{"classes": ["a", "b"]}': 'every class needs an object, such as {"name": "wood"}',
    '{"classes": [{"name": "a"}, {"name": "b"}], "ignored": [1]}': "classes that are not ignored is 1, expected 2",
    '{"classes": [{"name": "a"}], "ignored": [256]}': '"ignored" has 256, expected ids from 0 to 255',
    '{"classes": [{"name": "a", "colour": [1, 2, 300]}, {"name": "b"}]}': "the colour .1, 2, 300. has the level 300,",
    '{"classes": [{"name": "a"}, {"name": "b"}, {"name": "c"}], "ignored": 255}': '"ignored" is 255, expected a list',
    '{"classes": [{"name": "a", "color": [0, 0, 0]}]}': "the key 'color' is unknown",
    '{"classes": [{"name": "a", "colour": [0, 0]}]}': "not enough values",
    '{"classes": [{"colour": [0, 0, 0]}]}': "KeyError: 'name'",
    '{"classes": [{"name": "a"}, {"name": "b\\ud800"}]}': r"class 1 is called 'b.ud800'; expected one line of text in",
    '{"classes": [{"name": "a"}, {"name": "a"}]}': "two names are a, expected different ones",
    '{"classes": [{"name": "a", "colour": [0, 0, 7]}, {"name": "b", "colour": [0, 0, 7]}]}': "two colours are",
}


@pytest.mark.parametrize("text", WRONG_CLASSES, ids=range(len(WRONG_CLASSES)))
def test_a_wrong_list_of_classes_is_named_with_an_example(text, tmp_path):
    file = tmp_path / "classes.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f'^{file}: .*{WRONG_CLASSES[text]}.*; expected {{"classes": .{{'):
        folder_classes(file)


def test_labels_in_colours_or_with_a_palette_hold_the_same_ids(root):
    """A window holds the same ids. A class without a colour in classes.json has no colour in labels."""
    train = folder(root, "train")
    expected = [train[index].label for index in range(6)]
    classes = [{"name": name, "colour": [9, number, 200]} for number, name in enumerate("abcd")]
    (root / "classes.json").write_text(json.dumps({"classes": classes, "ignored": [3]}))
    colours = np.array([entry["colour"] for entry in classes], np.uint8)
    for number, entry in enumerate(train.files):
        raw = np.minimum(cv2.imread(str(entry.label), cv2.IMREAD_UNCHANGED), 3)
        if number < 4:
            trees.write(entry.label, np.ascontiguousarray(colours[raw][..., ::-1]))
        else:
            trees.write_palette(entry.label, raw, [(255 - i, i, 7) for i in range(4)])
    coloured = folder(root, "train")
    for index, label in enumerate(expected):
        assert np.array_equal(coloured[index].label, label)
        window = slice(3, 11), slice(5, 30)
        assert np.array_equal(coloured.undecoded(index)[1][window], label[window])
    before = coloured.fingerprint([0])
    classes[0]["colour"], classes[1]["colour"] = classes[1]["colour"], classes[0]["colour"]
    (root / "classes.json").write_text(json.dumps({"classes": classes, "ignored": [3]}))
    assert folder(root, "train").fingerprint([0]) != before  # of which the class index depends
    (root / "classes.json").write_text(json.dumps({"classes": [*classes[:2], {"name": "c"}], "ignored": [3]}))
    message = r"labels/a/board.0.png: contains 2 colours that no class has, such as \(9, 2, 200\), \(9, 3, 200\)"
    with pytest.raises(ValueError, match=message):
        folder(root, "train").read_label(0)


def encoded(pixels: np.ndarray, mode: str, kind: str, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).convert(mode).save(file := BytesIO(), kind, exif=exif)
    return file.getvalue()


def png(pixels: np.ndarray) -> bytes:
    return cv2.imencode(".png", pixels)[1].tobytes()


# A label's suffix and content, and the message about it; test_reading.py has other labels that are refused.
WRONG = {
    "jpeg": (".jpg", lambda label: encoded(label, "L", "JPEG", 1), "is a JPEG, which changes values; expected a PNG"),
    "a value of 16 bits": (".png", lambda label: png(label + np.uint16(1)), "holds the value 256; expected ids"),
    "a turned tiff": (".tif", lambda label: encoded(label, "L", "TIFF", 3), "expected a TIFF .*, black as 0, unturned"),
    "turned": (".png", lambda label: encoded(label, "L", "PNG", 3), "has an EXIF orientation, but labels are read as"),
    "an id without a class": (".png", lambda label: png(label + np.uint8(2)), "contains the ids 4, .*0-3, 255"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_labels_are_named_with_the_fix(case, root):
    """The check before a training, the full check and reading find the same."""
    suffix, content, problem = WRONG[case]
    file = root / "train/labels/a/board.0.png"
    label = cv2.imread(str(file), cv2.IMREAD_UNCHANGED)
    file = file.rename(file.with_suffix(suffix))
    file.write_bytes(content(label))
    train = folder(root, "train")
    message = f"{file}: .*{problem}.* Labels hold ids, .*, or the colours of {root}/classes.json.* Export them again "
    for read in (lambda: verify(train, workers=0), lambda: train[0]):
        with pytest.raises(ValueError, match=message):
            read()
    (found_problem,) = inspect(train, workers=0).problems
    assert re.match(message, found_problem.message)
    assert found_problem.kind == ("unknown ids" if case == "an id without a class" else "unreadable label")


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_labels_of_another_type_are_named_with_the_command_that_converts_them(dtype, root):
    expected = folder(root, "train").read_label(0)
    for file in (root / "train/labels/a").glob("*.png"):
        Image.fromarray(np.asarray(Image.open(file)).astype(dtype)).save(file.with_suffix(".tif"))
        file.unlink()
    with pytest.raises(ValueError, match=f"board.0.tif: holds {dtype}; expected ids of 8 or 16 bits. Conv") as error:
        folder(root, "train").read_label(0)
    command = re.search(r'python (-c ".*") LABELS/', str(error.value))[1]
    subprocess.run(f"{sys.executable} {command} {root}/train/labels/a/*.tif", shell=True, check=True)
    assert np.array_equal(folder(root, "train").read_label(0), expected)


def test_images_of_other_formats_are_not_passed_over(root):
    image = next((root / "train/images/a").iterdir())
    image.rename(image.with_suffix(".heic")).write_bytes(b"\0\0\0\x18ftypheic")
    with pytest.raises(ValueError, match=f"a/{image.stem}.heic: cannot be decoded as an image; expected AVIF, BMP"):
        verify(folder(root, "train"), workers=0)
    image.with_suffix(".heic").rename(image.with_suffix(".json"))  # of another program
    assert len(folder(root, "train").files) == 5
    (root / f"train/labels/a/{image.stem}.png").unlink()
    assert len(folder(root, "train").files) == 5


def test_what_is_left_out_is_counted(root):
    """An array is an image only where there are no others."""
    before, image = folder(root, "train"), next((root / "train/images/b").iterdir())
    assert before.remarks == ()
    for name in (f"{image.stem}.npy", "unlabelled.npy", "x.png.part", ".hidden", "Thumbs.db"):
        (image.parent / name).write_bytes(b"not read")
    for name in ("new", "without"):
        shutil.copy(root / f"train/labels/b/{image.stem}.png", root / f"train/labels/b/{name}.png")
    (image.parent / "folder.ppm").mkdir()
    shutil.copy(image, image.parent / "new.jp2")
    after = folder(root, "train")
    assert {*after.files} > {*before.files} and len(after) == len(before) + 1
    assert [sentence.partition(", such as ")[0] for sentence in after.remarks] == [
        "left out 1 labels without an image",
        "left out 3 files that are not read as images",
    ]
    assert after.remarks[0].endswith("train/labels/b/without.png")
    assert join_splits([after, after]).remarks == after.remarks
    assert {entry.image.name for entry in after.files} >= {"new.jp2", image.name}
    (image.parent / "new.tga").touch()
    with pytest.raises(ValueError, match="holds both 'b/new.jp2' and 'b/new.tga'|'b/new.tga' and 'b/new.jp2'"):
        folder(root, "train")


def test_palettes_that_swap_two_classes_and_several_pages_are_doubted(root):
    colours = {"wood": [9, 9, 9], "bark": [0, 200, 0], "rot": [200, 0, 0], "scale": [9, 0, 200]}
    classes = [{"name": name, "colour": colour} for name, colour in colours.items()]
    (root / "classes.json").write_text(json.dumps({"classes": classes, "ignored": [255, 3]}))
    for label in (root / "train/labels").rglob("*.png"):
        trees.write_palette(label, np.asarray(Image.open(label)), [(9, 9, 9), (200, 0, 0), (0, 200, 0), (9, 0, 200)])
    image = next((root / "train/images/a").iterdir())
    page = Image.open(image).convert("RGB")
    page.save(image.with_suffix(".tif"), save_all=True, append_images=[page, page])
    image.unlink()
    train = folder(root, "train")
    pages, swapped = verify(train, workers=0)
    assert re.search(r"the id 1 the colour \(200, 0, 0\), which the list of classes gives the id 2", swapped)
    assert pages.startswith("1 images have several pages") and f"{image.with_suffix('.tif')}, 3)" in pages
    assert verify(train, workers=0) == [pages, swapped]  # as remembered
    assert verify(folder(root, "train", palettes="any"), workers=0) == [pages]


PIXELS = trees.pair(7, [0], (24, 40))[0]
TURNED = encoded(PIXELS, "RGB", "JPEG", 6)
IMAGES = {
    "16 bits": png(PIXELS.astype(np.uint16) * 256 + 99),
    **{mode: encoded(PIXELS, mode, "PNG", 1) for mode in ("L", "LA", "RGBA", "P")},
    **{f"JPEG {turn}": encoded(PIXELS, "RGB", "JPEG", turn) for turn in (0, 1, 3, 6, 9)},
    **{f"{kind} 6": encoded(PIXELS, "RGB", kind, 6) for kind in ("PNG", "TIFF", "WEBP")},
    "BMP": encoded(PIXELS, "RGB", "BMP", 1),
    "EXIF, a text for a number": TURNED.replace(b"\x01\x12\0\x03", b"\x01\x12\0\x02"),
    "EXIF, damaged": TURNED.replace(b"MM\0*", b"MM\0\xff"),
}


def test_training_and_prediction_see_the_same_image(root, tmp_path):
    """It may have 16 bits, gray, alpha, a palette or an EXIF orientation, which scripts.predict applies too."""
    assert len({*IMAGES.values()}) == len(IMAGES)
    for kind, content in IMAGES.items():
        image, label = root / "val/images/a/board.0.jpg", root / "val/labels/a/board.0.png"
        image.write_bytes(content)
        expected = decode_image(image, turned=True)
        size = (40, 24) if kind[-1] in "5678" else (24, 40)
        trees.write(label, np.zeros(size, np.uint8))
        val = folder(root, "val")
        assert np.array_equal(val[0].image, expected) and expected.shape[:2] == size, kind
        window = slice(3, 11), slice(5, 20)
        undecoded, _ = val.undecoded(0)
        assert undecoded.shape == size and np.array_equal(undecoded[window], expected[window])
        verify(val, workers=0)
        assert inspect(val, workers=0).problems == ()
        trees.write(label, np.zeros(size[::-1], np.uint8))
        cure = "The image's EXIF .*: turn the labels too," if kind[-1] in "5678" else "Labels hold ids,"
        for read in (partial(verify, workers=0), lambda val: val[0], lambda val: val.undecoded(0)):
            with pytest.raises(
                ValueError, match=f"image {image} is {size[1]}x{size[0]}; expected the same size. {cure}"
            ):
                read(val)
        classes = tmp_path / kind / "train" / "cats"
        classes.mkdir(parents=True)
        (classes.parent / "dogs").mkdir()
        image.rename(classes / "1.jpg")
        assert np.array_equal(image_folder(tmp_path / kind, "train").image(0), expected)


def list_classes(root: Path, *keys: str) -> dict:
    file = make_classes(checked("make_classes", f"data.root={root}", "workers=0", "overwrite=true", *keys))
    assert file == root / "classes.json"
    return json.loads(file.read_text())


def test_nothing_outside_of_the_folder_is_read_or_written(root):
    (root.parent / "flat").mkdir()
    for split in ("../flat", str(root.parent / "flat"), "train/../../flat"):
        with pytest.raises(ValueError, match=f"^split '{split}' leads out of {root}: expected a folder or a list in"):
            folder(root, split)
    (root / "classes.json").unlink()
    with pytest.raises(ValueError, match=f"{root}/classes.json is missing[^$]*python -m scripts.make_classes"):
        folder(root, "val")
    (root / "classes.json").symlink_to(root.parent / "elsewhere.json")
    with pytest.raises(ValueError, match="classes.json is there already; overwrite=true replaces it"):
        make_classes(checked("make_classes", f"data.root={root}", "workers=0"))
    with pytest.raises(ValueError, match="classes.json is a link that leads nowhere"):
        folder(root, "train")
    list_classes(root)
    assert not (root.parent / "elsewhere.json").exists() and not (root / "classes.json").is_symlink()


def test_names_are_the_same_with_accents_of_their_own(root, tmp_path):
    """macOS stores them decomposed. Files keep their spelling, and so do the names of predictions."""
    apart, together = (unicodedata.normalize(form, "Bäume/é") for form in ("NFD", "NFC"))
    for kind, name, suffix in (("images", apart, ".jpg"), ("labels", together, ".png")):
        (root / "val" / kind / name).parent.mkdir()
        (root / "val" / kind / f"a/board.0{suffix}").rename(root / "val" / kind / f"{name}{suffix}")
    for name in (apart, "b/board.1"):
        assert name in names(folder(root, "val"))
    verify(folder(root, "val"), workers=0)
    for split, form in (("train", "NFC"), ("val", "NFD")):
        for name in ("é", "f", "z"):
            (tmp_path / "sorted" / split / unicodedata.normalize(form, name)).mkdir(parents=True)
            trees.write(tmp_path / "sorted" / split / unicodedata.normalize(form, name) / "1.png", PIXELS)
    train, val = (image_folder(tmp_path / "sorted", split) for split in ("train", "val"))
    assert train.classes == val.classes == ("f", "z", "é") and val.labels.tolist() == [0, 1, 2]


def test_folders_of_systems_are_no_part_of_the_data(root):
    """Network disks keep thumbnails in folders with the images' names."""
    before, splits = names(folder(root, "train")), folder_splits(root)
    for system in ("@eaDir/board.0.jpg/thumb.jpg", "#recycle/old.png", "__MACOSX/board.0.png"):
        for place in ("train/images/a", "train/labels/a", "train/images"):
            (root / place / system).parent.mkdir(parents=True)
            trees.write(root / place / system, PIXELS)
    labels = folder_labels(root)
    for place in ("#recycle/old", ".Trash-1000/files", "@eaDir", "$RECYCLE.BIN", "train/lost+found"):
        for kind in ("images", "labels"):
            (root / place / kind).mkdir(parents=True)
            trees.write(root / place / kind / "0.png", PIXELS)
    assert names(folder(root, "train")) == before and folder_splits(root) == splits and folder_labels(root) == labels
    assert class_folders(root / "train/images") == ("a", "b")


def test_splits_may_be_links(root):
    """Links that lead back to a folder above count for nothing."""
    linked = root.parent / "linked"
    linked.mkdir()
    for split in ("train", "val", "test"):
        (linked / split).symlink_to(root / split)
    (linked / "train/again").symlink_to(linked)
    (root / "train/images/a/again").symlink_to(root / "train/images")
    (root / "train/labels/again").symlink_to(root / "train")
    (root / "train/images/a/itself").symlink_to("itself")
    assert [*map(len, folder_labels(linked)[:3])] == [*map(len, folder_labels(root)[:3])]
    assert len(folder_labels(linked)[0]) == 8 and list_classes(linked)["classes"]
    assert names(folder(linked, "train")) == names(folder(root, "train"))


MASK = np.repeat(np.array([[0, 255]], np.uint8), 20, axis=1).repeat(24, axis=0)
MASKS = {
    "0 and 255": png(MASK),
    "one bit": encoded(MASK, "1", "PNG", 1),
    "RGBA": encoded(MASK, "RGBA", "PNG", 1),
    "gray with alpha": encoded(MASK, "LA", "PNG", 1),
}


@pytest.mark.parametrize("kind", MASKS)
def test_masks_whose_meaning_is_clear_are_read(kind, root):
    """Black and white masks of other tools: two classes, in windows too, and predicted in black and white."""
    for file in root.glob("*/labels/*/*.png"):
        file.write_bytes(MASKS[kind])
    colours = [{"colour": [255 * number] * 3} for number in range(2)] if kind != "one bit" else [{}, {}]
    classes = [{"name": f"class_{number}"} | colour for number, colour in enumerate(colours)]
    assert list_classes(root) == {"classes": classes, "ignored": [255] if kind == "one bit" else []}
    train = folder(root, "train")
    assert verify(train, workers=0) == [] and inspect(train, workers=0).problems == ()
    assert np.array_equal(train[0].label, MASK // 255)
    window = slice(3, 11), slice(5, 30)
    assert np.array_equal(train.undecoded(0)[1][window], MASK[window] // 255)


def test_masks_that_are_not_clear_are_refused_with_the_reason(root):
    files = sorted(root.glob("*/labels/*/*.png"))
    large = np.zeros((96, 96), np.uint8)
    cv2.circle(large, (48, 48), 30, 255, -1, cv2.LINE_AA, shift=0)
    assert 8 < len(np.unique(large)) < 100
    coloured = np.dstack([large, large.T, np.arange(96, dtype=np.uint8)[None].repeat(96, 0)])
    for file in files:
        trees.write(file, coloured)
    with pytest.raises(ValueError, match="classes .* expected 2 to 253"):
        list_classes(root)
    for file in files:
        file.write_bytes(MASKS["0 and 255"])
    files[1].write_bytes(MASKS["one bit"])
    with pytest.raises(ValueError, match="some labels hold ids, others single bits; expected one kind"):
        list_classes(root)
    files[1].write_bytes(png(np.dstack([MASK, MASK, MASK, MASK])))
    with pytest.raises(ValueError, match=f"{files[1]}: has transparent pixels, which have no class"):
        list_classes(root)


def test_files_whose_palettes_number_the_classes_differently_are_named(root):
    """Pillow's `quantize` writes the most frequent colour first, so an index may mean another class."""
    first, second, *further = sorted(root.glob("train/labels/*/*.png"))
    for file in root.glob("*/labels/*/*.png"):
        trees.write_palette(file, MASK // 255, [(0, 0, 0), (9, 200, 9), (7, 7, 7)])
    named = [{"name": "class_0", "colour": [0, 0, 0]}, {"name": "class_1", "colour": [9, 200, 9]}]
    assert list_classes(root) == {"classes": named, "ignored": [255]}
    train = folder(root, "train")
    verify(train, workers=0)
    trees.write_palette(further[0], MASK // 255, [(0, 0, 0), (9, 200, 9), (1, 2, 3)])  # the last is not used
    trees.write_palette(second, 1 - MASK // 255, [(9, 200, 9), (0, 0, 0)])
    message = rf"{second}: its palette gives the id 0 the colour \(9, 200, 9\), and {first} the colour \(0, 0, 0\)"
    with pytest.raises(ValueError, match=message):
        verify(train, workers=0)
    (problem,) = inspect(train, workers=0).problems
    assert problem.kind == "palettes differ" and re.match(message, problem.message)


@pytest.mark.parametrize(
    "colours",
    [
        [(0, 0, 0), (5, 5, 5), (255, 0, 0)],  # two alike, and the first colour of those that replace them
        [(0, 0, 0), (5, 5, 5), (254, 0, 0), (103, 140, 230)],
        [None, None, (255, 3, 3), (103, 140, 230), None],
        [None] * 254,
    ],
)
def test_colours_are_told_apart_and_those_that_can_be_stay(colours):
    shown = distinct_palette(dict(enumerate(colours)))
    pairs = [(colour, shown_colour) for colour, shown_colour in zip(colours, shown, strict=True) if colour is not None]
    assert len(colours) == 254 or [colour for colour, shown_colour in pairs if colour == shown_colour] == [
        colour for colour, _ in pairs if colour not in ((0, 0, 0), (5, 5, 5))
    ]
    assert len(shown) == len(colours) and not lookalikes(dict(enumerate(shown)))


@pytest.mark.parametrize("turn, square, is_counted", [(1, True, 0), (3, False, 2), (6, False, 0), (8, True, 2)])
def test_turned_images_whose_labels_may_not_be_are_counted(turn, square, is_counted, root):
    """Labels drawn on the pixels as stored have the right size if the image is upside down, mirrored or square."""
    size = (24, 24 if square else 40)
    for number in range(2):
        picture, label = (array[: size[0], : size[1]] for array in trees.pair(number, [0, 1, 2]))
        (root / f"turned/images/{number}.jpg").parent.mkdir(parents=True, exist_ok=True)
        (root / f"turned/images/{number}.jpg").write_bytes(encoded(picture, "RGB", "JPEG", turn))
        trees.write(root / f"turned/labels/{number}.png", np.ascontiguousarray(label.T) if turn > 4 else label)
    doubts = [doubt for doubt in verify(folder(root, "turned"), workers=0) if "EXIF" in doubt]
    example = f"(such as {root}/turned/images/0.jpg)"
    expected = f"{is_counted} images with labels are turned by their EXIF orientation {example}"
    assert [doubt.startswith(expected) and "scripts.browse_data" in doubt for doubt in doubts] == [True] * bool(
        is_counted
    )


GRAYS = [(0,) * 3, (85,) * 3, (170,) * 3]


def gray_palette(root: Path, classes: dict, grays: list, plain: bool) -> SegmentationDataset:
    """A split whose labels hold the indices 0 to 2 of a palette of grays; one of them perhaps the grays themselves."""
    (root / "classes.json").write_text(json.dumps({"ignored": [255], **classes}))
    for number in range(3):
        image, label = trees.pair(number, [0, 1, 2])
        trees.write(root / f"gray/images/{number}.png", image)
        trees.write_palette(root / f"gray/labels/{number}.png", label, grays)
    if plain:
        trees.write(root / "gray/labels/2.png", np.array(grays, np.uint8)[label, 0])
    return folder(root, "gray")


THREE = [{"name": name} for name in "abc"]
COLOURED = {"classes": [{"name": name, "colour": colour} for name, colour in zip("abc", GRAYS, strict=True)]}
SIX = {"classes": [{"name": f"{number}"} for number in range(6)]}
ODD = {"classes": SIX["classes"], "ignored": [1, 2, 255]}


@pytest.mark.parametrize(
    "classes, grays, plain, reading",
    [
        ({"classes": THREE}, GRAYS, False, "doubt"),
        (COLOURED, GRAYS, False, None),  # both readings are the same classes
        (COLOURED, GRAYS, True, None),
        ({"classes": THREE}, [(0,) * 3, (1,) * 3, (2,) * 3], True, None),
        (SIX, [(0,) * 3, (3,) * 3, (5,) * 3], False, "doubt"),
        (SIX, [(0,) * 3, (3,) * 3, (5,) * 3], True, "problem"),
        (ODD, [(0,) * 3, (3,) * 3, (5,) * 3], False, "problem"),  # only the grays are classes
        ({"classes": THREE}, [(0,) * 3, (85, 0, 0), (170,) * 3], False, None),
    ],
)
def test_a_palette_of_grays_has_two_readings(classes, grays, plain, reading, root):
    """Programs that save few grays as a palette number them anew. The index counts, as always."""
    dataset = gray_palette(root, classes, grays, plain)
    assert {*np.unique(dataset.raw_label(0))} == {0, 1, 2}
    inspection = inspect(dataset, workers=0)
    sentences = {"problem": [sentence.message for sentence in inspection.problems], "doubt": inspection.doubts("image")}
    sentences = {
        kind: [sentence for sentence in lines if "have palettes of grays" in sentence]
        for kind, lines in sentences.items()
    }
    assert {kind for kind, lines in sentences.items() if lines} == ({reading} if reading else set())
    for sentence in sentences.get(reading, ()):
        levels = ", ".join(str(gray) for gray, *_ in grays)
        assert f"their indices 0-2 count, not the grays {levels}; if the grays are meant, save gray PNGs" in sentence
        assert ("(1 others have none)" in sentence) == plain
    if reading == "problem":
        with pytest.raises(ValueError, match="palettes=any: their ids then count, whatever the colours"):
            verify(dataset, workers=0)
        assert not inspect(folder(root, "gray", palettes="any"), workers=0).problems


def test_make_classes_names_both_readings_of_a_palette_of_grays(root, capsys):
    gray_palette(root, {"classes": THREE}, GRAYS, plain=False)
    for split in ("train", "val", "test"):
        shutil.rmtree(root / split)
    list_classes(root)
    sentence = "3 labels have palettes of grays, such as .*: their indices 0-2 count, not the grays 0, 85, 170"
    assert re.search(sentence, capsys.readouterr().out.replace("\n", " "))


@pytest.mark.parametrize("end, contents", [("JSON", "polygons"), ("txt", "polygons or boxes (YOLO"), ("npy", "arrays")])
@pytest.mark.parametrize("place", ["labels", "images", "annotations"])
def test_what_lies_in_the_place_of_labels_is_named_with_the_cure(place, end, contents, root):
    """Labelling tools write polygons beside the images, or into a folder; programs save arrays."""
    for label in [*root.rglob("labels/**/*.png")]:
        substitute = Path(str(label).replace("/labels/", f"/{place}/")).with_suffix(f".{end}")
        substitute.parent.mkdir(parents=True, exist_ok=True)
        substitute.write_text("[]")
        label.unlink()
    cure = "PIL.Image.fromarray" if end == "npy" else "export masks from the labelling tool, or draw the outlines"
    for read in (partial(folder, root, "train"), partial(list_classes, root)):
        with pytest.raises(ValueError) as error:
            read()
        advice = f"Fix: {root}/train/{place} holds 6 files of {contents}"
        assert advice in str(error.value) and cure in str(error.value)


def test_one_file_for_all_images_is_named_and_a_stray_one_is_not(root):
    (root / "train/annotations").mkdir()
    (root / "train/annotations/instances.json").write_text("{}")
    (root / "train/labels/notes.txt").write_text("mine")
    first, *further = sorted((root / "train/labels").rglob("*.png"))
    first.unlink()
    with pytest.raises(ValueError, match="Fix: add the labels, under the names of their images"):
        folder(root, "train")
    for label in further:
        label.unlink()
    with pytest.raises(ValueError, match="annotations holds 1 files of polygons .*, such as instances.json: labels"):
        folder(root, "train")


def test_what_our_commands_write_is_no_file_of_polygons(tmp_path):
    (tmp_path / "train/predicted").mkdir(parents=True)
    (tmp_path / "train/a.jpg").touch()
    for name in ("classes.json", "split.json", "train/predicted/classes.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(ValueError, match="Fix: sort your images like this"):
        folder_labels(tmp_path)


def test_names_that_differ_only_in_capitals_are_named(root, capsys):
    first = sorted((root / "train/labels").rglob("*.png"))[0]
    name = str(first.relative_to(root / "train/labels").with_suffix(""))
    first.rename(first.with_name(f"{first.stem.upper()}.PNG"))
    upper = str(Path(name).with_name(first.stem.upper()))
    with pytest.raises(ValueError, match=f"; 1 differ only in capitals, such as {name} and {upper}: rename one of"):
        folder(root, "train")
    list_classes(root)
    assert "1 differ only in capitals, such as" in capsys.readouterr().out


def test_lists_in_other_capitals_are_named(root):
    stored = flat(root) / "images"
    name = sorted(str(path.relative_to(stored)) for path in stored.rglob("*.*") if path.suffix)[0]
    stem = str(Path(name).with_suffix(""))
    for line, meant in ((stem.upper(), stem), (f"{stem}{Path(name).suffix.upper()}", name)):
        (root / "own.txt").write_text(f"{line}\n")
        with pytest.raises(ValueError, match=f"; 1 differ only in capitals, such as {line} and {meant}: rename one"):
            folder(root, "own")


@pytest.mark.parametrize(
    "images, labels, suffix", [("images", "masks", ""), ("img_dir", "ann_dir", ""), ("pairs", "pairs", "_gt")]
)
def test_splits_may_be_folders_in_the_images_folder(images, labels, suffix, root, tmp_path):
    """mmsegmentation, YOLO and ADE20K have such folders. Training and make_classes then use these splits."""
    nested = tmp_path / "other"
    for split in ("train", "val"):
        for kind, new, end in (("images", images, ""), ("labels", labels, suffix)):
            for file in sorted((root / split / kind).rglob("*.*")):
                place = nested / new / split / file.relative_to(root / split / kind)
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(file, place.with_stem(place.stem + end))
    (nested / "images.txt").write_text("seen from above\n")  # no list
    shutil.copy(root / "classes.json", nested)
    names_given = {"image_folder": images, "label_folder": labels, "label_suffix": suffix}
    for split in ("train", "val"):
        usual, dataset = folder(root, split), folder(nested, split, **names_given)
        assert names(dataset) == names(usual) and not dataset.remarks
        assert np.array_equal(dataset.read_label(0), usual.read_label(0))
    options = LabelNames(labels, suffix, "data.", images)
    assert folder_splits(nested, options=options) == ["train", "val"]
    label_files = folder_labels(nested, options)
    assert (
        len(label_files.images) == len(folder(root, "train")) + len(folder(root, "val"))
        and not label_files.unpaired + label_files.unlabelled
    )
    with pytest.raises(ValueError, match="holds the splits train, val as folders: train on these, without lists"):
        sources_of(nested, label_files, ["train", "val"], 2, None)
    with pytest.raises(ValueError, match="give one of the splits that are there: train, val.$"):
        folder(nested, "validation", **names_given)
    if images == "img_dir":
        for command in (
            lambda: folder(nested, "train", keys="data."),
            lambda: folder_labels(nested, LabelNames(keys="data.")),
        ):
            with pytest.raises(ValueError, match="give data.image_folder=img_dir data.label_folder=ann_dir"):
                command()
    if images == "images":
        with pytest.raises(ValueError, match="holds labels such as train/.*: give data.label_folder=masks"):
            folder(nested, "train", keys="data.")


def test_where_only_training_images_have_labels_some_are_held_out(root):
    shutil.rmtree(root / "val")
    shutil.rmtree(root / "test" / "labels", ignore_errors=True)
    expected = f"splits that are there: train; or hold out some of its images: with data.root={root}/train, let scripts"
    with pytest.raises(ValueError, match=expected):
        folder(root, "val", keys="data.")


def test_ids_that_count_from_1_are_told_from_a_forgotten_class():
    table = ClassTable(("a", "b"), ((0, 0, 0), (9, 9, 9)), (0, 1), {0: 0, 1: 1, 255: 255})
    cure = "the ids 2, which .*; if they count from 1, scripts.make_classes overwrite=true lists them so$"
    with pytest.raises(UnknownIds, match=cure):
        table.train_ids(np.array([[1, 2]], np.uint8))
    with pytest.raises(UnknownIds, match="expected only 0-1, 255$"):
        table.train_ids(np.array([[0, 2]], np.uint8))


def test_voc_s_lists_are_named_instead_of_a_division(root):
    (root / "JPEGImages").mkdir()
    shutil.copytree(root / "train" / "images", root / "JPEGImages", dirs_exist_ok=True)
    for split in ("train", "val", "test"):
        shutil.rmtree(root / split, ignore_errors=True)
    lists = root / "ImageSets" / "Segmentation"
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a\n")
    with pytest.raises(ValueError, match=f"copy the lists of {lists} to {root}"):
        folder(root, "train", image_folder="JPEGImages", label_folder="SegmentationClass")


def test_images_with_the_names_of_nnu_net_and_pairs_in_a_split_are_renamed_and_moved(root):
    for split in ("val", "test"):
        shutil.rmtree(root / split)
    (root / "train" / "labels").rename(root / "labelsTr")
    (root / "train" / "images").rename(root / "imagesTr")
    for file in (root / "imagesTr").glob("*/*"):
        file.rename(file.with_stem(f"{file.stem}_0000"))
    with pytest.raises(ValueError, match="without _0000, and give image_folder=imagesTr label_folder=labelsTr"):
        folder(root, "train")
    for kind, end in (("images", "_0000"), ("labels", "")):
        for file in (root / f"{kind}Tr").glob("*/*"):
            suffix = "" if kind == "images" else "_mask"
            file.rename(root / "train" / f"{file.stem.removesuffix(end)}{suffix}{file.suffix}")
    for folders in ("imagesTr", "labelsTr", "train/images", "train/labels"):
        shutil.rmtree(root / folders, ignore_errors=True)
    cure = f"move the images and labels in {root}, with their folders, to {root}/images, and give label_folder=images "
    with pytest.raises(ValueError, match=f"{cure}label_suffix=_mask"):
        folder(root, "train")
    (root / "images").mkdir()
    (root / "train").rename(root / "images" / "train")
    assert folder(root, "train", label_folder="images", label_suffix="_mask").has_labels


def test_of_folders_with_the_images_names_one_that_is_called_like_labels_is_advised(root):
    for split in ("val", "test"):
        shutil.rmtree(root / split)
    (root / "train" / "images").rename(root / "train" / "image_2")
    (root / "train" / "labels").rename(root / "train" / "semantic")
    shutil.copytree(root / "train" / "image_2", root / "train" / "instance")
    (root / "2019").mkdir()
    (root / "train").rename(root / "2019" / "train")
    for read in (folder_labels, lambda root: folder(root, "train")):
        with pytest.raises(ValueError, match="Fix: give image_folder=image_2 label_folder=semantic.$"):
            read(root)


def test_commands_in_advice_name_the_folders(root):
    (root / "val" / "images").rename(root / "imgs")
    (root / "val" / "labels").rename(root / "masks")
    for split in ("train", "val", "test"):
        shutil.rmtree(root / split, ignore_errors=True)
    command = rf"data.root={root} data.image_folder=imgs data.label_folder=masks split=\[0.7"
    with pytest.raises(ValueError, match=f"let python -m scripts.make_classes {command}"):
        folder(root, "train", image_folder="imgs", label_folder="masks")


def test_texts_that_name_no_image_are_no_splits(root):
    flat(root)
    for name, text in (
        ("class_names", "leaf"),
        ("labelmap", "# label:color\nleaf:1,0,0::"),
        ("README", "Leaves."),
        ("a", ""),
    ):
        (root / f"{name}.txt").write_text(text)
    (root / "few.txt").write_text("train/a/board.0\n")
    assert "few" in folder_splits(root) and not {"class_names", "labelmap", "README", "a"} & {*folder_splits(root)}
