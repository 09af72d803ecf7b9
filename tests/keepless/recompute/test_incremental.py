"""Simulations that start from the last choice, and the exchanges that try many of them."""

import random

import pytest
import torch
from torch import nn

from keepless.recompute.step.incremental import Incremental
from keepless.recompute.step.rehearsal import rehearsed_step
from keepless.recompute.step.search import Choice, frontier
from keepless.recompute.step.simulation import Simulation, plain_peak
from keepless.recompute.step.step import Kind, Step
from tests.keepless.recompute.test_events import MANY, counted
from tests.keepless.recompute.test_recorded_plans import NETWORKS, bottleneck, fastest

FEW = ("in place", "a transformer", "ours", "over an input", "distances")


def changed(step: Step, seed: int, count: int):
    """Choices, each of which differs from the one before in up to three values, or in many."""
    draw, free = random.Random(seed), [i for i, one in enumerate(step.values) if one.kind == Kind.FREE]
    kept = [one.kind in (Kind.KEPT, Kind.FREE) for one in step.values]
    for number in range(count):
        some = draw.sample(free, min(len(free), draw.choice((1, 1, 2, 3)) if number % 20 else len(free) // 2))
        for i in some:
            kept[i] = not kept[i]
        kept = Simulation(step).led(kept)
        yield kept


def check(step: Step) -> None:
    whole, incremental = Simulation(step), Incremental(step)
    for kept in changed(step, 0, 60):
        expected, found = whole.run(kept), incremental.run(kept)
        for field, one, other in zip(expected._fields, expected, found, strict=True):
            assert one == other, field


@pytest.mark.parametrize("name", NETWORKS)
def test_the_outcome_does_not_depend_on_the_choices_before(name):
    make, shape = NETWORKS[name]
    check(rehearsed_step(make().to("meta"), (torch.empty(shape, device="meta"),), {}))


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.slow) for name in MANY])
def test_nor_where_a_graph_is_retained_for_a_second_backward_pass(name):
    make, shape = MANY[name]
    torch.manual_seed(0)
    network, x = make(), torch.randn(shape)
    check(counted(network, x.to(next(network.parameters()).dtype), passes=2)[0])


@pytest.fixture(scope="module")
def hard() -> Step:
    """A step of 12 residual blocks. Times are counted: 20 us for a call, 5 GB/s and 50 Gflop/s."""
    network = nn.Sequential(*(bottleneck(16, 8) for _ in range(12))).to("meta")
    step = rehearsed_step(network, (torch.empty(2, 16, 16, 16, device="meta"),), {})
    values = [one._replace(seconds=2e-5 + one.bytes / 5e9 + one.operations / 5e10) for one in step.values]
    return step._replace(values=values, seconds=4e-3)


def chosen(step: Step, share: float = 0.3) -> Choice:
    limit = int(share * plain_peak(step))
    return fastest(frontier(step, limit), limit)


def test_exchanges_lower_the_cost_of_a_hard_budget_in_the_same_way_each_time(hard, monkeypatch):
    limit, found = 0.3 * plain_peak(hard), chosen(hard)
    assert found == chosen(hard)
    monkeypatch.setattr("keepless.recompute.step.search.annealed", lambda _, kept, *rest: kept)
    assert found.seconds < 0.95 * chosen(hard).seconds and found.peak <= limit


def test_nothing_is_exchanged_where_a_thousand_steps_save_less_than_it_takes(hard, monkeypatch):
    step = hard._replace(values=[one._replace(seconds=one.seconds / 100) for one in hard.values])
    monkeypatch.setattr("keepless.recompute.step.search.annealed", None)  # not called
    assert chosen(step._replace(seconds=hard.seconds / 100)).peak <= 0.3 * plain_peak(hard)
