import ast
import re
from pathlib import Path

import numpy as np
import pytest

import datasets
from datasets import ClassTable, SegmentationDataset, camvid
from tests import trees


def label_path(root: Path) -> Path:
    return root / "train" / "labels" / "0001TP_000000.png"


def image_path(root: Path) -> Path:
    return root / "train" / "images" / "0001TP_000000.jpg"


def test_ids_outside_the_table(camvid_folders):
    label = np.zeros((24, 40), np.uint8)
    label[3, 4], label[5, 6], label[7, 8] = 12, 200, 254  # inside, 254 marks illegal values
    trees.write(label_path(camvid_folders), label)
    with pytest.raises(ValueError, match=f"^{label_path(camvid_folders)}: contains the ids 12, 200, 254, ") as error:
        camvid(camvid_folders, "train")[0]
    assert "expected only 0-11" in str(error.value) and "Check that" in str(error.value)


@pytest.mark.parametrize("read", [lambda dataset: dataset[0], lambda dataset: dataset.undecoded(0)])
def test_label_of_another_size(camvid_folders, read):
    trees.write(label_path(camvid_folders), np.zeros((24, 41), np.uint8))
    with pytest.raises(ValueError) as error:
        read(camvid(camvid_folders, "train"))
    label, image = label_path(camvid_folders), image_path(camvid_folders)
    message = f"{label}: the label is 41x24 pixels and its image {image} is 40x24; expected the same size. Restore"
    assert str(error.value).startswith(message)


READS = {
    "image": (image_path, lambda dataset: dataset.read_image(0)),
    "label": (label_path, lambda dataset: dataset.read_label(0)),
    "crops": (label_path, lambda dataset: dataset.undecoded(0)),
    "sizes": (label_path, lambda dataset: dataset.size(0)),
    "quick check": (image_path, lambda dataset: datasets.verify(dataset, workers=0)),
    "full check": (image_path, lambda dataset: pytest.fail(datasets.inspect(dataset, workers=0).problems[0].message)),
}


@pytest.mark.parametrize("kind", READS)
def test_where_a_dataset_is_read_the_advice_is_to_restore_the_file(camvid_folders, kind):
    which, read = READS[kind]
    which(camvid_folders).write_bytes(b"")
    with pytest.raises((ValueError, pytest.fail.Exception)) as error:
        read(camvid(camvid_folders, "train"))
    problem = f"{which(camvid_folders)}: the file is empty; expected a PNG or JPEG."
    assert f"{problem} Restore the file from the dataset's archive." in str(error.value)


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
