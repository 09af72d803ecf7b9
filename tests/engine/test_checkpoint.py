"""Checkpoints: complete or not there, never code, never a wrong network."""

import os
import pickle

import pytest
import torch
from torch import nn

from engine import checkpoint


def test_state_survives(tmp_path):
    path = tmp_path / "checkpoints" / "last.pt"
    checkpoint.save(path, {"step": 3, "network": {"w": torch.arange(4.0)}, "config": {"a": [1, None, "x"]}})
    state = checkpoint.load(path)
    assert state["step"] == 3 and state["config"] == {"a": [1, None, "x"]}
    assert torch.equal(state["network"]["w"], torch.arange(4.0))
    assert [p.name for p in path.parent.iterdir()] == ["last.pt"]


def test_an_interrupted_write_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "last.pt"
    checkpoint.save(path, {"step": 1})

    def fails(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="no space"):
        checkpoint.save(path, {"step": 2})
    assert checkpoint.load(path)["step"] == 1


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


def test_unusable_files_are_named(tmp_path):
    missing, damaged, foreign = tmp_path / "missing.pt", tmp_path / "damaged.pt", tmp_path / "foreign.pt"
    checkpoint.save(damaged, {"network": {"w": torch.randn(1000)}})
    damaged.write_bytes(damaged.read_bytes()[:2000])
    torch.save({"state_dict": {}}, foreign)
    for path, message in ((missing, "does not exist"), (damaged, "damaged"), (foreign, "format None: expected")):
        with pytest.raises(ValueError, match=message) as error:
            checkpoint.load(path)
        assert str(path) in str(error.value)


def test_another_number_of_classes_is_refused(tmp_path):
    state = {"classes": ["road", "sky"], "network": {}}
    with pytest.raises(ValueError, match="2 classes .*road.* has 3 .*a, b, c"):
        checkpoint.load_network(nn.Linear(2, 2), state, ("a", "b", "c"), tmp_path / "last.pt")


def test_the_random_stream_continues(tmp_path):
    network = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=10)
    checkpoint.save(tmp_path / "last.pt", checkpoint.run_state(network, optimizer, scheduler, step=7))
    expected = torch.rand(3)
    torch.manual_seed(123)
    assert checkpoint.restore_run(checkpoint.load(tmp_path / "last.pt"), network, optimizer, scheduler) == 7
    assert torch.equal(torch.rand(3), expected)
