"""Simulate the memory and time of a counted step for a choice of kept values."""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from ..passes.recipes import LONGEST_PLANNED
from .step import Event, Kind, Step

_HOLD, _LET, _SAVE, _READ, _RELEASE, _BUSY, _PASS = map(int, Event)  # plain numbers are compared faster


class Outcome(NamedTuple):
    """Memory and time of a choice. Lists have an entry for each value; a leader's covers all values of its recipe.

    An event is an index into `Simulation.events`, which has fewer events than the step.
    """

    peak: int  # bytes
    seconds: float  # to recompute values
    levels: list[int]  # the most bytes during each event
    consumers: list[int]  # number of operations and recipes that read the value
    born: list[int]  # event from which on it was needed; the number of events if never
    first: list[int]  # event of the backward pass that first read it, for an operation or a recipe
    last: list[int]  # event that last read it


class _Levels:
    """Counts the references to each memory. Its bytes are held while there are any."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes, self.holders = sizes, [0] * len(sizes)
        self.level = self.most = 0  # bytes now, and the most during this event

    def hold(self, memory: int) -> None:
        self.holders[memory] += 1
        if self.holders[memory] == 1:
            self.level += self.sizes[memory]
            if self.level > self.most:
                self.most = self.level

    def let(self, memory: int) -> None:
        self.holders[memory] -= 1
        if not self.holders[memory]:
            self.level -= self.sizes[memory]

    def uses(self, temporary: int) -> None:
        """Need temporary bytes for a moment."""
        if self.level + temporary > self.most:
            self.most = self.level + temporary


def plain_peak(step: Step, saves: bool = True) -> int:
    """Peak bytes of the step without recomputation. `saves`: with the tensors that autograd saves."""
    memories = _Levels(step.memories)
    for event, what in step.events:
        if event == _HOLD or (event == _SAVE and saves):
            memories.hold(what if event == _HOLD else step.saved[what].memory)
        elif event == _LET or (event == _RELEASE and saves):
            memories.let(what if event == _LET else step.saved[what].memory)
        elif event == _BUSY:
            memories.uses(what)
    return memories.most


def simulate(step: Step, kept: Sequence[bool]) -> Outcome:
    """See `Simulation.run`."""
    simulation = Simulation(step)
    return simulation.run(simulation.led(kept))


class Simulation:
    """A step, to be simulated for many choices."""

    def __init__(self, step: Step):
        self.step = step
        self.seconds = [value.seconds for value in step.values]  # to compute each
        self.leaders = [number if value.leader < 0 else value.leader for number, value in enumerate(step.values)]
        self.inputs = [step.values[leader].inputs for leader in self.leaders]
        self.together: dict[int, list[int]] = {}  # leader -> all values that its recipe computes
        for number, leader in enumerate(self.leaders):
            self.together.setdefault(leader, []).append(number)
        self.groups = [(leader, numbers) for leader, numbers in self.together.items() if len(numbers) > 1]
        self.consumers = [0] * len(step.values)  # operations
        self.sign_consumers: dict[int, tuple[int, int]] = {}  # value -> number of sign consumers, bytes of the mask
        for saved in step.saved:
            if saved.value >= 0:
                self.consumers[saved.value] += 1
            if saved.signs:
                number, _ = self.sign_consumers.get(saved.value, (0, 0))
                self.sign_consumers[saved.value] = number + 1, saved.signs
        self.kept_in = [value.memory for value in step.values]
        # The memories of the program, of each value if it is computed, and of its sign mask.
        signs = [self.sign_consumers.get(number, (0, 0))[1] for number in range(len(step.values))]
        self.sizes = [*step.memories, *(value.bytes for value in step.values), *signs]
        # Each event, its number, and the value that is saved. Later events in memories without values are merged into
        # it: their peak, and the level after them, in bytes above the level before.
        self.events = [(_BUSY, 0, -1, 0, 0)]
        self.at = [0]  # for each, the event of the step at which it has the most bytes
        self.forward = 0  # the event at which the forward pass has ended
        self._note_events()

    def _note_events(self) -> None:
        alone, shared, before = _Levels(self.step.memories), {*self.kept_in}, 0
        for now, (event, what) in enumerate(self.step.events):
            if now == self.step.forward:
                self.forward, before, alone.most = len(self.events), alone.level, alone.level
                self.events += [(_BUSY, 0, -1, 0, 0)] * 2
                self.at += [now] * 2
            value = self.step.saved[what].value if event in (_SAVE, _READ, _RELEASE) else -1
            if value >= 0 or event == _PASS or (event in (_HOLD, _LET) and what in shared):
                before = alone.most = alone.level
                self.events.append((int(event), what, value, 0, 0))
                self.at.append(now)
            else:
                most = alone.most
                if event in (_HOLD, _LET, _BUSY):
                    (alone.uses if event == _BUSY else alone.hold if event == _HOLD else alone.let)(what)
                self.at[-1] = now if alone.most > most else self.at[-1]
                self.events[-1] = *self.events[-1][:3], alone.most - before, alone.level - before

    def run(self, kept: Sequence[bool]) -> Outcome:
        """The memory and time of the step if it keeps these values, and recomputes others as `Value.get` does.

        `kept`: for each value, after `led`; True for `Kind.KEPT`, False for `Kind.DERIVED` and `Kind.OVERWRITTEN`.
        """
        return Run(self, kept).outcome()

    def peak_of(self, kept: Sequence[bool]) -> str:
        """The call and the module at the peak of a choice."""
        levels = self.run(self.led(kept)).levels
        event = self.at[levels.index(max(levels))]
        return next((place for end, place in self.step.places if end > event), "the end of the backward pass")

    def led(self, kept: Sequence[bool]) -> list[bool]:
        """Extend the choice for each leader to all values that its recipe computes; cut chains as the recorder does."""
        found = [kept[leader] for leader in self.leaders]
        if found.count(False) > LONGEST_PLANNED:
            depths = [0] * len(found)
            for number, is_kept in enumerate(found):
                if not is_kept:
                    depths[number] = 1 + max([depths[i] for i in self.inputs[number]], default=0)
                    if depths[number] > LONGEST_PLANNED and self.step.values[number].kind == Kind.FREE:
                        for one in self.together[self.leaders[number]]:
                            found[one], depths[one] = True, 0
        return found


class Run(_Levels):
    """A simulation of one choice."""

    def __init__(self, whole: Simulation, kept: Sequence[bool]):
        super().__init__(whole.sizes)
        self.whole, self.step, self.kept = whole, whole.step, kept
        count, end = len(kept), len(whole.events)
        self.leaders, self.inputs, self.consumers = whole.leaders, whole.inputs, list(whole.consumers)
        for number in reversed(range(count)):  # a value's inputs have smaller numbers
            if not kept[number] and number == self.leaders[number]:
                if any([self.consumers[one] for one in whole.together[number]]):
                    for i in self.inputs[number]:
                        self.consumers[i] += 1
        self.computed_in = len(self.step.memories)  # the first memory of computed values
        self.of_signs = self.computed_in + count  # the first memory of sign masks
        self.kept_in = list(whole.kept_in)
        # The memory of a value while it is kept or computed; -1: it has to be computed.
        self.place = list(whole.kept_in)
        for number in range(count):
            if not kept[number]:
                self.place[number] = -1
            elif number in whole.sign_consumers and whole.sign_consumers[number][0] == self.consumers[number]:
                self.kept_in[number] = self.of_signs + number
        self.needs = [0] * count  # consumers that may still read it
        self.wanted = [0] * count  # of a leader: how many values that its recipe computes have such consumers
        self.reads = [0] * count  # how often each was read in this backward pass
        self.using: dict[int, int] = {}  # number of a save -> the memory in which an operation that is running reads it
        self.born, self.first, self.last = [end] * count, [end] * count, [-1] * count
        self.runs = [0] * count  # of the recipe of each leader
        self.now = 0  # number of the event

    def outcome(self) -> Outcome:
        levels, needs, kept, using = [], self.needs, self.kept, self.using
        is_whole = [kept[one] and self.kept_in[one] < self.of_signs for one in range(len(kept))]
        for now, (event, what, value, most, change) in enumerate(self.whole.events):
            self.now, self.most = now, self.level
            if event == _SAVE:
                if needs[value]:
                    needs[value] += 1
                else:
                    self._need(value)
            elif event == _READ:
                if is_whole[value]:
                    self.last[value], self.first[value] = now, min(now, self.first[value])
                else:
                    self._read(what, value)
            elif event == _RELEASE:
                if needs[value] > 1 and what not in using:
                    needs[value] -= 1
                else:
                    self._release(what, value)
            elif event == _HOLD:
                self.hold(what)
            elif event == _LET:
                self.let(what)
            elif event == _PASS:
                self._pass_ends()
            level = self.level + most
            levels.append(level if level > self.most else self.most)
            self.level += change
        consumers, born, first, last = found = [self.consumers, self.born, self.first, self.last]
        for leader, numbers in self.whole.groups:  # a leader's entries stand for all values that its recipe computes
            consumers[leader] = sum([consumers[one] for one in numbers])
            born[leader], first[leader] = min([born[one] for one in numbers]), min([first[one] for one in numbers])
            last[leader] = max([last[one] for one in numbers])
        return Outcome(max(levels), sum(map(mul, self.runs, self.whole.seconds)), levels, *found)

    def _need(self, number: int) -> None:
        """Count a new consumer of a value. If it is the first, the recipe now reads its inputs: count it there, too."""
        pending = [number]
        while pending:
            one = pending.pop()
            self.needs[one] += 1
            if self.needs[one] > 1:
                continue
            if self.now < self.born[one]:
                self.born[one] = self.now
            if self.kept[one]:
                self.hold(self.kept_in[one])
            else:
                leader = self.leaders[one]
                self.wanted[leader] += 1
                if self.wanted[leader] == 1:
                    pending += self.inputs[leader]

    def _release(self, save: int, number: int) -> None:
        """Autograd drops a saved tensor, and with the last one whatever remains of its value and recipe."""
        if save in self.using:
            self.let(self.using.pop(save))
        pending = [number]
        while pending:
            one = pending.pop()
            self.needs[one] -= 1
            if self.needs[one]:
                continue
            if self.kept[one]:
                self.let(self.kept_in[one])
            else:
                leader = self.leaders[one]
                self._forget(one)
                self.wanted[leader] -= 1
                if not self.wanted[leader]:
                    pending += self.inputs[leader]

    def _read(self, save: int, number: int) -> None:
        """The backward pass reads a saved tensor: it is kept, unpacked from a sign mask, or computed first."""
        if save in self.using:  # read again: users' backward functions unpack saved tensors one by one
            self.let(self.using.pop(save))
        if self.kept_in[number] >= self.of_signs:
            self._use(save, self.computed_in + number)
            self.uses(self.step.saved[save].unpacking)
        elif not self.kept[number]:
            pending = [number]
            while pending:
                inputs = self.inputs[pending[-1]]
                missing = [] if self.place[pending[-1]] >= 0 else [i for i in inputs if self.place[i] < 0]
                pending += reversed(missing)
                if not missing and self.place[one := pending.pop()] < 0:
                    self._compute(one)
            self._use(save, self.place[number])
        self._count(number)

    def _use(self, save: int, memory: int) -> None:
        """An operation holds a saved tensor from reading to dropping it."""
        self.using[save] = memory
        self.hold(memory)

    def _compute(self, number: int) -> None:
        """Run the call that computes a value. Other values that it computes are held if they are still to be read."""
        leader = self.leaders[number]
        value, several = self.step.values[leader], self.whole.together[leader]
        self.runs[leader] += 1
        if value.leader >= 0:
            self.uses(value.busy)
        for one in several:
            if one == number or (self.place[one] < 0 and self.reads[one] < self.consumers[one]):
                self._place(one)
        if value.leader < 0:
            self.uses(value.busy)
        for i in self.inputs[number]:
            self._count(i)

    def _place(self, number: int) -> None:
        """Note where a value has been computed."""
        value = self.step.values[number]
        shared = value.inputs[0] if value.overwrites and self._is_spare(value.inputs[0]) else value.alias
        self.place[number] = self.place[shared] if shared >= 0 else self.computed_in + number
        self.hold(self.place[number])

    def _is_spare(self, number: int) -> bool:
        """Whether a value is computed for a single consumer, in memory of its own."""
        is_own = self.place[number] == self.computed_in + number and self.consumers[number] == 1
        return is_own and self.step.values[number].is_fresh

    def _count(self, number: int) -> None:
        """Count a read of a value; if it is computed, it is dropped after its last consumer."""
        if self.last[number] < 0:
            self.first[number] = self.now
        self.last[number] = self.now
        self.reads[number] += 1
        if self.reads[number] >= self.consumers[number]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if not self.kept[number] and self.place[number] >= 0:
            self.let(self.place[number])
            self.place[number] = -1

    def _pass_ends(self) -> None:
        """Drop values computed for consumers that never came; another backward pass computes them again."""
        while self.using:
            self.let(self.using.popitem()[1])
        for number in range(len(self.kept)):
            self._forget(number)
        self.reads = [0] * len(self.kept)
