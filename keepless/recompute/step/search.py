"""Choose what a step keeps, so that it takes the least time within each memory budget, or within one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, groupby, islice, zip_longest
from operator import attrgetter, itemgetter
from typing import NamedTuple

from ..passes.plan import Flag, Plan
from .exchanges import annealed
from .simulation import Simulation, Trial, plain_peak
from .step import Kind, Step, StepValue

_SEGMENTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_COARSER = 0.9  # ratio of successive targets of `segment`, and of the first targets in large steps
_FINER = (0.97, 0.99, 0.997)  # each target as a share of the peak before it; the next ratio where none is found
_MOST_RUNS = 700  # simulations in each part of the search, in small steps
_FEWEST_RUNS = 60  # and in large steps
_WORK = 5 * 10**5  # values in all simulations of a part, between these limits: about two seconds
_BYTES_PER_CALL = 20_000  # moving them takes as long as the overhead of a call
_OPERATIONS_PER_BYTE = 4
_FEW = 3  # single moves of each kind to simulate before choosing one
_MANY = 12  # likewise, at most, if none of the first helps
_BEST = 3  # choices that use up the memory left below the limit
_STEPS = 1000  # exchanges take no longer than so many steps save
_SAVED = 0.3  # if they save this share of the recomputation
_PER_EVENT = 2e-6  # seconds that an exchange takes for each event of the step
_LEAST_TRIALS = 100  # exchanges to try: at least, else none
_MOST_TRIALS = 2000
_TRIALS_PER_CALL = 20  # likewise, for each call of the step
_EVENTS = 1_500_000  # simulated in all exchanges, at most
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
            is_kept = self.kept[number if value.leader < 0 else value.leader]
            if value.call >= 0 and not is_kept:
                flags[value.call] |= value.flag
            elif value.kind == Kind.FREE and value.flag == Flag.AGAIN:
                flags[value.call] |= Flag.KEEP
        return Plan(step.calls, bytes(flags), self.peak, plain_peak(step))


def frontier(
    step: Step, limit: int = 0, budgets: Iterable[int] = (), start: Sequence[bool] | None = None
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

    Last, values are exchanged for others within a limit, as long as that pays: see `annealed`.

    Args:
        limit: bytes. Only the fastest choice within it is looked for, or if there is none the lowest peak; the front
            contains what was found on the way. If the baseline is within the limit, nothing is searched.
        budgets: without a limit: bytes, for each of which more choices are tried.
        start: a choice to begin with. If it is within the limit, the first search is left out.
    """
    search = _Search(step)
    baseline = search.baseline()
    if baseline.peak <= limit:
        return search.choices
    first_trial = None if start is None else search.simulate(start)
    if first_trial is None or first_trial.peak > limit:
        wanted_peak = max(limit, int(_CLOSE * plain_peak(step, saves=False)))
        counted = _Search(step._replace(values=list(map(_with_counted_seconds, step.values))), wanted_peak)
        first_trial = search.simulate(counted.any_within(limit).kept)
        if not limit:
            for choice in pareto(counted.choices):
                search.simulate(choice.kept)
    if limit and first_trial.peak > limit:
        search.keep_more(first_trial, first_trial.peak)
        return pareto(search.choices)
    search.lower_peak(baseline, limit, search.end_of_part())
    search.segment(limit)
    for choice in search.choices_within(limit)[:_BEST]:
        search.keep_more(search.simulate(choice.kept), limit)
    for budget in [limit] if limit else budgets:
        search.exchange(budget)
    least = 0 if limit else first_trial.peak  # the lowest peak is the same for all budgets
    return pareto(choice for choice in search.choices if choice.peak >= least)


def _with_counted_seconds(value: StepValue) -> StepValue:
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
    """A search for choices of a step. It ends once a peak is within `wanted_peak` bytes.

    Otherwise each part of it ends at a number of choices: see `end_of_part`.
    """

    def __init__(self, step: Step, wanted_peak: int = 0):
        self.step = step
        self.simulation = Simulation(step)
        self.runs = min(_MOST_RUNS, max(_FEWEST_RUNS, _WORK // max(len(step.values), 1)))
        self.wanted_peak = wanted_peak
        self.lowest_peak = 2**63  # bytes, of all choices
        self.is_free = [value.kind == Kind.FREE and value.leader in (-1, i) for i, value in enumerate(step.values)]
        self.free = [number for number, is_free in enumerate(self.is_free) if is_free]
        self.inputs = [[self.simulation.leaders[i] for i in value.inputs] for value in step.values]
        self.bytes = [step.memories[value.memory] for value in step.values]
        for leader, members in self.simulation.members.items():
            self.bytes[leader] = sum(self.bytes[number] for number in members)
        self.choices: list[Choice] = []  # all that were simulated

    def simulate(self, kept: Sequence[bool]) -> Trial:
        """Simulate a choice, and note it among the choices."""
        trial = self.simulation.run(kept)
        self.choices.append(Choice(trial.peak, trial.seconds, tuple(trial.kept)))
        self.lowest_peak = min(self.lowest_peak, trial.peak)
        return trial

    def baseline(self) -> Trial:
        """Simulate the choice that keeps everything that can be kept."""
        return self.simulate([value.kind in (Kind.KEPT, Kind.FREE) for value in self.step.values])

    def any_within(self, limit: int) -> Choice:
        """A choice within the limit, as soon as one is found; if there is none, the one with the lowest peak."""
        baseline = self.baseline()
        self.segment(1)
        self.lower_peak(baseline, 1, self.end_of_part())
        choices = pareto(self.choices)
        return next((choice for choice in choices if choice.peak <= limit), choices[-1])

    def end_of_part(self) -> int:
        """The number of choices at which a part of the search ends that begins now."""
        return len(self.choices) + self.runs

    def is_over(self, end: int) -> bool:
        return len(self.choices) >= end or self.lowest_peak <= self.wanted_peak

    def segment(self, limit: int) -> None:
        """Try choices that cut the step into segments, keep more in the memory left, and lower the lowest peak further.

        `limit`: as for `frontier`.
        """
        end = self.end_of_part()
        baseline_peak = self.choices[0].peak
        segment_trials: list[Trial] = []
        for kept in segmented(self.step):
            trial = self.simulate(kept)
            segment_trials.append(trial)
            target = max(limit, trial.peak)
            while target < baseline_peak and not self.is_over(end):
                trial = self.keep_more(trial, target)
                target = baseline_peak if limit else int(target / _COARSER)
        self.lower_peak(min(segment_trials, key=attrgetter("peak")), limit, self.end_of_part())

    def lower_peak(self, trial: Trial, limit: int, end: int) -> None:
        """Try choices with ever lower peaks, in small steps, as far as possible or to the limit.

        A share of the peak that is not reached is left out from then on: later ones would not be reached either.
        """
        shares = list(_FINER if self.runs == _MOST_RUNS else (_COARSER, *_FINER))
        while trial.peak > limit and shares:
            lower_trial = self.lower_to(trial, max(limit, int(shares[0] * trial.peak)), end)
            if lower_trial is None:
                del shares[0]
            else:
                trial = lower_trial

    def lower_to(self, trial: Trial, target: int, end: int) -> Trial | None:
        """A choice whose peak is at most the target; None if none is found."""
        while trial.peak > target:
            lower_trial = None if self.is_over(end) else self.lower_excess(trial, target)
            if lower_trial is None:
                return None
            trial = lower_trial
        return self.keep_more(trial, target)

    def lower_excess(self, trial: Trial, target: int) -> Trial | None:
        """A choice with a smaller total excess over the target; None if none is found."""
        excess = _excess(trial, target)
        ranked = self.ranked_drops(trial, target)
        groups = self.enough_drops(ranked, trial, target)
        count = len(groups)
        while count > 1:  # try as many at once as the excess seems to need
            candidate = self.simulate(_flipped(trial.kept, set().union(*groups[:count])))
            if _excess(candidate, target) < excess * 0.7:
                return candidate
            count //= 3
        keeps = ([number] for number in self.dropped_at_peak(trial))
        single_moves = zip_longest((group for _, group in ranked), keeps)
        best = self.best_move(trial, target, single_moves)
        return best or self.best_move(trial, target, zip(self.swaps(trial)))

    def best_move(self, trial: Trial, target: int, moves: Iterable[Sequence[list[int] | None]]) -> Trial | None:
        """The choice after the move that lowers the total excess most for the time it costs; None if none helps.

        `moves`: each entry has a move of every kind, or None. `_FEW` entries are tried, and up to `_MANY` until one
        helps.
        """
        excess = _excess(trial, target)
        best: Trial | None = None
        best_rate = 0.0
        for number, moves_of_each_kind in enumerate(islice(moves, _MANY)):
            if best is not None and number >= _FEW:
                break
            for move in filter(None, moves_of_each_kind):
                candidate = self.simulate(_flipped(trial.kept, move))
                gain = excess - _excess(candidate, target)
                rate = gain / max(candidate.seconds - trial.seconds, 1e-9)
                if rate > best_rate:
                    best = candidate
                    best_rate = rate
        return best

    def ranked_drops(self, trial: Trial, target: int) -> list[tuple[int, list[int]]]:
        """Values to drop while the step is above the target, each with its group; the cheapest per byte first."""
        ranked = []
        exceeding_before = [0, *accumulate(level > target for level in trial.levels)]  # events above the target
        for i in self.free:
            if trial.kept[i] and trial.consumers[i]:
                event_count = exceeding_before[trial.first_read[i]] - exceeding_before[trial.needed_from[i]]
                if event_count:
                    group, seconds = self.drop_group(trial, i)
                    ranked.append((seconds / (self.bytes[i] * event_count + 1), i, group))
        return [(i, group) for _, i, group in sorted(ranked)]

    def enough_drops(self, ranked: list[tuple[int, list[int]]], trial: Trial, target: int) -> list[list[int]]:
        """As many groups as seem to bring the peak down to the target."""
        excesses = [max(0, level - target) for level in trial.levels]
        groups = []
        for i, group in ranked:
            span = slice(trial.needed_from[i], trial.first_read[i])
            size = self.bytes[i]
            if any(excesses[span]):
                groups.append(group)
                excesses[span] = [excess - size if excess > size else 0 for excess in excesses[span]]
        return groups

    def drop_group(self, trial: Trial, number: int) -> tuple[list[int], float]:
        """A value with the values that would be kept only for its recipe; and the seconds to compute them."""
        group: list[int] = []
        seconds = 0.0
        pending = [number]
        while pending:
            computed = pending.pop()
            seconds += self.step.values[computed].seconds
            if trial.kept[computed]:
                group.append(computed)
            for i in self.inputs[computed]:
                is_only_for_recipe = not trial.consumers[i] and (not trial.kept[i] or self.is_free[i])
                if is_only_for_recipe and i not in group and i not in pending:
                    pending.append(i)
        return group, seconds

    def dropped_at_peak(self, trial: Trial) -> list[int]:
        """The recomputed values in memory at the peak, smallest first."""
        peak = trial.levels.index(trial.peak)
        dropped = [i for i in self.dropped(trial) if trial.first_read[i] <= peak <= trial.last_read[i]]
        return sorted(dropped, key=self.bytes.__getitem__)

    def dropped(self, trial: Trial) -> list[int]:
        """The values that a choice recomputes instead of keeping."""
        return [i for i in self.free if not trial.kept[i] and trial.consumers[i]]

    def swaps(self, trial: Trial) -> list[list[int]]:
        """Pairs of a kept and a dropped value to swap, where one is computed from the other.

        Each swap lowers the memory at the peak, the first one the most.
        """
        peak = trial.levels.index(trial.peak)
        ranked = []
        for i in self.free:
            sources = self.sources(trial, i) if trial.consumers[i] else ()
            for j in sources:
                if self.is_free[j] and trial.kept[i] is not trial.kept[j]:
                    kept, dropped = (i, j) if trial.kept[i] else (j, i)
                    freed = self.freed_by_swap(trial, kept, dropped, peak)
                    if freed > 0:
                        ranked.append((freed, [kept, dropped]))
        return [pair for _, pair in sorted(ranked, reverse=True)]

    def freed_by_swap(self, trial: Trial, kept: int, dropped: int, event: int) -> int:
        """Bytes that a swap of these values frees at an event; negative if it adds some."""
        is_kept_then = trial.needed_from[kept] <= event <= trial.last_read[kept]
        is_held_then = trial.first_read[dropped] <= event <= trial.last_read[dropped]
        freed = self.bytes[kept] if is_kept_then else 0
        added = 0 if is_held_then else self.bytes[dropped]
        return freed - added

    def sources(self, trial: Trial, number: int) -> set[int]:
        """The values from which a value is computed, back to kept ones."""
        sources: set[int] = set()
        pending = [*self.inputs[number]]
        while pending:
            i = pending.pop()
            if i not in sources:
                sources.add(i)
                if not trial.kept[i]:
                    pending += self.inputs[i]
        return sources

    def exchange(self, limit: int) -> None:
        """Exchange kept values for dropped ones within the limit, as long as that pays."""
        if limit < self.lowest_peak or limit >= self.choices[0].peak:  # of the baseline
            return
        fastest = self.choices_within(limit)[0]
        event_count = len(self.simulation.events)
        trials = min(
            _MOST_TRIALS,
            _TRIALS_PER_CALL * len(self.step.calls),
            _EVENTS // event_count,
            int(_STEPS * _SAVED * fastest.seconds / (_PER_EVENT * event_count)),
        )
        if trials >= _LEAST_TRIALS:
            kept = annealed(self.simulation, fastest.kept, self.free, limit, trials)
            self.keep_more(self.simulate(kept), limit)

    def choices_within(self, limit: int) -> list[Choice]:
        """The choices within the limit so far, the fastest first."""
        return sorted((choice for choice in self.choices if choice.peak <= limit), key=attrgetter("seconds"))

    def keep_more(self, trial: Trial, target: int) -> Trial:
        """Keep more values where memory is left below the target, the most expensive to recompute first.

        Returns the fuller choice, or the given one if that is better.
        """
        kept = list(trial.kept)
        levels = list(trial.levels)
        for i in sorted(self.dropped(trial), key=lambda i: -self.step.values[i].seconds):
            span = slice(trial.needed_from[i], trial.first_read[i])
            size = self.bytes[i]
            span_levels = levels[span]
            if not span_levels or max(span_levels) + size <= target:
                kept[i] = True
                levels[span] = [level + size for level in span_levels]
        if kept == list(trial.kept):
            return trial
        fuller = self.simulate(kept)
        is_better = fuller.peak <= target and fuller.seconds <= trial.seconds
        return fuller if is_better else trial


def _flipped(kept: Sequence[bool], move: Iterable[int]) -> list[bool]:
    """The choice with these values kept instead of dropped, and vice versa."""
    flipped = list(kept)
    for i in move:
        flipped[i] = not flipped[i]
    return flipped


def _excess(trial: Trial, target: int) -> int:
    """Bytes above the target, over all events."""
    return sum(level - target for level in trial.levels if level > target)


def segmented(step: Step) -> Iterator[list[bool]]:
    """Choices that cut a step into segments, as activation checkpointing does: from few long ones to many short ones.

    The forward pass is cut where fewer bytes are handed on than just before and after, i.e. between its blocks; or, if
    these bytes are nowhere fewer, between layers of equal size. Values handed on at a cut are kept, and everything else
    is recomputed from them.
    """
    handed_on = _handed_on(step)
    sizes = [_bytes_in_memory(step, results) for results in handed_on]
    cuts = _local_minima(sizes) or [i for i in range(1, len(sizes) - 1) if 0 < sizes[i] == sizes[i - 1]]
    sizes_of_free = (value.bytes if value.kind == Kind.FREE else 0 for value in step.values)
    bytes_before = [0, *accumulate(sizes_of_free)]  # of the results before each value
    seen: set[tuple[int, ...]] = set()
    for count in _SEGMENTS:
        chosen = _cuts_at_least_apart(cuts, bytes_before, bytes_before[-1] / count)
        if chosen not in seen:
            seen.add(chosen)
            kept = [value.kind == Kind.KEPT for value in step.values]
            for i in set().union(*(handed_on[cut] for cut in chosen)):
                kept[i] = True
            yield kept


def _cuts_at_least_apart(cuts: Iterable[int], bytes_before: Sequence[int], distance: float) -> tuple[int, ...]:
    """The cuts that end segments of so many bytes, each the first after the one before."""
    chosen: list[int] = []
    segment_start = 0
    for cut in cuts:
        if bytes_before[cut] - segment_start >= distance:
            chosen.append(cut)
            segment_start = bytes_before[cut]
    return tuple(chosen)


def _bytes_in_memory(step: Step, results: Iterable[int]) -> int:
    """Bytes of the memories of some values."""
    return sum(step.memories[memory] for memory in {step.values[i].memory for i in results})


def _local_minima(sizes: Iterable[int]) -> list[int]:
    """Where sizes above 0 are less than just before and after; of equal ones in a row, the first one."""
    runs = [next(run) for _, run in groupby(enumerate(sizes), key=itemgetter(1))]
    neighbours = zip(runs, runs[1:], runs[2:], strict=False)
    return [i for (_, before), (i, size), (_, after) in neighbours if before > size < after and size > 0]


def _handed_on(step: Step) -> list[set[int]]:
    """For each value: the results up to it that later recipes read."""
    sources: list[set[int]] = []  # the results from which a value is made through views and the like
    last_readers: dict[int, int] = {}  # the last value whose recipe reads a result
    for number, value in enumerate(step.values):
        results = set().union(*(sources[i] for i in value.inputs))
        for i in results:
            last_readers[i] = number
        sources.append({number if value.leader < 0 else value.leader} if value.kind == Kind.FREE else results)
    handed_on: list[set[int]] = []
    present: set[int] = set()
    for number, value in enumerate(step.values):
        if value.kind == Kind.FREE:
            present = present | sources[number]
        present = {i for i in present if last_readers.get(i, -1) > number}
        handed_on.append(present)
    return handed_on
