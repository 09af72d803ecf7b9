"""A training step as data: its values, its memories, and its events in order."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

from ..passes.plan import Flag


class Kind(IntEnum):
    """The choices that a plan has for a value."""

    KEPT = 0  # always kept: it cannot be recomputed
    DERIVED = 1  # always recomputed, as views and casts are
    FREE = 2  # may be kept or recomputed
    OVERWRITTEN = 3  # always recomputed: the network has written over it


class Event(IntEnum):
    """What happens in a step. Each event comes with a number.

    HOLD and LET: of a memory; SAVE, READ and RELEASE: of a `Save`; BUSY: of bytes; PASS: 0.
    """

    HOLD = 0  # the program, or the backward pass, gets a tensor
    LET = 1  # the program, or the backward pass, drops it
    SAVE = 2  # autograd saves a value
    READ = 3  # the backward pass reads it
    RELEASE = 4  # autograd drops it
    BUSY = 5  # an operator needs this many temporary bytes while it runs, besides arguments and results
    PASS = 6  # the backward pass ends, and drops what it has recomputed


class StepValue(NamedTuple):
    """A value of the step."""

    kind: Kind
    memory: int  # number of its memory, if it is kept
    bytes: int  # allocated when it is recomputed; 0 if it shares an input's memory
    inputs: tuple[int, ...]  # numbers of the values that its recipe reads
    alias: int  # the input whose memory it shares; -1 if none
    call: int  # number of the call that made it; -1 if none
    seconds: float = 0.0  # to compute it
    busy: int = 0  # temporary bytes of the call while it runs, besides arguments and results
    operations: int = 0  # multiplications and additions
    is_fresh: bool = False  # nothing else shares its memory when it is recomputed
    overwrites: bool = False  # it is computed in place of its first input, if that is fresh and has no other consumer
    flag: int = Flag.AGAIN  # flag of its call if it is recomputed
    leader: int = -1  # the first of several values made by one recipe: it has their costs; else -1


class Save(NamedTuple):
    """A tensor that autograd saves."""

    value: int  # number of the saved value; -1 if it has none
    signs: int  # bytes of its sign mask, if this is all that the operation needs; otherwise 0
    memory: int  # number of the memory that PyTorch alone would keep
    unpacking: int = 0  # temporary bytes to unpack the sign mask, besides the result


class Step(NamedTuple):
    """The memory of a training step."""

    values: list[StepValue]
    memories: list[int]  # bytes of each; 0 if it existed before the step
    saved: list[Save]
    events: list[tuple[Event, int]]
    forward: int  # number of events in the forward pass
    calls: list[Any]  # function of each call, and bytes of all results up to its own
    unseen: str = ""  # what hides calls from the trace, such as a checkpoint
    seconds: float = 0.0  # of the baseline step
    operations: int = 0  # of the baseline step: multiplications and additions
    places: Sequence[tuple[int, str]] = ()  # operators: number of events at their end, and the call and module
    gradients: int = 0  # bytes of the gradients that parameters get
    coming: Sequence[tuple[int, tuple[Event, int]]] = ()  # see `as_gradients_come`: events to replace, by their numbers

    def as_gradients_come(self) -> "Step":
        """The same step if no parameter has a gradient before it: each gradient takes memory as it comes, and stays.

        Otherwise it is added to the one that is there, and freed.
        """
        events = list(self.events)
        for index, event in self.coming:
            events[index] = event
        return self._replace(events=events, coming=())

    def without_outputs(self) -> "Step":
        """The same step if the program drops the outputs before the backward pass, so that only its loss holds them.

        The loss drops them once it has its own gradients: when the backward pass first reads a tensor of the network.
        """
        events = self.events
        passes = [index for index, (event, _) in enumerate(events) if event == Event.PASS]
        end = 1 + max(passes, default=-1)
        reads = (index for index in range(self.forward, end) if events[index][0] == Event.READ)
        first_read = next(reads, self.forward)
        drops = [event for event in events[end:] if event[0] == Event.LET]
        rest = [event for event in events[end:] if event[0] != Event.LET]
        return self._replace(events=[*events[:first_read], *drops, *events[first_read:end], *rest])


def busy(events: Sequence[tuple[Event, int]], memories: Sequence[int]) -> int:
    """The peak during some events, in bytes above the level after them."""
    level = peak = 0
    for event, number in events:
        if event == Event.BUSY:
            peak = max(peak, level + number)
        elif event == Event.HOLD:
            level += memories[number]
            peak = max(peak, level)
        elif event == Event.LET:
            level -= memories[number]
    return peak - level


def in_order(values: list[StepValue], saved: list[Save]) -> tuple[list[StepValue], list[Save]]:
    """Renumber the values so that inputs come first: what a call saves inside was noted before the call's inputs."""
    new_numbers: dict[int, int] = {}
    for number in range(len(values)):
        pending = [number]
        while pending:
            missing = [i for i in values[pending[-1]].inputs if i not in new_numbers]
            pending += missing
            if not missing:
                new_numbers.setdefault(pending.pop(), len(new_numbers))
    order = list(new_numbers)
    new_numbers[-1] = -1
    ordered = [
        value._replace(
            inputs=tuple(new_numbers[i] for i in value.inputs),
            alias=new_numbers[value.alias],
            leader=new_numbers[value.leader],
        )
        for value in map(values.__getitem__, order)
    ]
    return ordered, [save._replace(value=new_numbers[save.value]) for save in saved]
