"""Files stay inside the user's folder; errors name the key of a folder, and the file that could not be written."""

import errno
import os
import re
import signal
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from engine.checkpoint import files as checkpoint
from engine.process import output_files
from engine.process.output_files import (
    WrittenBehind,
    claim_folder,
    png,
    writable_file,
    writable_folder,
    write_figure,
    write_file,
)
from engine.process.stopping import errors_for_users
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
    with pytest.raises(ValueError, match=rf"^output={tmp_path}/net.png: expected a folder.* output={tmp_path}/net$"):
        writable_folder("output", tmp_path / "net.png")
    assert not (tmp_path / "net.png").exists()


def test_every_file_that_the_disk_does_not_take_is_named(tmp_path):
    """Both opening it and writing to it may fail. No part of it is left."""
    pixels, palette = np.zeros((64, 64), np.uint8), np.arange(768, dtype=np.uint8).reshape(256, 3)
    pixels[::3, 1::5] = 7
    writers = {
        "a.txt": lambda path: write_file(path, 100 * "ä"),
        "a.bin": lambda path: write_file(path, bytes(101)),
        "ids.png": lambda path: write_file(path, png(pixels, palette)),
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


def test_a_file_is_replaced_only_if_a_mark_says_whose_it_is(tmp_path):
    """Links, to a file or to nowhere, count as what they lead to. Root may replace a device by a file."""
    mine = b'{"dataset": "d", "split": "val", "environment": {}}'
    contents = {"ours": mine, "empty": b"", "other": mine[:30], "labels.png": b"\x89PNG" + mine}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "link").symlink_to("other")
    (tmp_path / "gone").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("ours", "empty", "new"):
        writable_file("report", tmp_path / name, kind="results")
    for name, reason in (
        *((name, "was not written by this command") for name in ("other", "labels.png", "link")),
        *(("gone", "is a link that leads nowhere"), (".", "is a folder"), ("pipe", "is a device: give another file")),
    ):
        with pytest.raises(ValueError, match=f"^report={tmp_path / name} {reason}"):
            writable_file("report", tmp_path / name, kind="results")
    os.link(tmp_path / "ours", tmp_path / "input")
    with pytest.raises(ValueError, match="is the input: give another file"):
        writable_file("report", tmp_path / "ours", tmp_path / "input", kind="results")


def test_a_folder_takes_pictures_beside_others_but_replaces_only_those_on_its_list(tmp_path):
    folder, names = tmp_path / "out", ["a.png", os.fsdecode(b"b/caf\xe9.png")]
    for _ in range(2):
        claim_folder("overlays", folder, names)
        for name in names:
            write_file(folder / name, b"picture")
    (folder / "mine.png").write_bytes(b"label")
    claim_folder("overlays", folder, ["a.png", "c.png"])
    with pytest.raises(ValueError, match=f"^overlays={folder} holds mine.png, which .* or remove them"):
        claim_folder("overlays", folder, ["a.png", "mine.png"])
    (folder / "mine.png").unlink()
    claim_folder("overlays", folder, ["mine.png", *names])
    (folder / "written.json").write_text('{"files": ["a.png"]}')
    with pytest.raises(ValueError, match="written.json was not written by this command"):
        claim_folder("overlays", folder, names)
    (old := tmp_path / "old").mkdir()
    (old / "a.png").symlink_to("nowhere")
    with pytest.raises(ValueError, match="holds a.png, .*no written.json says that a command wrote them"):
        claim_folder("overlays", old, names)
    assert [path.name for path in old.iterdir()] == ["a.png"]


def test_links_are_replaced_and_not_written_through(tmp_path):
    """Also at the name of the unfinished file, where another user may have put them."""
    (victim := tmp_path / "victim").write_text("precious")
    for name in ("soft", ".unfinished.partial"):
        (tmp_path / name).symlink_to(victim)
    for name in ("hard", ".other.partial"):
        os.link(victim, tmp_path / name)
    os.mkfifo(tmp_path / ".pipe.partial")
    for name in ("soft", "hard", "unfinished", "other", "pipe"):
        write_file(tmp_path / name, name)
        assert (tmp_path / name).read_text() == name and not (tmp_path / name).is_symlink()
    assert victim.read_text() == "precious"
    assert {path.name for path in tmp_path.glob(".*")} == {".unfinished.partial", ".other.partial", ".pipe.partial"}


def dies_while_it_writes(path: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_file(Path(path), b"half")


def write_often(path: str) -> None:
    for number in range(200):
        write_file(Path(path), str(number % 10) * 5000)


def test_a_kill_leaves_the_old_file_and_several_writers_complete_ones(tmp_path):
    path = tmp_path / f"{'r' * 250}.json"  # as long as a disk takes
    path.write_bytes(b"old")
    killed = get_context("fork").Process(target=dies_while_it_writes, args=(str(path),))
    killed.start()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL and path.read_bytes() == b"old" and len([*tmp_path.iterdir()]) == 2
    writers = [get_context("fork").Process(target=write_often, args=(str(path),)) for _ in range(3)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        text = path.read_text()
        assert text == "old" or text == text[:1] * 5000
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert [*tmp_path.iterdir()] == [path]


def test_a_disk_without_locks_takes_files(tmp_path, monkeypatch):
    monkeypatch.setattr(output_files.fcntl, "flock", Mock(side_effect=OSError(errno.ENOSYS, "not implemented")))
    write_file(tmp_path / "a.json", "{}")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["{}"]


def test_only_one_place_writes_files():
    """Commands that users run write by `engine.process.output_files`, so that no message lacks the file's name."""
    files = [*REPOSITORY.glob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")]
    files += [
        path for task in ("segmentation", "classification") for path in (REPOSITORY / "engine" / task).glob("*.py")
    ]
    direct = re.compile(r"\.(write_text|write_bytes|savefig|imwrite)\(|open\([^)]*, \"[wax]|torch\.save\(")
    writers = {path.relative_to(REPOSITORY).as_posix() for path in files if direct.search(path.read_text())}
    assert not writers


def test_files_are_written_behind_in_order():
    """The first content is ready last."""
    contents, ready = [], Event()
    with WrittenBehind() as files:
        files.add(lambda: ready.wait(60), lambda content: contents.append(("first", content)), 1)
        files.add(lambda: ready.set(), lambda content: contents.append(("second", content)), 1)
    assert contents == [("first", True), ("second", None)]


@pytest.mark.parametrize("late", [0, 2, 9])
def test_an_error_of_a_file_written_behind_ends_the_writing(late):
    """It is raised by a later call or at the end, also instead of an error of the caller, which came later."""
    numbers = []

    def write(number: int, _: object) -> None:
        if number == 1:
            raise OSError(28, "No space left on device", "b.png")
        numbers.append(number)

    with pytest.raises(OSError, match="'b.png'"), WrittenBehind() as files:
        for number in range(2 + late):
            files.add(lambda: None, partial(write, number), 1)
        raise ValueError("later")
    assert numbers == [0]


@pytest.mark.parametrize("error, expected", [(ValueError, [0, 1, 2]), (KeyboardInterrupt, [0])])
def test_what_waits_is_written_after_an_error_and_not_after_an_interrupt(error, expected, monkeypatch):
    """An interrupt drops what waits; the file that is being made is still written."""
    numbers, begun, interrupted = [], Event(), Event()
    monkeypatch.setattr(output_files, "_WRITERS", 1)

    def first() -> None:
        begun.set()
        interrupted.wait(60)

    with pytest.raises(error):  # noqa: PT012
        files = WrittenBehind()
        monkeypatch.setattr(output_files, "_WRITERS", 9)
        shutdown = files._pool.shutdown

        def ended(**options: bool) -> None:
            shutdown(wait=False, **options)
            interrupted.set()
            shutdown()

        monkeypatch.setattr(files._pool, "shutdown", ended)
        with files:
            files.add(first, lambda _: numbers.append(0), 1)
            for number in (1, 2):
                files.add(lambda: None, lambda _, number=number: numbers.append(number), 1)
            assert begun.wait(60)
            if error is ValueError:
                interrupted.set()
            raise error
    assert numbers == expected


def test_little_waits_to_be_written(monkeypatch):
    """Large contents are written before the call returns."""
    monkeypatch.setattr(output_files, "_MOST_BYTES", 10)
    contents, released = [], Event()
    with WrittenBehind() as files:
        files.add(lambda: released.wait(60), contents.append, 4)
        files.add(released.set, lambda _: contents.append(False), 4)
        files.add(lambda: None, contents.append, 11)
        assert contents == [True, False, None]


def test_a_file_that_cannot_be_replaced_is_named_with_the_cure(tmp_path, monkeypatch):
    """A file with the attribute "immutable": the rename fails, and names the partial file first."""
    monkeypatch.setattr(os, "replace", Mock(side_effect=PermissionError(errno.EPERM, "Operation not permitted", "a")))
    with pytest.raises(SystemExit, match=f"not permitted: '{tmp_path / 'r.json'}': make the .*chattr -i.*start it a"):
        with errors_for_users():
            write_file(tmp_path / "r.json", "{}")
    assert not [*tmp_path.iterdir()]
