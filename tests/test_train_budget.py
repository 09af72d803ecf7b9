"""Trainings with trainer.recompute=budget: the same weights in the bytes that the budget leaves."""

import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.process.distributed import World
from engine.schema.memory import device_memory
from engine.training import build, loop, planner
from engine.training.loop import train_step
from engine.training.run import Run
from tests.runs import SHORT, composed, one_epoch, run_config, same
from train_seg import train

SMALL = ("body.base_channels=[8,8,16]", "body.stem_channels=8", "head.hidden_channels=8", "head.out_channels=8")
NETWORK = (*SHORT, "body=resnext_tiny", *SMALL, "norm=std", "data.crops_per_minibatch=4")
CROPS, SIZE, WORLD_SIZE = 4, 64, 2


@pytest.mark.slow
def test_a_resumed_run_plans_again_and_is_equal_to_the_bit(tmp_path, capsys, monkeypatch):
    step = planner.planned_step(run_config(*NETWORK), CROPS, SIZE)
    device = device_memory(step.needed(step.plans[0][0]))  # a real step needs more, for the operators of a CPU
    budget = ("trainer.recompute=budget", f"memory.budget={device // 2**10}KiB", "resume=auto")
    options = (*NETWORK, "trainer.steps=6", "trainer.checkpoint_every_steps=4")

    def weights(run: str, *more: str) -> dict[str, torch.Tensor]:
        train(composed("train_seg", f"run_dir={tmp_path / run}", *options, *more))
        return checkpoint.load(tmp_path / run / "checkpoints" / "last.pt")["network"]

    plain = weights("plain")
    counted, take = iter(range(5)), loop.train_step

    def interrupted(*arguments):
        if next(counted) == 4:
            raise KeyboardInterrupt
        return take(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "train_step", interrupted)
        weights("planned", *budget)
    sums = r"MiB less .* of weights, .* of momentum, .* of images, .* of gradients, .* of loss leave .* for activations"
    assert re.search(sums, capsys.readouterr().out)
    assert same(weights("planned", *budget), plain)


def plans_after(rank: int, steps: int) -> list:
    """The plans of this rank for the network's inputs, and its weights."""
    world = World(rank, WORLD_SIZE)
    config = run_config(*NETWORK, "norm=inplace", "trainer.recompute=budget", "memory.activations=4MiB")
    learner = build.learner(config, partial(assemble.network_of, config, 5), one_epoch(20), world)
    run = SimpleNamespace(world=world, learner=learner, config=config)
    for number in range(1, steps + 1):
        generator = torch.Generator().manual_seed(WORLD_SIZE * number + rank)
        images = torch.randint(0, 256, (2, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        share = {"image": images, "label": torch.randint(0, 5, (2, SIZE, SIZE), generator=generator)}
        train_step(learner, assemble.loss(config.loss), share, CROPS, world)
        if number == loop.PLANNED_STEPS:
            Run.share_plans(run)
    (hooks,) = {hook.__self__ for hook in learner.network._forward_hooks.values()}
    sizes = [size for sizes in hooks.plans._kinds.values() for size in sizes]
    plans = [replace(plan, calls=len(plan.calls)) for size in sizes for plan in size.plans]
    return [plans, [parameter.detach() for parameter in learner.network.parameters()]]


@pytest.mark.slow
def test_all_ranks_have_the_same_plans(ranks):
    (plans, weights), (others, other_weights) = ranks.run(plans_after, loop.PLANNED_STEPS + 1)
    assert plans == others and plans[0]
    assert all(map(torch.equal, weights, other_weights))
