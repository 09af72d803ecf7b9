"""Simulate many choices of kept values: each time, only what differs from the choice before."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, compress
from operator import add, mul, ne
from typing import NamedTuple

from .simulation import Outcome, Run, Simulation
from .step import Event, Step

_MOST_PARTS = 5000  # that are remembered
_FEW = 24  # where more values differ from the choice before, the whole is simulated faster
_LEVEL, _HELD, _READ, _RUNS = range(4)


class _Part(NamedTuple):
    """What some values add to a step, whatever else is kept: a kept one, or dropped ones that recipes connect.

    Effects are LEVEL: event, owner, the most bytes during it and those after it, above those before; HELD: memory of
    the program, event, 1 (it is held) or -1 (no longer); READ: value, consumers in this part, born, first, last, see
    `Outcome`; RUNS: leader, how often its recipe runs. An owner tells apart parts that share an event.
    """

    values: tuple[int, ...]
    effects: set[tuple[int, ...]]


class _PartRun(Run):
    """Simulates some values alone. The program's memories, which others may hold too, count as empty."""

    def __init__(self, whole: "Incremental", kept: Sequence[bool], values: tuple[int, ...], is_read: bool):
        super().__init__(whole, kept, values)
        self.sizes, self.found = whole.sizes_alone, set[tuple[int, ...]]()
        if is_read:
            self.kept_in[values[0]] = whole.kept_in[values[0]]

    def hold(self, memory: int) -> None:
        super().hold(memory)
        if memory < self.computed_in and self.holders[memory] == 1:
            self.found.add((_HELD, memory, self.now, 1))

    def let(self, memory: int) -> None:
        super().let(memory)
        if memory < self.computed_in and not self.holders[memory]:
            self.found.add((_HELD, memory, self.now, -1))

    def effects(self, events: Iterable[int]) -> set[tuple[int, ...]]:
        whole, found, inputs = self.whole, self.found, set[int]()
        for now in events:
            self.now, self.most, before = now, self.level, self.level
            event, what, value, _, _ = whole.events[now]
            self.happens(event, what, value)
            if self.most > before or self.level < before:
                owner = self.values[0] if event == Event.PASS else -1
                found.add((_LEVEL, now, owner, self.most - before, self.level - before))
        for i in self.values:
            inputs.update(() if self.kept[i] else self.inputs[i])
            if self.runs[i]:
                found.add((_RUNS, i, self.runs[i]))
        inputs.difference_update(self.values)
        for i in (*self.values, *inputs):
            if consumers := self.consumers[i] - (whole.consumers[i] if i in inputs else 0):
                found.add((_READ, i, consumers, self.born[i], self.first[i], self.last[i]))
        return found


class Incremental(Simulation):
    """A simulation that remembers the last choice, and works out only what differs. Outcomes are `Simulation`'s."""

    def __init__(self, step: Step):
        super().__init__(step)
        count, end = len(step.values), len(self.events)
        self.sizes_alone = [0] * len(step.memories) + self.sizes[len(step.memories) :]
        self.around = [{*self.together[leader], *self.inputs[leader]} for leader in self.leaders]  # by recipes
        for leader in self.together:
            for i in self.inputs[leader]:
                self.around[i].add(leader)
        self.events_of: list[list[int]] = [[] for _ in range(count)]
        self.holders: dict[int, Counter[int]] = defaultdict(Counter)  # memory -> changes at events
        for now, (event, what, value, _, _) in enumerate(self.events):
            if value >= 0:
                self.events_of[value].append(now)
            elif event in (Event.HOLD, Event.LET):
                self.holders[what][now] += 1 if event == Event.HOLD else -1
        self.passes = [now for now, event in enumerate(self.events) if event[0] == Event.PASS]
        self.parts: dict[tuple[tuple[int, ...], bool, bool], _Part] = {}  # found so far
        # The last choice, and what its parts add up to.
        self.kept, self.part_of = [True] * count, [_Part((), set())] * count
        self.asked: Sequence[bool] = self.kept
        self.runs = [0] * count  # of the recipe of each leader
        self.facts: list[set[tuple[int, ...]]] = [set() for _ in range(count)]  # effects READ
        self.sums = [0] * count, [end] * count, [end] * count, [-1] * count
        self.changed: set[int] = set()  # values for which these sums are out of date
        self.levels: dict[int, list[tuple[int, int]]] = {}  # memory -> events, each with the change of the level
        # Bytes at each event: its own alone, and then with the later events that `Simulation` has merged into it.
        self.most, self.change = [0] * end, [0] * end
        self.tops, self.changes = [event[3] for event in self.events], [event[4] for event in self.events]
        self._add_up({*self.holders}, set())
        self._replace((), range(count))

    def run(self, kept: Sequence[bool]) -> Outcome:
        before, self.asked = self.asked, kept
        if min(sum(map(ne, kept, one)) for one in (self.kept, before)) > _FEW:
            return super().run(kept)
        peak, seconds = self.change_to(kept)
        consumers, born, first, last = self.sums
        for i in self.changed:
            facts = self.facts[i] or {(_READ, i, 0, len(self.events), len(self.events), -1)}
            consumers[i] = sum([one[2] for one in facts])
            born[i], first[i] = min([one[3] for one in facts]), min([one[4] for one in facts])
            last[i] = max([one[5] for one in facts])
        self.changed = set()
        sums = consumers.copy(), born.copy(), first.copy(), last.copy()
        self.led_by_first(*sums)
        return Outcome(peak, seconds, [*self._levels()], *sums)

    def _levels(self) -> Iterator[int]:
        return map(add, accumulate(self.changes, initial=0), self.tops)

    def change_to(self, kept: Sequence[bool]) -> tuple[int, float]:
        """The peak and the seconds of a choice: see `Outcome`."""
        near = set()  # values whose parts change
        for leader in {self.leaders[i] for i in compress(range(len(kept)), map(ne, kept, self.kept))}:
            near.update(self.together[leader])
            if not kept[leader]:
                around = chain(*[self.around[i] for i in self.together[leader]])
                near.update([i for i in around if not self.kept[i]])
        self.kept = [*kept]
        stale = {part.values: part for part in map(self.part_of.__getitem__, near)}
        self._replace(stale.values(), {*chain(*stale)})
        return max(self._levels()), sum(map(mul, self.runs, self.seconds))

    def _replace(self, stale: Iterable[_Part], values: Collection[int]) -> None:
        """Put new parts in the place of stale ones, which had these values."""
        changed = self._exchange(stale, map(self._part, self._connected({i for i in values if not self.kept[i]})))
        old, new = [], []
        for i in changed.intersection(self.sign_consumers).union(values):
            if self.kept[i]:
                part = self._part((i,))
                if i in self.sign_consumers and self.facts[i] - part.effects:  # a recipe needs more than its sign mask
                    part = self._part((i,), is_read=True)
                if i not in values:
                    old.append(self.part_of[i])
                new.append(part)
        self._exchange(old, new)

    def _connected(self, dropped: set[int]) -> Iterator[tuple[int, ...]]:
        """The values that recipes connect, in order."""
        while dropped:
            found, more = set[int](), {dropped.pop()}
            while more:
                found |= more
                more = dropped.intersection(chain(*[self.around[i] for i in more]))
                dropped -= more
            yield tuple(sorted(found))

    def _part(self, values: tuple[int, ...], is_read: bool = False) -> _Part:
        """`is_read`: of a kept value, by a recipe."""
        key = values, self.kept[values[0]], is_read
        if (found := self.parts.get(key)) is None:
            if len(self.parts) >= _MOST_PARTS:
                self.parts.clear()
            events = sorted([*self.passes, *chain(*[self.events_of[i] for i in values])])
            found = self.parts[key] = _Part(values, _PartRun(self, self.kept, values, is_read).effects(events))
        return found

    def _exchange(self, old: Iterable[_Part], new: Iterable[_Part]) -> set[int]:
        """Add new parts in place of old ones. Returns the values that are read at other times."""
        before, after = set[tuple[int, ...]]().union(*[part.effects for part in old]), set[tuple[int, ...]]()
        for part in new:
            after |= part.effects
            for i in part.values:
                self.part_of[i] = part
        memories, events, changed = set[int](), set[int](), set[int]()
        for sign, effects in ((-1, before - after), (1, after - before)):
            for effect in effects:
                kind, where = effect[:2]
                if kind == _LEVEL:
                    self.most[where] += sign * effect[3]
                    self.change[where] += sign * effect[4]
                    events.add(where)
                elif kind == _HELD:
                    self.holders[where][effect[2]] += sign * effect[3]
                    memories.add(where)
                elif kind == _RUNS:
                    self.runs[where] += sign * effect[2]
                else:
                    (self.facts[where].add if sign > 0 else self.facts[where].remove)(effect)
                    changed.add(where)
        self._add_up(memories, events)
        self.changed |= changed
        return changed

    def _add_up(self, memories: Iterable[int], events: set[int]) -> None:
        """Bring the levels up to date, where these memories and events have changed."""
        for memory in memories:
            size, holders, levels = self.step.memories[memory], 0, []
            for now, change in sorted(self.holders[memory].items()):
                before, holders = holders, holders + change
                if (not before) != (not holders):
                    levels.append((now, size if holders else -size))
            for now, change in levels:
                self.change[now] += change
            for now, change in self.levels.get(memory, ()):
                self.change[now] -= change
                events.add(now)
            events.update([now for now, _ in levels])
            self.levels[memory] = levels
        for now in events:
            _, _, _, most, change = self.events[now]
            self.tops[now], self.changes[now] = max(self.most[now], self.change[now] + most), self.change[now] + change
