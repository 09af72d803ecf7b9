"""Checkpoints of every earlier version load, evaluate and resume; malformed ones are refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from datasets import synthetic
from engine.checkpoint import files as checkpoint
from engine.checkpoint.migrations import FORMAT, SEGMENTATION_ONLY, migrated
from engine.checkpoint.random_states import restore_random_states
from engine.configuration import config as cfg
from engine.distributed import World
from engine.schema.optim import SGD, Poly
from engine.schema.segmentation import SegmentationRun
from eval import evaluate
from tests.runs import composed, run_config
from train_seg import train

OLDEST = Path(__file__).parent / "old_checkpoints" / "b0b34fd.pt"  # the commit that wrote it
SCORES = (0.02154218330902728, 0.2150651737555832)  # its mIoU and pixel accuracy, by that commit


def old_state(**more) -> dict:
    """A state in the format before tasks, with all that an evaluation needs."""
    config = cfg.plain(run_config())
    network = {"w": torch.arange(3.0)}
    state = {"format": SEGMENTATION_ONLY, "step": 3, "config": config, "classes": ["road", "sky"], "network": network}
    return {**state, **more}


def loaded(tmp_path: Path, state: dict) -> dict:
    """The state, written and read back."""
    torch.save(state, tmp_path / "last.pt")
    return checkpoint.load(tmp_path / "last.pt")


def test_a_checkpoint_from_before_there_were_tasks_is_of_a_segmentation(tmp_path):
    before = old_state(palette=[[0, 0, 0], [1, 2, 3]], total_steps=9)
    state = loaded(tmp_path, before)
    assert (state["format"], state["task"]) == (FORMAT, "segmentation")
    assert cfg.of_checkpoint(state, SegmentationRun, "last.pt") == run_config()
    assert torch.equal(state["network"]["w"], before["network"]["w"])
    same = ("step", "config", "classes", "palette", "total_steps")
    assert {key: state[key] for key in same} == {key: before[key] for key in same}
    assert state.keys() == before.keys() | {"task", "skipped_images"} and state["skipped_images"] == 0
    assert loaded(tmp_path, old_state(skipped_images=4))["skipped_images"] == 4


def configuration_of(tmp_path: Path, state: dict) -> SegmentationRun:
    return cfg.of_checkpoint(loaded(tmp_path, state), SegmentationRun, "last.pt")


@pytest.mark.parametrize("format", [FORMAT, SEGMENTATION_ONLY])
def test_a_checkpoint_from_before_there_was_a_key_for_it_does_not_antialias(tmp_path, format):
    state = old_state(format=format, task="segmentation", skipped_images=0)
    assert configuration_of(tmp_path, state) == run_config() and run_config().data.antialias
    del state["config"]["data"]["antialias"]
    assert configuration_of(tmp_path, state) == run_config("data.antialias=false")
    another_task = {"format": FORMAT, "task": "shapes", "config": {"data": {"name": "shapes"}}}
    assert migrated(another_task) is another_task


def test_a_checkpoint_from_before_there_were_samplers_and_schedules_had_the_only_ones(tmp_path):
    before, by_class = old_state(), run_config("sampler=class_uniform")
    del before["config"]["sampler"]
    assert configuration_of(tmp_path, before) == run_config("sampler=uniform")
    assert configuration_of(tmp_path, old_state(config=cfg.plain(by_class))) == by_class
    before["config"]["optim"] = {"lr": 0.3, "momentum": 0.8, "weight_decay": 0.1, "nesterov": True, "power": 2.0}
    del before["config"]["lr_schedule"]
    config = configuration_of(tmp_path, before)
    assert config.optim == SGD(lr=0.3, momentum=0.8, weight_decay=0.1, nesterov=True)
    assert config.lr_schedule == Poly(power=2.0)


@pytest.mark.parametrize("compiles, now", [(False, "activations"), (True, "blocks")])
def test_selective_checkpointing_is_replaced_and_that_is_said(tmp_path, caplog, compiles, now):
    state = old_state()
    state["config"]["trainer"] |= {"recompute": "selective", "compile": compiles}
    with caplog.at_level("INFO"):
        assert configuration_of(tmp_path, state).trainer.recompute == now
    assert f"recompute={now}" in caplog.text


def test_a_checkpoint_from_before_there_were_ranks_continues_its_random_numbers(tmp_path, caplog):
    """It holds the states of all devices of one process, which computed on the first."""
    torch.manual_seed(5)
    devices = [torch.arange(16, dtype=torch.uint8) + i for i in range(2)]
    random = {"cpu": torch.get_rng_state(), "cuda": []}
    expected = torch.rand(3)
    state = loaded(tmp_path, old_state(random=random))
    torch.manual_seed(123)
    restore_random_states(state["random"], World())
    assert torch.equal(torch.rand(3), expected) and not caplog.records
    of_devices = loaded(tmp_path, old_state(random={**random, "cuda": devices}))["random"]["cuda"]
    assert len(of_devices) == 1 and torch.equal(of_devices[0], devices[0])
    of_ranks = {"cpu": [torch.tensor([rank], dtype=torch.uint8) for rank in range(3)], "cuda": []}
    assert loaded(tmp_path, old_state(random=of_ranks))["random"] == of_ranks  # as they are: one state for each rank


def test_neither_the_present_format_nor_the_given_state_is_changed():
    present = {"format": FORMAT, "step": 1}
    assert migrated(present) is present and present == {"format": FORMAT, "step": 1}
    before = old_state(random={"cpu": torch.zeros(3), "cuda": []})
    del before["config"]["sampler"]
    unchanged = repr(before)
    migrated(before)
    assert repr(before) == unchanged


@pytest.mark.parametrize(
    "key, value",
    [
        *(("config", value) for value in (None, "norm: std")),
        *(("format", value) for value in (None, ["inplace-abn/2"], "inplace-abn-segmentation/0")),
        ("classes", None),
    ],
)
def test_malformed_content_is_left_to_the_check(tmp_path, key, value):
    """Which names the file and the key."""
    without = old_state()
    del without[key]
    for state in ({**without, key: value}, without):
        with pytest.raises(ValueError, match=f"^checkpoint {tmp_path / 'last.pt'} has .*{key}.*: expected "):
            loaded(tmp_path, state)


def test_malformed_groups_are_left_to_the_check_of_the_configuration(tmp_path):
    state = loaded(tmp_path, old_state(config={"data": 5, "optim": 5}))
    assert state["config"]["data"] == state["config"]["optim"] == 5


@pytest.mark.parametrize(
    "random",
    [None, [1], {"cpu": 5}, {"cuda": 5}, {"cpu": torch.zeros(2), "cuda": None}, {"cpu": torch.zeros(2), "cuda": 5}],
    ids=str,
)
def test_malformed_random_states_do_not_keep_a_checkpoint_from_evaluation(tmp_path, random):
    """They only matter when a run resumes."""
    assert loaded(tmp_path, old_state(random=random))["step"] == 3


def with_the_keys_of(file: Path, run_dir: Path) -> DictConfig:
    """The config that the run's command line composes today."""
    before = checkpoint.read(file)["config"]
    power = before["optim"].pop("power")
    today = composed("train_seg", f"lr_schedule.power={power}", "data.antialias=false")
    return OmegaConf.merge(today, before, {"run_dir": str(run_dir), "resume": "auto"})


def test_an_old_checkpoint_evaluates_as_it_did(tmp_path):
    options = ("workers=0", "device=cpu", f"results={tmp_path / 'results.json'}")
    synthetic(None, "val")  # an evaluation does not draw it
    results = evaluate(composed("eval", f"checkpoint={OLDEST}", *options))
    found = (results["miou"], results["pixel_accuracy"])
    assert results["images"] == 40 and found == pytest.approx(SCORES, abs=1e-3)  # other processors round


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_the_run_of_an_old_checkpoint_continues_to_its_end(tmp_path):
    before = checkpoint.read(OLDEST)
    last = tmp_path / "checkpoints" / "last.pt"
    last.parent.mkdir()
    shutil.copy(OLDEST, last)
    with torch.backends.mkldnn.flags(enabled=False):  # github.com/uxlfoundation/oneDNN/issues/6035, see CONTRIBUTING
        train(with_the_keys_of(OLDEST, tmp_path))
    state, records = checkpoint.load(last), (tmp_path / "metrics.jsonl").read_text().splitlines()
    steps = [record["step"] for record in map(json.loads, records) if record["kind"] == "train"]
    assert steps == list(range(before["step"] + 1, before["total_steps"] + 1)) and len(steps) > 1
    assert (state["format"], state["task"], state["step"]) == (FORMAT, "segmentation", before["total_steps"])
    assert state["ema_updates"] == before["ema_updates"] + len(steps)
    for name, weights in before["network"].items():
        if name.endswith(".weight"):
            assert not torch.equal(state["network"][name], weights), name
    # It really resumes: momentum and learning rate are the old run's.
    assert state["scheduler"]["last_epoch"] == before["scheduler"]["last_epoch"] + len(steps)
    assert json.loads((tmp_path / "results.json").read_text())["checkpoint"] == str(last)
