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
from engine.training import loop, planner, setup
from engine.training.loop import train_step
from engine.training.run import Run
from keepless.recompute.costs import peak_bytes
from tests.runs import SHORT, composed, one_epoch, run_config, same
from train_seg import train

SMALL = ("body.base_channels=[8,8,16]", "body.stem_channels=8", "head.hidden_channels=8", "head.out_channels=8")
NETWORK = (*SHORT, "body=resnext_tiny", *SMALL, "norm=std", "data.crops_per_minibatch=4")
CROPS, SIZE, WORLD_SIZE = 4, 64, 2


def learner_of(*overrides: str, world: World = World()):  # noqa: B008  # immutable
    config = run_config(*NETWORK, *overrides)
    make = partial(assemble.network_of, config, 5)
    return config, setup.learner(config, make, one_epoch(20), world), assemble.loss(config.loss, ignore_index=255)


def minibatches(steps: int, crops: int = CROPS):
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        images = torch.randint(0, 256, (crops, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator)
        yield {"image": images, "label": torch.randint(0, 5, (crops, SIZE, SIZE), generator=generator)}


@pytest.mark.slow
@pytest.mark.filterwarnings("error:no plan")
def test_twenty_steps_in_less_memory_have_the_same_losses(double):
    options = ("trainer.accumulation_steps=2", "trainer.ema_decay=0.9", "optim=adamw", "optim.lr=1e-3")
    config, plain, loss = learner_of(*options)
    room = planner.room(config, CROPS, SIZE)
    activations = int(0.85 * room.plans[0][0]) // 2**10
    budget = ("trainer.recompute=budget", f"memory.activations={activations}KiB")
    _, planned, _ = learner_of(*options, *budget)
    losses, peaks = [], []
    for learner in (plain, planned):
        steps = [partial(train_step, learner, loss, each, CROPS, World()) for each in minibatches(20)]
        losses.append([learner.read(step())[0] for step in steps])
        peaks.append(peak_bytes(steps[0], "cpu"))
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=0, atol=1e-10)
    assert all(torch.equal(a, b) for a, b in zip(plain.network.parameters(), planned.network.parameters(), strict=True))
    inputs = CROPS * 3 * SIZE**2 * 8 // config.trainer.accumulation_steps
    allowed = activations * 2**10 + room.beside["gradients"] + room.beside["loss"] + inputs
    assert peaks[1] <= allowed and peaks[1] < 0.9 * peaks[0]


@pytest.mark.slow
def test_a_resumed_run_plans_again_and_is_equal_to_the_bit(tmp_path, capsys, monkeypatch):
    room = planner.room(run_config(*NETWORK), CROPS, SIZE)
    device = device_memory(room.needed(room.plans[0][0]))  # a real step needs more, for the operators of a CPU
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


def plans_after(rank: int, norm: str, steps: int) -> list:
    """The plans of this rank for the network's inputs, and its weights."""
    world = World(rank, 2)
    config, learner, loss = learner_of(
        f"norm={norm}", "trainer.recompute=budget", "memory.activations=4MiB", world=world
    )
    run = SimpleNamespace(world=world, learner=learner, config=config)
    for number, each in enumerate(minibatches(steps), start=1):
        share = {key: value[2 * rank : 2 * rank + 2] for key, value in each.items()}
        train_step(learner, loss, share, CROPS, world)
        if number == loop.PLANNED_STEPS:
            Run.share_plans(run)
    (hooks,) = {hook.__self__ for hook in learner.network._forward_hooks.values()}
    sizes = [size for sizes in hooks.plans._kinds.values() for size in sizes]
    plans = [replace(plan, calls=len(plan.calls)) for size in sizes for plan in size.plans]
    return [plans, [parameter.detach() for parameter in learner.network.parameters()]]


@pytest.mark.slow
def test_all_ranks_have_the_same_plans(ranks):
    (plans, weights), (others, other_weights) = ranks.run(plans_after, "inplace", loop.PLANNED_STEPS + 1)
    assert plans == others and plans[0]
    assert all(map(torch.equal, weights, other_weights))
