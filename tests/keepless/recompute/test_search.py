"""The search: how many simulations it takes, how near the best its plans are, and what is said."""

import copy
import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.step.dry import counted_step, rehearsed_step
from keepless.recompute.step.search import Choice, frontier, pareto, segmented
from keepless.recompute.step.simulation import Simulation, plain_peak
from keepless.recompute.step.step import Event, Kind, Save, Step, StepValue
from keepless.units import size_text
from tests.keepless.recompute.ahead import peak_of, plans_of, step
from tests.keepless.recompute.networks import blocks


@pytest.mark.parametrize("calls", [60, pytest.param(999, marks=pytest.mark.slow)])
def test_a_search_takes_few_simulations(calls, monkeypatch):
    run, simulations = Simulation.run, []  # for each the calls of its step
    seen = lambda self, kept: simulations.append(len(self.step.calls)) or run(self, kept)  # noqa: E731
    monkeypatch.setattr(Simulation, "run", seen)
    network = blocks(calls // 3, nn.BatchNorm2d(8), nn.SiLU()).to("meta")
    rehearsed = rehearsed_step(network, (torch.randn(2, 3, 32, 32, device="meta"),), {})
    plain = plain_peak(rehearsed)
    for limit in (plain, 2 * plain):  # at or above the plain peak
        frontier(rehearsed, limit)
    assert simulations == [calls + 1, calls + 1]
    choices = frontier(rehearsed, plain // 2)
    assert min(choice.peak for choice in choices) <= plain // 2
    assert len(simulations) < 10 * calls


def random_step(seed: int) -> Step:
    """A forward pass of up to 12 values, each of which reads some of those before it, and its backward pass."""
    draw = random.Random(seed)
    nodes, memories, saved, events = [], [], [], []
    for number in range(draw.randint(6, 12)):
        inputs = tuple(sorted({max(0, number - draw.choice([1, 1, 1, 2, 3])) for _ in range(draw.choice([1, 1, 2]))}))
        inputs = inputs if number else ()
        is_free = number and draw.random() < 0.9
        memories.append(draw.randint(10, 100))
        seconds = draw.choice([0.1, 0.1, 1, 2, 4]) * draw.uniform(0.5, 1.5)
        kind = Kind.FREE if is_free else Kind.KEPT
        nodes.append(StepValue(kind, number, memories[-1], inputs if is_free else (), -1, number, seconds))
        events.append((Event.HOLD, number))
        for read in [i for i in inputs if draw.random() < 0.6] + ([number] if draw.random() < 0.3 else []):
            events.append((Event.SAVE, len(saved)))
            saved.append(Save(read, 0, read))
        events += [(Event.LET, number - 1)] if number else []
    events.append((Event.LET, len(nodes) - 1))
    forward = len(events)
    for number in reversed(range(len(saved))):
        gradient = len(memories)
        memories.append(draw.randint(0, 20))
        events += [(Event.READ, number), (Event.HOLD, gradient), (Event.RELEASE, number), (Event.LET, gradient)]
    return Step(nodes, memories, saved, events, forward, [])


def best(step: Step) -> list[Choice]:
    """The frontier, from all choices that there are."""
    values, simulation, choices = step.values, Simulation(step), []
    free = [number for number, value in enumerate(values) if value.kind == Kind.FREE and value.leader in (-1, number)]
    assert len(free) <= 14
    for drawn in itertools.product((True, False), repeat=len(free)):
        kept = [value.kind == Kind.KEPT for value in values]
        for number, is_kept in zip(free, drawn, strict=True):
            kept[number] = is_kept
        outcome = simulation.run(kept)
        choices.append(Choice(outcome.peak, outcome.seconds, tuple(outcome.kept)))
    return pareto(choices)


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 150), marks=pytest.mark.slow)])
def test_plans_are_near_the_best_of_all(seeds):
    """The peak in the time of every point of the best frontier: median within 5 %, worst within 30 %."""
    ratios = []
    for seed in seeds:
        step = random_step(seed)
        choices = frontier(step)
        front = best(step)
        assert plain_peak(step, saves=False) <= front[-1].peak
        for choice in front:
            ratios.append(
                min(candidate.peak for candidate in choices if candidate.seconds <= choice.seconds + 1e-9) / choice.peak
            )
        peaks, times = zip(*((candidate.peak, candidate.seconds) for candidate in choices), strict=True)
        assert list(peaks) == sorted(peaks, reverse=True) and list(times) == sorted(times)
    ratios.sort()
    assert ratios[len(ratios) // 2] <= 1.05 and ratios[-1] <= 1.3


class Joined(nn.Module):
    """Convolutions, instance norms and activations at two resolutions, as in a U-Net: many choices are dead ends."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low, self.up = self.block(3, 8), self.block(8, 16), self.block(24, 8)

    def block(self, inputs: int, outputs: int) -> nn.Sequential:
        widths = [inputs, outputs, outputs]
        parts = [
            [nn.Conv2d(a, b, 3, padding=1), nn.InstanceNorm2d(b), nn.LeakyReLU(0.1, True)]
            for a, b in itertools.pairwise(widths)
        ]
        return nn.Sequential(*(module for part in parts for module in part))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(x)
        return self.up(torch.cat([F.interpolate(self.low(F.max_pool2d(x, 2)), scale_factor=2), x], 1))


def test_a_larger_budget_is_met_wherever_a_smaller_one_is_and_the_least_is_the_same():
    """Although times are measured anew for each budget."""
    rehearsed = rehearsed_step(Joined().to("meta"), (torch.randn(2, 3, 32, 32, device="meta"),), {})
    plain, draws, limits, peaks = plain_peak(rehearsed), random.Random(0), [], []
    for share in range(30, 100, 7):
        values = [value._replace(seconds=draws.uniform(0, 1) ** 4) for value in rehearsed.values]
        limits.append(share * plain // 100)
        peaks.append(min(choice.peak for choice in frontier(rehearsed._replace(values=values), limits[-1])))
    least = frontier(rehearsed)[-1].peak
    assert 0.5 * plain < least < 0.8 * plain
    assert all(peak == least if limit < least else peak <= limit for limit, peak in zip(limits, peaks, strict=True))


def test_the_least_is_named_at_once_and_taken():
    """It does not count the outputs, which the program may drop before the backward pass."""
    torch.manual_seed(0)
    network, x = Joined(), torch.randn(2, 3, 32, 32)
    plain = plain_peak(rehearsed_step(network, (x,), {}))
    recompute_activations(network, budget=plain // 2)
    with pytest.warns(UserWarning, match="the lowest peak is") as warned:
        peaks = [peak_of(network, x) for _ in range(3)]
    least = plans_of(network).recent[0].plan.peak
    assert len(warned) == 1 and f"the lowest peak is {size_text(least)}, which is used" in str(warned[0].message)
    assert least == pytest.approx(peaks[0], rel=0.01)
    assert max(peaks) - min(peaks) < 1000


def test_layers_of_one_size_are_cut_into_segments():
    """At the peak, a step of n layers holds about 2 sqrt(n) results."""
    network = nn.Sequential(*(module for _ in range(50) for module in (nn.Linear(8, 8), nn.GELU())))
    rehearsed = rehearsed_step(network.to("meta"), (torch.randn(8, 8, device="meta"),), {})
    assert min(Simulation(rehearsed).run(kept).peak for kept in segmented(rehearsed)) < 3 * 100**0.5 * 8 * 8 * 4


class Texts(nn.Module):
    """Encoders of words, and decoders that also attend to what they have found. Blocks run through `run`."""

    def __init__(self, encoders: int, decoders: int) -> None:
        super().__init__()
        options = {"dim_feedforward": 128, "batch_first": True, "norm_first": True}
        self.words, self.encoders = nn.Embedding(50, 32), encoders
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, **options) for _ in range(encoders))
        self.blocks.extend(nn.TransformerDecoderLayer(32, 2, **options) for _ in range(decoders))

    def run(self, block: nn.Module, *arguments: torch.Tensor) -> torch.Tensor:
        return block(*arguments)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask, x, encoded = nn.Transformer.generate_square_subsequent_mask(words.shape[1]), self.words(words), ()
        for number, block in enumerate(self.blocks):
            encoded = (x,) if number == self.encoders else encoded
            x = self.run(block, x, *encoded, mask)
        return F.cross_entropy((x @ self.words.weight.T).flatten(0, 1), words.flatten())


@pytest.mark.parametrize("encoders, decoders", [(4, 0), (2, 2)])
def test_segments_reach_the_peak_of_checkpoints_with_the_same_gradients(encoders, decoders):
    """Checkpoints of whole blocks are among the choices of a plan."""
    torch.manual_seed(0)
    network, words = Texts(encoders, decoders), torch.randint(50, (2, 128))
    checkpointed = copy.deepcopy(network)
    checkpointed.run = lambda block, *arguments: checkpoint(block, *arguments, use_reentrant=False)
    expected = step(network, words)
    checkpointed_peak = peak_bytes(lambda: step(checkpointed, words), "cpu")
    traced = counted_step(network, (words,), {})
    kept = min(segmented(traced), key=lambda kept: Simulation(traced).run(kept).peak)
    plan = Choice(0, 0.0, tuple(kept)).plan(traced)
    assert all(map(torch.equal, step(network, words, plan), expected))
    planned_peak = peak_bytes(lambda: step(network, words, plan), "cpu")
    assert planned_peak <= checkpointed_peak
    assert Simulation(traced).run(kept).peak == pytest.approx(planned_peak, rel=0.03)
