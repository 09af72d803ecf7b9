import ast
import re
import struct
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import datasets
from datasets import ClassTable, SegmentationDataset, camvid


def label_path(root: Path) -> Path:
    return root / "train" / "labels" / "0001TP_000000.png"


def image_path(root: Path) -> Path:
    return root / "train" / "images" / "0001TP_000000.jpg"


def message_of(root: Path) -> str:
    with pytest.raises(ValueError) as error:
        camvid(root, "train")[0]
    return str(error.value)


def test_ids_outside_the_table(camvid_folders):
    label = np.zeros((24, 40), np.uint8)
    label[3, 4], label[5, 6] = 12, 200
    cv2.imwrite(str(label_path(camvid_folders)), label)
    message = message_of(camvid_folders)
    assert str(label_path(camvid_folders)) in message and "ids 12, 200" in message
    assert "expected only 0-11" in message and "Check that" in message


def test_the_id_that_marks_illegal_values_inside_is_itself_reported(camvid_folders):
    cv2.imwrite(str(label_path(camvid_folders)), np.full((24, 40), 254, np.uint8))
    assert "ids 254," in message_of(camvid_folders)


def test_label_of_another_size(camvid_folders):
    cv2.imwrite(str(label_path(camvid_folders)), np.zeros((24, 41), np.uint8))
    message = message_of(camvid_folders)
    assert str(label_path(camvid_folders)) in message and str(image_path(camvid_folders)) in message
    assert "41x24" in message and "40x24" in message and "expected the same size" in message


@pytest.mark.parametrize("pixels", [np.zeros((24, 40, 3), np.uint8), np.zeros((24, 40), np.uint16)])
def test_label_that_is_no_id_map(camvid_folders, pixels):
    cv2.imwrite(str(label_path(camvid_folders)), pixels)
    message = message_of(camvid_folders)
    assert str(label_path(camvid_folders)) in message and "one 8-bit class id per pixel" in message


@pytest.mark.parametrize("which", [image_path, label_path])
@pytest.mark.parametrize(
    "damage, complaint",
    [
        (lambda data: data[: len(data) // 2], "truncated"),
        (lambda data: b"", "empty"),
        (lambda data: b"<html>not found</html>", "neither PNG nor JPEG"),
        (lambda data: data[:8] + data[-12:], "cannot be decoded"),
    ],
)
def test_damaged_file(camvid_folders, which, damage, complaint):
    path = which(camvid_folders)
    path.write_bytes(damage(path.read_bytes()))
    message = message_of(camvid_folders)
    assert str(path) in message and complaint in message and "expected" in message and "Restore the file" in message


READS = {
    "image": (image_path, lambda dataset: dataset.read_image(0)),
    "label": (label_path, lambda dataset: dataset.read_label(0)),
    "sizes": (label_path, lambda dataset: dataset.size(0)),
    "quick check": (image_path, datasets.verify),
    "full check": (image_path, lambda dataset: pytest.fail(datasets.inspect(dataset).problems[0].message)),
}


@pytest.mark.parametrize("kind", READS)
def test_where_a_dataset_is_read_the_advice_is_to_restore_the_file(camvid_folders, kind):
    which, read = READS[kind]
    which(camvid_folders).write_bytes(b"")
    with pytest.raises((ValueError, pytest.fail.Exception)) as error:
        read(camvid(camvid_folders, "train"))
    problem = f"{which(camvid_folders)}: the file is empty; expected a PNG or JPEG."
    assert f"{problem} Restore the file from the dataset's archive." in str(error.value)


def test_file_that_vanished(camvid_folders):
    dataset = camvid(camvid_folders, "train")
    image_path(camvid_folders).unlink()
    with pytest.raises(ValueError, match="0001TP_000000.jpg: cannot be read"):
        dataset[0]


def test_palette_png_gives_indices(camvid_folders):
    expected = camvid(camvid_folders, "train")[0].label
    raw = np.where(expected == 255, 11, expected).astype(np.uint8)
    palette = Image.fromarray(raw, mode="L").convert("P")
    palette.putdata(raw.flatten().tolist())
    palette.putpalette([value for colour in range(12) for value in (255 - colour, 7 * colour, 3)])
    palette.save(label_path(camvid_folders))
    assert Image.open(label_path(camvid_folders)).mode == "P"
    assert np.array_equal(camvid(camvid_folders, "train")[0].label, expected)


def test_label_of_four_bits_is_refused(camvid_folders):
    """Decoders stretch 0 … 15 to 0 … 255, and some of these are other classes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 40, 24, 4, 0, 0, 0, 0)  # width, height, bits, grayscale
    rows = (b"\0" + bytes(20)) * 24
    chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    label_path(camvid_folders).write_bytes(b"\x89PNG\r\n\x1a\n" + chunks)
    with pytest.raises(ValueError, match="has 4 bits per pixel; expected .* 8-bit"):
        camvid(camvid_folders, "train")[0]


def test_one_name_with_two_files_is_refused(camvid_folders):
    path = image_path(camvid_folders)
    path.with_suffix(".JPEG").write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match="holds both .*Remove one"):
        camvid(camvid_folders, "train")


def test_grayscale_image_becomes_rgb(camvid_folders):
    gray = np.random.default_rng(0).integers(0, 256, (24, 40), dtype=np.uint8)
    cv2.imwrite(str(image_path(camvid_folders)), gray)
    image = camvid(camvid_folders, "train")[0].image
    assert image.shape == (24, 40, 3) and (image[..., 0] == image[..., 2]).all()


def test_unicode_and_spaces_in_paths(camvid_folders):
    moved = camvid_folders.rename(camvid_folders.parent / "Straßen 街")
    assert camvid(moved, "train")[0].label.shape == (24, 40)


def test_colour_uses_the_palette_and_draws_ignored_pixels_black(camvid_folders):
    dataset = camvid(camvid_folders, "train")
    ids = np.array([[0, 8, 255]], np.uint8)
    assert dataset.colour(ids).tolist() == [[[128, 128, 128], [64, 0, 128], [0, 0, 0]]]


def test_a_dataset_of_ones_own():
    table = ClassTable(
        names=("off", "on"),
        palette=((0, 0, 0), (255, 255, 255)),
        official_ids=(10, 20),
        label_ids={3: 0, 4: 1, 0: 255},
        official_void=99,
    )
    dataset = SegmentationDataset(name="lamps", split="train", files=[], table=table)
    raw = np.array([[0, 3, 4]], np.uint8)
    assert dataset.table.train_ids(raw).tolist() == [[255, 0, 1]]
    assert dataset.encode_prediction(np.array([[255, 0, 1]], np.uint8)).tolist() == [[99, 10, 20]]
    assert (dataset.classes, dataset.ignore_index, len(dataset)) == (("off", "on"), 255, 0)


def test_datasets_imports_nothing_else_of_ours():
    folder = Path(datasets.__file__).parent
    ours = {entry.name for entry in folder.parent.iterdir() if entry.is_dir()} | {"train_seg", "train_imagenet", "eval"}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module]
            else:
                continue
            rooms = {module.split(".")[0] for module in modules} & ours
            assert rooms <= {"datasets"}, f"{path} imports {rooms}"


def test_datasets_knows_no_configuration_key():
    """No group.key or group=choice: messages name arguments, or keys passed in by the caller."""
    folder = Path(datasets.__file__).parent
    groups = {entry.name for entry in (folder.parent / "configs").iterdir() if entry.is_dir()} | {"init", "resume"}
    assert {"data", "sampler"} < groups
    key = re.compile(rf"(?<![\w./])({'|'.join(sorted(groups))})(\.(?!py\b)[a-z_]+|=\w)")
    assert key.search("set data.root=DIR") and key.search("sampler=uniform") and not key.search("(docs/data.md)")
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                assert not key.search(node.value), f"{path}:{node.lineno} names {key.search(node.value)[0]}"
