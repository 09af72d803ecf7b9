"""The learning rate at every step, and which parameters get which rate and decay."""

import math

import pytest
import torch
from torch import nn

from engine import assemble
from engine.schema.keys import complete_and_check
from engine.schema.optim import SGD, AdamW, Cosine, Linear, LRSchedule, MultiStep, Poly
from engine.schema.schedule import Schedule

STEPS = 200
SCHEDULE = Schedule(total_steps=STEPS, steps_per_epoch=20, evaluate_every=None, checkpoint_every=100, log_every=20)


def small_network() -> nn.ModuleDict:
    return nn.ModuleDict({"body": nn.Conv2d(2, 2, 1), "norm": nn.BatchNorm2d(2), "cls": nn.Conv2d(2, 3, 1)})


def run(optimizer: torch.optim.Optimizer, config: LRSchedule) -> list[float]:
    """The first group's learning rate in every step, and after the last."""
    scheduler = assemble.lr_schedule(config, optimizer, SCHEDULE)
    rates_so_far = []
    for _ in range(STEPS):
        rates_so_far.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return [*rates_so_far, optimizer.param_groups[0]["lr"]]


def rates(config: LRSchedule) -> list[float]:
    complete_and_check(config, "lr_schedule.")
    return run(assemble.optimizer(SGD(lr=0.1), small_network(), ("cls",)), config)


@pytest.mark.parametrize(
    "config, expected",
    [
        (Poly(), lambda step: 0.1 * (1 - step / 200) ** 0.9),  # in-place ABN, section 4.2
        (Linear(), lambda step: 0.1 + (1e-6 - 0.1) * step / 200),
        (Cosine(), lambda step: 0.05 * (1 + math.cos(math.pi * step / 200))),
        (MultiStep(epochs=[2, 5]), lambda step: 0.1 * 0.1 ** ((step >= 40) + (step >= 100))),
        (MultiStep(steps=[30, 170]), lambda step: 0.1 * 0.1 ** ((step >= 30) + (step >= 170))),
    ],
)
def test_the_rate_of_every_step(config, expected):
    assert rates(config) == pytest.approx([expected(step) for step in range(STEPS)] + [expected(200 - 1e-9)], abs=1e-9)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "config, expected",
    [
        (Poly(warmup_epochs=2), lambda step: 0.1 * (1 - (step - 40) / 160) ** 0.9),
        (Linear(warmup_steps=40), lambda step: 0.1 + (1e-6 - 0.1) * (step - 40) / 160),
        (Cosine(warmup_steps=40), lambda step: 0.05 * (1 + math.cos(math.pi * (step - 40) / 160))),
        # Counted from the start of the run.
        (MultiStep(epochs=[5], warmup_steps=40), lambda step: 0.1 * 0.1 ** (step >= 100)),
    ],
)
def test_a_warm_up_rises_to_the_rate_that_the_schedule_starts_from(config, expected):
    rates_of_steps = rates(config)
    assert rates_of_steps[:40] == pytest.approx([0.1 * (0.01 + 0.99 * step / 40) for step in range(40)])
    assert rates_of_steps[40:200] == pytest.approx([expected(step) for step in range(40, STEPS)], abs=1e-9)


@pytest.mark.parametrize(
    "config, message",
    [
        (MultiStep(), "lr_schedule.epochs and lr_schedule.steps are both null"),
        (MultiStep(epochs=[3, 2]), r"lr_schedule.epochs=\[3, 2\]: expected rising numbers"),
        (
            MultiStep(epochs=[1], steps=[2]),
            r"lr_schedule.epochs=\[1\] and lr_schedule.steps=\[2\]: give null for one of them",
        ),
        (Poly(warmup_epochs=1, warmup_steps=2), "give null for one of them"),
        (Cosine(warmup_steps=300), "warmup_steps=300: .* the run has 200; give lr_schedule.warmup_steps=20, or more"),
        (Linear(end=0.2), "lr_schedule.end=0.2: expected at most optim.lr=0.1"),
        (MultiStep(epochs=[1], warmup_steps=20), "the rate falls after step 20, within the warm-up of 20 steps"),
        (SGD(lr=0.1, momentum=0.0, nesterov=True), "optim.nesterov=true with optim.momentum=0"),
        (AdamW(lr=0.1, betas=[0.9, 1.0]), r"optim.betas=\[0.9, 1.0\]: expected numbers below 1"),
    ],
)
def test_schedules_and_optimisers_that_cannot_be_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        rates(config) if isinstance(config, LRSchedule) else complete_and_check(config, "optim.")


def test_by_default_one_group_decays_whole_and_the_head_can_have_its_own_rate():
    """The paper has one group, and so have checkpoints from before there were groups."""
    (group,) = assemble.optimizer(SGD(lr=0.1), small_network(), ("cls",)).param_groups
    assert group["param_names"] == [name for name, _ in small_network().named_parameters()]
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.1, 0.9, 1e-4, False)
    config = SGD(lr=0.1, head_lr_factor=10.0, decay="weights", weight_decay=0.5)
    network = nn.ModuleDict({"cls": nn.Conv2d(2, 3, 1), "body": nn.Conv2d(2, 2, 1), "norm": nn.BatchNorm2d(2)})
    optimizer = assemble.optimizer(config, network, ("cls",))
    assert [(group["param_names"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [
        (["body.weight"], 0.1, 0.5),
        (["body.bias", "norm.weight", "norm.bias"], 0.1, 0.0),
        (["cls.weight"], 1.0, 0.5),
        (["cls.bias"], 1.0, 0.0),
    ]
    run(optimizer, Linear())
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-6, 1e-6, 1e-5, 1e-5])


def test_adamw_has_its_keys():
    optimizer = assemble.optimizer(AdamW(lr=1e-3, betas=[0.8, 0.95], fused=False), small_network(), ())
    assert type(optimizer) is torch.optim.AdamW
    (group,) = optimizer.param_groups
    assert (group["betas"], group["fused"]) == ((0.8, 0.95), False)
