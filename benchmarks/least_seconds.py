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
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from scipy.optimize import linprog
from scipy.sparse import csr_array
from torch import Tensor, nn

from keepless.recompute.signatures.plans import BudgetRow, rehearsed_step
from keepless.recompute.step.simulation import Simulation
from keepless.recompute.step.step import Event, Kind, Step

_MOMENTS = 50  # about; more make the bound no higher, but take longer
_MIB, _MS = 2.0**-20, 1e3  # units of the program: solvers want numbers around 1

Sum = list[tuple[int, float]]  # variables and their factors


def bounds_of(network: nn.Module, inputs: Tensor, rows: Sequence[BudgetRow]) -> list[float | None]:
    """For each row of `keepless.plan` the share of a step below which no plan within its budget is.

    None: it is not known, or says little. The network has no gradients yet.
    """
    step = rehearsed_step(network, (inputs,), {})
    gradients = 0
    if step.coming:
        gradients = step.gradients
        step = step.as_gradients_come()
    return [_share(least_seconds(step, row.budget + gradients), row.seconds * step.seconds, step) for row in rows]


def _share(least: float | None, seconds: float, step: Step) -> float | None:
    says_little = least is None or not seconds / 3 <= least <= 1.001 * seconds  # solvers round
    return None if least is None or says_little else min(least, seconds) / step.seconds


def least_seconds(step: Step, limit: int, patience: float = 10.0) -> float | None:
    """Seconds that every plan of a step within the limit recomputes, at least; infinite if there surely is no plan.

    Args:
        limit: bytes.
        patience: seconds to solve the program; None if they are not enough.
    """
    return _Plans(step, limit).program.least(patience)


class _Program:
    """Variables from 0 to 1 with costs, and sums of them with upper limits."""

    def __init__(self) -> None:
        self.costs: list[float] = []
        self.limits: list[float] = []
        self.factors: list[tuple[int, int, float]] = []  # number of the sum, variable, factor

    def variable(self, cost: float = 0.0) -> Sum:
        self.costs.append(cost)
        return [(len(self.costs) - 1, 1.0)]

    def limit(self, terms: Sum, most: float) -> None:
        self.factors += [(len(self.limits), *term) for term in terms]
        self.limits.append(most)

    def at_most(self, terms: Sum, *bounds: Sum) -> None:
        """A sum is at most the total of others."""
        self.limit([*terms, *(term for bound in bounds for term in _negative(bound))], 0.0)

    def part_of(self, terms: Sum) -> Sum:
        """A variable that is at most a sum; nothing of nothing."""
        if not terms:
            return []
        part = self.variable()
        self.at_most(part, terms)
        return part

    def least(self, patience: float) -> float | None:
        """See `least_seconds`."""
        if not self.factors:
            return 0.0
        rows, variables, factors = zip(*self.factors, strict=True)
        matrix = csr_array((factors, (rows, variables)), shape=(len(self.limits), len(self.costs)))
        options = {"time_limit": patience}
        solution = linprog(self.costs, matrix, self.limits, bounds=(0, 1), method="highs", options=options)
        return {0: solution.fun and solution.fun / _MS, 2: float("inf")}.get(solution.status)


def _negative(terms: Sum) -> Sum:
    return [(variable, -factor) for variable, factor in terms]


class _Plans:
    """The program of all plans within a number of bytes. A leader's variables stand for its whole recipe."""

    def __init__(self, step: Step, limit: int):
        self.step = step
        self.simulation = Simulation(step)
        self.program = _Program()
        self.members = self.simulation.members
        self.leaders = self.simulation.leaders
        self.end = len(self.simulation.events)
        self.first_reads = dict.fromkeys(self.members, self.end)  # leader -> first read of what its recipe computes
        self.unclear: set[int] = set()  # values that may be computed twice in the first pass
        self._note_reads()
        moments = [*self._moments(limit)]
        self.moments = [moment.event_index for moment in moments]
        self.kept: dict[int, Sum] = {}  # leader -> whether it is kept
        self.signs: dict[int, Sum] = {}  # or kept as a sign mask
        self.recomputations: dict[int, Sum] = {}  # or computed again
        self.computed: dict[int, list[tuple[int, Sum]]] = {}  # leader -> moments, and the part computed by them
        for leader, events in reversed(self._computing_events().items()):  # inputs come first
            self._choose(leader, is_computed=bool(events))
            self._compute(leader, events)
        for moment in moments:
            moment.limit()

    def _note_reads(self) -> None:
        """Note when values are first read, and which may be computed twice."""
        is_over = False
        reads: set[int] = set()  # saves
        for index, event in enumerate(self.simulation.events):
            if event.kind == Event.READ:
                leader = self.leaders[event.value]
                self.first_reads[leader] = min(self.first_reads[leader], index)
                if event.number in reads and not is_over:
                    self.unclear.add(event.value)
                reads.add(event.number)
            elif event.kind == Event.PASS:
                is_over = True
        for number in reversed(range(len(self.step.values))):
            if number in self.unclear:
                self.unclear.update(self.simulation.inputs[number])

    def _limited_events(self) -> set[int]:
        """The events at which bytes are limited: of every part of the step, the highest of the baseline."""
        kinds = Event.SAVE, Event.READ, Event.RELEASE
        levels = self.simulation.run([value.kind in (Kind.KEPT, Kind.FREE) for value in self.step.values]).levels
        changes = [index for index, event in enumerate(self.simulation.events) if event.kind in kinds]
        parts = [0, *changes[:: max(1, len(changes) // _MOMENTS)], self.end]
        return {max(range(*part), key=levels.__getitem__) for part in pairwise(parts) if part[0] < part[1]}

    def _moments(self, limit: int) -> Iterator["_Moment"]:
        """The moments at which bytes are limited, with what is held and saved then."""
        limited = self._limited_events()
        level = 0
        is_over = False
        holders: Counter[int] = Counter()  # of each memory
        saved: dict[int, int] = {}  # number of a save -> its value
        for index, event in enumerate(self.simulation.events):
            if event.kind == Event.SAVE:
                saved[event.number] = event.value
            elif event.kind == Event.RELEASE:
                saved.pop(event.number, None)
            elif event.kind == Event.PASS:
                is_over = True
            elif event.kind == Event.HOLD:
                holders[event.number] += 1
            elif event.kind == Event.LET:
                holders[event.number] -= 1
            if index in limited:
                held_memories = {memory for memory, count in holders.items() if count}
                room = limit - level - event.rise - sum(self.step.memories[memory] for memory in held_memories)
                yield _Moment(self, index, room, held_memories, {*saved.values()}, is_over)
            level += event.change

    def _computing_events(self) -> dict[int, list[int]]:
        """For each leader, consumers first: the events that may be the first to compute it."""
        events_by_leader: dict[int, list[int]] = {}
        consumed: dict[int, set[int]] = defaultdict(set)  # leader -> events that may compute what reads it
        for leader in sorted(self.members, reverse=True):
            first = self.first_reads[leader]
            moments = {first, *consumed[leader]} if self.step.values[leader].kind != Kind.KEPT else ()
            events_by_leader[leader] = sorted(index for index in moments if index <= first and index < self.end)
            for number in self.simulation.inputs[leader]:
                consumed[self.leaders[number]].update(events_by_leader[leader])
        return events_by_leader

    def _choose(self, leader: int, is_computed: bool) -> None:
        """A recipe's values are kept or computed, if the backward pass reads them."""
        simulation = self.simulation
        value = self.step.values[leader]
        if value.kind in (Kind.KEPT, Kind.FREE):
            self.kept[leader] = self.program.variable()
            is_mask_enough = 0 < simulation.sign_consumers[leader] == simulation.consumers[leader]
            if is_mask_enough and len(self.members[leader]) == 1:
                self.signs[leader] = self.program.variable()
        if is_computed:
            self.recomputations[leader] = self.program.variable(_MS * value.seconds)
        ways = [term for ways in (self.kept, self.signs, self.recomputations) for term in ways.get(leader, [])]
        self.program.limit(ways, 1.0)
        if value.kind == Kind.KEPT or self.first_reads[leader] < self.end:
            self.program.limit(_negative(ways), -1.0)

    def _compute(self, leader: int, events: Sequence[int]) -> None:
        """A recipe is computed once, and by then its inputs have been computed unless they are kept."""
        self.computed[leader] = []
        numbers = {bisect_left(self.moments, event) for event in events}
        for event_index in (self.moments[number] for number in sorted(numbers) if number < len(self.moments)):
            part = self.recomputations[leader]
            if self.first_reads[leader] > event_index:
                part = self.program.part_of(part)
            for input_leader in {self.leaders[number] for number in self.simulation.inputs[leader]}:
                if self.step.values[input_leader].kind != Kind.KEPT:
                    input_part = self.computed_by(input_leader, event_index)
                    self.program.at_most(part, input_part, self.kept.get(input_leader, []))
            self.computed[leader].append((event_index, part))

    def computed_by(self, leader: int, event_index: int) -> Sum:
        """The part of a recipe that has been computed by a moment."""
        return next((part for moment, part in reversed(self.computed[leader]) if moment <= event_index), [])


@dataclass
class _Moment:
    """A moment whose bytes are limited."""

    plans: _Plans
    event_index: int  # of the event after which it is
    room: int  # bytes for values
    held_memories: set[int]  # that the program holds
    saved: set[int]  # values that autograd has saved
    is_over: bool  # the first backward pass has ended
    keeps: dict[int, Sum] = field(default_factory=dict)  # value -> whether it is held because it is kept
    holds: dict[int, Sum] = field(default_factory=dict)  # or because it has been computed
    waits: dict[int, Sum] = field(default_factory=dict)  # leader -> whether it is needed, but not computed yet

    def __post_init__(self) -> None:
        self.leaders = self.plans.leaders
        self.values = self.plans.step.values
        self.program = self.plans.program

    def limit(self) -> None:
        terms = self._hold_saved()
        for leader in reversed(self.plans.recomputations):
            self._wait(leader)
        for number in reversed(range(len(self.values))):
            self._share(number)
        terms += self._kept_terms() + self._computed_terms()
        self.program.limit([(variable, _MIB * size) for variable, size in terms], _MIB * self.room)

    def _hold_saved(self) -> Sum:
        """What is saved is held once it is kept or computed. Returns the bytes of sign masks."""
        simulation = self.plans.simulation
        terms = Sum()
        for number in self.saved:
            leader = self.leaders[number]
            if len(self.plans.members[leader]) == 1 or not simulation.sign_consumers[number]:
                self.keeps[number] = self.plans.kept.get(leader, [])
            if self.is_clear(number):
                self.holds[number] = self.plans.computed_by(leader, self.event_index)
            self.waits[leader] = self._rest(leader)
            terms += [(variable, simulation.sign_bytes[number]) for variable, _ in self.plans.signs.get(leader, [])]
        return terms

    def is_clear(self, number: int) -> bool:
        """Whether a value is held from when it is computed until its last consumer has read it."""
        return not self.is_over and number not in self.plans.unclear

    def _rest(self, leader: int) -> Sum:
        """The part of a recipe that is computed later."""
        recomputation = self.plans.recomputations.get(leader, [])
        computed = self.plans.computed_by(leader, self.event_index)
        return [] if recomputation == computed else [*recomputation, *_negative(computed)]

    def _kept_held_or_waiting(self, number: int) -> tuple[Sum, Sum, Sum]:
        """How a value is kept, held or waiting, because of what needs it."""
        leader = self.leaders[number]
        if number not in self.keeps:
            self.keeps[number] = self.program.part_of(self.plans.kept.get(leader, []))
        if number not in self.holds and self.is_clear(number):
            self.holds[number] = self.program.part_of(self.plans.computed_by(leader, self.event_index))
        if leader not in self.waits:
            self.waits[leader] = self.program.part_of(self._rest(leader))
        return self.keeps[number], self.holds.get(number, []), self.waits[leader]

    def _wait(self, leader: int) -> None:
        """Until a recipe is computed, each of its inputs is kept, held or waiting, too."""
        waiting = self.waits.get(leader)
        if waiting:
            for number in dict.fromkeys(self.plans.simulation.inputs[leader]):
                if self.is_clear(number) or not self.plans.computed_by(self.leaders[number], self.event_index):
                    self.program.at_most(waiting, *self._kept_held_or_waiting(number))

    def _share(self, number: int) -> None:
        """A view holds its input's memory once it is computed, and waits until then."""
        value = self.values[number]
        holding = self.holds.get(number, [])
        if holding and value.alias >= 0 and not value.overwrites and value.alias not in self.plans.unclear:
            waiting = self.waits.get(self.leaders[number], [])
            self.program.at_most([*holding, *waiting], *self._kept_held_or_waiting(value.alias))

    def _kept_terms(self) -> Sum:
        """Bytes of kept values. Several may lie in one memory."""
        together: dict[int, list[Sum]] = defaultdict(list)
        for number, kept in self.keeps.items():
            memory = self.values[number].memory
            if kept and memory not in self.held_memories and kept not in together[memory]:
                together[memory].append(kept)
        terms = Sum()
        for memory, sums in together.items():
            if len(sums) == 1:
                (terms_of_memory,) = sums
            else:
                terms_of_memory = self.program.variable()
                for kept in sums:
                    self.program.at_most(kept, terms_of_memory)
            terms += [(variable, self.plans.step.memories[memory]) for variable, _ in terms_of_memory]
        return terms

    def _computed_terms(self) -> Sum:
        """Bytes of computed values. One that overwrites its input counts at most the input's bytes."""
        terms = Sum()
        for number, holding in self.holds.items():
            value = self.values[number]
            size = min(value.bytes, self.values[value.inputs[0]].bytes) if value.overwrites else value.bytes
            terms += [(variable, size) for variable, _ in holding if size]
        return terms
