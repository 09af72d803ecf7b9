"""Durations, and the learning rate at every step."""

from functools import partial

import pytest
import torch
from torch import nn

from engine import build
from engine.schedule import Schedule, in_steps
from engine.schema.training import Optim


def test_learning_rate_follows_the_paper():
    """lr_0 (1 - iter / max_iter)^0.9, section 4.2."""
    config = Optim(lr=2.5e-3)
    optimizer = build.optimizer(config, [("weight", nn.Parameter(torch.zeros(1)))])
    scheduler = build.lr_schedule(config, optimizer, total_steps=200)
    for iteration in range(200):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(2.5e-3 * (1 - iteration / 200) ** 0.9, rel=1e-9)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0
    assert optimizer.param_groups[0] | {"momentum": 0.9, "weight_decay": 1e-4} == optimizer.param_groups[0]


def test_durations_in_steps():
    in_run = partial(in_steps, steps_per_epoch=185)
    assert in_run(360, None) == 66_600  # Cityscapes: 2975 images, 16 crops
    assert in_run(360, 500) == in_run(1000, 500) == 500
    assert in_run(2, 500) == 370  # the shorter one
    assert in_run(None, None) is None


def test_schedule_counts_steps_done():
    schedule = Schedule(total_steps=10, steps_per_epoch=4, evaluate_every=5, checkpoint_every=4, log_every=3)
    done = range(1, 11)
    assert [s for s in done if schedule.evaluates(s)] == [5]  # the final evaluation is separate
    assert [s for s in done if schedule.checkpoints(s)] == [4, 5, 8, 10]  # and before an evaluation
    assert [s for s in done if schedule.logs(s)] == [3, 6, 9, 10]
    assert schedule.epoch(10) == 2.5
