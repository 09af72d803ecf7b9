"""Files stay inside the user's folder; errors name the key of a folder, and the file that could not be written."""

import os
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from engine.checkpoint import files as checkpoint
from engine.process.output_files import writable_file, writable_folder, write_figure, write_file, write_png
from scripts.predict import write_classes
from tests.engine.checkpoint.test_files import files_of_at_most
from tests.runs import REPOSITORY


def test_a_folder_that_cannot_be_written_to_is_named_with_its_key(tmp_path):
    assert writable_folder("predictions", tmp_path / "a" / "b").is_dir()
    (tmp_path / "file").touch()
    for folder, reason in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "a", "Not a directory")):
        expected = rf"predictions: {folder} is not a writable folder \({reason}\); give another with predictions="
        with pytest.raises(ValueError, match=expected):
            writable_folder("predictions", folder)


def test_a_device_is_no_place_for_a_file(tmp_path):
    """Root may replace a device by a file, and containers often run as root: results=/dev/null did so."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match=f"^results={tmp_path / 'pipe'} is a device: give another file"):
        writable_file("results", tmp_path / "pipe")


def test_every_file_that_the_disk_does_not_take_is_named(tmp_path):
    """Both opening it and writing to it may fail. No part of it is left."""
    pixels, palette = np.zeros((64, 64), np.uint8), np.arange(768, dtype=np.uint8).reshape(256, 3)
    pixels[::3, 1::5] = 7
    writers = {
        "a.txt": lambda path: write_file(path, 100 * "ä"),
        "a.bin": lambda path: write_file(path, bytes(101)),
        "a.png": lambda path: write_png(path, np.stack(3 * [pixels], axis=2)),
        "ids.png": lambda path: write_png(path, pixels, palette),
        "figure.png": lambda path: write_figure(path, Figure((1, 1)), dpi=50),
        "classes.json": lambda path: write_classes(path, network),
        "model.pt": lambda path: checkpoint.write_alone(path, {"w": torch.zeros(100)}),
    }
    network = SimpleNamespace(label_ids=np.arange(2), classes=["road", "sky"], palette=np.zeros((2, 3), int))
    (tmp_path / "b").touch()
    for name, writer in writers.items():
        path = tmp_path / name
        with files_of_at_most(40), pytest.raises(OSError, match=f"File too large.*{path}|{path}.*: File too large"):
            writer(path)
        assert not path.exists()
        with pytest.raises(OSError, match=f"{tmp_path / 'b' / name}"):
            writer(tmp_path / "b" / name)
        writer(path)
    assert (tmp_path / "a.txt").read_text("utf-8") == 100 * "ä"
    with Image.open(tmp_path / "ids.png") as stored:
        assert stored.mode == "P" and np.array_equal(np.asarray(stored), pixels)
        assert stored.getpalette() == palette.flatten().tolist()


def test_only_one_place_writes_files():
    """Commands that users run write by `engine.process.output_files`, so that no message lacks the file's name."""
    files = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")]
    files += [
        path for task in ("segmentation", "classification") for path in (REPOSITORY / "engine" / task).glob("*.py")
    ]
    direct = re.compile(r"\.(write_text|write_bytes|savefig|imwrite)\(|open\([^)]*, \"[wax]|torch\.save\(")
    found = {path.relative_to(REPOSITORY).as_posix() for path in files if direct.search(path.read_text())}
    assert not found
