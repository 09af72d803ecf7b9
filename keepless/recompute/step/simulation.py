"""Simulate the memory and time of a counted step for a choice of kept values."""

from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from ..passes.recipes import LONGEST_PLANNED
from .step import Event, Kind, Step

_HOLD, _LET, _SAVE, _READ, _RELEASE, _BUSY, _PASS = map(int, Event)  # plain numbers are compared faster


class MergedEvent(NamedTuple):
    """An event of the step, with those after it in memories without values. Bytes are above the level before it."""

    kind: int  # see `Event`
    number: int
    value: int  # that is saved, read or released; -1 if none
    rise: int = 0  # the most bytes of the events merged into it
    change: int = 0  # bytes after them


_START = MergedEvent(_BUSY, 0, -1)  # into which events are merged


class _Levels:
    """Counts the references to each memory. Its bytes are held while there are any."""

    def __init__(self, sizes: Sequence[int]):
        self.sizes = sizes
        self.holders = [0] * len(sizes)  # references to each memory
        self.level = 0  # bytes now
        self.highest = 0  # the most during this event

    def hold(self, memory: int) -> None:
        self.holders[memory] += 1
        if self.holders[memory] == 1:
            self.level += self.sizes[memory]
            if self.level > self.highest:
                self.highest = self.level

    def release(self, memory: int) -> None:
        self.holders[memory] -= 1
        if not self.holders[memory]:
            self.level -= self.sizes[memory]

    def need(self, temporary: int) -> None:
        """Need temporary bytes for a moment."""
        if self.level + temporary > self.highest:
            self.highest = self.level + temporary

    def apply(self, event: int, number: int) -> None:
        """Let an event happen, if it is about memory."""
        if event == _HOLD:
            self.hold(number)
        elif event == _LET:
            self.release(number)
        elif event == _BUSY:
            self.need(number)


def plain_peak(step: Step, saves: bool = True) -> int:
    """Peak bytes of the step without recomputation. `saves`: with the tensors that autograd saves."""
    levels = _Levels(step.memories)
    for event, number in step.events:
        if event == _SAVE and saves:
            levels.hold(step.saved[number].memory)
        elif event == _RELEASE and saves:
            levels.release(step.saved[number].memory)
        else:
            levels.apply(event, number)
    return levels.highest


class Simulation:
    """A step, to be simulated for many choices."""

    def __init__(self, step: Step):
        self.step = step
        self.seconds = [value.seconds for value in step.values]  # to compute each
        self.leaders = [number if value.leader < 0 else value.leader for number, value in enumerate(step.values)]
        self.inputs = [step.values[leader].inputs for leader in self.leaders]
        self.members: dict[int, list[int]] = {}  # leader -> all values that its recipe computes
        for number, leader in enumerate(self.leaders):
            self.members.setdefault(leader, []).append(number)
        self.groups = [(leader, members) for leader, members in self.members.items() if len(members) > 1]
        self.consumers = [0] * len(step.values)  # operations that save each value
        self.sign_consumers = [0] * len(step.values)  # those that need only its sign mask
        self.sign_bytes = [0] * len(step.values)  # of this mask
        for save in step.saved:
            if save.value >= 0:
                self.consumers[save.value] += 1
            if save.signs:
                self.sign_consumers[save.value] += 1
                self.sign_bytes[save.value] = save.signs
        self.kept_memories = [value.memory for value in step.values]
        # The memories of the program, of each value if it is computed, and of its sign mask.
        self.sizes = [*step.memories, *(value.bytes for value in step.values), *self.sign_bytes]
        self.events: list[MergedEvent] = []
        self.peak_events: list[int] = []  # for each, the event of the step at which it has the most bytes
        self.forward = 0  # the event at which the forward pass has ended
        self._merge_events()

    def _merge_events(self) -> None:
        """Note the events of the step that depend on the choice. Others are merged into the last of these before them.

        The first events of the step, and of its backward pass, are merged into a `_START`.
        """
        merged_levels = _Levels(self.step.memories)  # of the events that are merged
        with_values = {*self.kept_memories}
        self._add_event(_START, 0, merged_levels)
        for index, (event, number) in enumerate(self.step.events):
            if index == self.step.forward:
                self.forward = len(self.events)
                self._add_event(_START, index, merged_levels)  # nothing is merged: it has what the pass leaves
                self._add_event(_START, index, merged_levels)
            value = self.step.saved[number].value if event in (_SAVE, _READ, _RELEASE) else -1
            if value >= 0 or event == _PASS or (event in (_HOLD, _LET) and number in with_values):
                self._add_event(MergedEvent(int(event), number, value), index, merged_levels)
            else:
                self._merge_into_last(event, number, index, merged_levels)

    def _add_event(self, event: MergedEvent, index: int, merged_levels: _Levels) -> None:
        """Add an event, into which later ones may be merged. `index`: its number in the step."""
        merged_levels.highest = merged_levels.level
        self.events.append(event)
        self.peak_events.append(index)

    def _merge_into_last(self, event: int, number: int, index: int, merged_levels: _Levels) -> None:
        """Merge an event of the step into the last one of the simulation."""
        last = self.events[-1]
        level_before = merged_levels.level - last.change
        highest_before = merged_levels.highest
        merged_levels.apply(event, number)
        if merged_levels.highest > highest_before:
            self.peak_events[-1] = index
        rise = merged_levels.highest - level_before
        self.events[-1] = last._replace(rise=rise, change=merged_levels.level - level_before)

    def run(self, kept: Sequence[bool]) -> "Trial":
        """The memory and time of the step if it keeps these values, and recomputes others as `Value.get` does.

        `kept`: for each value, True for `Kind.KEPT`, False for `Kind.DERIVED` and `Kind.OVERWRITTEN`. A leader's choice
        counts for all values that its recipe computes, and chains are cut as by the recorder: see `Trial.kept`.
        """
        extended = [kept[leader] for leader in self.leaders]
        if extended.count(False) > LONGEST_PLANNED:
            self._cut_chains(extended)
        trial = Trial(self, extended)
        trial.run()
        return trial

    def consumers_of(self, kept: Sequence[bool]) -> list[int]:
        """For each value, how many operations and recipes read it."""
        consumers = list(self.consumers)
        for number in reversed(range(len(kept))):  # a value's inputs have smaller numbers
            if not kept[number] and number == self.leaders[number]:
                if any([consumers[member] for member in self.members[number]]):
                    for i in self.inputs[number]:
                        consumers[i] += 1
        return consumers

    def place_of_peak(self, kept: Sequence[bool]) -> str:
        """The call and the module that run at the peak of a choice."""
        trial = self.run(kept)
        event = self.peak_events[trial.levels.index(trial.peak)]
        return next((place for end, place in self.step.places if end > event), "the end of the backward pass")

    def _cut_chains(self, kept: list[bool]) -> None:
        """Keep values where too many recipes would follow one another."""
        depths = [0] * len(kept)
        for number in range(len(kept)):
            if not kept[number]:
                depths[number] = 1 + max([depths[i] for i in self.inputs[number]], default=0)
                if depths[number] > LONGEST_PLANNED and self.step.values[number].kind == Kind.FREE:
                    for member in self.members[self.leaders[number]]:
                        kept[member] = True
                        depths[member] = 0


class Trial(_Levels):
    """A choice of kept values, and what `run` finds out about it.

    Lists have an entry for each value; a leader's covers all values of its recipe. An event is an index into
    `Simulation.events`, which has fewer events than the step.
    """

    def __init__(self, simulation: Simulation, kept: Sequence[bool]):
        super().__init__(simulation.sizes)
        count = len(kept)
        end = len(simulation.events)
        self.kept = kept
        self.peak = 0  # bytes
        self.seconds = 0.0  # to recompute values
        self.levels: list[int] = []  # the most bytes during each event
        self.consumers = simulation.consumers_of(kept)  # number of operations and recipes that read the value
        self.needed_from = [end] * count  # event from which on it was needed; the number of events if never
        self.first_read = [end] * count  # event of the backward pass that first read it, for an operation or a recipe
        self.last_read = [-1] * count  # event that last read it
        self.simulation = simulation
        self.step = simulation.step
        self.leaders = simulation.leaders
        self.inputs = simulation.inputs
        self.first_computed_memory = len(self.step.memories)
        self.first_sign_memory = self.first_computed_memory + count
        self.kept_memories = list(simulation.kept_memories)
        # The memory of a value while it is kept or computed; -1: it has to be computed.
        self.memories = list(simulation.kept_memories)
        for number in range(count):
            if not kept[number]:
                self.memories[number] = -1
            elif 0 < simulation.sign_consumers[number] == self.consumers[number]:
                self.kept_memories[number] = self.first_sign_memory + number
        self.consumers_left = [0] * count  # consumers that may still read each value
        self.members_needed = [0] * count  # of a leader: values of its recipe that have such consumers
        self.read_counts = [0] * count  # how often each was read in this backward pass
        self.memories_in_use: dict[int, int] = {}  # number of a save -> where a running operation reads it
        self.run_counts = [0] * count  # of the recipe of each leader
        self.event_number = 0

    def run(self) -> None:
        """Run all events."""
        levels = self.levels
        consumers_left = self.consumers_left
        first_sign_memory = self.first_sign_memory
        is_whole = [
            is_kept and memory < first_sign_memory
            for is_kept, memory in zip(self.kept, self.kept_memories, strict=True)
        ]
        for index, (kind, number, value, rise, change) in enumerate(self.simulation.events):
            self.event_number = index
            self.highest = self.level
            if kind == _SAVE:
                if consumers_left[value]:
                    consumers_left[value] += 1
                else:
                    self._count_consumer(value, 1)
            elif kind == _READ:
                if is_whole[value]:
                    self.last_read[value] = index
                    self.first_read[value] = min(index, self.first_read[value])
                else:
                    self._read(number, value)
            elif kind == _RELEASE:
                if number in self.memories_in_use:
                    self._leave(number)
                if consumers_left[value] > 1:
                    consumers_left[value] -= 1
                else:
                    self._count_consumer(value, -1)
            elif kind == _HOLD:
                self.hold(number)
            elif kind == _LET:
                self.release(number)
            elif kind == _PASS:
                self._end_pass()
            level = self.level + rise
            levels.append(level if level > self.highest else self.highest)
            self.level += change
        self._sum_up_groups()
        self.peak = max(levels)
        self.seconds = sum(map(mul, self.run_counts, self.simulation.seconds))

    def _sum_up_groups(self) -> None:
        """Let a leader's entries stand for those of all members."""
        for leader, members in self.simulation.groups:
            self.consumers[leader] = sum([self.consumers[member] for member in members])
            self.needed_from[leader] = min([self.needed_from[member] for member in members])
            self.first_read[leader] = min([self.first_read[member] for member in members])
            self.last_read[leader] = max([self.last_read[member] for member in members])

    def _count_consumer(self, number: int, change: int) -> None:
        """Count a consumer of a value that has come (1) or gone (-1).

        With its first consumer a recipe begins to read its inputs, and with its last one it ends.
        """
        turning = int(change > 0)  # the number at which a recipe begins or ends
        pending = [number]
        while pending:
            value = pending.pop()
            self.consumers_left[value] += change
            if self.consumers_left[value] != turning:
                continue
            if turning and self.event_number < self.needed_from[value]:
                self.needed_from[value] = self.event_number
            if not self.kept[value]:
                if not turning:
                    self._forget(value)
                leader = self.leaders[value]
                self.members_needed[leader] += change
                if self.members_needed[leader] == turning:
                    pending += self.inputs[leader]
            elif turning:
                self.hold(self.kept_memories[value])
            else:
                self.release(self.kept_memories[value])

    def _read(self, save: int, number: int) -> None:
        """The backward pass reads a saved tensor: it is kept, unpacked from a sign mask, or computed first."""
        if save in self.memories_in_use:  # read again: users' backward functions unpack saved tensors one by one
            self._leave(save)
        if self.kept_memories[number] >= self.first_sign_memory:
            self._use(save, self.first_computed_memory + number)
            self.need(self.step.saved[save].unpacking)
        elif not self.kept[number]:
            self._compute_with_inputs(number)
            self._use(save, self.memories[number])
        self._count_read(number)

    def _use(self, save: int, memory: int) -> None:
        """An operation holds a saved tensor from reading to dropping it."""
        self.memories_in_use[save] = memory
        self.hold(memory)

    def _leave(self, save: int) -> None:
        """An operation drops a saved tensor."""
        self.release(self.memories_in_use.pop(save))

    def _compute_with_inputs(self, number: int) -> None:
        """Compute a value, and before it the inputs that are not there."""
        pending = [number]
        while pending:
            value = pending[-1]
            missing = [] if self.memories[value] >= 0 else [i for i in self.inputs[value] if self.memories[i] < 0]
            pending += reversed(missing)
            if not missing:
                pending.pop()
                if self.memories[value] < 0:
                    self._compute(value)

    def _compute(self, number: int) -> None:
        """Run the call that computes a value. Other values that it computes are held if they are still to be read."""
        leader = self.leaders[number]
        value = self.step.values[leader]
        self.run_counts[leader] += 1
        if value.leader >= 0:  # these bytes include its results
            self.need(value.busy)
        for member in self.simulation.members[leader]:
            if member == number or (self.memories[member] < 0 and self.read_counts[member] < self.consumers[member]):
                self._place(member)
        if value.leader < 0:
            self.need(value.busy)
        for i in self.inputs[number]:
            self._count_read(i)

    def _place(self, number: int) -> None:
        """Note where a value has been computed."""
        value = self.step.values[number]
        sharing = value.inputs[0] if value.overwrites and self._is_spare(value.inputs[0]) else value.alias
        self.memories[number] = self.memories[sharing] if sharing >= 0 else self.first_computed_memory + number
        self.hold(self.memories[number])

    def _is_spare(self, number: int) -> bool:
        """Whether a value is computed for a single consumer, in memory of its own."""
        is_alone = self.memories[number] == self.first_computed_memory + number and self.consumers[number] == 1
        return is_alone and self.step.values[number].is_fresh

    def _count_read(self, number: int) -> None:
        """Count a read of a value; if it is computed, it is dropped after its last consumer."""
        if self.last_read[number] < 0:
            self.first_read[number] = self.event_number
        self.last_read[number] = self.event_number
        self.read_counts[number] += 1
        if self.read_counts[number] >= self.consumers[number]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        if not self.kept[number] and self.memories[number] >= 0:
            self.release(self.memories[number])
            self.memories[number] = -1

    def _end_pass(self) -> None:
        """Drop values computed for consumers that never came; another backward pass computes them again."""
        for save in list(self.memories_in_use):
            self._leave(save)
        for number, memory in enumerate(self.memories):
            if memory >= 0 and not self.kept[number]:
                self._forget(number)
        self.read_counts = [0] * len(self.kept)
