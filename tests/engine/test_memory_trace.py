"""Traces of a step on fake tensors against the same step on real ones."""

import gc
import itertools
import json
import weakref

import pytest
import torch

from engine import build
from engine.distributed import World
from engine.learner import Learner
from engine.made_tensors import MadeTensors
from engine.memory_trace import traced
from engine.training_step import Loss, accumulate_gradients
from scripts.bench.measuring import saved_for_backward
from tests import runs

CROPS, SIZE = 3, 64


def made(config, crops: int = CROPS, size: int = SIZE) -> tuple[Learner, Loss, dict]:
    torch.manual_seed(0)
    network = build.segmentation_network(config, classes=5)
    forward = build.forward(config, torch.nn.Identity(), torch.device("cpu")).through(network)
    optimizer = build.optimizer(config.optim, network, config.head_modules)
    scheduler = build.lr_schedule(config.lr_schedule, optimizer, build.schedule_of(config, images=100))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    learner = Learner(network, forward, optimizer, scheduler, scaler, config.trainer.accumulation_steps)
    minibatch = {
        "image": torch.zeros(crops, 3, size, size, dtype=torch.uint8),
        "label": torch.zeros(crops, size, size, dtype=torch.uint8),
    }
    return learner, build.loss(config.loss, 255), minibatch


def counted(config) -> tuple[int, int]:
    """Bytes saved for the backward pass, and the peak beyond what exists before, of a real step."""
    learner, loss, minibatch = made(config)
    learner.network.train()
    _, saved = saved_for_backward(lambda: loss(learner.forward(minibatch["image"]), minibatch["label"]))
    held = {p.untyped_storage()._cdata for p in (*learner.network.parameters(), *minibatch.values())}
    accumulate_gradients(learner, loss, minibatch, CROPS, World())
    learner.step(1.0)
    learner.optimizer.zero_grad()
    with MadeTensors() as real:
        accumulate_gradients(learner, loss, minibatch, CROPS, World())
        learner.gradient_norm()
        learner.step(1.0)
    sizes = (t.untyped_storage().nbytes() for t in saved if t.untyped_storage()._cdata not in held)
    return sum(sizes), real.peak


NORMS = ("std", "checkpoint", "checkpoint_xhat", "inplace_1", "inplace")


@pytest.mark.parametrize(
    "body, norm",
    [
        ("resnext_tiny", "std"),
        ("resnext_tiny", "checkpoint"),
        ("revnet_tiny", "inplace"),
        *(pytest.param("resnext_tiny", norm, marks=pytest.mark.slow) for norm in NORMS[2:]),
    ],
)
def test_a_trace_is_what_a_real_step_takes(body, norm):
    config = runs.run_config(f"norm={norm}", f"body={body}", "norm.backend=eager")
    config.body.structure = [1] * len(config.body.structure)
    trace = traced(lambda: made(config))
    saved, peak = counted(config)
    assert sum(trace.saved.values()) == saved
    changing = ("gradients", "activations", "temporary")
    assert sum(trace.at_peak[kind] for kind in changing) == peak
    learner, _, minibatch = made(config)
    assert trace.saved.keys() <= {name for name, _ in learner.network.named_modules()}
    parameters = sum(p.nbytes for p in learner.network.parameters())
    assert trace.at_peak["weights"] == parameters + sum(b.nbytes for b in learner.network.buffers())
    assert trace.at_peak["momentum"] == parameters
    assert trace.at_peak["images"] == sum(tensor.nbytes for tensor in minibatch.values())


def test_nothing_of_a_trace_stays():
    networks = []

    def make():
        learner, *rest = made(runs.run_config("body=resnext_tiny", "norm.backend=eager"))
        networks.append(weakref.ref(learner.network))
        return learner, *rest

    traced(make)
    gc.collect()
    assert networks[0]() is None


@pytest.mark.parametrize("norm", ["std", "inplace"])
def test_offloaded_every_saved_tensor_moves(norm):
    config, moved = runs.run_config(f"norm={norm}", "body=resnext_tiny", "norm.backend=eager"), []
    learner, loss, minibatch = made(config)
    learner.network.train()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: moved.append(saved.nbytes), lambda _: None):
        loss(learner.forward(minibatch["image"]), minibatch["label"])
    kept, offloaded = traced(lambda: made(config)), traced(lambda: made(config), offloaded=True)
    assert kept.moved == 0 and offloaded.moved == sum(moved) > sum(kept.saved.values())
    assert offloaded.peak < kept.peak and offloaded.at_peak["activations"] < 0.5 * kept.at_peak["activations"]


def allocated_peak(step, folder) -> int:
    """The most that PyTorch's CPU allocator gave out during a step, inside operators too."""
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    profile.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    changes = sorted((e["ts"], e["args"]["Bytes"]) for e in events if e.get("name") == "[memory]")
    return max(itertools.accumulate(change for _, change in changes))


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_memory_inside_operators_is_under_a_tenth(norm, tmp_path):
    """Of batch normalisation's backward pass, for one."""
    config = runs.run_config(f"norm={norm}", "body=resnext_tiny", "norm.backend=eager")
    trace = traced(lambda: made(config, crops=4, size=512))
    learner, loss, minibatch = made(config, crops=4, size=512)
    learner.network.train()

    def step() -> None:
        learner.optimizer.zero_grad()
        accumulate_gradients(learner, loss, minibatch, 4, World())
        learner.gradient_norm()
        learner.step(1.0)

    step()
    learner.optimizer.zero_grad()
    planned = sum(trace.at_peak[kind] for kind in ("gradients", "activations", "temporary"))
    assert 0.9 < planned / allocated_peak(step, tmp_path) <= 1
