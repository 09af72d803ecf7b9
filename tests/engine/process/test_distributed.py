"""Several processes compute what one does: the same losses, gradients, statistics, weights and scores."""

import json
import os
import signal
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.checkpoint.run_directory import RunDirectory
from engine.process import distributed
from engine.process.distributed import World, joined
from engine.process.stopping import Preempted
from engine.records.metrics_logger import MetricsLogger
from engine.training import build
from engine.training.loop import train_step
from eval import evaluate
from tests.runs import DRAWN, NARROW_A2, SHORT, checked, one_epoch, run_config, same
from train_seg import train

WORLD_SIZE = 3  # so that shares can differ, a machine can have some of them, and sums depend on their order


def this_world() -> World:
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()


def steps(rank: int, norm: str, order: list[int], parts: int = 1, overrides: tuple[str, ...] = ()) -> dict:
    """Two training steps in float64 on this rank: losses, last gradients, weights, running statistics.

    `order` permutes the crops of each minibatch; each rank splits its share into `parts` micro-batches.
    """
    world, crops = this_world(), len(order)
    sizes = (f"data.crops_per_minibatch={crops}", f"trainer.accumulation_steps={parts}")
    options = (f"norm={norm}", "norm.sync=true", *sizes, *overrides)
    config, outcomes = run_config(*SHORT, *options), []
    generator = torch.Generator().manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        learner = build.learner(config, 5, one_epoch(10), world)
        for _ in range(2):
            images = torch.randint(0, 256, (crops, 3, 48, 48), dtype=torch.uint8, generator=generator)
            labels = torch.randint(0, 6, (crops, 48, 48), dtype=torch.uint8, generator=generator)
            labels[labels == 5] = 255
            share = order[world.rank * crops // world.size : (world.rank + 1) * crops // world.size]
            minibatch = {"image": images[share], "label": labels[share]}
            outcome = train_step(learner, assemble.loss(config.loss), minibatch, crops, world)
            outcomes.append(learner.read(outcome)[:2])
        gradients = {f"gradient of {name}": p.grad for name, p in learner.network.named_parameters()}
        return {"losses and norms": torch.tensor(outcomes), **gradients, **learner.network.state_dict()}
    finally:
        torch.set_default_dtype(torch.float32)


SLOW = pytest.mark.slow("compiles on three ranks")
COMPILED = [
    pytest.param(norm, ("trainer.compile=true", f"trainer.recompute={recompute}"), marks=SLOW)
    for norm, recompute in (("inplace", "none"), ("std", "blocks"), ("inplace", "sqrt"))
]


@pytest.mark.parametrize("norm, overrides", [("inplace", ()), *COMPILED])
def test_shares_of_a_minibatch_step_as_the_whole_one(ranks, norm, overrides):
    """The ranks have 2, 3 and 3 of the eight crops. Only they compile their networks."""
    order = list(range(8))
    assert_equal_to_rounding(ranks.run(steps, norm, order, 1, overrides), steps(0, norm, order))


def unequal_weights(rank: int) -> dict:
    """The weights of a learner, and of its average, whose networks differ from rank to rank."""
    config = run_config(*SHORT, "trainer.ema_decay=0.9")
    config = replace(config, trainer=replace(config.trainer, capture=True))  # on a CPU, where it is refused

    def different_network(*arguments: object) -> torch.nn.Module:
        network = assemble.network_of(*arguments)
        for parameter in network.parameters():
            parameter.data.add_(rank)
        return network

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "CapturedMicroBatches", lambda *_, **__: None)
        patch.setattr(build, "network_of", different_network)
        learner = build.learner(config, 5, one_epoch(10), this_world())
    averages = {f"average of {name}": value for name, value in learner.average.module.named_parameters()}
    return {**dict(learner.network.named_parameters()), **averages}


def test_captured_trainings_begin_with_the_weights_of_the_first_rank(ranks):
    alone = unequal_weights(0)
    assert all(same(state, alone) for state in ranks.run(unequal_weights))


def leaving(process_group: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    with torch.profiler.record_function("gradients leave"):
        return allreduce_hook(process_group, bucket)


def backward_events(rank: int, compiled: bool) -> str:
    """A backward pass in order: "g" for gradients that leave, "c" for a convolution or a compiled graph that starts."""
    wide = ("body.base_channels=[32,32,64]", "head.hidden_channels=8")  # 5 MiB, in buckets of 1 MiB instead of 25
    config = run_config(*SHORT, *wide, "head.out_channels=8", f"trainer.compile={compiled}")
    small_buckets = partial(distributed.DistributedDataParallel, bucket_cap_mb=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "DistributedDataParallel", small_buckets)
        learner = build.learner(config, 5, one_epoch(10), this_world())
    learner.forward.network.register_comm_hook(None, leaving)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    learner.forward(images).main.logits.mean().backward()
    loss = learner.forward(images).main.logits.mean()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    letters = {"gradients leave": "g", "CompiledFunctionBackward": "c", "ConvolutionBackward0": "c"}
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return "".join(letters[event.name] for event in events if event.name in letters)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=SLOW)])
def test_gradients_leave_while_the_backward_pass_runs(ranks, compiled):
    """DDP wraps the compiled network, and PyTorch splits its graph at DDP's buckets."""
    for events in ranks.run(backward_events, compiled):
        assert events.count("g") >= 3 and "gc" in events, events


@pytest.mark.parametrize(
    "norm, recompute",
    [
        ("inplace", "blocks"),
        pytest.param("std", "none", marks=pytest.mark.slow),
        pytest.param("checkpoint", "sqrt", marks=pytest.mark.slow),
    ],
)
def test_micro_batches_of_each_rank_take_the_step_of_the_whole_minibatch(ranks, norm, recompute):
    """Norms see one part at a time, so one process gets the crops in the order of the parts of several.
    In the backward pass of checkpointed blocks, norms exchange their statistics again, while gradients leave.
    """
    parts = 2
    order = torch.arange(2 * WORLD_SIZE * parts)
    together = order.view(WORLD_SIZE, parts, -1).transpose(0, 1).flatten()
    assert together.tolist() != order.tolist()
    state = ranks.run(steps, norm, order.tolist(), parts, (f"trainer.recompute={recompute}",))
    assert_equal_to_rounding(state, steps(0, norm, together.tolist(), parts))


def test_ranks_with_one_crop_each_step_as_one_process(ranks):
    """The head's pooled branch then has one value per channel on each rank, which no norm can use alone."""
    order = list(range(WORLD_SIZE))
    assert_equal_to_rounding(ranks.run(steps, "inplace", order), steps(0, "inplace", order))
    config = run_config(*SHORT, f"data.crops_per_minibatch={WORLD_SIZE}", "norm.sync=true")
    config.check_shares(WORLD_SIZE)
    with pytest.raises(ValueError, match=r"gives 1 crop\(s\) at a time.*use at least 6 crops, or norm.sync=true"):
        replace(config, norm=replace(config.norm, sync=False)).check_shares(WORLD_SIZE)


def assert_equal_to_rounding(results: list[dict], alone: dict) -> None:
    for result in results:
        for name, expected in alone.items():
            scale = expected.abs().max().item()
            torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-10 * max(scale, 1e-3), msg=name)


def test_parts_have_the_norms_of_unsynchronised_processes(ranks):
    """docs/training.md advises it for fewer devices. Only running statistics differ: every part updates them."""
    order, options = list(range(12)), ("norm.sync=false",)
    alone = steps(0, "inplace", order, WORLD_SIZE, options)
    expected = {name: tensor for name, tensor in alone.items() if "running_" not in name and "num_b" not in name}
    assert_equal_to_rounding(ranks.run(steps, "inplace", order, 1, options), expected)


def run_in_rank(rank: int, overrides: tuple[str, ...]) -> dict:
    """A training in which every warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(checked("train_seg", *(override.format(rank=rank) for override in overrides)))


def test_a_run_ends_with_the_scores_of_all_images(ranks, tmp_path):
    """Seven images, each evaluated on one rank, give the scores of one process with the same weights.
    Without synchronised norms, all ranks evaluate with rank 0's running statistics, as saved.
    """
    norm = ("norm.sync=false", "norm.momentum=0.9")
    options = (*SHORT, "data.crops_per_minibatch=8", "trainer.steps=2", "trainer.evaluate_images=7", *norm)
    results = ranks.run(run_in_rank, (f"run_dir={tmp_path}", *options))
    file_content = json.loads((tmp_path / "results.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.training.run.write_results", lambda path, evaluated, *_, **__: evaluated)
        alone = train(checked("train_seg", f"run_dir={tmp_path}", *options, "resume=auto"))
    for result in (*results, file_content):
        assert result["images"] == alone.images == 7
        assert result["confusion_matrix"] == alone.details["confusion_matrix"]
        assert result["miou"] == alone.scores["miou"]


def evaluated_in_rank(rank: int, overrides: tuple[str, ...]) -> dict:
    return evaluate(checked("eval", *overrides))


def test_evaluating_a_checkpoint_on_several_processes(ranks, tmp_path):
    """Several processes count, predict and draw what one does; they evaluate averaged weights if there are some.

    The several segment three images at once.
    """
    options = (*SHORT, "trainer.steps=2", "trainer.ema_decay=0.9", "data.base_size=128")
    train(checked("train_seg", f"run_dir={tmp_path}", *options))
    checkpoint_file = f"checkpoint={tmp_path / 'checkpoints' / 'last.pt'}"
    common = (checkpoint_file, "workers=0", "device=cpu")

    def folders(name: str) -> list[str]:
        return [f"{key}={tmp_path / name / key}" for key in ("predictions", "overlays", "results")]

    alone = evaluate(checked("eval", *common, *folders("alone")))
    several = ranks.run(evaluated_in_rank, (*common, "batch_size=3", *folders("several")))
    for results in several:
        assert results["confusion_matrix"] == alone["confusion_matrix"]
        assert results["images"] == alone["images"] == DRAWN["synthetic"]["val"]
    files = {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").glob("*/*.png")}
    assert len(files) == 2 * alone["images"]
    assert all((tmp_path / "several" / f).read_bytes() == (tmp_path / "alone" / f).read_bytes() for f in files)
    trained = evaluate(checked("eval", checkpoint_file, "workers=0", "device=cpu", "averaged=false"))
    assert trained["confusion_matrix"] != alone["confusion_matrix"]
    assert (tmp_path / "results_all_images_trained.json").is_file()


def asked_to_stop(rank: int, overrides: tuple[str, ...], stopped_rank: int, at_step: int) -> str:
    original, counted = MetricsLogger.count_step, []

    def step(self, *args, **kwargs):
        counted.append(None)
        if rank == stopped_rank and len(counted) == at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Preempted) as stopped:
        patch.setattr(MetricsLogger, "count_step", step)
        run_in_rank(rank, overrides)
    return str(stopped.value)


def test_all_processes_stop_after_the_same_step_and_resume_to_the_same_weights(ranks, tmp_path):
    """The network has dropout, which every rank draws for itself."""
    options = (*SHORT, *NARROW_A2, "data.crops_per_minibatch=7", "trainer.steps=7", "trainer.ema_decay=0.5")
    ranks.run(run_in_rank, (f"run_dir={tmp_path / 'whole'}", *options))
    stopped = ranks.run(asked_to_stop, (f"run_dir={tmp_path / 'stopped'}", *options), 1, 2)
    assert set(stopped) <= {"stopped after step 4 of 7", "stopped after step 5 of 7"} and len(set(stopped)) == 1
    ranks.run(run_in_rank, (f"run_dir={tmp_path / 'stopped'}", *options, "resume=auto"))
    whole, resumed = (checkpoint.load(tmp_path / name / "checkpoints" / "last.pt") for name in ("whole", "stopped"))
    assert all(same(resumed[part], whole[part]) for part in ("network", "ema"))
    states = whole["random"]["cpu"]
    assert len(states) == len(stopped) and not torch.equal(states[0], states[1])


def sees_no_checkpoint(rank: int, overrides: tuple[str, ...], blind: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if rank == blind:
            patch.setattr(RunDirectory, "checkpoint_to_resume", lambda *_: None)
        run_in_rank(rank, overrides)


def test_all_processes_start_from_the_same(ranks, tmp_path):
    """If one does not see the checkpoint, or got another value, none starts, and all say why."""
    options = (f"run_dir={tmp_path}", *SHORT, "data.crops_per_minibatch=8", "trainer.steps=2", "resume=auto")
    ranks.run(run_in_rank, options)
    before = (tmp_path / "checkpoints" / "last.pt").read_bytes()
    for error in ranks.run(sees_no_checkpoint, options, 1):
        assert isinstance(error, ValueError) and f"must share the folder {tmp_path}" in str(error)
        assert "process 0 has steps in the checkpoint=2; process 1 has steps in the checkpoint=0" in str(error)
    for error in ranks.run(run_in_rank, (f"run_dir={tmp_path / 'other'}", *options[1:], "optim.lr={rank}.5")):
        assert isinstance(error, ValueError) and "process 0 has optim.lr=0.5; process 1 has optim.lr=1.5" in str(error)
    assert (tmp_path / "checkpoints" / "last.pt").read_bytes() == before and not (tmp_path / "other").exists()


@pytest.mark.parametrize("size, rank", distributed._OTHER_LAUNCHERS.items())
def test_one_of_several_processes_that_torchrun_did_not_start_is_refused(monkeypatch, size, rank):
    monkeypatch.setenv(size, "2")
    if rank:
        assert distributed.world_size() == 1  # a shell of salloc, or an environment that sbatch has passed on
        monkeypatch.setenv(rank, "1")
    message = f"^{size}=2, but torchrun did not start this process, which would train alone: .* or unset {size}"
    with pytest.raises(ValueError, match=message), joined("cpu", timeout_seconds=60):
        pass
    monkeypatch.setenv(size, "1")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert distributed.world_size() == 1
    monkeypatch.setenv(size, "2")
    for name, value in (("TORCHELASTIC_RUN_ID", "7"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert distributed.world_size() == 4  # torchrun in a step of srun


def test_a_driver_without_a_device_is_named_once(monkeypatch, tmp_path, caplog):
    (tmp_path / "version").write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.57.02  Tue Jul 13\n")
    monkeypatch.setattr(distributed, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    distributed.warn_of_driver.cache_clear()
    for name in ("cpu", "auto", "auto"):
        assert distributed.device_of(name).type == "cpu"
    (message,) = [record.message for record in caplog.records if "driver" in record.message]
    assert (
        "built for CUDA 13.0, and finds no device: this runs on the CPU. The driver is 470.57.02: update it" in message
    )
