"""Precision and speed switches of train_seg.py: each does what it says."""

import functools
import json
from pathlib import Path

import pytest
import torch

from engine.process.transfers import prefetched
from tests.runs import SHORT, checked
from train_seg import train

FEW = ("body=resnet_cifar_tiny", "body.structure=[1,1,1]", "head.dilations=[2]")  # modules to trace


def train_short(run_dir: Path, *overrides: str) -> None:
    train(checked("train_seg", f"run_dir={run_dir}", *SHORT, "trainer.steps=3", *overrides))


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["std", "inplace"])
def test_compiling_makes_one_graph_for_each_size_of_a_part(tmp_path, monkeypatch, norm):
    """Micro-batches have 3, 2 and 2 crops. No graph breaks, before and after an evaluation. Dynamo traces but does not
    compile: no compiler is needed."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr("engine.training.build.check_compiler", lambda *_, **__: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = ("data.crops_per_minibatch=7", "trainer.accumulation_steps=3", f"norm={norm}", "trainer.compile=true")
    train_short(tmp_path, *FEW, *options, "trainer.evaluate_every_steps=2")
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


def test_a_trace_shows_the_layers_of_the_profiled_steps(tmp_path):
    train_short(tmp_path, *FEW, "trainer.profile=2", "trainer.steps=13")
    events = json.loads((tmp_path / "profile" / "trace.json").read_text())["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert sum(name.startswith("ProfilerStep#") for name in names) >= 2
    assert "BatchNormActivation" in names and "BatchNormActivationBackward" in names


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")
def test_prefetched_minibatches_equal_the_loader_s():
    minibatches = [{"image": torch.full((1000,), n).pin_memory(), "name": str(n)} for n in range(20)]
    seen = [(each["image"].sum(), each["name"]) for each in prefetched(minibatches, torch.device("cuda"))]
    assert [(total.item(), name) for total, name in seen] == [(1000 * n, str(n)) for n in range(20)]
