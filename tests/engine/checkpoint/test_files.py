"""Checkpoints: complete or absent, every byte checked, never code, never a wrong network."""

import errno
import os
import pickle
import resource
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from engine.checkpoint import files as checkpoint
from engine.process.console import logger
from tests.runs import same


def state_of(step: int, **parts) -> dict:
    return {"task": "a task", "step": step, "config": {}, "classes": ["road", "sky"], "network": {}, **parts}


def test_a_run_directory_stands_for_its_last_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    last = tmp_path / "run" / "checkpoints" / "last.pt"
    assert checkpoint.file_of("~/run") == tmp_path / "run"  # there is none: the message names what was given
    last.parent.mkdir(parents=True)
    last.touch()
    assert {checkpoint.file_of(place) for place in ("~/run", str(last.parent), str(last))} == {last}


def test_a_checkpoint_leaves_no_file_open(tmp_path):
    before = {*os.listdir("/dev/fd")}
    checkpoint.save(tmp_path / "last.pt", state_of(1))
    assert {*os.listdir("/dev/fd")} <= before


@contextmanager
def files_of_at_most(size: int):
    """For larger files the kernel, and so torch.save, reports the same error as for a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def check_that_step_2_is_not_written(path: Path, previous: Path | None, message: str) -> None:
    """The disk has checkpoints of steps 1 (`path`) and 0 (`previous`); step 2 holds 40,000 bytes of tensors."""
    files = sorted(path.parent.iterdir())
    state = state_of(2, network={"w": torch.randn(9000)}, optimizer=[{"m": torch.randn(500, 2)}, None])
    with pytest.raises(OSError) as error:
        checkpoint.save(path, state, previous)
    for words in (f"{path} of step 2 cannot be written: {message}", "needs 40,000 bytes", "bytes are free there"):
        assert words in str(error.value)
    assert f"the last good checkpoint is kept: {path}, of step 1. Make room" in str(error.value)
    assert sorted(path.parent.iterdir()) == files
    assert checkpoint.load(path)["step"] == 1 and (previous is None or checkpoint.load(previous)["step"] == 0)


@pytest.fixture
def path_and_previous(tmp_path) -> tuple[Path, Path]:
    path, previous = tmp_path / "last.pt", tmp_path / "previous.pt"
    for step in range(2):
        checkpoint.save(path, state_of(step), previous)
    return path, previous


@pytest.mark.parametrize("room", [0, 1, 5000, 8192, 30000, 40000])
def test_a_full_disk_keeps_the_checkpoints_and_is_reported(path_and_previous, room):
    with files_of_at_most(room):
        check_that_step_2_is_not_written(*path_and_previous, message="File too large")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_quota_keeps_the_checkpoint(path_and_previous, monkeypatch, call):
    monkeypatch.setattr(os, call, Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded")))
    check_that_step_2_is_not_written(path_and_previous[0], None, message="Disk quota exceeded")


@pytest.mark.parametrize("number, times", [(errno.EINVAL, 1), (errno.EACCES, 1), (errno.EIO, 2)])
def test_a_disk_that_cannot_flush_folders_is_named_and_the_checkpoint_stays(
    path_and_previous, monkeypatch, caplog, number, times
):
    """As CIFS, 9p or a virtual machine's shared folders. That the bytes of the file cannot be flushed is an error."""
    flush = os.fsync

    def of_files(opened: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{opened}"):
            raise OSError(number, os.strerror(number))
        flush(opened)

    monkeypatch.setattr(os, "fsync", of_files)
    for step in (2, 3):
        checkpoint.save(path_and_previous[0], state_of(step))
    assert checkpoint.load(path_and_previous[0])["step"] == 3
    assert len(caplog.messages) == times and os.strerror(number) in caplog.text


def test_a_first_checkpoint_without_room_leaves_nothing(tmp_path):
    path = tmp_path / "checkpoints" / "last.pt"
    with files_of_at_most(100), pytest.raises(OSError, match="of step 1 cannot be .*; there is no earlier checkpoint"):
        checkpoint.save(path, {"step": 1, "w": torch.randn(100)}, path.with_name("previous.pt"))
    assert not list(path.parent.iterdir())
    with pytest.raises(AttributeError, match="lambda|local"):  # not taken for a full disk
        checkpoint.save(path, {"step": 1, "code": lambda: None})
    checkpoint.save(path, {"step": 2})
    assert list(path.parent.iterdir()) == [path]
    checkpoint.save(path, state_of(2))
    best = path.with_name("best.pt")
    for kept in (False, True):
        if kept:
            checkpoint.save(best, state_of(1))
        with files_of_at_most(100), pytest.raises(OSError, match=f"best.pt of .*is kept: {path}, of step 2. Make room"):
            checkpoint.save(best, {"step": 3, "w": torch.randn(100)})


def is_noticed(path: Path, content: bytes, good: dict) -> bool:
    """Whether a damaged file is refused by name. If not, only padding changed, and it must give the good state."""
    path.write_bytes(content)
    try:
        state = checkpoint.load(path)
    except ValueError as error:
        assert str(path) in str(error) and "damaged" in str(error)
        return True
    assert state.keys() == good.keys() and state["step"] == good["step"] and same(state["network"], good["network"])
    return False


def test_no_changed_byte_and_no_lost_end_goes_unnoticed(tmp_path):
    path = tmp_path / "checkpoints" / "last.pt"
    network, config = {"a": torch.randn(30), "b": torch.arange(5)}, {"a": [1, None, "x"]}
    checkpoint.save(path, state_of(3, network=network, config=config))
    good, content = checkpoint.load(path), path.read_bytes()
    assert good["config"] == config and same(good["network"], network)
    assert list(path.parent.iterdir()) == [path]
    flipped = [content[:i] + bytes([content[i] ^ 0xFF]) + content[i + 1 :] for i in range(0, len(content), 5)]
    assert 5 * sum(is_noticed(path, damaged, good) for damaged in flipped) > 30 * 4 + 5 * 8  # in tensors, and elsewhere
    for size in range(0, len(content), 29):
        assert is_noticed(path, content[:size], good)
        is_noticed(path, content[:size] + bytes(len(content) - size), good)  # as some filesystems do


class Payload:
    def __reduce__(self):
        return os.mkdir, ("executed",)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, monkeypatch, write):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "last.pt"
    write({"format": checkpoint.FORMAT, "payload": Payload()}, path)
    with pytest.raises(ValueError, match="last.pt"):
        checkpoint.load(path)
    assert not (tmp_path / "executed").exists()


def test_the_checkpoint_that_is_probably_meant_is_named(tmp_path):
    (tmp_path / "best.pt").touch()
    with pytest.raises(ValueError, match=f"best.pth does not exist: expected {tmp_path}/best.pt, perhaps$"):
        checkpoint.load(tmp_path / "best.pth")


def test_unusable_files_are_named(tmp_path):
    path = tmp_path / "last.pt"
    with pytest.raises(ValueError, match=f"{path} does not exist"):
        checkpoint.load(path)
    checkpoint.save(path, {"network": {"w": torch.randn(1000)}})
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=f"{path} is damaged.*restore it from a copy"):
        checkpoint.load(path)
    foreign = "is not of this project: .* scripts.convert_checkpoint .* init.format=standard_bn"
    contents = {"has format 'abn/1': expected": {"format": "abn/1"}, foreign: {"state_dict": {}}}
    for problem, content in [*contents.items(), (foreign, [1]), (foreign, None)]:
        torch.save(content, path)
        with pytest.raises(ValueError, match=f"^checkpoint {path} {problem}"):
            checkpoint.load(path)
    (tmp_path / "log.txt").write_text("class IoU\n")
    with pytest.raises(ValueError, match="log.txt is a text that begins with b'class IoU.*, not a checkpoint"):
        checkpoint.load(tmp_path / "log.txt")
    with pytest.raises(ValueError, match=f"^checkpoint {tmp_path} is a folder: expected "):
        checkpoint.load(tmp_path)


def test_only_the_number_of_unnamed_classes_is_compared(tmp_path, caplog, monkeypatch):
    """Numbers may be names, too, such as a user's folders: without the mark they are compared."""
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO", logger=logger.name)
    state = state_of(1, classes=["0", "1"], network=nn.Linear(2, 2).state_dict())

    def load(state: dict, *classes: str) -> nn.Module:
        return checkpoint.load_network(lambda: nn.Linear(2, 2), state, classes, tmp_path / "net.pt")

    with pytest.raises(ValueError, match="has 2; class 1 is 1 in the checkpoint and sky in the dataset: evaluate it"):
        load(state, "0", "sky")
    unnamed = {**state, "unnamed_classes": True}
    with pytest.raises(ValueError, match="was trained on 2 classes .* has 1; .* is 0 "):
        load(unnamed, "road")
    load(unnamed, "0", "1")
    assert not caplog.messages
    assert torch.equal(load(unnamed, "road", "sky").weight, state["network"]["weight"])
    [line] = {*caplog.messages}  # one handler may be there twice
    assert line.endswith("net.pt does not name its 2 classes: only their number was compared")
    with pytest.raises(ValueError, match="2 classes, and .* two orders: 10, 9 as text, 9, 10 as "):
        load(unnamed, "10", "9")
    load(unnamed, "9", "10")
    checkpoint.load_network(lambda: nn.Linear(2, 2), unnamed, ("10", "9"), tmp_path / "net.pt", order_key=None)
    with pytest.raises(ValueError, match="class 0 is 9 in the checkpoint and 10 in .*: give class_order=numbers or t"):
        load({**state, "classes": ["9", "10"]}, "10", "9")


def test_a_lone_file_is_complete_or_absent_and_others_stay(tmp_path, monkeypatch):
    partial_files = [tmp_path / "last.pt.partial", tmp_path / "net.pt.partial"]
    for partial_file in partial_files:
        partial_file.write_bytes(b"half")
    path = tmp_path / "net.pt"
    checkpoint.write_alone(path, {"w": torch.arange(4.0)})
    with files_of_at_most(20_000), pytest.raises(OSError, match=f"File too large: '{path}'"):
        checkpoint.write_alone(path, {"w": torch.randn(9000)})
    assert sorted(tmp_path.iterdir()) == [*partial_files[:1], path, *partial_files[1:]]
    assert torch.equal(torch.load(path)["w"], torch.arange(4.0))

    rename = os.replace

    def after_a_step_of_the_training(unfinished: Path, final: Path) -> None:
        if final == path:
            checkpoint.save(tmp_path / "last.pt", state_of(1))  # removes the training's partial files
        rename(unfinished, final)

    monkeypatch.setattr(os, "replace", after_a_step_of_the_training)
    checkpoint.write_alone(path, {"w": torch.zeros(2)})
    assert torch.equal(torch.load(path)["w"], torch.zeros(2))


def test_a_network_that_does_not_fit_is_a_message(tmp_path):
    state = state_of(1, network=nn.Linear(2, 2).state_dict())
    with pytest.raises(ValueError, match=f"^checkpoint {tmp_path}.* the network of its configuration"):
        checkpoint.load_network(lambda: nn.Linear(3, 2), state, ("road", "sky"), tmp_path / "last.pt")
    state["network"]["more"] = torch.ones(1)
    with pytest.raises(ValueError, match=r"does not fit the network of its configuration: [^$]*Unexpected key.*more"):
        checkpoint.load_network(lambda: nn.Linear(2, 2), state, ("road", "sky"), tmp_path / "last.pt")
