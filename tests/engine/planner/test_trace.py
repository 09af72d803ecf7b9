"""Traces of a step on fake tensors against the same step on real ones."""

import gc
import weakref

import pytest
import torch

from engine.distributed import World
from engine.loop import accumulate_gradients
from engine.planner.fit import fake_step
from engine.planner.made_tensors import MadeTensors
from engine.planner.trace import traced
from keepless.saved import kept_bytes
from scripts.evidence.measuring import peak_bytes
from tests import runs

CROPS, SIZE = 3, 128


def counted(config) -> tuple[int, int]:
    """Bytes saved for the backward pass, and the peak beyond what exists before, of a real step."""
    learner, loss, minibatch = fake_step(config, CROPS, SIZE)
    learner.network.train()
    network, images, labels = learner.network, minibatch["image"], minibatch["label"]
    kept = kept_bytes(network, lambda: loss(learner.forward(images), labels), [images, labels])
    accumulate_gradients(learner, loss, minibatch, CROPS, World())
    learner.step(1.0)
    learner.optimizer.zero_grad()
    with MadeTensors() as real:
        accumulate_gradients(learner, loss, minibatch, CROPS, World())
        learner.gradient_norm()
        learner.step(1.0)
    return kept, real.peak


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
    trace = traced(lambda: fake_step(config, CROPS, SIZE))
    saved, peak = counted(config)
    assert sum(trace.saved.values()) == saved
    changing = ("gradients", "activations", "temporary")
    assert sum(trace.at_peak[kind] for kind in changing) == peak
    learner, _, minibatch = fake_step(config, CROPS, SIZE)
    assert trace.saved.keys() <= {name for name, _ in learner.network.named_modules()}
    parameters = sum(p.nbytes for p in learner.network.parameters())
    assert trace.at_peak["weights"] == parameters + sum(b.nbytes for b in learner.network.buffers())
    assert trace.at_peak["momentum"] == parameters
    assert trace.at_peak["images"] == sum(tensor.nbytes for tensor in minibatch.values())


def test_averaged_weights_are_a_second_copy_of_the_weights():
    options = ("trainer.ema_decay=0.9", "lr_schedule=step", "lr_schedule.warmup_steps=500")  # whatever the rate does
    trace = traced(lambda: fake_step(runs.run_config("body=resnext_tiny", *options), CROPS, SIZE))
    assert trace.at_peak["average"] == trace.at_peak["weights"]


def test_nothing_of_a_trace_stays():
    networks = []

    def make():
        step = fake_step(runs.run_config("body=resnext_tiny", "norm.backend=eager"), CROPS, SIZE)
        networks.append(weakref.ref(step[0].network))
        return step

    traced(make)
    gc.collect()
    assert networks[0]() is None


@pytest.mark.parametrize("norm", ["std", "inplace"])
def test_offloaded_every_saved_tensor_moves(norm):
    config, moved = runs.run_config(f"norm={norm}", "body=resnext_tiny", "norm.backend=eager"), []
    learner, loss, minibatch = fake_step(config, CROPS, SIZE)
    learner.network.train()
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: moved.append(saved.nbytes), lambda _: None):
        loss(learner.forward(minibatch["image"]), minibatch["label"])
    kept, offloaded = (traced(lambda: fake_step(config, CROPS, SIZE), offloaded=moves) for moves in (False, True))
    assert kept.moved == 0 and offloaded.moved == sum(moved) > sum(kept.saved.values())
    assert offloaded.peak < kept.peak and offloaded.at_peak["activations"] < 0.5 * kept.at_peak["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_memory_inside_operators_is_under_a_tenth(norm):
    """Of batch normalisation's backward pass, for one."""
    config = runs.run_config(f"norm={norm}", "body=resnext_tiny", "norm.backend=eager")
    trace = traced(lambda: fake_step(config, 4, 512))
    learner, loss, minibatch = fake_step(config, 4, 512)
    learner.network.train()

    def step() -> None:
        learner.optimizer.zero_grad()
        accumulate_gradients(learner, loss, minibatch, 4, World())
        learner.gradient_norm()
        learner.step(1.0)

    step()
    learner.optimizer.zero_grad()
    planned = sum(trace.at_peak[kind] for kind in ("gradients", "activations", "temporary"))
    assert 0.9 < planned / peak_bytes(step, "cpu") <= 1
