"""Precision and speed switches of train_seg.py: each does what it says and changes nothing else."""

import functools
import json
from pathlib import Path

import pytest
import torch

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.process.distributed import World
from engine.process.transfers import prefetched
from engine.training import build
from eval import evaluate
from tests.cuda import NEEDS_CUDA
from tests.runs import SHORT, composed, one_epoch, run_config, same
from train_seg import train

STEPS = 3
# Small steps keep rounding differences small. Four crops, because the head's pooled branch normalises one value per
# crop: of two values, one is always above and one below their mean.
GENTLE = ("data.crops_per_minibatch=4", "optim.lr=1e-3", "norm.backend=eager")
Weights = dict[str, torch.Tensor]


def trained(run_dir: Path, *overrides: str) -> dict:
    """The last checkpoint of a short training."""
    train(composed("train_seg", f"run_dir={run_dir}", *SHORT, *GENTLE, f"trainer.steps={STEPS}", *overrides))
    return checkpoint.load(run_dir / "checkpoints" / "last.pt")


@functools.cache
def initial_weights() -> Weights:
    config = run_config(*SHORT)
    make = functools.partial(assemble.network_of, config, 19)
    return build.learner(config, make, one_epoch(4), World()).network.state_dict()


def moved(weights: Weights) -> torch.Tensor:
    """The difference of all weights from their initial values, as one vector."""
    start = initial_weights()
    assert weights.keys() == start.keys()
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    return torch.cat([(weights[name] - start[name]).flatten() for name in start if not name.endswith(statistics)])


def difference(weights: Weights, others: Weights) -> float:
    """Distance between two trainings' weights, relative to how far the second has moved."""
    return ((moved(weights) - moved(others)).norm() / moved(others).norm()).item()


@pytest.mark.parametrize("norm", ["std", pytest.param("inplace", marks=pytest.mark.slow)])
def test_compiling_makes_one_graph_for_each_size_of_a_part(tmp_path, monkeypatch, norm):
    """Micro-batches have 3, 2 and 2 crops. No graph breaks, before and after an evaluation. Dynamo traces but does not
    compile: no compiler is needed."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr("engine.training.build.check_compiler", lambda *_, **__: None)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    options = ("data.crops_per_minibatch=7", "trainer.accumulation_steps=3", f"norm={norm}", "trainer.compile=true")
    trained(tmp_path, *options, "trainer.evaluate_every_steps=2")
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("norm, recompute", [("std", "none"), ("inplace", "sqrt")])
def test_compiled_by_inductor_it_trains_the_same(tmp_path, double, norm, recompute):
    """float64, as rounding in float32 becomes visible after a few steps."""
    expected = trained(tmp_path / "eager", f"norm={norm}")["network"]
    state = trained(tmp_path / "compiled", f"norm={norm}", f"trainer.recompute={recompute}", "trainer.compile=true")
    assert state["network"]["cls.weight"].dtype == torch.float64
    assert difference(state["network"], expected) < 1e-9


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_deterministic_runs_are_equal_and_evaluated_with_the_arithmetic_of_the_training(tmp_path, device):
    """Runs on CPUs are always equal; there the test checks that PyTorch gets the settings."""
    options = ("trainer.deterministic=true", "trainer.tf32=true", f"trainer.device={device}")
    try:
        first = trained(tmp_path / "a", *options)["network"]
        assert torch.are_deterministic_algorithms_enabled()
        if device != "cpu":
            assert same(first, trained(tmp_path / "b", *options)["network"])
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    last = tmp_path / "a" / "checkpoints" / "last.pt"
    evaluate(composed("eval", f"checkpoint={last}", "workers=0", "device=cpu"))
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32


def test_a_trace_shows_the_layers_of_the_profiled_steps(tmp_path):
    trained(tmp_path, "trainer.profile=2", "trainer.steps=13")
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
