"""Traces of a step on fake tensors against the same step on real ones."""

import pytest
import torch

from engine import build
from engine.distributed import World
from engine.learner import Learner
from engine.loop import Loss, accumulate_gradients
from engine.made_tensors import MadeTensors
from engine.memory_trace import traced
from scripts.bench.measuring import saved_for_backward
from tests import runs

CROPS, SIZE = 3, 64


def made(config) -> tuple[Learner, Loss, dict]:
    torch.manual_seed(0)
    network = build.segmentation_network(config, classes=5)
    forward = build.forward(config, torch.nn.Identity(), torch.device("cpu")).through(network)
    optimizer = build.optimizer(config.optim, network, config.head_modules)
    scheduler = build.lr_schedule(config.lr_schedule, optimizer, build.schedule_of(config, images=100))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    learner = Learner(network, forward, optimizer, scheduler, scaler, config.trainer.accumulation_steps)
    minibatch = {
        "image": torch.zeros(CROPS, 3, SIZE, SIZE, dtype=torch.uint8),
        "label": torch.zeros(CROPS, SIZE, SIZE, dtype=torch.uint8),
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


@pytest.mark.parametrize("norm", ["std", "checkpoint", "checkpoint_xhat", "inplace_1", "inplace"])
@pytest.mark.parametrize("body", ["resnext_tiny", "revnet_tiny"])
def test_a_trace_is_what_a_real_step_takes(body, norm):
    config = runs.run_config("run_dir=unused", f"norm={norm}", f"body={body}", "norm.backend=eager")
    trace = traced(lambda: made(config))
    saved, peak = counted(config)
    assert sum(trace.saved.values()) == saved
    changing = ("gradients", "activations", "temporary")
    assert sum(trace.at_peak[kind] for kind in changing) == peak
    learner, _, minibatch = made(config)
    parameters = sum(p.nbytes for p in learner.network.parameters())
    assert trace.at_peak["weights"] == parameters + sum(b.nbytes for b in learner.network.buffers())
    assert trace.at_peak["momentum"] == parameters
    assert trace.at_peak["images"] == sum(tensor.nbytes for tensor in minibatch.values())
