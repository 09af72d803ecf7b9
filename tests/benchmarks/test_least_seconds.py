"""The bound: no plan of a step is below it, and it is near the best one of networks."""

import random

import pytest
import torch
from torch import nn

from benchmarks.least_seconds import bounds_of, least_seconds
from keepless import plan
from keepless.recompute.step.search import frontier
from keepless.recompute.step.simulation import plain_peak
from keepless.recompute.step.step import Event, Kind, Step
from tests.keepless.recompute.test_recorded_plans import SHARES, bottleneck, counted_costs, fastest
from tests.keepless.recompute.test_search import best, random_step


def changed_step(seed: int) -> Step:
    """A random step with what networks have: views, masks, recipes of several values, in-place calls, second reads."""
    draw, step = random.Random(seed), random_step(seed)
    values, memories, saved = list(step.values), list(step.memories), list(step.saved)
    for number, value in enumerate(values):
        if (kind := draw.random()) < 0.5 and value.inputs:
            source = values[value.inputs[0]]
            last = values[number - 1]
            if kind < 0.15:
                value = value._replace(kind=Kind.DERIVED, alias=value.inputs[0], bytes=0, memory=source.memory)
            elif kind < 0.25:
                value = value._replace(overwrites=True, bytes=draw.choice([value.bytes, source.bytes]))
            elif kind < 0.35:
                value = value._replace(memory=last.memory, busy=draw.randint(0, 40))
            elif last.kind == value.kind == Kind.FREE and last.leader < 0:
                values[number - 1] = last._replace(leader=number - 1)
                value = value._replace(leader=number - 1, inputs=last.inputs)
        values[number] = value._replace(is_fresh=draw.random() < 0.7)
    masks = [draw.randint(1, 8) * (draw.random() < 0.4) for _ in values]
    saved = [one._replace(signs=masks[one.value], memory=values[one.value].memory) for one in saved]
    backward, kind = step.events[step.forward :], draw.random()
    if kind < 0.2:  # a tensor is read twice
        backward = [one for pair in backward for one in ([(Event.READ, pair[1]), pair] if pair[0] == 4 else [pair])]
    elif kind < 0.4:  # two backward passes
        retained = [one for one in backward if one[0] != Event.RELEASE]
        backward = [*retained, (Event.PASS, 0), *backward]
    for _ in range(3):  # gradients that stay
        memories.append(draw.randint(5, 40))
        backward.insert(draw.randint(0, len(backward)), (Event.HOLD, len(memories) - 1))
    events = [*step.events[: step.forward], *backward, (Event.PASS, 0)]
    return step._replace(values=values, memories=memories, saved=saved, events=events)


@pytest.mark.table
@pytest.mark.parametrize("name, near", [("ResNet", 0.8), ("DenseNet", 0.7), ("transformer", 0.7), ("pools", 0.7)])
def test_plans_that_are_found_are_near_the_bound(name, near):
    step, shares = counted_costs(name), []
    for limit in [int(share * plain_peak(step)) for share in SHARES]:
        found, least = fastest(frontier(step, limit), limit), least_seconds(step, limit)
        if found.peak <= limit:
            assert least <= found.seconds * (1 + 1e-6)
            shares.append(least / found.seconds)
    assert max(shares) >= near


@pytest.mark.parametrize("seeds", [range(10), pytest.param(range(10, 300), marks=pytest.mark.slow)])
def test_no_plan_of_a_random_step_is_below_the_bound(seeds):
    """At and just below the peak of every plan of the front."""
    for seed in seeds:
        step = changed_step(seed)
        front = best(step)
        for number, choice in enumerate(front):
            for limit in {choice.peak, front[number - 1].peak - 1 if number else choice.peak}:
                least = least_seconds(step, limit)
                assert least is not None and least <= choice.seconds * (1 + 1e-6) + 1e-9


def test_below_every_peak_there_is_no_plan():
    step = changed_step(0)
    assert least_seconds(step, best(step)[-1].peak // 2) == float("inf")
    assert least_seconds(step, 2 * best(step)[0].peak) == 0


def test_rows_of_a_plan_have_bounds():
    """Those that say little are None."""
    network, images = nn.Sequential(*(bottleneck(16, 8) for _ in range(3))), torch.randn(2, 16, 16, 16)
    rows = plan(network, images, (0.8, 0.6, "1MiB")).rows
    found = bounds_of(network, images, rows)
    assert found[2] == 0 < found[1]
    assert all(bound is None or row.seconds / 3 <= bound <= row.seconds for row, bound in zip(rows, found, strict=True))
