"""Random programs: a prepared network is like the plain one, to the bit, whatever its steps do."""

import copy
import gc
import warnings
from contextlib import nullcontext
from functools import partial
from random import Random

import pytest
import torch

from keepless import recompute_activations, recomputing
from keepless.recompute.step.costs import peak_bytes
from keepless.torch_internals import current_hooks
from tests.keepless.recompute.agreement import (
    AROUND,
    REFUSED,
    USES,
    agree,
    agrees,
    by_backward,
    freed_in_part,
    in_another_thread,
    in_parts,
    is_refused,
    keep_by_chance,
    note_followed,
    once,
    run,
    second_derivatives,
    several,
    under,
    under_a_checkpoint,
)
from tests.keepless.recompute.ahead import plans, watched_count
from tests.keepless.recompute.programs import (
    CALM,
    CHOICES,
    DEPENDING,
    HIDING,
    MODES,
    Moves,
    Program,
    WithMeta,
    changed,
    drawn,
    hides,
    program,
)


def pair(budget=None) -> tuple[Program, Program]:
    """A plain and a prepared program."""
    torch.manual_seed(1)
    plain = Program()
    return plain, recompute_activations(copy.deepcopy(plain), budget=budget)


def slow(seeds: range, *values):
    return pytest.param(*values, seeds, marks=pytest.mark.slow)


def take_steps(draws: Random, seed: int, budget, monkeypatch) -> None:
    """Compare ten steps, each of one of three or four programs that differ in one call, or in an option of all calls.

    Most come twice in a row. A step may have several passes, be under a checkpoint, or under hooks of the program. In a
    third of the programs calls depend on more than arguments: on modes around a pass or in it, on `.data`, on dropout's
    p; PyTorch refuses hooks around some of these, too.
    """
    depends = seed % 3 == 0
    moves = drawn(draws, 3, 12, [DEPENDING]) if depends else drawn(draws, 2, 12)
    wraps = draws.choice([once] * 4 + [several, once if depends else under_a_checkpoint])
    print(seed, budget, wraps.__name__, moves)
    if budget == "by chance":
        keep_by_chance(monkeypatch, draws)
    plain, within = pair("1KiB" if budget == "by chance" else budget)
    steps = [(moves, {}), *(changed(moves, draws) for _ in range(draws.randint(2, 3)))]
    draws.shuffle(steps)
    for number in [0, 0, 1, 1, 0, 2, 2, 0, -1, -1]:
        moves, options = steps[number]
        use, around, passes = draws.choice(USES), draws.choice(AROUND[:1] * 8 + AROUND), wraps
        choices = {choice for _, choice, *_ in moves}
        if depends:
            use, around, options = draws.choice(USES[:2]), nullcontext, {}  # `.data = …` of a subclass is not seen
            passes = draws.choice([wraps, wraps, partial(under, draws.choice([*MODES.values()]))])
        if "reentrant" in choices or (wraps is under_a_checkpoint and not choices.isdisjoint(("checkpoint", "vmap"))):
            use = by_backward  # PyTorch's own checkpoints may not be unpacked twice
        if "vmap" in choices or use is second_derivatives:
            around = nullcontext  # with hooks, PyTorch's own sums of second derivatives have another order
        is_interrupted = KeyboardInterrupt in choices
        passes = wraps if is_interrupted else passes  # a mode's exit would remove ours, which Ctrl-C has left on top
        if budget is not None and is_interrupted:
            continue  # it would end the planning, before the step
        step, is_unchecked = program(moves, **options), wraps is under_a_checkpoint
        if is_unchecked and is_refused(run(copy.deepcopy(plain), step, use)):
            continue  # PyTorch checks no versions under a checkpoint: its gradients are wrong
        agree(plain, within, step, use, passes, around, hides(moves))
        assert is_interrupted or current_hooks() is None
    with recomputing():
        pass  # it removes what an interrupted last step has left


# Without a budget, within each of three budgets, and by plans that keep a random part.
SEEDS = [("by chance", range(6)), slow(range(6, 80), "by chance"), (None, range(10)), slow(range(10, 400), None)]
for budget in (1.0, 0.7, "1KiB"):
    SEEDS += [(budget, range(1, 2)), slow(range(2, 40), budget)]


@pytest.mark.table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget, seeds", SEEDS)
def test_a_prepared_network_whose_steps_change_is_like_the_plain_one(budget, seeds, monkeypatch):
    for seed in seeds:
        take_steps(Random(seed), seed, budget, monkeypatch)


# A part of a concatenation, which a layer saves, is overwritten. PyTorch allows it.
PARTS_ARE_JOINED: Moves = [("unary", 0, 0, 0), ("layer", 0, 0, 1), ("binary", 3, 3, 0), ("layer", 2, 4, 1)]
WRITES = [(kind, choice, 3, 0) for kind in ("operator", *HIDING) for choice in CHOICES[kind]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_writes_by_operators_are_seen_and_others_refused(monkeypatch):
    """Hooks and checkpoints change nothing, although autograd checks no versions there."""
    keep_by_chance(monkeypatch, Random(0))
    for around in AROUND:
        assert REFUSED.search(str(run(pair()[1], program([("layer", 0, 0, 1), ("squared", 0, 2, 0)]), around=around)))
    for moves in ([*PARTS_ARE_JOINED, write] for write in WRITES):
        print(moves)
        for around in AROUND:
            plain, within = pair()
            assert agree(plain, within, program(moves), around=around, may_refuse=hides(moves))
        for budget in (None, "1KiB", "1KiB"):
            plain, within = pair(budget)
            for _ in range(3):
                assert agree(plain, within, program(moves), may_refuse=hides(moves))
        assert agree(*pair(), program(moves), wraps=under_a_checkpoint, may_refuse=hides(moves))


# What has once gone wrong.
FOUND: dict[str, tuple[Moves, dict]] = {
    # `silu_` saves a copy of its argument, so PyTorch allows that it is overwritten.
    "a copy is saved": ([("in place", 8, 0, 0), ("transposed", 0, 0, 0), ("no_grad", 0, 0, 0)], {}),
    "a checkpoint repeats a pass of tensors with metadata without it": (
        [
            *[("unary", 2, 7, 0), ("layer", 8, 3, 0), ("unary", 2, 2, 8), ("binary", 3, 5, 8)],
            *[("transposed", 0, 6, 0), ("layer", 3, 4, 6)],
        ],
        {"kind": WithMeta},
    ),
    "a copy of a norm's permuted result is saved, and overwritten twice": (
        [("unary", 31, 1, 1), ("unary", 1, 2, 3), ("in place", 8, 2, 8), ("in place", 2, 4, 4)],
        {},
    ),
    "a checkpoint repeats a pass in another thread": ([("layer", 5, 0, 1), ("unary", 0, 2, 0), ("layer", 0, 3, 1)], {}),
}


@pytest.mark.parametrize("moves, options", FOUND.values(), ids=FOUND)
def test_programs_that_once_differed(moves, options):
    for wraps, use in ((once, in_parts), (once, freed_in_part), (under_a_checkpoint, in_another_thread)):
        plain, within = pair()
        for _ in range(2):
            agree(plain, within, program(moves, **options), use, wraps)


UNPLANNED = {**dict.fromkeys(["checkpoint", "reentrant", "copying hooks"], "a checkpoint"), "vmap": "torch.vmap"}
# Their steps are recorded anew. A checkpointed norm may save a view of what only attention has made.
WITHOUT_ADVICE = [{("region", "vmap")}, {("region", "autocast"), ("layer", 7)}, {("unary", 29), ("layer", 5)}]


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 300), marks=pytest.mark.slow)])
def test_a_program_that_writes_over_nothing_follows_its_one_plan_and_its_advice(seeds, monkeypatch, request):
    """From the second step on, which takes no more than the first. It is told what a budget cannot plan."""
    request.addfinalizer(gc.enable)
    gc.disable()  # it would free tensors of earlier steps within a measured one
    passes, recorded = note_followed(monkeypatch), 0
    for seed in seeds:
        gc.collect()
        passes.clear()
        draws, peaks = Random(seed), []
        moves, budget = drawn(draws, 2, 9, [CALM]), draws.choice([None, "1KiB"])
        if seed < len(UNPLANNED):
            moves, budget = [("region", [*UNPLANNED][seed], 0, 0), ("unary", 0, 0, 0)], "1KiB"
        print(seed, budget, moves)
        plain, within = pair(budget)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            about_budgets = (
                "no plan keeps|this step is within|a budget of .* changes nothing|the first steps with a shape"
            )
            warnings.filterwarnings("ignore", f"{about_budgets}|Mismatch dtype|There is a performance drop")
            for _ in range(3 if budget is None else 4):  # the first step within a budget is watched
                within.zero_grad()
                step = partial(run, within, program(moves))
                results = []
                if budget is None:
                    peaks.append(peak_bytes(lambda: results.append(step()), "cpu"))  # noqa: B023
                else:
                    results.append(step())
                expected = run(plain, program(moves))
                agrees(expected, results[0])
        if isinstance(expected, Exception):
            continue
        has_none = any(ones.issubset(move[:2] for move in moves) for ones in WITHOUT_ADVICE)
        recorded += not (passes or has_none)
        assert (
            passes in ([True] * (1 + (budget is not None)), []) or has_none
        )  # without one, the third is recorded anew
        texts = [str(warning.message) for warning in caught]
        unplanned = [UNPLANNED.get(choice, "") for _, choice, *_ in moves]
        assert all(any(words and words in text for words in unplanned) for text in texts)
        assert len(texts) == 1 or seed >= len(UNPLANNED)
        assert all(later <= 1.01 * peaks[0] for later in peaks[1:])
        if budget is not None:
            assert plans(within) == [1] and watched_count(within) == 1
    assert recorded <= len(seeds) // 100  # some views of views cannot be made again either
