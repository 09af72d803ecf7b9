"""Simulate the memory and time of a counted step for a choice of kept values."""

from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from ..torch_internals import without_dispatch_modes, without_function_modes
from .step import Event, Step


class Outcome(NamedTuple):
    """Memory and time of a choice. Lists have an entry for each value; a leader's covers all values of its recipe."""

    peak: int  # bytes
    seconds: float  # to recompute values
    levels: Tensor  # the most bytes during each event; int64
    readers: list[int]  # number of operations and recipes that read it
    born: list[int]  # event from which on it was needed; the number of events if never
    first: list[int]  # event of the backward pass that first read it, for itself or to compute another
    last: list[int]  # event that last read it


def simulate(step: Step, kept: Sequence[bool]) -> Outcome:
    """See `Simulation.run`."""
    with on_real_tensors():
        return Simulation(step).run(kept)


@contextmanager
def on_real_tensors() -> Iterator[None]:
    """Context for a `Simulation`, which computes with small tensors: modes, e.g. for fake tensors, do not see them."""
    with without_function_modes(), without_dispatch_modes(), torch.no_grad():
        yield


def plain_peak(step: Step) -> int:
    """Peak bytes of the step in plain PyTorch."""
    holders = [0] * len(step.memories)
    level = peak = 0
    for event, what in step.events:
        if event == Event.BUSY:
            peak = max(peak, level + what)
        elif event not in (Event.READ, Event.PASS):
            memory = what if event in (Event.HOLD, Event.LET) else step.saved[what].memory
            change = 1 if event in (Event.HOLD, Event.SAVE) else -1
            holders[memory] += change
            if holders[memory] == max(change, 0):
                level += change * step.memories[memory]
        peak = max(peak, level)
    return peak


class Simulation:
    """A step, prepared to be simulated for many choices.

    What does not depend on the choice is computed once: when the program holds each memory, and when autograd saves,
    reads and releases each value. Each choice adds the time spans of the values that it keeps and recomputes.
    """

    def __init__(self, step: Step):
        self.step = step
        self.end = len(step.events)
        self.spans: list[list[tuple[int, int]]] = [[] for _ in step.memories]  # in which the program holds a memory
        count = len(step.values)
        self.readers = [0] * count  # operations
        self.born, self.dead = [self.end] * count, [-1] * count
        self.first, self.last = [self.end] * count, [-1] * count
        # Event, number of the save, its value, and whether it is a read. Save -1: the backward pass ends.
        self.actions: list[tuple[int, int, int, bool]] = []
        self.inputs = [value.inputs for value in step.values]
        self.together: dict[int, list[int]] = {}  # leader -> all values that its recipe computes
        for number, value in enumerate(step.values):
            if value.leader >= 0:
                self.together.setdefault(value.leader, []).append(number)
        self.steady, self.highest = _Changes(self.end), _Changes(self.end)  # of the program alone
        self._note_events()
        self.sign_readers: dict[int, tuple[int, int]] = {}  # value -> number of sign readers, bytes of the signs
        self.unpacking: dict[int, int] = {}
        for saved in step.saved:
            if saved.signs:
                number, _ = self.sign_readers.get(saved.value, (0, 0))
                self.sign_readers[saved.value] = number + 1, saved.signs
                self.unpacking[saved.value] = saved.unpacking
        self.base = self.steady.sums(), self.highest.sums()

    def _note_events(self) -> None:
        step, holders, since = self.step, [0] * len(self.step.memories), [0] * len(self.step.memories)
        open_saves: dict[int, int] = {}
        for now, (event, what) in enumerate(step.events):
            if event == Event.HOLD:
                holders[what] += 1
                if holders[what] == 1:
                    since[what] = now
            elif event == Event.LET:
                holders[what] -= 1
                if not holders[what]:
                    self.spans[what].append((since[what], now))
            elif event == Event.BUSY:
                self.highest.add(now, what)
            elif event == Event.PASS:
                self.actions.append((now, -1, -1, False))
            elif (value := step.saved[what].value) >= 0:
                if event == Event.SAVE:
                    self.readers[value] += 1
                    self.born[value] = min(self.born[value], now)
                    open_saves[what] = value
                elif event == Event.READ:
                    self.first[value], self.last[value] = min(self.first[value], now), now
                    self.actions.append((now, what, value, True))
                else:
                    self.dead[value] = max(self.dead[value], now)
                    del open_saves[what]
                    self.actions.append((now, what, value, False))
        for value in open_saves.values():
            self.dead[value] = self.end
        for memory, number in enumerate(holders):
            if number:
                self.spans[memory].append((since[memory], self.end))
            for begin, end in self.spans[memory]:
                self.steady.span(begin, end, step.memories[memory])

    def run(self, kept: Sequence[bool]) -> Outcome:
        """The memory and time of a step that keeps these values, and recomputes others as `Value.get` does.

        `kept`: for each value; True for `Kind.KEPT`, False for `Kind.FOLLOWS` and `Kind.OVERWRITTEN`.
        """
        return _Run(self, self.led(kept)).outcome()

    def bound(self) -> int:
        """Bytes below which no choice has its peak: what the program holds by itself."""
        return int(self.added(_Changes(self.end), _Changes(self.end)).max())

    def led(self, kept: Sequence[bool]) -> Sequence[bool]:
        """Extend the choice for each leader to all values that its recipe computes."""
        if self.together:
            kept = list(kept)
            for leader, numbers in self.together.items():
                for number in numbers:
                    kept[number] = kept[leader]
        return kept

    def added(self, steady: "_Changes", highest: "_Changes") -> Tensor:
        """The most bytes during each event, with a choice's changes: lasting (`steady`) and momentary (`highest`)."""
        changes = self.base[0] + steady.sums()
        after = changes.cumsum(0)
        return torch.maximum(after, after - changes + self.base[1] + highest.sums())


class _Changes:
    """Bytes allocated or freed at events."""

    def __init__(self, end: int):
        self.end = end
        self.events: list[int] = []
        self.bytes: list[int] = []

    def add(self, event: int, change: int) -> None:
        self.events.append(event)
        self.bytes.append(change)

    def span(self, begin: int, end: int, size: int) -> None:
        """Add `size` bytes from one event to another."""
        self.events += (begin, end)
        self.bytes += (size, -size)

    def sums(self) -> Tensor:
        """The total for each event."""
        sums = torch.zeros(self.end + 1, dtype=torch.int64)
        if self.events:  # arrays, because tensors of long lists take ten times as long
            where, sizes = (torch.frombuffer(array("q", one), dtype=torch.int64) for one in (self.events, self.bytes))
            sums.index_add_(0, where, sizes)
        return sums[:-1]


class _Run:
    """A simulation of one choice."""

    def __init__(self, whole: Simulation, kept: Sequence[bool]):
        count = len(whole.step.values)
        self.whole, self.step, self.values, self.kept = whole, whole.step, whole.step.values, kept
        self.inputs = whole.inputs
        self.readers, self.born, self.dead = list(whole.readers), list(whole.born), list(whole.dead)
        self.first, self.last = list(whole.first), list(whole.last)
        self._reach_inputs()
        # For values of which only the signs are read: the bytes kept instead.
        self.signs = {
            value: size for value, (number, size) in whole.sign_readers.items() if number == self.readers[value]
        }
        self.reads = [0] * count
        self.place = [-1] * count  # for a computed value: the value whose memory it is in; -1: not computed
        self.users = [0] * count  # computed values in this one's memory, and operations that read them
        self.using: dict[int, int] = {}  # number of a save -> the memory in which a running operation reads it
        self.seconds = 0.0
        self.now = 0  # number of the event
        self.level = self.most = 0  # bytes that this event has added so far, and their maximum
        self.steady, self.highest = _Changes(whole.end), _Changes(whole.end)

    def _reach_inputs(self) -> None:
        """Keep the inputs of a recomputed value as long as the value is needed."""
        readers, born, dead, inputs = self.readers, self.born, self.dead, self.inputs
        for number in range(len(self.kept) - 1, -1, -1):  # a value's inputs have smaller numbers
            if self.kept[number]:
                continue
            if self.values[number].leader >= 0:
                if self.values[number].leader != number:
                    continue
                outputs = [one for one in self.whole.together[number] if readers[one]]
                begin = min((born[one] for one in outputs), default=-1)
                end = max((dead[one] for one in outputs), default=-1)
            else:
                begin, end = born[number] if readers[number] else -1, dead[number]
            if begin >= 0:
                for i in inputs[number]:
                    readers[i] += 1
                    if begin < born[i]:
                        born[i] = begin
                    if end > dead[i]:
                        dead[i] = end

    def outcome(self) -> Outcome:
        for begin, end, size in self._kept_spans():
            self.steady.span(begin, end, size)
        kept, signs = self.kept, self.signs
        for now, number, value, is_read in self.whole.actions:
            if value >= 0 and kept[value] and value not in signs:
                continue
            self.now, self.level, self.most = now, 0, 0
            if number < 0:
                self._pass_ends()
            elif kept[value]:
                self._expand(value, is_read)
            elif is_read:
                self._read(number, value)
            else:
                self._release(number, value)
            if self.level:
                self.steady.add(now, self.level)
            if self.most:
                self.highest.add(now, self.most)
        for leader, numbers in self.whole.together.items():  # the leader stands for all
            self.readers[leader] = sum(self.readers[one] for one in numbers)
            for found, choose in ((self.born, min), (self.first, min), (self.last, max)):
                found[leader] = choose(found[one] for one in numbers)
        levels = self.whole.added(self.steady, self.highest)
        return Outcome(int(levels.max()), self.seconds, levels, self.readers, self.born, self.first, self.last)

    def _kept_spans(self) -> Iterator[tuple[int, int, int]]:
        """(begin, end, bytes) of memory that is kept while the program does not hold it."""
        needed: dict[int, tuple[int, int]] = {}  # memory -> (begin, end)
        for number, is_kept in enumerate(self.kept):
            if not is_kept or not self.readers[number]:
                continue
            begin, end = self.born[number], self.dead[number]
            if number in self.signs:
                yield begin, end, self.signs[number]
                continue
            memory = self.values[number].memory
            if memory in needed:
                others = needed[memory]
                begin, end = min(begin, others[0]), max(end, others[1])
            needed[memory] = begin, end
        for memory, (begin, end) in needed.items():
            size = self.step.memories[memory]
            for held, let in self.whole.spans[memory]:
                if begin < held:
                    yield begin, min(held, end), size
                begin = max(begin, let)
                if begin >= end:
                    break
            if begin < end:
                yield begin, end, size

    def _expand(self, value: int, is_read: bool) -> None:
        """Unpack values from signs for an operation that reads them (`is_read`), or free them after it has run."""
        self.level = self.values[value].bytes if is_read else -self.values[value].bytes
        self.most = self.whole.unpacking[value] if is_read else 0

    def _read(self, number: int, value: int) -> None:
        """The backward pass reads a saved tensor, which is computed first."""
        kept, place = self.kept, self.place
        if number in self.using:  # read again: users' backward functions unpack saved tensors one by one
            self._leave(self.using.pop(number))
        pending = [value] if place[value] < 0 else []
        while pending:
            other = pending.pop()
            if other < 0:  # after its inputs
                if place[~other] < 0:
                    self._compute(~other)
            elif place[other] < 0:
                missing = [i for i in self.inputs[other] if not kept[i] and place[i] < 0]
                if missing:
                    pending.append(~other)
                    pending += reversed(missing)
                else:
                    self._compute(other)
        if place[value] >= 0:
            self.using[number] = place[value]
            self.users[place[value]] += 1
        self._count(value)

    def _release(self, number: int, value: int) -> None:
        """Autograd drops a saved tensor, and with the last one whatever remains of its value and recipe."""
        if number in self.using:
            self._leave(self.using.pop(number))
        pending = [value]
        while pending:
            other = pending.pop()
            if self.dead[other] == self.now and not self.kept[other]:
                self._forget(other)
                pending += self.values[other].inputs

    def _pass_ends(self) -> None:
        """Drop values computed for readers that never came; another backward pass computes them again."""
        while self.using:
            self._leave(self.using.popitem()[1])
        for number, place in enumerate(self.place):
            if place >= 0:
                self._forget(number)
        self.reads = [0] * len(self.reads)

    def _compute(self, number: int) -> None:
        """Run the call that computes a value; other values that it computes stay if they are still to be read."""
        leader = self.values[number].leader
        value = self.values[leader if leader >= 0 else number]
        self.seconds += value.seconds
        if leader >= 0:
            self.most = max(self.most, self.level + value.busy)
        for one in (number,) if leader < 0 else self.whole.together[leader]:
            if one == number or (self.place[one] < 0 and self.reads[one] < self.readers[one]):
                self._place(one)
        self._read_inputs(number)

    def _place(self, number: int) -> None:
        """A value has been computed."""
        value = self.values[number]
        shared = value.inputs[0] if value.overwrites and self._is_spare(value.inputs[0]) else value.alias
        if shared < 0:
            self.place[number] = number
            self.level += value.bytes
            self.most = max(self.most, self.level + (value.busy if value.leader < 0 else 0))
        elif not self.kept[shared]:
            self.place[number] = self.place[shared]
        if self.place[number] >= 0:  # otherwise it is a view of kept memory
            self.users[self.place[number]] += 1

    def _read_inputs(self, number: int) -> None:
        now, kept, first, last, reads = self.now, self.kept, self.first, self.last, self.reads
        for i in self.inputs[number]:
            if now < first[i]:
                first[i] = now
            if now > last[i]:
                last[i] = now
            if not kept[i]:
                reads[i] += 1
                if reads[i] >= self.readers[i]:
                    self._forget(i)

    def _is_spare(self, number: int) -> bool:
        """Whether a value is computed for one reader, in memory of its own."""
        is_own = self.place[number] == number and self.readers[number] == 1
        return is_own and self.values[number].is_fresh and not self.kept[number]

    def _count(self, number: int) -> None:
        """A computed value was read; drop it after its last reader."""
        self.reads[number] += 1
        if self.reads[number] >= self.readers[number]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if self.place[number] >= 0:
            self._leave(self.place[number])
            self.place[number] = -1

    def _leave(self, number: int) -> None:
        """Release one use of a computed value's memory."""
        self.users[number] -= 1
        if not self.users[number]:
            self.level -= self.values[number].bytes
