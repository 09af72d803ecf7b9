"""Several processes compute what one does: the same losses, gradients, statistics, weights and scores."""

import json
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from engine import build, checkpoint
from engine.distributed import World, node_group
from engine.stopping import Preempted
from engine.training_step import train_step
from engine.waits import DataWait
from eval import evaluate
from models.layers import ABN, renew_statistics
from tests.ranks import Ranks
from tests.runs import SHORT, composed, one_epoch, run_config
from train_seg import train

NORMS = ("inplace", "std")


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory):
    started = Ranks(request.param, tmp_path_factory.mktemp("ranks"))
    yield started
    started.stop()


def this_world() -> World:
    return World(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else World()


def steps(rank: int, norm: str, order: list[int], parts: int = 1, overrides: tuple[str, ...] = ()) -> dict:
    """Three training steps in float64 on this rank: losses, last gradients, weights, running statistics.

    `order` permutes the crops of each minibatch; each rank splits its share into `parts` micro-batches.
    """
    torch.set_default_dtype(torch.float64)
    try:
        return _steps(norm, order, parts, overrides)
    finally:
        torch.set_default_dtype(torch.float32)


def _steps(norm: str, order: list[int], parts: int, overrides: tuple[str, ...]) -> dict:
    world, crops = this_world(), len(order)
    sizes = (f"data.crops_per_minibatch={crops}", f"trainer.accumulation_steps={parts}")
    options = (f"norm={norm}", "norm.sync=true", *sizes, *overrides)
    config = run_config(*SHORT, *options)
    learner = build.learner(config, partial(build.segmentation_network, config, 5), one_epoch(10), world)
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []
    for _ in range(3):
        images = torch.randint(0, 256, (crops, 3, 48, 48), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 6, (crops, 48, 48), dtype=torch.uint8, generator=generator)
        labels[labels == 5] = 255
        share = order[world.rank * crops // world.size : (world.rank + 1) * crops // world.size]
        minibatch = {"image": images[share], "label": labels[share]}
        loss, norm = train_step(learner, build.loss(config.loss, ignore_index=255), minibatch, crops, world)
        losses.append(loss)
        norms.append(norm)
    gradients = {f"gradient of {name}": p.grad for name, p in learner.network.named_parameters()}
    return {"losses": torch.tensor([losses, norms]), **gradients, **learner.network.state_dict()}


@pytest.mark.parametrize("norm", NORMS)
def test_shares_of_a_minibatch_step_as_the_whole_one(ranks, norm):
    """Three ranks have 2, 3 and 3 of the eight crops."""
    order = list(range(8))
    assert_equal_to_rounding(ranks.run(steps, norm, order), steps(0, norm, order))


@pytest.mark.slow
@pytest.mark.parametrize("norm, recompute", [(norm, how) for norm in NORMS for how in ("none", "blocks", "selective")])
def test_compiled_they_step_as_a_whole_minibatch_that_is_not(ranks, norm, recompute):
    order = list(range(8))
    overrides = ("trainer.compile=true", f"trainer.recompute={recompute}")
    compiled = ranks.run(steps, norm, order, 1, overrides, timeout=300)
    assert_equal_to_rounding(compiled, steps(0, norm, order))


def leaving(process_group: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    with torch.profiler.record_function("gradients leave"):
        return allreduce_hook(process_group, bucket)


def backward_events(rank: int, compiled: bool) -> str:
    """A backward pass in order: "g" for gradients that leave, "c" for a convolution or a compiled graph that starts."""
    wide = ("body.structure=[1,1,1,1]", "body.base_channels=[128,128,256]", "head.hidden_channels=8")  # 76 MiB
    config = run_config(*SHORT, *wide, "head.out_channels=8", f"trainer.compile={compiled}")
    learner = build.learner(config, partial(build.segmentation_network, config, 5), one_epoch(10), this_world())
    learner.forward.network.register_comm_hook(None, leaving)
    images = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    learner.forward(images).mean().backward()
    loss = learner.forward(images).mean()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        loss.backward()
    letters = {"gradients leave": "g", "CompiledFunctionBackward": "c", "ConvolutionBackward0": "c"}
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return "".join(letters[event.name] for event in events if event.name in letters)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_leave_while_the_backward_pass_runs(ranks, compiled):
    """Compiled too, although DDP wraps the compiled network: PyTorch splits its graph at DDP's buckets."""
    for events in ranks.run(backward_events, compiled):
        assert events.count("g") == 3 and "gc" in events, events


@pytest.mark.parametrize("norm", NORMS)
def test_parts_of_the_shares_step_as_those_of_the_whole_minibatch(ranks, norm):
    """Norms see one part at a time, so one process gets the crops in the order of the parts of several."""
    size, parts = len(ranks.processes), 2
    order = torch.arange(2 * size * parts)
    together = order.view(size, parts, -1).transpose(0, 1).flatten()
    assert together.tolist() != order.tolist()
    assert_equal_to_rounding(ranks.run(steps, norm, order.tolist(), parts), steps(0, norm, together.tolist(), parts))


@pytest.mark.parametrize(
    "norm, recompute",
    [
        ("inplace", "blocks"),
        pytest.param("std", "selective", marks=pytest.mark.slow),
        pytest.param("checkpoint", "sqrt", marks=pytest.mark.slow),
    ],
)
def test_checkpointed_blocks_step_as_stored_ones(ranks, norm, recompute):
    """In the backward pass, norms exchange their statistics again, while gradients leave. Two micro-batches."""
    size, parts = len(ranks.processes), 2
    order = torch.arange(2 * size * parts)
    together = order.view(size, parts, -1).transpose(0, 1).flatten()
    found = ranks.run(steps, norm, order.tolist(), parts, (f"trainer.recompute={recompute}",))
    assert_equal_to_rounding(found, steps(0, norm, together.tolist(), parts))


def assert_equal_to_rounding(results: list[dict], alone: dict) -> None:
    for result in results:
        for name, expected in alone.items():
            scale = expected.abs().max().item()
            torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-10 * max(scale, 1e-3), msg=name)


def waits(rank: int, slow_rank: int, slow_part: str) -> tuple[float, float]:
    """Seconds of a step that this rank waited for data and for other ranks, if `slow_rank` sleeps for 0.4 s."""
    world, sleeps = this_world(), rank == slow_rank
    config = run_config(*SHORT, "norm.sync=false", f"data.crops_per_minibatch={2 * world.size}")
    learner = build.learner(config, partial(build.segmentation_network, config, 5), one_epoch(10), world)
    if sleeps and slow_part == "network":
        learner.network.register_forward_pre_hook(lambda *_: time.sleep(0.4))

    def minibatches():
        for _ in range(2):  # the first step of a process is slow
            dist.barrier()
            if sleeps and slow_part == "data":
                time.sleep(0.4)
            yield {"image": torch.zeros(2, 3, 48, 48, dtype=torch.uint8), "label": torch.zeros(2, 48, 48).byte()}

    waiting, loss = DataWait(minibatches()), build.loss(config.loss, ignore_index=255)
    for minibatch in waiting:
        data_s = waiting.seconds
        train_step(learner, loss, minibatch, 2 * world.size, world)
    return data_s, learner.exchange.seconds


@pytest.mark.parametrize("slow_part", ["data", "network"])
def test_a_straggler_shows_in_the_waits(ranks, slow_part):
    """The slow rank waits for its data, if that is what is slow, and the others wait for the slow rank."""
    (slow_data_s, slow_exchange_s), *others = ranks.run(waits, 0, slow_part)
    assert all(exchange_s > 0.2 and exchange_s > 2 * slow_exchange_s for _, exchange_s in others)
    assert (slow_data_s > 0.3) == (slow_part == "data")


@pytest.mark.parametrize("norm", NORMS)
def test_parts_have_the_norms_of_unsynchronised_processes(ranks, norm):
    """As docs/training.md advises for fewer devices. Only running statistics differ: every part updates them."""
    size, order = len(ranks.processes), list(range(12))
    alone = steps(0, norm, order, size, ("norm.sync=false",))
    of_the_first = ("running_mean", "running_var", "num_batches_tracked")
    assert_equal_to_rounding(
        ranks.run(steps, norm, order, 1, ("norm.sync=false",)),
        {name: tensor for name, tensor in alone.items() if not name.endswith(of_the_first)},
    )


def renewed(rank: int, shares: int) -> dict[str, torch.Tensor]:
    """A norm's statistics from this rank's share of six minibatches."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), ABN(4))
    minibatches = [torch.randn(2, 3, 8, 8) for _ in range(6)]
    renew_statistics(network, minibatches[rank::shares])
    return {name: tensor for name, tensor in network.state_dict().items() if "running" in name}


def test_renewed_statistics_are_those_of_all_processes_minibatches(ranks):
    alone = renewed(0, 1)
    for result in ranks.run(renewed, len(ranks.processes)):
        for name, expected in alone.items():
            torch.testing.assert_close(result[name], expected)


def run_in_rank(rank: int, overrides: tuple[str, ...]) -> dict:
    return train(composed("train_seg", *overrides))


@pytest.mark.parametrize("norm", [("norm.sync=true",), ("norm.sync=false", "norm.momentum=0.9")])
def test_a_run_ends_with_the_scores_of_all_images(ranks, tmp_path, norm):
    """Seven images, each evaluated on one rank, give the scores of one process with the same weights.

    Without synchronised norms, all ranks evaluate with rank 0's running statistics, as saved.
    """
    options = (*SHORT, "data.crops_per_minibatch=8", "trainer.steps=2", "trainer.evaluate_images=7", *norm)
    results = ranks.run(run_in_rank, (f"run_dir={tmp_path}", *options))
    written = json.loads((tmp_path / "results.json").read_text())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.run.write_results", lambda path, evaluated, *_, **__: evaluated)
        alone = train(composed("train_seg", f"run_dir={tmp_path}", *options, "resume=auto"))
    for result in (*results, written):
        assert result["images"] == alone.images == 7
        assert result["confusion_matrix"] == alone.details["confusion_matrix"]
        assert result["miou"] == alone.scores["miou"]


def evaluated_in_rank(rank: int, overrides: tuple[str, ...]) -> dict:
    return evaluate(composed("eval", *overrides))


def test_evaluating_a_checkpoint_on_several_processes(ranks, tmp_path):
    """Same counts, predictions and overlays as in one process; averaged weights are evaluated if present."""
    train(composed("train_seg", f"run_dir={tmp_path}", *SHORT, "trainer.steps=2", "trainer.ema_decay=0.9"))
    checkpoint_file = f"checkpoint={tmp_path / 'checkpoints' / 'last.pt'}"
    common = (checkpoint_file, "workers=0", "device=cpu", "overlay_images=5")

    def folders(name: str) -> tuple[str, ...]:
        parts = (("predictions", "png"), ("overlays", "overlays"), ("results", "results.json"))
        return tuple(f"{key}={tmp_path / name / value}" for key, value in parts)

    alone = evaluate(composed("eval", *common, *folders("alone")))
    several = ranks.run(evaluated_in_rank, (*common, *folders("several")))
    for results in several:
        assert results["confusion_matrix"] == alone["confusion_matrix"] and results["images"] == alone["images"] == 40
    files = {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*.png")}
    assert len(files) == 40 + 5 + 1  # the confusion matrix
    for file in files:
        assert (tmp_path / "several" / file).read_bytes() == (tmp_path / "alone" / file).read_bytes(), file
    trained = evaluate(composed("eval", checkpoint_file, "workers=0", "device=cpu", "averaged=false"))
    assert trained["confusion_matrix"] != alone["confusion_matrix"]
    assert (tmp_path / "results_trained.json").is_file()


def asked_to_stop(rank: int, overrides: tuple[str, ...], asked: int, at_step: int) -> str:
    """One rank gets SIGTERM during a step."""
    from engine.metrics_logger import MetricsLogger

    original, counted = MetricsLogger.step, []

    def step(self, *args, **kwargs):
        counted.append(None)
        if rank == asked and len(counted) == at_step:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(self, *args, **kwargs)

    MetricsLogger.step = step
    try:
        train(composed("train_seg", *overrides))
    except Preempted as stopped:
        return str(stopped)
    finally:
        MetricsLogger.step = original
    return "not stopped"


def test_all_processes_stop_after_the_same_step_and_resume_to_the_same_weights(ranks, tmp_path):
    """With dropout, which every rank draws for itself."""
    body = ("body=wider_resnet38_a2", "body.structure=[1,1,1,1,1,1]", "body.stem_channels=8")
    channels = "body.channels=[[8,8],[8,8],[8,8],[8,8],[8,8,8],[8,8,8]]"
    options = (*SHORT, *body, channels, "data.crops_per_minibatch=7", "trainer.steps=5", "trainer.ema_decay=0.5")
    ranks.run(run_in_rank, (f"run_dir={tmp_path / 'whole'}", *options))
    stopped = ranks.run(asked_to_stop, (f"run_dir={tmp_path / 'stopped'}", *options), 1, 2)
    assert set(stopped) <= {"stopped after step 2 of 5", "stopped after step 3 of 5"} and len(set(stopped)) == 1
    ranks.run(run_in_rank, (f"run_dir={tmp_path / 'stopped'}", *options, "resume=auto"))
    whole, resumed = (checkpoint.load(tmp_path / name / "checkpoints" / "last.pt") for name in ("whole", "stopped"))
    for part in ("network", "ema"):
        assert all(torch.equal(resumed[part][name], tensor) for name, tensor in whole[part].items())
    states = whole["random"]["cpu"]
    assert len(states) == len(stopped) and not torch.equal(states[0], states[1])


def nodes_of(rank: int) -> tuple[int, list[int]]:
    os.environ["GROUP_RANK"] = str(rank // 2)
    group = node_group(this_world(), timeout_seconds=60)
    del os.environ["GROUP_RANK"]
    return dist.get_world_size(group), dist.get_process_group_ranks(group)


def sees_no_checkpoint(rank: int, overrides: tuple[str, ...], blind: int) -> None:
    from engine.run_directory import RunDirectory

    original = RunDirectory.checkpoint_to_resume
    if rank == blind:
        RunDirectory.checkpoint_to_resume = lambda *_: None
    try:
        train(composed("train_seg", *overrides))
    finally:
        RunDirectory.checkpoint_to_resume = original


def test_all_processes_start_from_the_same(ranks, tmp_path):
    """If one does not see the checkpoint, or got another value, none starts, and all say why."""
    options = (f"run_dir={tmp_path}", *SHORT, "data.crops_per_minibatch=8", "trainer.steps=2", "resume=auto")
    ranks.run(run_in_rank, (*options,))
    before = (tmp_path / "checkpoints" / "last.pt").read_bytes()
    for error in ranks.run(sees_no_checkpoint, options, 1):
        assert isinstance(error, ValueError)
        assert "process 0 has 200 training and 40 validation images, 2 steps to train, 2 of them done" in str(error)
        assert (
            f"process 1 has 200 training and 40 validation images, 2 steps to train, no checkpoint in {tmp_path}; "
            in (str(error))
        )
    for error in ranks.run(with_another_rate, (f"run_dir={tmp_path / 'other'}", *options[1:])):
        assert isinstance(error, ValueError) and "process 0 has optim.lr=1.0; process 1 has optim.lr=2.0" in str(error)
    assert (tmp_path / "checkpoints" / "last.pt").read_bytes() == before and not (tmp_path / "other").exists()


def with_another_rate(rank: int, overrides: tuple[str, ...]) -> None:
    train(composed("train_seg", *overrides, f"optim.lr={rank + 1}"))


def test_norms_can_be_synchronised_within_a_machine(ranks):
    size = len(ranks.processes)
    members = [ranks_of_node for _, ranks_of_node in ranks.run(nodes_of)]
    assert members == ([[0, 1]] * 2 if size == 2 else [[0, 1], [0, 1], [2]])


def test_a_single_process_is_its_own_world(tmp_path: Path):
    world = World()
    tensor = torch.tensor([3])
    assert world.first and world.sum_(tensor) is tensor and tensor == 3 and world.gather("a") == ["a"]
