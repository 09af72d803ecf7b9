"""Traces of a step on fake tensors, judged by PyTorch's own tracker of memory and by the same step on real tensors."""

import gc
import warnings
import weakref

import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker

from engine.process.distributed import World, data_parallel
from engine.training import planner
from engine.training.loop import accumulate_gradients
from engine.training.planner import FakeTensors, fake_step, step_memory, take_optimizer_step
from keepless.made_tensors import MadeTensors
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from tests import runs
from tests.norms import IN_PLACE, STRATEGIES

CROPS, SIZE = 4, 128
NORMS = ("std", "checkpoint", "checkpoint_xhat", "inplace_1", "inplace")


def tracked(config) -> dict[str, int]:
    """Bytes at the peak of the second step, by kind, as PyTorch's tracker counts them."""
    with FakeTensors():
        learner, loss, minibatch, _ = fake_step(config, CROPS, SIZE)
        learner.optimizer.zero_grad()
        tracker = MemTracker()
        tracker.track_external(learner.network, learner.optimizer, minibatch["image"], minibatch["label"])
        with tracker:
            accumulate_gradients(learner, loss, minibatch, CROPS, World())
            take_optimizer_step(learner)
    (of_device,) = tracker.get_tracker_snapshot("peak").values()
    return {getattr(kind, "value", kind): size for kind, size in of_device.items()}


@pytest.mark.table
@pytest.mark.parametrize(
    "overrides",
    [
        "norm=std trainer.recompute=blocks",
        "norm=inplace body=revnet_tiny",
        *(
            pytest.param(slow, marks=pytest.mark.slow)
            for slow in (
                *("norm=std", "norm=inplace", "norm=std optim=adamw", "norm=std trainer.recompute=activations"),
                "norm=std body=revnet_tiny",
            )
        ),
        *(pytest.param(f"norm={norm} trainer.precision=bfloat16", marks=pytest.mark.slow) for norm in NORMS),
    ],
)
def test_pytorch_s_tracker_finds_the_same_peak_to_the_byte(overrides, monkeypatch):
    """It counts a new tensor for each sum of gradients, which autograd computes in place on real tensors."""
    monkeypatch.setattr("keepless.made_tensors.engine_adds", lambda: False)
    config = runs.run_config("body=resnext_tiny", "norm.backend=eager", "optim.fused=true", *overrides.split())
    config.body.structure = [1] * len(config.body.structure)
    trace = step_memory(config, CROPS, SIZE)
    judged = tracked(config)
    assert trace.peak == judged["Total"]
    assert trace.at_peak["weights"] == judged["Parameter"] + judged["Buffer"]
    assert (trace.at_peak["momentum"], trace.at_peak["images"]) == (judged["Optstate"], judged["Other"])


@pytest.mark.table
@pytest.mark.parametrize("body, norm", [("resnext_tiny", "checkpoint"), ("revnet_tiny", "inplace")])
def test_a_real_step_saves_what_a_trace_says(body, norm):
    config = runs.run_config(f"norm={norm}", f"body={body}", "norm.backend=eager")
    learner, loss, minibatch, _ = fake_step(config, CROPS, SIZE)
    images, labels = minibatch["image"], minibatch["label"]
    kept = kept_bytes(learner.network, lambda: loss(learner.forward(images), labels), [images, labels])
    assert step_memory(config, CROPS, SIZE).kept == kept


def test_averaged_weights_are_a_second_copy_of_the_weights_made_without_a_warning():
    """PyTorch would warn only once per process, so another test may have had its warning: here it always warns."""
    averaged = ("trainer.ema_decay=0.9", "lr_schedule=multistep", "lr_schedule.warmup_steps=500")  # whatever the rate
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            trace = step_memory(runs.run_config("body=resnext_tiny", *averaged), CROPS, SIZE)
    finally:
        torch.set_warn_always(False)
    assert trace.at_peak["average"] == trace.at_peak["weights"]


def test_nothing_of_a_trace_stays(monkeypatch):
    networks = []

    def make(*arguments):
        step = fake_step(*arguments)
        networks.append(weakref.ref(step[0].network))
        return step

    monkeypatch.setattr(planner, "fake_step", make)
    step_memory(runs.run_config("body=resnext_tiny", "norm.backend=eager"), CROPS, SIZE)
    gc.collect()
    assert networks[0]() is None


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_memory_inside_operators_is_under_a_tenth(norm):
    """The backward pass of batch normalisation has such memory."""
    config = runs.run_config(f"norm={norm}", "body=resnext_tiny", "norm.backend=eager")
    trace = step_memory(config, 4, 512)
    learner, loss, minibatch, _ = fake_step(config, 4, 512)

    def step() -> None:
        learner.optimizer.zero_grad()
        accumulate_gradients(learner, loss, minibatch, 4, World())
        take_optimizer_step(learner)

    step()
    learner.optimizer.zero_grad()
    planned = sum(trace.at_peak[kind] for kind in ("gradients", "activations", "temporary"))
    assert 0.9 < planned / peak_bytes(step, "cpu") <= 1


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("strategy", IN_PLACE)
def test_a_plan_of_fused_norms_has_no_tensor_in_between(strategy, frozen):
    """The forward pass makes one new buffer, the backward pass another (and vectors), as the Triton kernels do."""
    with FakeTensors():
        layer = STRATEGIES[strategy](64, backend="compiled").train(not frozen)
        x = torch.empty((2, 64, 96, 96), requires_grad=True)
        with MadeTensors() as tensors:
            z = layer(x)
            assert z.nbytes <= tensors.peak < 1.01 * z.nbytes
            dz = torch.empty_like(z)
            z.backward(dz)
        assert 3 * z.nbytes <= tensors.peak < 3.01 * z.nbytes  # z, dL/dz, dL/dx


def test_with_several_devices_the_buckets_of_ddp_are_there_throughout(tmp_path):
    """The real step is of one process in a group of one, in which DDP has the same buckets."""
    config = runs.run_config("body=resnext_tiny", "norm.backend=eager", "norm=std")
    trace = step_memory(config, CROPS, SIZE, device_count=2)
    learner, loss, minibatch, resident = fake_step(config, CROPS, SIZE)

    def step() -> None:
        accumulate_gradients(learner, loss, minibatch, CROPS, World())
        learner.optimizer.zero_grad()

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        trained = data_parallel(learner.network, torch.device("cpu"))
        learner.forward = learner.forward.with_network(trained)
        step()
        step()  # which rebuilds the buckets
        measured = peak_bytes(step, "cpu") + resident["gradients"]
    finally:
        torch.distributed.destroy_process_group()
    planned = sum(trace.at_peak[kind] for kind in ("gradients", "activations", "temporary"))
    assert trace.at_peak["gradients"] >= resident["gradients"]
    assert 0.9 < planned / measured <= 1


def test_with_several_devices_another_moment_can_be_the_peak():
    config = runs.run_config("body=resnext_tiny", "norm.backend=eager", "norm=std")
    alone, several = (step_memory(config, 2, 72, devices) for devices in (1, 2))
    assert (alone.place, several.place) == ("backward", "forward")
    assert several.peak > alone.peak - alone.at_peak["gradients"] + several.at_peak["gradients"]


def test_accumulated_gradients_lie_beside_the_buckets():
    """DDP copies them with the last micro-batch."""
    config = runs.run_config("body=resnext_tiny", "norm.backend=eager", "trainer.accumulation_steps=2")
    alone, several = (step_memory(config, CROPS, 64, devices) for devices in (1, 2))
    assert several.peak == alone.peak + alone.at_peak["momentum"]
