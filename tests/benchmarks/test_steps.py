"""The benchmark of training steps: what it runs and counts. No test asserts a time."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from benchmarks import steps
from benchmarks.steps import DEFAULT, TrainingArguments
from scripts.reports.papers import configured_as
from tests.benchmarks.records import measured

pytestmark = pytest.mark.slow


def test_a_record_has_times_and_bytes_of_what_ran_and_reasons_for_the_rest(in_process, monkeypatch, tmp_path):
    """A whole run on tiny crops: three switches that run, and one that cannot work."""
    options = ["recipe=null", "threads=1", "crop_size=48", "crops=4", "starts=1", "rounds=2", "parts=[switches]"]
    names = ("trainer.accumulation_steps=2", "optim.fused=false")
    monkeypatch.setitem(steps.GROUPS, "switches", (DEFAULT, *names, "optim.lr=1e30"))
    call, text = measured("steps", tmp_path, *options, 'overrides=["norm.backend=eager"]')
    rows = {row["switch"]: row for row in call["items"]["start1"]}
    for name in (DEFAULT, *names):
        row = rows[name]
        assert len(row["times_ms"]) == 2 and row["loss"] > 0
        assert row["peak_bytes"] > row["saved_bytes"] > 0 and row["process_mib"] > 100
    # Half of the crops at a time, beside what does not depend on them.
    assert 0.5 <= rows[names[0]]["saved_bytes"] / rows[DEFAULT]["saved_bytes"] < 0.6
    assert rows["optim.lr=1e30"]["reason"].startswith("failed: FloatingPointError: the loss is nan")
    assert "- optim.lr=1e30, 1: failed: FloatingPointError: the loss is nan" in text


@pytest.mark.parametrize("switch, searches", [(DEFAULT, True), ("trainer.deterministic=true", False)])
def test_convolutions_use_the_algorithms_of_a_training(monkeypatch, switch, searches):
    """cuDNN looks for the fastest: `engine.training.preparation.open_run` says so too."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", not searches)
    monkeypatch.setattr(steps, "synthetic", lambda *_: SimpleNamespace(classes=["road"]))
    monkeypatch.setattr(steps.build, "learner", Mock(side_effect=KeyboardInterrupt))
    try:
        with pytest.raises(KeyboardInterrupt):
            steps.Training(TrainingArguments(recipe=None, crop_size=48).words(), switch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.backends.cudnn.benchmark == searches


def test_every_switch_changes_the_training_that_it_is_compared_with():
    shared = TrainingArguments(device="cuda").words()
    default = configured_as(None, *shared)
    overrides = {
        override
        for switches in steps.GROUPS.values()
        for switch in switches
        for override in switch.split()
        if "=" in override
    }
    for override in overrides:
        assert configured_as(None, *shared, override) != default, override
