"""Advice decides no value: passes with any advice, also a wrong one, are like plain PyTorch to the bit."""

import copy
from contextlib import nullcontext
from random import Random

import pytest
import torch

from keepless import recompute_activations
from keepless.recompute.passes import advice as bits
from keepless.recompute.passes.advice import Advice, Site
from keepless.recompute.passes.advised import Advised
from tests.keepless.recompute.agreement import AROUND, USES, agree, keep_by_chance, once, second_derivatives, several
from tests.keepless.recompute.programs import DEPENDING, Program, changed, drawn, hides, program

ANY = (bits.HOOKS, bits.DROP, bits.SIGNS, bits.RULES, bits.MASK, bits.DERIVE, bits.MEMORY, bits.COUNT, bits.ADDED)


def sites_of(advice: Advice) -> list[Site]:
    found: dict[int, Site] = {}
    pending = [advice.root, *advice.readers.values()]
    while pending:
        site = pending.pop()
        if id(site) not in found:
            found[id(site)] = site
            pending += [site.next, *(site.others or {}).values()]
    return [site for site in found.values() if site.function is not None]


def scramble(advice: Advice, draws: Random) -> None:
    """Give each site random advice, and some of them other sites that follow."""
    sites, follows_edges = sites_of(advice), draws.random() < 0.3
    likely = draws.choice([0.2, 0.5, 0.8])
    for site in sites:
        site.advice = sum(bit for bit in ANY if draws.random() < likely)
        if draws.random() < 0.05:
            site.advice |= bits.UNKNOWN
        if follows_edges and draws.random() < 0.1:
            site.next = draws.choice(sites)


@pytest.fixture
def scrambled(monkeypatch) -> list[Random]:
    """Advice is scrambled before each pass but the first by these random numbers. Each pass adds one of them."""
    draws, enter = [Random(0)], Advised.__enter__

    def scrambling(self: Advised) -> Advised:
        if not self.is_first:
            scramble(self.advice, draws[0])
            draws.append(draws[0])
        return enter(self)

    monkeypatch.setattr(Advised, "__enter__", scrambling)
    return draws


SEEDS = [(None, range(20)), ("by chance", range(3))]
SEEDS += [pytest.param(None, range(20, 500), marks=pytest.mark.slow)]
SEEDS += [pytest.param("by chance", range(3, 60), marks=pytest.mark.slow)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget, seeds", SEEDS)
def test_random_programs_with_scrambled_advice_are_like_plain_ones(budget, seeds, scrambled, monkeypatch):
    """Programs draw, write over tensors, raise, change between steps, and run parts under other modes and hooks."""
    for seed in seeds:
        draws = scrambled[0] = Random(seed)
        is_calm = seed % 3 == 0  # PyTorch, too, refuses hooks around such programs
        moves = drawn(draws, 3, 12, [DEPENDING]) if is_calm else drawn(draws, 2, 12)
        print(seed, budget, moves)
        if budget == "by chance":
            keep_by_chance(monkeypatch, draws)
        torch.manual_seed(1)
        plain = Program()
        ours = recompute_activations(copy.deepcopy(plain), budget="1KiB" if budget else None)
        steps = [(moves, {}), *(changed(moves, draws) for _ in range(2))]
        for number in (0, 0, 0, 1, 0, 2, 0):
            moves, options = steps[number]
            options = {} if is_calm else options  # `.data = …` of a tensor with metadata is not seen
            if KeyboardInterrupt in {choice for _, choice, *_ in moves} and budget:
                continue  # it would end the planning, before the step
            use = draws.choice(USES[:2] if is_calm else USES)
            around = draws.choice(AROUND[:1] * 8 + AROUND)
            if is_calm or "vmap" in {choice for _, choice, *_ in moves} or use is second_derivatives:
                around = nullcontext  # with hooks, PyTorch's own sums of second derivatives have another order
            agree(
                plain, ours, program(moves, **options), use, draws.choice([once, once, several]), around, hides(moves)
            )
    assert len(scrambled) > 3 * len(seeds)
