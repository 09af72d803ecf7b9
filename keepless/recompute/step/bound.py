"""The time below which no plan of a step within a budget can be: the least cost of a linear program.

The idea is Checkmate's (Jain et al., 2020): what is kept, computed and held at each moment are variables, here from 0
to 1, and the bytes of each moment are limited. Every plan that `Simulation` can make is a solution, so none takes less
time than the best one. What the program leaves out only takes more bytes or time:

- Variables need not be 0 or 1, and bytes are limited at some moments (`_MOMENTS`).
- A value is paid once, though a second backward pass, or a tensor that is read twice, computes it again. After the
  first pass, and if it may be computed twice in it, a computed value counts as no bytes.
- A kept value is held until what follows from it has been computed. A chain of recipes takes nothing while it runs.
- No chain is too long.
"""

from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise

from .simulation import Simulation
from .step import Event, Kind, Step

try:
    from scipy.optimize import linprog
    from scipy.sparse import csr_array
except ImportError as error:
    raise ModuleNotFoundError(
        f"a bound of plans needs SciPy ({error}): pip install scipy, or leave bound out"
    ) from error

_MOMENTS = 50  # about; more make the bound no higher, but take longer
_MIB, _MS = 2.0**-20, 1e3  # units of the program: solvers want numbers around 1

Sum = list[tuple[int, float]]  # variables and their factors


def least_seconds(step: Step, limit: int, patience: float = 10.0) -> float | None:
    """Seconds that every plan of a step within the limit recomputes, at least; infinite if there surely is no plan.

    Args:
        limit: bytes.
        patience: seconds to solve the program; None if they are not enough.
    """
    return _Plans(_Times(step), limit).program.least(patience)


class _Program:
    """Variables from 0 to 1 with costs, and sums of them with upper limits."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.rows: list[tuple[Sum, float]] = []

    def variable(self, cost: float = 0.0) -> Sum:
        self.costs.append(cost)
        return [(len(self.costs) - 1, 1.0)]

    def limit(self, terms: Sum, most: float = 0.0) -> None:
        self.rows.append((terms, most))

    def at_most(self, terms: Sum, *others: Sum) -> None:
        """A sum is at most the total of others."""
        self.limit([*terms, *(term for other in others for term in _negative(other))])

    def part_of(self, terms: Sum) -> Sum:
        """A variable that is at most a sum; nothing of nothing."""
        if not terms:
            return []
        part = self.variable()
        self.at_most(part, terms)
        return part

    def least(self, patience: float) -> float | None:
        """See `least_seconds`."""
        entries = [(factor, row, variable) for row, (terms, _) in enumerate(self.rows) for variable, factor in terms]
        factors, rows, variables = zip(*entries, strict=True)
        matrix = csr_array((factors, (rows, variables)), shape=(len(self.rows), len(self.costs)))
        limits = [most for _, most in self.rows]
        options = {"time_limit": patience}
        found = linprog(self.costs, matrix, limits, bounds=(0, 1), method="highs", options=options)
        return {0: found.fun and found.fun / _MS, 2: float("inf")}.get(found.status)


def _negative(terms: Sum) -> Sum:
    return [(variable, -factor) for variable, factor in terms]


class _Times:
    """When a step saves and reads values, and when it may compute them, in events of its simulation."""

    def __init__(self, step: Step):
        self.step, self.simulation = step, Simulation(step)
        self.together = self.simulation.together
        self.end = self.pass_ends = len(self.simulation.events)
        self.fixed: list[int] = []  # bytes of each event whatever is kept
        self.held: list[frozenset[int]] = []  # memories of values that are among them
        self.spans: dict[int, list[tuple[int, int, int]]] = defaultdict(list)  # value -> SAVE, READ, RELEASE of saves
        self.unclear: set[int] = set()  # values that may be computed twice in a pass
        self._note_events()
        self.consumers: dict[int, set[int]] = defaultdict(set)  # value -> leaders whose recipes read it
        self.first: dict[int, int] = {}  # leader -> first READ of a value that its recipe computes
        self.computed: dict[int, list[int]] = {}  # leader -> events that may be the first to compute it
        self.since: dict[int, int] = {}  # leader -> event from which on it surely is needed, if it will be computed
        for leader in sorted(self.together, reverse=True):  # consumers come first
            self._note(leader)

    def _note_events(self) -> None:
        saved: dict[int, list[int]] = {}
        level, holders, held = 0, defaultdict[int, int](int), frozenset[int]()
        for now, (event, what, value, most, change) in enumerate(self.simulation.events):
            if event == Event.SAVE:
                saved[what] = [now, self.end, self.end]
            elif event == Event.READ:
                if saved[what][1] < now < self.pass_ends:
                    self.unclear.add(value)
                saved[what][1] = min(saved[what][1], now)
            elif event == Event.RELEASE:
                saved[what][2] = min(saved[what][2], now)
            elif event == Event.PASS:
                self.pass_ends = min(self.pass_ends, now)
            elif event in (Event.HOLD, Event.LET):
                holders[what] += 1 if event == Event.HOLD else -1
                held = frozenset(memory for memory, number in holders.items() if number)
            self.fixed.append(level + most + sum(self.step.memories[memory] for memory in held))
            self.held.append(held)
            level += change
        for save, (since, read, until) in saved.items():
            self.spans[self.step.saved[save].value].append((since, read, until))
        for number in reversed(range(len(self.step.values))):
            self.unclear.update(self.simulation.inputs[number] if number in self.unclear else ())

    def _note(self, leader: int) -> None:
        consumers = set().union(*(self.consumers[number] for number in self.together[leader]))
        spans = [span for number in self.together[leader] for span in self.spans[number]]
        self.first[leader] = first = min((read for _, read, _ in spans), default=self.end)
        self.since[leader] = max(
            [*(since for since, _, _ in spans), *(self.since[one] for one in consumers)], default=0
        )
        moments = {first}.union(*(self.computed[one] for one in consumers))
        is_kept = self.step.values[leader].kind == Kind.KEPT
        self.computed[leader] = [] if is_kept else sorted(now for now in moments if now <= first and now < self.end)
        if self.computed[leader]:
            for number in self.simulation.inputs[leader]:
                self.consumers[number].add(leader)

    def moments(self) -> list[int]:
        """The events at which bytes are limited: of every part of the step, the highest of the baseline."""
        values = self.step.values
        most = self.simulation.run([value.kind in (Kind.KEPT, Kind.FREE) for value in values]).levels
        kinds = (Event.SAVE, Event.READ, Event.RELEASE)
        changes = [now for now, (event, *_) in enumerate(self.simulation.events) if event in kinds]
        parts = [0, *changes[:: max(1, len(changes) // _MOMENTS)], self.end]
        return [max(range(*part), key=most.__getitem__) for part in pairwise(parts) if part[0] < part[1]]


class _Plans:
    """The program of all plans within a number of bytes. Values that one recipe computes share their variables."""

    def __init__(self, times: _Times, limit: int):
        self.times, self.bytes, self.program = times, limit, _Program()
        self.moments = times.moments()
        self.kept: dict[int, Sum] = {}  # whether it is kept
        self.signs: dict[int, Sum] = {}  # or kept as a sign mask
        self.again: dict[int, Sum] = {}  # or computed again
        self.done: dict[int, list[tuple[int, Sum]]] = {}  # by which moment it has been computed
        for leader in sorted(times.together):  # inputs come first
            self._choose(leader)
            self._compute(leader)
        for leader, several in self.done.items():
            for now, done in several:
                if now < times.first[leader]:  # only for what follows from it
                    consumers = set().union(*(times.consumers[number] for number in times.together[leader]))
                    self.program.at_most(done, *(self.done_by(one, now) for one in consumers))
        for now in self.moments:
            _Moment(self, now).limit()

    def _choose(self, leader: int) -> None:
        """It is kept or computed, if the backward pass reads it."""
        times, simulation, value = self.times, self.times.simulation, self.times.step.values[leader]
        if value.kind in (Kind.KEPT, Kind.FREE):
            self.kept[leader] = self.program.variable()
            number = simulation.sign_consumers.get(leader, (0, 0))[0]
            if number and number == simulation.consumers[leader] and len(times.together[leader]) == 1:
                self.signs[leader] = self.program.variable()
        if times.computed[leader]:
            self.again[leader] = self.program.variable(_MS * value.seconds)
        ways = [term for ways in (self.kept, self.signs, self.again) for term in ways.get(leader, [])]
        self.program.limit(ways, 1.0)
        if value.kind == Kind.KEPT or times.first[leader] < times.end:
            self.program.limit(_negative(ways), -1.0)

    def _compute(self, leader: int) -> None:
        """It is computed once, and by then its inputs have been computed unless they are kept."""
        before: Sum = []
        self.done[leader] = []
        numbers = {bisect_left(self.moments, event) for event in self.times.computed[leader]}
        for now in (self.moments[number] for number in sorted(numbers) if number < len(self.moments)):
            is_last = self.times.first[leader] <= now
            done = self.again[leader] if is_last else self.program.part_of(self.again[leader])
            if before:
                self.program.at_most(before, done)
            for one in {self.times.simulation.leaders[number] for number in self.times.simulation.inputs[leader]}:
                if self.times.step.values[one].kind != Kind.KEPT:
                    self.program.at_most(done, self.done_by(one, now), self.kept.get(one, []))
            self.done[leader].append((now, done))
            before = done

    def done_by(self, leader: int, now: int) -> Sum:
        """The part of it that has been computed by a moment."""
        return next((done for moment, done in reversed(self.done[leader]) if moment <= now), [])


class _Moment:
    """Limits the bytes of a moment."""

    def __init__(self, plans: _Plans, now: int):
        self.plans, self.times, self.program, self.now = plans, plans.times, plans.program, now
        self.leaders, self.values = self.times.simulation.leaders, self.times.step.values
        self.keeps: dict[int, Sum] = {}  # value -> whether it is held because it is kept
        self.holds: dict[int, Sum] = {}  # or because it has been computed
        self.waits: dict[int, Sum] = {}  # leader -> whether it is needed, but not computed yet
        self.saved: dict[int, bool] = {}  # value that is saved -> whether an operation has read it
        for number, spans in self.times.spans.items():
            if open_ := [read for since, read, until in spans if since <= now < until]:
                self.saved[number] = min(open_) <= now < self.times.pass_ends
        self.needed = {self.leaders[number] for number in self.saved}

    def limit(self) -> None:
        costs, rows = len(self.program.costs), len(self.program.rows)
        terms = self._saved()
        for leader in reversed(self.plans.again):
            if leader in self.waits or leader in self.needed or self.times.since[leader] <= self.now:
                self._wait(leader)
        for number in reversed(range(len(self.values))):
            self._share(number)
        terms += self._kept() + self._computed()
        room = self.plans.bytes - self.times.fixed[self.now]
        if sum(size for _, size in terms) <= room:  # whatever is kept
            del self.program.costs[costs:], self.program.rows[rows:]
        else:
            self.program.limit([(variable, _MIB * size) for variable, size in terms], _MIB * room)

    def _saved(self) -> Sum:
        """What is saved is held once it is kept or computed. Returns the bytes of sign masks, and of what follows."""
        simulation, terms = self.times.simulation, Sum()
        for number, is_used in self.saved.items():
            leader = self.leaders[number]
            if len(self.times.together[leader]) == 1 or number not in simulation.sign_consumers:
                self.keeps[number] = self.plans.kept.get(leader, [])
            if self.is_clear(number):
                self.holds[number] = self.plans.done_by(leader, self.now)
            for variable, _ in self.plans.signs.get(leader, []):
                size = simulation.sign_consumers[number][1] + is_used * self.values[number].bytes
                terms.append((variable, size))
        return terms

    def is_clear(self, number: int) -> bool:
        """Whether a value is held from when it is computed until its last consumer has read it."""
        return self.now < self.times.pass_ends and number not in self.times.unclear

    def kept(self, number: int) -> Sum:
        if number not in self.keeps:
            self.keeps[number] = self.program.part_of(self.plans.kept.get(self.leaders[number], []))
        return self.keeps[number]

    def held(self, number: int) -> Sum:
        if number not in self.holds and self.is_clear(number):
            self.holds[number] = self.program.part_of(self.plans.done_by(self.leaders[number], self.now))
        return self.holds.get(number, [])

    def waiting(self, leader: int) -> Sum:
        if leader not in self.waits:
            again, done = self.plans.again.get(leader, []), self.plans.done_by(leader, self.now)
            rest = [] if again == done else [*again, *_negative(done)]
            is_needed = leader in self.needed or self.times.since[leader] <= self.now
            self.waits[leader] = rest if is_needed else self.program.part_of(rest)
        return self.waits[leader]

    def _wait(self, leader: int) -> None:
        """Until it is computed, each of its inputs is kept, held or waiting, too."""
        if own := self.waiting(leader):
            for number in dict.fromkeys(self.times.simulation.inputs[leader]):
                one = self.leaders[number]
                is_held = number in self.saved and self.keeps.get(number) and self.is_clear(number)  # anyway
                if not is_held and (self.is_clear(number) or not self.plans.done_by(one, self.now)):
                    self.program.at_most(own, self.kept(number), self.held(number), self.waiting(one))

    def _share(self, number: int) -> None:
        """A view holds its input's memory once it is computed, and waits until then."""
        value, own = self.values[number], self.holds.get(number, [])
        if own and value.alias >= 0 and not value.overwrites and value.alias not in self.times.unclear:
            waiting = self.waits.get(self.leaders[number], [])
            ways = self.kept(value.alias), self.held(value.alias), self.waiting(self.leaders[value.alias])
            self.program.at_most([*own, *waiting], *ways)

    def _kept(self) -> Sum:
        """Bytes of kept values. Several may lie in one memory."""
        together: dict[int, list[Sum]] = defaultdict(list)
        for number, kept in self.keeps.items():
            memory = self.values[number].memory
            if kept and memory not in self.times.held[self.now] and kept not in together[memory]:
                together[memory].append(kept)
        terms = Sum()
        for memory, several in together.items():
            held = several[0] if len(several) == 1 else self.program.variable()
            for kept in several if len(several) > 1 else ():
                self.program.at_most(kept, held)
            terms += [(variable, self.times.step.memories[memory]) for variable, _ in held]
        return terms

    def _computed(self) -> Sum:
        """Bytes of computed values. One that overwrites its input counts at most the input's bytes."""
        terms = Sum()
        for number, held in self.holds.items():
            value = self.values[number]
            size = min(value.bytes, self.values[value.inputs[0]].bytes) if value.overwrites else value.bytes
            terms += [(variable, size) for variable, _ in held if size]
        return terms
