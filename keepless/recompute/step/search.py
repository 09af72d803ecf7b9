"""Choose what a step keeps, so that it takes the least time within each memory budget, or within one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, islice, zip_longest
from operator import attrgetter
from typing import NamedTuple

from ..passes.plan import Flag, Plan
from .exchanges import COLD, HOT, annealed
from .simulation import Outcome, Simulation, plain_peak
from .step import Kind, Step, StepValue

_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_COARSER = 0.9  # ratio of successive targets of `segment`, and of the first targets in large steps
_FINER = (0.97, 0.99, 0.997)  # each target as a share of the peak before it; the next ratio where none is found
_RUNS, _FEWEST = 700, 60  # simulations in each part of the search: at most (small steps) and at least (large steps)
_WORK = 5 * 10**5  # values in all simulations of a part, between these limits: about two seconds
_BYTES_PER_CALL = 20_000  # moving them takes as long as the overhead of a call
_OPERATIONS_PER_BYTE = 4
_FEW, _MANY = 3, 12  # single moves of each kind to simulate before choosing one: usually, and at most if none helps
_AGAIN = 200  # simulations in a second attempt that simulates many
_BEST = 3  # choices that use up the memory left below the limit
_HARD = 0.08  # share of a step spent on recomputation, from which on many exchanges are tried
_FULL = 0.995  # share of the limit, up to which a few are
_SAVED, _STEPS = 0.3, 1000  # they take no longer than so many steps save, if they save this share
_PER_EVENT = 2e-6  # seconds that a trial takes for each event of the step
_LEAST_TRIALS, _FILLING, _TRIALS, _PER_CALL = 100, 300, 2000, 20  # at least, else none; if few; at most; for each call
_EVENTS = 1_500_000  # in all trials, at most
_CLOSE = 1.02  # stop lowering the lowest peak at this many times the lower bound for all choices


class Choice(NamedTuple):
    """The values that a step keeps, with the peak and the time."""

    peak: int  # bytes
    seconds: float  # to recompute values
    kept: tuple[bool, ...]  # for each value

    def plan(self, step: Step) -> Plan:
        """The plan that makes this choice in the calls of a step."""
        flags = bytearray(len(step.calls))
        for number, value in enumerate(step.values):
            kept = self.kept[number if value.leader < 0 else value.leader]
            if value.call >= 0 and not kept:
                flags[value.call] |= value.flag
            elif value.kind == Kind.FREE and value.flag == Flag.AGAIN:
                flags[value.call] |= Flag.KEEP
        return Plan(step.calls, bytes(flags), self.peak, plain_peak(step))


class Tried(NamedTuple):
    """A simulated choice."""

    kept: Sequence[bool]
    outcome: Outcome

    @property
    def peak(self) -> int:
        return self.outcome.peak


def frontier(
    step: Step, limit: int = 0, budgets: Iterable[int] = (), known: Sequence[bool] | None = None
) -> list[Choice]:
    """The Pareto front of peak and time, by decreasing peak.

    A first search looks for any choice within the limit. Its costs are counted bytes and operations, and it takes the
    same path for every limit: so all budgets agree on the lowest peak, and if a budget can be met, so can any larger
    one. If the limit is met, a second search uses the seconds of each call, and finds the fastest choice.

    Both try activation checkpointing of whole blocks, and lower the lowest of these peaks, and the baseline's, by 3 %
    at a time (in large steps 10 % first): they drop the values that cost the least for the bytes that they free while
    the step is above the target. Where too much is recomputed at once, they keep some values again to shorten chains of
    recipes. Where none of this helps, they swap a kept value for a dropped one that is computed from it, or the other
    way round. They end after a number of simulations, not of seconds.

    Last, where a plan within a limit recomputes much, or leaves memory below it, values are exchanged for others: see
    `annealed`.

    Args:
        limit: bytes. Only the fastest choice within it is looked for, or if there is none the lowest peak; the front
            contains what was found on the way. If the baseline is within the limit, nothing is searched.
        budgets: without a limit: bytes, for each of which more choices are tried.
        known: a choice to begin with. If it is within the limit, the first search is left out.
    """
    simulation = Simulation(step)
    search = _Search(step, simulation)
    plain = search.plain()
    if plain.peak <= limit:
        return search.found
    met = None if known is None else search.tried(known)
    if met is None or met.peak > limit:
        counted = _Search(step._replace(values=list(map(_by_counting, step.values))), simulation)
        met = search.tried(counted.any_within(limit).kept)
        for choice in [] if limit else pareto(counted.found):
            search.tried(choice.kept)
    if limit and met.peak > limit:
        search.tidied(met, met.peak)
        return pareto(search.found)
    search.lower(plain, limit)
    if limit:
        search.lower(plain, limit, _MANY, _AGAIN)
    search.segment(limit)
    for choice in sorted((one for one in search.found if one.peak <= limit), key=attrgetter("seconds"))[:_BEST]:
        search.tidied(search.tried(choice.kept), limit)
    for one in [limit] if limit else budgets:
        search.exchange(one)
    least = 0 if limit else met.peak  # the lowest peak is the same for all budgets
    return pareto(choice for choice in search.found if choice.peak >= least)


def _by_counting(value: StepValue) -> StepValue:
    """A value whose seconds follow from its bytes and operations, so they are the same in every trace."""
    return value._replace(seconds=1e-10 * (_BYTES_PER_CALL + value.bytes + value.operations / _OPERATIONS_PER_BYTE))


def pareto(choices: Iterable[Choice]) -> list[Choice]:
    """The Pareto front, by decreasing peak."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.peak, choice.seconds)):
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best[::-1]


class _Search:
    def __init__(self, step: Step, simulation: Simulation):
        self.step, self.simulation = step, simulation
        self.seconds = [value.seconds for value in step.values]
        self.runs = min(_RUNS, max(_FEWEST, _WORK // max(len(step.values), 1)))
        self.allowed = 0  # number of simulations at which the present part ends
        self.moves = _FEW  # see `lower`
        self.wanted = 0  # bytes; the search ends once a peak is within them
        self.lowest = 2**63  # lowest peak of all choices, bytes
        self.is_free = [value.kind == Kind.FREE and value.leader in (-1, i) for i, value in enumerate(step.values)]
        self.free = [number for number, is_free in enumerate(self.is_free) if is_free]
        self.inputs = [[simulation.leaders[i] for i in value.inputs] for value in step.values]
        self.bytes = [step.memories[value.memory] for value in step.values]
        for leader, numbers in self.simulation.together.items():
            self.bytes[leader] = sum(self.bytes[number] for number in numbers)
        self.found: list[Choice] = []

    def tried(self, kept: Sequence[bool]) -> Tried:
        """Simulate a choice."""
        kept = self.simulation.led(kept)
        self.simulation.seconds = self.seconds
        outcome = self.simulation.run(kept)
        self.found.append(Choice(outcome.peak, outcome.seconds, tuple(kept)))
        self.lowest = min(self.lowest, outcome.peak)
        return Tried(kept, outcome)

    def plain(self) -> Tried:
        """The baseline: keep everything that can be kept."""
        values = zip(self.step.values, self.is_free, strict=True)
        return self.tried([value.kind == Kind.KEPT or is_free for value, is_free in values])

    def any_within(self, limit: int) -> Choice:
        """A choice within the limit, as soon as one is found; if there is none, the one with the lowest peak."""
        self.wanted = max(limit, int(_CLOSE * plain_peak(self.step, saves=False)))
        plain = self.plain()
        self.segment(1)
        self.lower(plain, 1)
        choices = pareto(self.found)
        return next((choice for choice in choices if choice.peak <= limit), choices[-1])

    def is_spent(self) -> bool:
        return len(self.found) >= self.allowed or self.lowest <= self.wanted

    def segment(self, limit: int) -> None:
        """Try choices that cut the step into segments, keep more in the memory left, and lower the lowest peak further.

        `limit`: as for `frontier`.
        """
        self.allowed = len(self.found) + self.runs
        lowest, most = None, self.found[0].peak
        for kept in segmented(self.step):
            at = self.tried(kept)
            if lowest is None or at.peak < lowest.peak:
                lowest = at
            target = max(limit, at.peak)
            while target < most and not self.is_spent():
                at, target = self.tidied(at, target), most if limit else int(target / _COARSER)
        if lowest is not None:
            self.lower(lowest, limit)

    def lower(self, at: Tried, limit: int, moves: int = _FEW, runs: int = _RUNS) -> None:
        """Lower the peak in small steps, as far as possible or to the limit.

        `moves`: single moves of each kind to simulate before choosing one. `runs`: simulations, at most.
        """
        self.moves, self.allowed = moves, len(self.found) + min(runs, self.runs)
        steps = iter(_FINER if self.runs == _RUNS else (_COARSER, *_FINER))
        share = next(steps)
        while at.peak > limit:
            if share * at.peak < limit and self.below(at, limit):
                return
            while (found := self.below(at, int(share * at.peak))) is None:
                share = next(steps, 0.0)
                if not share or self.is_spent():
                    return
            at = found

    def below(self, at: Tried, target: int) -> Tried | None:
        """A choice whose peak is at most the target; None if none is found."""
        while at.peak > target:
            better = None if self.is_spent() else self.improved(at, target)
            if better is None:
                return None
            at = better
        return self.tidied(at, target)

    def improved(self, at: Tried, target: int) -> Tried | None:
        """A choice with a smaller total excess over the target; None if none is found."""
        before = _excess(at.outcome, target)
        ranked = self.drops(at, target)
        moves = self.enough(ranked, at.outcome, target)
        count = len(moves)
        while count > 1:  # try as many at once as the excess seems to need
            found = self.tried(_flipped(at.kept, set().union(*moves[:count])))
            if _excess(found.outcome, target) < before * 0.7:
                return found
            count //= 3
        again = ([i] for i in self.dropped_at_peak(at))
        single = zip_longest((group for _, group in ranked), again)
        return self.best(at, target, single) or self.best(at, target, zip(self.swaps(at)))

    def best(self, at: Tried, target: int, moves: Iterable[Sequence[list[int] | None]]) -> Tried | None:
        """The move that lowers the total excess most for the time that it costs; None if none of the first does."""
        before, best, rate = _excess(at.outcome, target), None, 0.0
        for number, together in enumerate(islice(moves, _MANY)):
            if best is not None and number >= self.moves:
                break
            for move in filter(None, together):
                found = self.tried(_flipped(at.kept, move))
                gain = (before - _excess(found.outcome, target)) / max(found.outcome.seconds - at.outcome.seconds, 1e-9)
                if gain > rate:
                    best, rate = found, gain
        return best

    def drops(self, at: Tried, target: int) -> list[tuple[int, list[int]]]:
        """Values to drop while the step is above the target, each with its group; the cheapest per byte first."""
        outcome, ranked = at.outcome, []
        counts = [0, *accumulate(level > target for level in outcome.levels)]
        for i in self.free:
            if at.kept[i] and outcome.consumers[i]:
                moments = counts[outcome.first[i]] - counts[outcome.born[i]]
                if moments:
                    group, seconds = self.group(at, i)
                    ranked.append((seconds / (self.bytes[i] * moments + 1), i, group))
        return [(i, group) for _, i, group in sorted(ranked)]

    def enough(self, ranked: list[tuple[int, list[int]]], outcome: Outcome, target: int) -> list[list[int]]:
        """As many groups as seem to bring the peak down to the target."""
        over = [max(0, level - target) for level in outcome.levels]
        groups = []
        for i, group in ranked:
            where, size = slice(outcome.born[i], outcome.first[i]), self.bytes[i]
            if any(span := over[where]):
                groups.append(group)
                over[where] = [one - size if one > size else 0 for one in span]
        return groups

    def group(self, at: Tried, number: int) -> tuple[list[int], float]:
        """A value with the values that would be kept only for its recipe; and the seconds to compute them."""
        group: list[int] = []
        seconds, pending = 0.0, [number]
        while pending:
            number = pending.pop()
            seconds += self.step.values[number].seconds
            if at.kept[number]:
                group.append(number)
            for i in self.inputs[number]:
                if not at.outcome.consumers[i] and i not in group and i not in pending:
                    if not at.kept[i] or self.is_free[i]:
                        pending.append(i)
        return group, seconds

    def dropped_at_peak(self, at: Tried) -> list[int]:
        """The recomputed values in memory at the peak, smallest first."""
        outcome, peak = at.outcome, at.outcome.levels.index(at.outcome.peak)
        dropped = (i for i in self.free if not at.kept[i] and outcome.consumers[i])
        return sorted((i for i in dropped if outcome.first[i] <= peak <= outcome.last[i]), key=self.bytes.__getitem__)

    def swaps(self, at: Tried) -> list[list[int]]:
        """Pairs of a kept and a dropped value to swap, where one is computed from the other.

        Each swap lowers the memory at the peak, the first one the most.
        """
        outcome, peak = at.outcome, at.outcome.levels.index(at.outcome.peak)
        ranked = []
        for i in filter(outcome.consumers.__getitem__, self.free):
            for j in self.sources(at, i):
                if self.is_free[j] and at.kept[i] is not at.kept[j]:
                    kept, dropped = (i, j) if at.kept[i] else (j, i)
                    is_kept_then = outcome.born[kept] <= peak <= outcome.last[kept]
                    is_held_then = outcome.first[dropped] <= peak <= outcome.last[dropped]
                    lowers = is_kept_then * self.bytes[kept] - (not is_held_then) * self.bytes[dropped]
                    if lowers > 0:
                        ranked.append((lowers, [kept, dropped]))
        return [pair for _, pair in sorted(ranked, reverse=True)]

    def sources(self, at: Tried, number: int) -> set[int]:
        """The values from which a value is computed, back to kept ones."""
        found: set[int] = set()
        pending = [*self.inputs[number]]
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                pending += [] if at.kept[i] else self.inputs[i]
        return found

    def exchange(self, limit: int) -> None:
        """Exchange kept values for dropped ones where much is recomputed, and where memory is left below the limit."""
        baseline = self.found[0]
        if limit < self.lowest or limit >= baseline.peak:
            return
        fastest, events = self.fastest(limit), len(self.simulation.events)
        most = min(_TRIALS, _PER_CALL * len(self.step.calls), _EVENTS // events)
        self.annealed(fastest, limit, fastest.seconds - _HARD * self.step.seconds, most, HOT)
        fastest = self.fastest(limit)
        if fastest.peak < _FULL * limit:
            self.annealed(fastest, limit, fastest.seconds, _FILLING, COLD)

    def fastest(self, limit: int) -> Choice:
        """The fastest choice within the limit so far."""
        return min((one for one in self.found if one.peak <= limit), key=attrgetter("seconds"))

    def annealed(self, choice: Choice, limit: int, seconds: float, trials: int, temperature: float) -> None:
        """Try exchanges, so many at most. `seconds`: of each step, a share of which may be saved."""
        paid = _STEPS * _SAVED * seconds / (_PER_EVENT * len(self.simulation.events))
        if min(trials, paid) >= _LEAST_TRIALS:
            self.simulation.seconds = self.seconds
            how = limit, min(trials, int(paid)), temperature
            self.tidied(self.tried(annealed(self.simulation, choice.kept, self.free, *how)), limit)

    def tidied(self, at: Tried, target: int) -> Tried:
        """Use the remaining memory to keep values again, the most expensive to recompute first."""
        outcome, kept, levels = at.outcome, list(at.kept), list(at.outcome.levels)
        dropped = [i for i in self.free if not kept[i] and outcome.consumers[i]]
        for i in sorted(dropped, key=lambda i: -self.step.values[i].seconds):
            where, size = slice(outcome.born[i], outcome.first[i]), self.bytes[i]
            span = levels[where]
            if not span or max(span) + size <= target:
                kept[i] = True
                levels[where] = [level + size for level in span]
        if kept == list(at.kept):
            return at
        found = self.tried(kept)
        return found if found.peak <= target and found.outcome.seconds <= outcome.seconds else at


def _flipped(kept: Sequence[bool], move: Iterable[int]) -> list[bool]:
    """The choice with these values kept instead of dropped, and vice versa."""
    trial = list(kept)
    for i in move:
        trial[i] = not trial[i]
    return trial


def _excess(outcome: Outcome, target: int) -> int:
    """Bytes above the target, over all events."""
    return sum(level - target for level in outcome.levels if level > target)


def segmented(step: Step) -> Iterator[list[bool]]:
    """Choices that cut a step into segments, as activation checkpointing does: from few long ones to many short ones.

    The forward pass is cut where fewer bytes are handed on than just before and after, i.e. between its blocks. Values
    handed on at a cut are kept, and everything else is recomputed from them.
    """
    handed = _handed_on(step)
    sizes = [sum(step.memories[memory] for memory in {step.values[i].memory for i in one}) for one in handed]
    cuts = [
        i
        for i in range(1, len(handed) - 1)
        if 0 < sizes[i] < sizes[i - 1] and sizes[i] <= next((size for size in sizes[i:] if size != sizes[i]), 0)
    ]
    if not cuts:  # consecutive layers of equal size
        cuts = [i for i in range(1, len(handed) - 1) if 0 < sizes[i] == sizes[i - 1]]
    inside = [0]  # bytes of the results before each value
    for value in step.values:
        inside.append(inside[-1] + (value.bytes if value.kind == Kind.FREE else 0))
    seen: set[tuple[int, ...]] = set()
    for count in _SEGMENTS:
        chosen, since = [], 0
        for cut in cuts:
            if inside[cut] - since >= inside[-1] / count:
                chosen.append(cut)
                since = inside[cut]
        if tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            kept = [value.kind == Kind.KEPT for value in step.values]
            for i in set().union(*(handed[cut] for cut in chosen)):
                kept[i] = True
            yield kept


def _handed_on(step: Step) -> list[set[int]]:
    """For each value: the results up to it that later recipes read."""
    sources: list[set[int]] = []  # the results from which a value is made through views and the like
    last: dict[int, int] = {}  # the last value whose recipe reads a result
    for number, value in enumerate(step.values):
        read = set().union(*(sources[i] for i in value.inputs))
        for i in read:
            last[i] = number
        sources.append({number if value.leader < 0 else value.leader} if value.kind == Kind.FREE else read)
    handed: list[set[int]] = []
    now: set[int] = set()
    for number, value in enumerate(step.values):
        if value.kind == Kind.FREE:
            now |= sources[number]
        now = {i for i in now if last.get(i, -1) > number}
        handed.append(set(now))
    return handed
