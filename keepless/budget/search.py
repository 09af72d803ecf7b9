"""Choose what a step keeps: the least time for every number of bytes."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .simulation import Outcome, simulate
from .step import Kind, Plan, Step

_FINER = 0.97  # each target is this much lower than the peak before it
_SECONDS = 20.0
_FEW = 16  # values of which pairs are tried
_TRIED = 12  # single moves of a kind that are simulated before one is made


class Choice(NamedTuple):
    """The values that a step keeps, and what that costs."""

    peak: int  # bytes
    seconds: float  # to compute values again
    kept: tuple[bool, ...]  # for each value

    def plan(self, step: Step) -> Plan:
        """The plan that makes this choice in the calls of a step."""
        again = {value.call for value, kept in zip(step.values, self.kept, strict=True) if value.call >= 0 and not kept}
        free = {value.call for value in step.values if value.kind == Kind.FREE}
        return Plan(step.calls, frozenset(again), frozenset(free - again))


def frontier(step: Step) -> list[Choice]:
    """The Pareto front of peak and time, by decreasing peak.

    The search begins with all that can be kept, and again with all but the results of norms, activations and the like;
    a third time, by bytes alone, since times are noisy.
    It lowers the peak by 3 % at a time: it drops the values that cost the least time for the bytes that they free while
    the step is above the target. It keeps values again, which cuts chains of recipes, where too much is
    computed at once. What it finds is then changed in single values, as long as this helps. After 20 seconds of this
    thread's time it stops with the choices that it has.
    """
    search = _Search(step, time.thread_time() + _SECONDS)
    for only_slow, search.counts_time in ((False, True), (True, True), (True, False)):
        search.start(only_slow)
        while search.lower(int(search.outcome.peak * _FINER)):
            pass
    search.polish()
    return pareto(search.found)


def pareto(choices: Iterable[Choice]) -> list[Choice]:
    """The Pareto front, by decreasing peak."""
    best: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.peak, choice.seconds)):
        if not best or choice.seconds < best[-1].seconds:
            best.append(choice)
    return best[::-1]


class _Search:
    def __init__(self, step: Step, deadline: float):
        self.step = step
        self.deadline = deadline
        self.is_free = [value.kind == Kind.FREE for value in step.values]
        self.found: list[Choice] = []
        self.counts_time = True

    def start(self, only_slow: bool) -> None:
        """Keep all that can be kept, or with `only_slow` the results of convolutions, matrix products and attention."""
        self.kept = [
            value.kind == Kind.KEPT or (value.kind == Kind.FREE and not (only_slow and value.operations == 0))
            for value in self.step.values
        ]
        self.outcome = self.simulated(self.kept)

    def simulated(self, kept: Sequence[bool]) -> Outcome:
        outcome = simulate(self.step, kept)
        self.found.append(Choice(outcome.peak, outcome.seconds, tuple(kept)))
        return outcome

    def lower(self, target: int) -> bool:
        """Go on to a choice whose peak is at most the target; False if none is found."""
        kept, outcome = self.kept, self.outcome
        while outcome.peak > target:
            if time.thread_time() > self.deadline:
                return False
            kept, outcome, better = self.improved(kept, outcome, target)
            if not better:
                return False
        self.kept, self.outcome = self.tidied(kept, outcome, target)
        return True

    def improved(self, kept: list[bool], outcome: Outcome, target: int) -> tuple[list[bool], Outcome, bool]:
        """Return a choice with a smaller total excess over the target."""
        before = _excess(outcome, target)
        ranked = self.drops(kept, outcome, target)
        moves = self.enough(ranked, outcome, target)
        count = len(moves)
        while count > 1:  # as many at once as the excess seems to need
            several = list(kept)
            for move in moves[:count]:
                for i in move:
                    several[i] = False
            found = self.simulated(several)
            if _excess(found, target) < before * 0.7:
                return several, found, True
            count //= 3
        pins = [[i] for i in self.live(kept, outcome, False)]  # to keep again
        held = [self.group(kept, outcome, i)[0] for i in self.live(kept, outcome, True)]  # to drop
        singles = [*(group for _, group in ranked[:_TRIED]), *pins[:_TRIED]]
        pairs = [pin + drop for pin in pins[-_TRIED:] for drop in held[-_TRIED:]]
        for moves in (singles, pairs):
            best: tuple[float, list[bool], Outcome] | None = None
            for move in moves:
                trial = _flipped(kept, move)
                found = self.simulated(trial)
                gain = before - _excess(found, target)
                if gain > 0:
                    rate = gain / max(found.seconds - outcome.seconds, 1e-9)
                    if best is None or rate > best[0]:
                        best = rate, trial, found
            if best is not None:
                return best[1], best[2], True
        return kept, outcome, False

    def polish(self) -> None:
        """Change single values of what was found, and pairs of them in small steps, until nothing gets better."""
        done: set[tuple[bool, ...]] = set()
        free = [i for i, is_free in enumerate(self.is_free) if is_free]
        if len(free) > _FEW:
            least = min(choice.peak for choice in self.found) // 1000
            free = [i for i in free if self.bytes(i) > least]
        while time.thread_time() < self.deadline:
            choices = [choice for choice in pareto(self.found) if choice.kept not in done]
            if not choices:
                return
            for choice in choices:
                done.add(choice.kept)
                if time.thread_time() > self.deadline:
                    return
                moves = [[i] for i in free]
                if len(free) <= _FEW:
                    moves += [[i, j] for i in free for j in free if i < j]
                for move in moves:
                    self.simulated(_flipped(choice.kept, move))

    def drops(self, kept: list[bool], outcome: Outcome, target: int) -> list[tuple[int, list[int]]]:
        """Values to drop while the step is above the target, those first that cost the least time for their bytes.

        Each with its group.
        """
        counts = [0]
        for level in outcome.levels:
            counts.append(counts[-1] + (level > target))
        ranked = []
        for i in range(len(kept)):
            if kept[i] and self.is_free[i] and outcome.readers[i]:
                moments = counts[outcome.first[i]] - counts[outcome.born[i]]
                if moments:
                    group, seconds = self.group(kept, outcome, i)
                    price = seconds if self.counts_time else 1.0
                    ranked.append((price / (self.bytes(i) * moments + 1), i, group))
        return [(i, group) for _, i, group in sorted(ranked)]

    def enough(self, ranked: list[tuple[int, list[int]]], outcome: Outcome, target: int) -> list[list[int]]:
        """As many of these as seem to bring the peak down to the target."""
        over = [max(0, level - target) for level in outcome.levels]
        groups = []
        for i, group in ranked:
            begin, end = outcome.born[i], outcome.first[i]
            if any(over[begin:end]):
                groups.append(group)
                over[begin:end] = [max(0, level - self.bytes(i)) for level in over[begin:end]]
        return groups

    def bytes(self, number: int) -> int:
        return self.step.memories[self.step.values[number].memory]

    def group(self, kept: list[bool], outcome: Outcome, number: int) -> tuple[list[int], float]:
        """A value, with the values that would be kept for its recipe alone; and the seconds to compute them."""
        group: list[int] = []
        seconds, pending = 0.0, [number]
        while pending:
            number = pending.pop()
            seconds += self.step.values[number].seconds
            if kept[number]:
                group.append(number)
            for i in self.step.values[number].inputs:
                if not outcome.readers[i] and i not in group and i not in pending:
                    if not kept[i] or self.is_free[i]:
                        pending.append(i)
        return group, seconds

    def live(self, kept: list[bool], outcome: Outcome, are_kept: bool) -> list[int]:
        """The free values in memory at the peak that are kept, or else computed; the largest last."""
        peak = outcome.levels.index(outcome.peak)
        start = outcome.born if are_kept else outcome.first
        found = [
            i
            for i, is_free in enumerate(self.is_free)
            if is_free and kept[i] == are_kept and outcome.readers[i] and start[i] <= peak <= outcome.last[i]
        ]
        return sorted(found, key=self.bytes)

    def tidied(self, kept: list[bool], outcome: Outcome, target: int) -> tuple[list[bool], Outcome]:
        """Use the remaining room to keep values again, most expensive to recompute first."""
        dropped = [i for i in range(len(kept)) if self.is_free[i] and not kept[i] and outcome.readers[i]]
        dropped.sort(key=lambda i: -self.step.values[i].seconds)
        trial, levels, any_kept = list(kept), list(outcome.levels), False
        for i in dropped:
            size = self.bytes(i)
            begin, end = outcome.born[i], outcome.first[i]
            if max(levels[begin:end], default=0) + size <= target:
                trial[i] = any_kept = True
                levels[begin:end] = [level + size for level in levels[begin:end]]
        if any_kept:
            found = self.simulated(trial)
            if found.peak <= target and found.seconds <= outcome.seconds:
                return trial, found
        return kept, outcome


def _flipped(kept: Sequence[bool], move: Iterable[int]) -> list[bool]:
    """The choice with these values kept instead of dropped, and vice versa."""
    trial = list(kept)
    for i in move:
        trial[i] = not trial[i]
    return trial


def _excess(outcome: Outcome, target: int) -> int:
    """Bytes above the target, over all events."""
    return sum(level - target for level in outcome.levels if level > target)
