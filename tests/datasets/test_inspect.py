"""Every kind of damage is found, named and counted; what can be read is counted exactly."""

import zlib

import numpy as np
import pytest
from PIL import Image

from datasets import SegmentationDataset, camvid, cityscapes, coco_stuff, inspect, vistas
from datasets.inspection import Inspection
from tests import trees

DATASETS = {
    "camvid": (camvid, trees.camvid_folders),
    "cityscapes": (cityscapes, trees.cityscapes),
    "coco_stuff": (coco_stuff, trees.coco_stuff),
    "vistas": (vistas, trees.vistas),
}


def found(dataset: SegmentationDataset, workers: int = 0) -> Inspection:
    return inspect(dataset, workers)


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_good_data_has_no_problem_and_exact_counts(kind, split, tmp_path):
    make, tree = DATASETS[kind]
    dataset = make(tree(tmp_path / "data"), split, strict=False)
    inspection = found(dataset, workers=2 if split == "train" else 0)
    assert inspection.problems == ()
    labels = [dataset.read_label(index) for index in range(len(dataset)) if dataset.files[index].label is not None]
    assert bool(labels) == (split != "test" or kind == "camvid")
    for class_id in range(len(dataset.classes)):
        assert inspection.pixels[class_id] == sum(int((label == class_id).sum()) for label in labels)
        assert inspection.images[class_id] == sum(bool((label == class_id).any()) for label in labels)
    assert inspection.ignored == sum(int((label == 255).sum()) for label in labels)
    assert inspection.pixels.sum() + inspection.ignored == sum(label.size for label in labels)


def test_counts_are_exact_beyond_the_numbers_that_float32_holds(tmp_path):
    """At 22 megapixels, like the largest photographs of Vistas."""
    root = trees.camvid_folders(tmp_path / "camvid")
    label = np.full((4000, 5500), 3, np.uint8)
    label[1234, 567:570] = 7
    trees.write(root / "val" / "labels" / "0001TP_000000.png", label)
    (root / "val" / "labels" / "0001TP_000001.png").unlink()
    inspection = found(camvid(root, "val", strict=False))
    assert inspection.pixels[[3, 7]].tolist() == [4000 * 5500 - 3, 3] and inspection.pixels.sum() == 4000 * 5500


def test_reports_progress_of_all_files(tmp_path):
    seen = []
    dataset = camvid(trees.camvid_folders(tmp_path), "train")
    inspect(dataset, workers=2, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 6) for done in range(1, 7)]


def in_the_middle(change):
    """Replaces the middle half of a file's bytes."""

    def damage(data: bytes) -> bytes:
        quarter = len(data) // 4
        return data[:quarter] + change(data[quarter:-quarter]) + data[-quarter:]

    return damage


DAMAGE = {
    "truncated": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "replaced": lambda data: b"<html>not found</html>",
    "zeroed": in_the_middle(lambda middle: bytes(len(middle))),
    "cut": in_the_middle(lambda middle: b""),
    "repeated": in_the_middle(lambda middle: 2 * middle),
    "reversed": in_the_middle(lambda middle: middle[::-1]),
}
FLIP = in_the_middle(lambda middle: bytes([middle[0] ^ 1]) + middle[1:])  # one bit
FILES = {
    "jpeg image": ("vistas", "training/images/street-000000000000001.jpg", "unreadable image"),
    "png image": ("cityscapes", "leftImg8bit/train/bochum/bochum_000000_000019_leftImg8bit.png", "unreadable image"),
    "label": ("cityscapes", "gtFine/train/bochum/bochum_000000_000019_gtFine_labelIds.png", "unreadable label"),
    "instances": (
        "cityscapes",
        "gtFine/train/bochum/bochum_000000_000019_gtFine_instanceIds.png",
        "unreadable instances",
    ),
    "palette label": ("vistas", "training/labels/street-000000000000001.png", "unreadable label"),
    "unlabelled image": ("cityscapes", "leftImg8bit/test/berlin/berlin_000001_000019_leftImg8bit.png", None),
}
CASES = [(file, damage) for file in FILES for damage in DAMAGE] + [
    (file, "one bit flipped")
    for file in FILES
    if file != "jpeg image"  # has no checksums
]


@pytest.mark.parametrize("file, damage", CASES)
def test_finds_damaged_files_and_counts_the_others(file, damage, tmp_path, capfd):
    kind, name, problem = FILES[file]
    make, tree = DATASETS[kind]
    split = "test" if "test" in name else "train"
    root = tree(tmp_path / "data")
    intact = found(make(root, split))
    path = root / name
    path.write_bytes(DAMAGE.get(damage, FLIP)(path.read_bytes()))
    inspection = found(make(root, split, strict=False))
    assert [(entry.kind, entry.message.startswith(f"{path}: ")) for entry in inspection.problems] == [
        (problem or "unreadable image", True)
    ]
    lost = intact.pixels.sum() + intact.ignored - inspection.pixels.sum() - inspection.ignored
    assert (lost > 0) == ("label" in file.split())
    assert capfd.readouterr() == ("", "")  # what decoders print would break the progress bar


def test_finds_a_pixel_of_a_palette_that_only_the_check_sum_betrays(tmp_path):
    """Pillow silently decodes such files, about one in twenty with a flipped bit. Other windows must fail too."""
    root = trees.coco_stuff(tmp_path / "data")
    dataset = coco_stuff(root, "train")
    path = dataset.files[0].label
    stored = np.asarray(Image.open(path))
    ids = stored.copy()
    row, column = np.argwhere((ids > 91) & (ids < 182))[0]
    ids[row, column] += 1  # another class
    data = path.read_bytes()
    start, end = data.index(b"IDAT") + 4, data.index(b"IEND") - 8
    rows = b"".join(b"\0" + values.tobytes() for values in ids)
    content = zlib.compress(rows + bytes(len(rows)))  # inflates to more than the picture, as damaged codes may
    path.write_bytes(data[: start - 8] + len(content).to_bytes(4, "big") + b"IDAT" + content + data[end:])
    assert (np.asarray(Image.open(path)) != stored).sum() == 1
    for read in (dataset.read_label, lambda index: dataset.undecoded(index)[1][0:1, 0:1]):
        with pytest.raises(ValueError, match=f"{path}: damaged pixels"):
            read(0)
    (problem,) = found(dataset).problems
    assert problem.kind == "unreadable label" and problem.message.startswith(f"{path}: damaged pixels")


def test_finds_sizes_ids_and_files_without_counterparts_in_one_pass(tmp_path):
    root = trees.camvid_folders(tmp_path / "camvid")
    labels, images = root / "train" / "labels", root / "train" / "images"
    trees.write(labels / "0001TP_000000.png", np.zeros((12, 20), np.uint8))
    trees.write(labels / "0001TP_000001.png", np.full((24, 40), 77, np.uint8))
    (labels / "0001TP_000002.png").unlink()
    (images / "0001TP_000003.jpg").unlink()
    inspection = found(camvid(root, "train", strict=False))
    assert [(kind, message.partition(":")[0]) for kind, message in inspection.problems] == [
        ("image without label", str(images / "0001TP_000002.jpg")),
        ("label without image", str(labels / "0001TP_000003.png")),
        ("sizes differ", str(labels / "0001TP_000000.png")),
        ("unknown ids", str(labels / "0001TP_000001.png")),
    ]
    with pytest.raises(ValueError, match="1 of 5 images have no label"):
        camvid(root, "train")  # training needs complete data


@pytest.mark.parametrize("kind, image, label", [
    ("cityscapes", "leftImg8bit/train/aachen/{}_leftImg8bit.png", "gtFine/train/aachen/{}_gtFine_labelIds.png"),
    ("coco_stuff", "train2017/{}.jpg", "annotations/stuff_train2017_pixelmaps/{}.png"),
    ("vistas", "training/images/{}.jpg", "training/labels/{}.png"),
])  # fmt: skip
def test_every_dataset_reports_files_without_counterparts(kind, image, label, tmp_path):
    make, tree = DATASETS[kind]
    root = tree(tmp_path / "data")
    first, second = (entry.name for entry in make(root, "train").files[:2])
    (root / label.format(first)).unlink()
    if kind == "vistas":
        (root / f"training/instances/{first}.png").unlink()  # would be read instead of the label
    (root / image.format(second)).unlink()
    with pytest.raises(ValueError):
        make(root, "train")
    problems = found(make(root, "train", strict=False)).problems
    assert [(kind, message.partition(":")[0]) for kind, message in problems] == [
        ("image without label", str(root / image.format(first))),
        ("label without image", str(root / label.format(second))),
    ]


def test_a_split_in_which_no_image_has_its_label_is_refused(tmp_path):
    root = trees.camvid_folders(tmp_path / "camvid")
    for path in (root / "val" / "labels").iterdir():
        path.rename(path.with_name(f"label_{path.name}"))
    with pytest.raises(ValueError, match="2 of 2 images have no label"):
        camvid(root, "val", strict=False)


def test_labels_beyond_the_challenge_are_no_problem(tmp_path):
    """The label archive covers all images, but images that are not on the lists may be missing."""
    root = trees.coco_stuff(tmp_path / "data")
    (root / "train2017" / "000000000025.jpg").unlink()
    assert found(coco_stuff(root, "train", strict=False)).problems == ()
    (problem,) = found(coco_stuff(root, "train", lists="full", strict=False)).problems
    assert problem.kind == "label without image"


def test_an_error_that_nobody_expected_is_a_problem_of_its_file(tmp_path):
    dataset = camvid(trees.camvid_folders(tmp_path), "train")

    def decode(file, window):
        if "000004" in file.path.name:
            raise RuntimeError("what nobody expected")
        return decode_label(file, window)

    dataset.decode_label, decode_label = decode, dataset.decode_label
    (problem,) = found(dataset).problems
    assert problem.kind == "unexpected error" and "0001TP_000004.png" in problem.message
    assert "RuntimeError: what nobody expected" in problem.message
