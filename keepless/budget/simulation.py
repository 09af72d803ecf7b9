"""Simulate the memory and time of a traced step for a choice of kept values."""

from collections.abc import Sequence
from typing import NamedTuple

from .step import Event, Step


class Outcome(NamedTuple):
    """Memory and time of a choice. Lists have an entry for each value, unless they say otherwise."""

    peak: int  # bytes
    seconds: float  # to compute values again
    levels: list[int]  # bytes during each event, at its highest
    readers: list[int]  # operations and recipes
    born: list[int]  # event from which on it was needed; -1 if never
    first: list[int]  # event of the backward pass that first read it, for itself or to compute another
    last: list[int]  # and last


def simulate(step: Step, kept: Sequence[bool]) -> Outcome:
    """The memory and time of a step that keeps these values, and computes others again as `Value.get` does.

    `kept`: for each value; True for those of `Kind.KEPT`, and False for those that follow or are overwritten.
    """
    return _Simulation(step, kept).run()


def plain_peak(step: Step) -> int:
    """Peak bytes of the step in plain PyTorch."""
    holders = [0] * len(step.memories)
    level = peak = 0
    for event, what in step.events:
        if event == Event.BUSY:
            peak = max(peak, level + what)
        elif event != Event.READ:
            memory = what if event in (Event.HOLD, Event.LET) else step.saved[what].memory
            change = 1 if event in (Event.HOLD, Event.SAVE) else -1
            holders[memory] += change
            if holders[memory] == max(change, 0):
                level += change * step.memories[memory]
        peak = max(peak, level)
    return peak


class _Simulation:
    def __init__(self, step: Step, kept: Sequence[bool]):
        count = len(step.values)
        self.step, self.kept = step, kept
        self.values, self.memories = step.values, step.memories
        self.readers = _readers(step, kept)
        self.signs = self._signs()  # bytes kept instead of the value, if only its signs are read
        self.holders = [0] * len(step.memories)  # the program's tensors, and kept values
        self.references = [0] * count  # readers that are there now
        self.reads = [0] * count
        self.place = [-1] * count  # of a computed value: the value in whose memory it is; -1: not computed
        self.users = [0] * count  # computed values in this one's memory, and operations that read them
        self.using: dict[int, int] = {}  # the memory that a running operation reads, by number of the save
        self.expanded: dict[int, int] = {}  # bytes of values made from signs, by number of the save
        self.level = self.highest = 0
        self.seconds = 0.0
        self.now = 0  # number of the event
        self.born, self.first, self.last = [-1] * count, [len(step.events)] * count, [-1] * count

    def _signs(self) -> list[int]:
        signs, sign_readers = [0] * len(self.values), [0] * len(self.values)
        for saved in self.step.saved:
            if saved.signs:
                sign_readers[saved.value] += 1
                signs[saved.value] = saved.signs
        return [size if self.readers[i] == sign_readers[i] else 0 for i, size in enumerate(signs)]

    def run(self) -> Outcome:
        happens = [self.hold, self.let, self.save, self.read, self.release, self.busy]  # by `Event`
        levels = []
        for number, (event, what) in enumerate(self.step.events):
            self.now = number
            self.highest = self.level
            happens[event](what)
            levels.append(max(self.highest, self.level))
        return Outcome(max(levels), self.seconds, levels, self.readers, self.born, self.first, self.last)

    def hold(self, memory: int) -> None:
        self.holders[memory] += 1
        if self.holders[memory] == 1:
            self.level += self.memories[memory]

    def let(self, memory: int) -> None:
        self.holders[memory] -= 1
        if not self.holders[memory]:
            self.level -= self.memories[memory]

    def busy(self, size: int) -> None:
        self.highest += size

    def save(self, number: int) -> None:
        """Autograd saves a value, which is kept from now on, or what its recipe needs."""
        pending = [self.step.saved[number].value]
        while pending:
            value = pending.pop()
            if value < 0:
                continue
            self.references[value] += 1
            if self.references[value] > 1:
                continue
            self.born[value] = self.now
            if not self.kept[value]:
                pending += self.values[value].inputs
            elif self.signs[value]:
                self.level += self.signs[value]
            else:
                self.hold(self.values[value].memory)

    def release(self, number: int) -> None:
        """Autograd drops a saved tensor."""
        self.level -= self.expanded.pop(number, 0)
        if number in self.using:
            self._leave(self.using.pop(number))
        pending = [self.step.saved[number].value]
        while pending:
            value = pending.pop()
            if value < 0:
                continue
            self.references[value] -= 1
            if self.references[value]:
                continue
            if not self.kept[value]:
                self._forget(value)
                pending += self.values[value].inputs
            elif self.signs[value]:
                self.level -= self.signs[value]
            else:
                self.let(self.values[value].memory)

    def read(self, number: int) -> None:
        """The backward pass reads a saved tensor, which is computed first if it is not kept."""
        value = self.step.saved[number].value
        if value < 0:
            return
        self._note(value)
        if self.kept[value]:
            if self.signs[value]:  # a byte for each, twice, and then values for the operation
                self.expanded[number] = self.values[value].bytes
                self.highest = max(self.highest, self.level + 16 * self.signs[value])
                self.level += self.values[value].bytes
            return
        pending = [(value, False)]
        while pending:
            other, has_inputs = pending.pop()
            if self.kept[other] or self.place[other] >= 0:
                continue
            if has_inputs:
                self._compute(other)
            else:
                pending.append((other, True))
                pending += [(i, False) for i in reversed(self.values[other].inputs)]
        if self.place[value] >= 0:
            self.using[number] = self.place[value]
            self.users[self.place[value]] += 1
        self._count(value)

    def _compute(self, number: int) -> None:
        value = self.values[number]
        self.seconds += value.seconds
        shared = value.inputs[0] if value.overwrites and self._is_spare(value.inputs[0]) else value.alias
        if shared < 0:
            self.place[number] = number
            self.level += value.bytes
            self.highest = max(self.highest, self.level + value.busy)
        elif not self.kept[shared]:
            self.place[number] = self.place[shared]
        if self.place[number] >= 0:  # else it is a view of kept memory
            self.users[self.place[number]] += 1
        for i in value.inputs:
            self._note(i)
            if not self.kept[i]:
                self._count(i)

    def _is_spare(self, number: int) -> bool:
        """Whether a value is computed for one reader, in memory of its own."""
        is_own = self.place[number] == number and self.readers[number] == 1
        return is_own and self.values[number].is_fresh and not self.kept[number]

    def _note(self, number: int) -> None:
        self.first[number] = min(self.first[number], self.now)
        self.last[number] = self.now

    def _count(self, number: int) -> None:
        """A computed value was read, and is forgotten after its last reader."""
        self.reads[number] += 1
        if self.reads[number] >= self.readers[number]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if self.place[number] >= 0:
            self._leave(self.place[number])
            self.place[number] = -1

    def _leave(self, number: int) -> None:
        """One user less of a computed value's memory."""
        self.users[number] -= 1
        if not self.users[number]:
            self.level -= self.values[number].bytes


def _readers(step: Step, kept: Sequence[bool]) -> list[int]:
    """How many operations and recipes read each value."""
    readers = [0] * len(step.values)
    pending = [saved.value for saved in step.saved if saved.value >= 0]
    while pending:
        number = pending.pop()
        readers[number] += 1
        if readers[number] == 1 and not kept[number]:
            pending += step.values[number].inputs
    return readers
