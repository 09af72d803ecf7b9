"""Where segmentation datasets look for their files, and what they say if these are elsewhere or missing."""

import os
import re
import shutil
from pathlib import Path

import pytest

import datasets
from datasets import SegmentationDataset, camvid
from tests import trees


@pytest.fixture(params=trees.SEGMENTATION)
def kind(request) -> str:
    return request.param


@pytest.fixture
def root(kind, tmp_path) -> Path:
    return trees.SEGMENTATION[kind](tmp_path / "above" / "Straßen 街 data")


def opened(kind: str, root: Path | None, split: str = "train", **options) -> SegmentationDataset:
    return getattr(datasets, kind)(root, split, **options)


def refusal(kind: str, root: Path | None, split: str = "train", **options) -> str:
    with pytest.raises(ValueError) as error:
        opened(kind, root, split, **options)
    return str(error.value)


@pytest.mark.parametrize("placeholders", [True, False])  # published as labels of a test split
def test_a_split_may_have_no_labels_and_there_are_no_other_splits(root, kind, placeholders):
    if not placeholders:
        shutil.rmtree(root / "gtFine" / "test", ignore_errors=True)
    for split in trees.splits_of(kind, root):
        dataset = opened(kind, root, split)
        assert not (dataset.has_labels and split == "test" and kind in trees.WITHHELD)
        if not dataset.has_labels:
            assert {sample.label for sample in dataset} == {None} and dataset[0].label is None
            with pytest.raises(ValueError, match=f"no labels in split '{split}'.*such as val"):
                dataset.read_label(0)
    unknown = f"split 'validation' is unknown to {kind}; expected one of "
    if kind == "folder":  # one's own images, whose splits have any names
        unknown = f"{kind}: the folder {root}/validation/images is missing."
    assert refusal(kind, root, "validation").startswith(unknown)


def test_missing_folders_are_named_with_what_is_there_the_layout_and_the_fix(kind, root):
    if kind == "camvid":  # in the other layout, a split without images is not a missing folder
        root = trees.camvid_annot(root.parent / "annot")
    pairs = zip(*((file.image, file.label) for file in opened(kind, root).files), strict=True)
    images, labels = (Path(os.path.commonpath([path.parent for path in paths])) for paths in pairs)
    aside = root.parent / "aside"
    if kind == "coco_stuff":
        shutil.rmtree(root / "stuffthingmaps")
    for folder in (labels, images):
        problem = f"no labels for split 'train', looked for {folder}/*.png and "
        if kind != "coco_stuff" or folder == images:
            problem = f"the folder {folder} is missing."
        folder.rename(aside)
        message = refusal(kind, root)
        assert message.startswith(f"{kind}: {problem}")
        entries = sorted(path.name + "/" * path.is_dir() for path in root.iterdir())
        assert f"\nFound in {root}: {', '.join(entries)}\n" in message
        assert f"\nExpected layout of {kind}:\n    DIR/" in message
        if folder == images:
            folder.mkdir(parents=True)
            assert refusal(kind, root).startswith(f"{kind}: no images in split 'train', looked for {folder}/*")
            folder.rmdir()
        aside.rename(folder)
    assert len(opened(kind, root)) > 2


def test_images_without_a_label_are_named_and_labels_without_an_image_are_left_out(kind, root):
    first, second, *further = opened(kind, root).files
    count, looked_for = 2 + len(further), first.label.parents[1]
    for missing, entry in enumerate((first, second), start=1):
        entry.label.unlink()
        message = refusal(kind, root)
        assert message.startswith(f"{kind}: {missing} of {count} images have no label: ")
        assert first.name in message and f"; looked for {looked_for}/" in message
    for entry in (first, second):
        entry.image.unlink()
    if kind != "coco_stuff":  # which has a list of images
        trees.write(first.label, trees.pair(0, [0])[1])
        assert [*opened(kind, root).files] == further


def test_names_and_sizes_of_files_show_what_changed_and_not_where_they_lie(camvid_folders, tmp_path):
    names, sizes = camvid(camvid_folders, "train").names_and_sizes()
    moved = shutil.copytree(camvid_folders, tmp_path / "moved")  # with other times
    assert camvid(moved, "train").names_and_sizes() == (names, sizes)
    files = camvid(moved, "train").files[0]
    files.image.write_bytes(files.image.read_bytes() + b"0")
    assert camvid(moved, "train").names_and_sizes()[0] == names != camvid(moved, "train").names_and_sizes()[1] != sizes
    for path in (files.image, files.label):
        path.rename(path.with_stem("other"))
    assert camvid(moved, "train").names_and_sizes()[0] != names
    (files.image.with_name("other.JPEG")).write_bytes(b"")
    assert re.search("holds both .*Remove one, or move labels", refusal("camvid", moved))
