import os
import shutil
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from datasets import image_folder, imagenet, verify
from datasets.imagenet import IMAGE_FOLDER
from tests.datasets import classification_trees as trees
from tests.datasets.classification_trees import WNIDS, encoded, photograph, write


@pytest.fixture
def root(tmp_path):
    return trees.imagenet(tmp_path / "imagenet")


def names(dataset) -> list[str]:
    return [dataset.image_name(number) for number in range(len(dataset))]


def test_classes_are_the_sorted_folders(root):
    train, val = imagenet(root, "train"), imagenet(root, "val")
    assert train.classes == val.classes == WNIDS
    assert [train.label(number) for number in range(len(train))] == [0, 0, 1, 1, 2, 2]
    assert names(train) == [f"{wnid}/{wnid}_{number}.JPEG" for wnid in WNIDS for number in range(2)]
    assert [val.label(number) for number in range(len(val))] == [0, 1, 2]
    assert (train.name, train.split, train.palette) == ("imagenet", "train", None)
    image = train.image(3)
    assert image.shape == (47, 46, 3) and image.dtype == np.uint8
    # One array, not a million Python objects that every worker would copy by counting references.
    assert train.files.names.dtype.kind == "S" and train.labels.dtype == np.int64
    shutil.rmtree(root / "train")
    assert imagenet(root, "val").classes == WNIDS  # one split alone can be evaluated


def test_folders_named_by_numbers_are_sorted_as_chosen(tmp_path):
    for name in ("2", "10", "1"):
        write(tmp_path / "train" / name / "1.png", encoded(photograph(int(name), (20, 30)), "PNG"))
    for read in (imagenet, image_folder):
        for order, expected in ((None, "1 10 2"), ("text", "1 10 2"), ("numbers", "1 2 10")):
            train = read(tmp_path, "train", class_order=order)
            assert train.classes == tuple(expected.split()) and train.labels.tolist() == [0, 1, 2]
            assert names(train) == [f"{name}/1.png" for name in train.classes]
    (tmp_path / "train/10/1.png").unlink()
    for order in ("text", "numbers"):  # what was remembered of one order does not count for the other
        assert verify(imagenet(tmp_path, "train", order), workers=0)[0].startswith("no training image shows 10: ")
    with pytest.raises(ValueError, match="^data.class_order=size: expected one of text, numbers"):
        imagenet(tmp_path, "train", class_order="size", keys="data.")
    (tmp_path / "train" / os.fsdecode(b"caf\xe9")).mkdir()
    with pytest.raises(ValueError, match=f"^image_folder: {tmp_path}/train: class 3 is called 'caf.udce9'; .*: rename"):
        image_folder(tmp_path, "train")


def test_other_trees_with_other_suffixes_in_any_case(tmp_path):
    for number, suffix in enumerate(("jpg", "JPG", "jpeg", "JPEG", "png", "PNG")):
        kind = "PNG" if suffix.lower() == "png" else "JPEG"
        write(tmp_path / "train" / "cats" / f"{number}.{suffix}", encoded(photograph(number, (20, 30)), kind))
    write(tmp_path / "train" / "dogs" / "from a zoo" / "1.png", encoded(photograph(9, (20, 30)), "PNG"))
    for ignored in ("cats/.hidden.jpg", "cats/notes.txt", ".folder/1.jpg"):
        write(tmp_path / "train" / ignored, b"x")
    (tmp_path / "val" / "cats").mkdir(parents=True)
    (tmp_path / "val" / "dogs").mkdir()
    train = imagenet(tmp_path, "train")
    assert train.classes == ("cats", "dogs") and [train.label(number) for number in range(7)] == [0] * 6 + [1]
    assert np.array_equal(train.image(6), photograph(9, (20, 30))) and names(train)[6] == "dogs/from a zoo/1.png"
    verify(train, workers=0)


@pytest.mark.parametrize("beside", ["without", "beside"])
def test_a_flat_split_is_refused_with_the_way_to_sort_it(root, beside):
    for path in list((root / "val").glob("*/*")):
        path.rename(root / "val" / path.name)
        if beside == "without":
            path.parent.rmdir()
    problem = f"holds 3 images {beside} class folders, such as ILSVRC2012_val_00000001.JPEG"
    fix = "Fix: move each image into .* val/WNID/NAME.JPEG[^$]*LOC_val_solution.csv"
    with pytest.raises(ValueError, match=f"{problem}[^$]*{fix}"):
        imagenet(root, "val")
    with pytest.raises(ValueError, match=f"{problem}[^$]*Fix: move each image into .* in DIR/train and DIR/val "):
        image_folder(root, "val")
    assert [*IMAGE_FOLDER.count_images(root)] == ["train", "val"]


def test_splits_with_different_classes_are_refused_by_name(root):
    (root / "val" / WNIDS[1]).rename(root / "val" / "n00000000")
    message = rf"different classes: 1 only in train \({WNIDS[1]}\) and 1 only in val \(n00000000\); expected the same"
    for split, pattern in (("train", message), ("val", "1 only in val .* and 1 only in train")):
        with pytest.raises(ValueError, match=pattern):
            imagenet(root, split)


def test_all_suffixes_of_own_images_are_read_and_others_counted(root):
    folder = root / "train" / WNIDS[1]
    before = image_folder(root, "train")
    for name in ("new.ppm", "new.tga", "a.txt", "b.JPEG.part", "Thumbs.db"):
        (folder / name).write_bytes(b"P6 1 1 255 abc")
    after = image_folder(root, "train")
    assert [name for name in names(after) if name not in names(before)] == [
        f"{WNIDS[1]}/new.ppm",
        f"{WNIDS[1]}/new.tga",
    ]
    assert [*after.remarks] == [f"left out 2 files that are not read as images, such as {folder}/a.txt"]
    (published,) = imagenet(root, "train").remarks
    assert published.startswith("left out 4 files that are not read as images, such as") and before.remarks == ()


def test_classes_of_own_images_that_are_empty_are_named(root):
    first, second, third = ((root / "train" / wnid) for wnid in WNIDS)
    for file in second.iterdir():
        file.unlink()
    (doubt,) = verify(image_folder(root, "train"), workers=0)
    assert doubt == f"no training image shows {WNIDS[1]}: check the labels and the classes"
    for split in ("train", "val"):
        for folder in (second, third):
            shutil.rmtree(root / split / folder.name)
    with pytest.raises(ValueError, match=f"{root}/train holds one class folder, {first.name}, .* two classes or more"):
        image_folder(root, "train")


def adobe_cmyk(black: int) -> bytes:
    """A CMYK JPEG; Pillow writes what Adobe's programs do: inverted values and their marker."""
    pixels = np.asarray(Image.fromarray(photograph(3, (40, 48))).convert("CMYK")).copy()
    pixels[..., 3] = black
    Image.fromarray(pixels, "CMYK").save(file := BytesIO(), "JPEG", quality=95)
    return file.getvalue()


def without_adobe_marker(data: bytes) -> bytes:
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4], "big") :]


def as_ycck(data: bytes) -> bytes:
    """The Adobe marker then says that cyan, magenta and yellow were transformed as RGB is to YCbCr."""
    start = data.index(b"Adobe") + 11
    return data[:start] + b"\x02" + data[start + 1 :]


TRANSPARENCY = np.full((40, 48), 99, np.uint8)
ODD = {
    "a PNG": (encoded(photograph(1, (40, 48)), "PNG"), 0),
    "a PNG with transparency": (encoded(np.dstack([photograph(1, (40, 48)), TRANSPARENCY]), "PNG"), 0),
    "a grey JPEG": (encoded(photograph(1, (40, 48))[..., 0]), 0),
    "a progressive JPEG": (encoded(photograph(1, (40, 48)), progressive=True), 0),
    "CMYK": (adobe_cmyk(black=60), 2),
    "CMYK without Adobe's marker": (without_adobe_marker(adobe_cmyk(black=60)), 2),
    "YCCK": (as_ycck(adobe_cmyk(black=60)), 2),
}


def test_files_named_jpeg_that_are_something_else_decode_as_by_pillow(root):
    """ImageNet has a PNG and 22 CMYK files named .JPEG. OpenCV rounds CMYK differently, by at most 2 levels."""
    dataset = imagenet(root, "train")
    for kind, (data, most) in ODD.items():
        write(root / "train" / WNIDS[0] / f"{WNIDS[0]}_0.JPEG", data)
        expected = np.asarray(Image.open(BytesIO(data)).convert("RGB")).astype(int)
        assert np.abs(dataset.image(0) - expected).max() <= most and expected.std() > 20, kind
        verify(imagenet(root, "train"), workers=0)


CHANGES = {
    "add": lambda folder: write(folder / "new.JPEG", encoded(photograph(0, (30, 30)))),
    "remove": lambda folder: (folder / f"{WNIDS[1]}_0.JPEG").unlink(),
    "rename": lambda folder: (folder / f"{WNIDS[1]}_0.JPEG").rename(folder / "z.JPEG"),
    "class": lambda folder: [write(folder.parents[1] / split / "n99" / "1.JPEG", b"") for split in ("train", "val")],
    "overwrite": lambda folder: write(folder / f"{WNIDS[1]}_0.JPEG", b""),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_files_changes_their_hashes(root, change):
    before, again = imagenet(root, "train"), imagenet(root, "train")
    assert before.files.fingerprint([1]) == again.files.fingerprint([1]) != before.files.fingerprint([2])
    CHANGES[change](root / "train" / WNIDS[1])
    after = imagenet(root, "train")
    assert names(after) == sorted(f"{path.parent.name}/{path.name}" for path in (root / "train").rglob("*.JPEG"))
    assert after.names_and_sizes() != before.names_and_sizes()
    assert after.files.fingerprint([1]) != before.files.fingerprint([1])
