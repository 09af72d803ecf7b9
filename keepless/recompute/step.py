"""A training step as data: its values, its memory, and what happens in which order; and plans of such steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

from .report import KeptTensor

_MORE = 1.01  # bytes of results are as planned if they are at most so many times as large: dimensions are rounded


class Flag:
    """What a plan says of a call, as bits. None of them: its result is kept, as it cannot be computed again."""

    KEEP = 1  # keep the result, which could be computed again
    AGAIN = 2  # compute it again, with all that the call has saved inside
    MASK = 4  # draw the mask again, which a dropout has saved inside; its result follows from it
    PLAIN = 8  # PyTorch saves all that the call needs, without our hooks


class Kind(IntEnum):
    """The choice that a plan has for a value."""

    KEPT = 0  # always kept: it cannot be recomputed
    FOLLOWS = 1  # always recomputed, as views and casts are
    FREE = 2  # keep it, or compute it again
    OVERWRITTEN = 3  # compute it again: the network has written over it


class Event(IntEnum):
    """An event and its number: HOLD and LET refer to a memory; SAVE, READ and RELEASE to a `Save`; BUSY to bytes.

    DONE and PASS have none.
    """

    HOLD = 0  # the program, or the backward pass, gets a tensor
    LET = 1  # and drops it
    SAVE = 2  # autograd saves a value
    READ = 3  # the backward pass reads it
    RELEASE = 4  # autograd drops it
    BUSY = 5  # an operator takes so many bytes while it runs, beside its arguments and results
    DONE = 6  # an operation of the backward pass has run, and drops what it has read
    PASS = 7  # a backward pass ends, and drops what it has computed again


class StepValue(NamedTuple):
    """A value of the step."""

    kind: Kind
    memory: int  # number of the memory that it is in, if it is kept
    bytes: int  # allocated when it is computed again; 0 if it shares an input's memory
    inputs: tuple[int, ...]  # of its recipe
    alias: int  # the input whose memory it shares; -1 if none
    call: int  # number of the call that made it; -1 if none
    seconds: float = 0.0  # to compute it
    busy: int = 0  # bytes that the call takes while it runs, beside its arguments and results
    operations: int = 0  # multiplications and additions
    is_fresh: bool = False  # nothing else shares its memory when it is computed again
    overwrites: bool = False  # it is computed over its first input, if that is fresh and has no other reader
    flag: int = Flag.AGAIN  # of its call, where it is computed again
    leader: int = -1  # the first of the values that one recipe computes, which has their costs; -1: it is alone


class Save(NamedTuple):
    """A tensor that autograd saves."""

    value: int  # that is saved; -1 if none is
    signs: int  # bytes of its signs, if it is saved for these alone; otherwise 0
    memory: int  # kept by PyTorch alone
    call: int  # number of the call during which it is saved, or of the next one with a rule; -1 if none
    unpacking: int = 0  # bytes that making values from the signs takes beside the values


class Step(NamedTuple):
    """A training step, as far as its memory goes."""

    values: list[StepValue]
    memories: list[int]  # bytes; 0 for what was there before the step
    saved: list[Save]
    events: list[tuple[Event, int]]
    forward: int  # number of events in the forward pass
    calls: list[Any]  # function of each call, and bytes of all results up to its own
    unseen: str = ""  # what hides calls from it, such as a checkpoint

    def without_outputs(self) -> "Step":
        """The step of a program that drops the outputs before the backward pass; here they are held to the end."""
        end = 1 + max((now for now, (event, _) in enumerate(self.events) if event == Event.PASS), default=-1)
        dropped = [one for one in self.events[end:] if one[0] == Event.LET]
        others = [one for one in self.events[end:] if one[0] != Event.LET]
        events = [*self.events[: self.forward], *dropped, *self.events[self.forward : end], *others]
        return self._replace(events=events, forward=self.forward + len(dropped))


@dataclass
class Plan:
    """What one sequence of calls keeps or computes again."""

    calls: Sequence[Any]  # function of each call, and bytes of all results up to its own
    flags: bytes  # of each call
    peak: int = 0  # bytes
    plain: int = 0  # bytes at the peak of the plain network
    kept: Sequence[KeptTensor] | None = field(default=None, compare=False)  # by a pass whose calls all had hooks
    inputs: int = field(default=0, compare=False)  # bytes of that pass's inputs

    def flag(self, number: int, function: Any, total: int) -> int | None:
        """The flag of a call; None if it is not one of this plan.

        `total`: bytes of all results so far, which may be fewer than planned.
        """
        if number >= len(self.calls):
            return None
        known, most = self.calls[number]
        return self.flags[number] if known == function and total <= _MORE * most else None

    def choice(self, step: Step) -> list[bool]:
        """Whether each value of a step with these calls is kept; shapes may be others."""
        return [
            value.kind == Kind.KEPT or (value.kind == Kind.FREE and not self.flags[value.call] & value.flag)
            for value in step.values
        ]


def in_order(values: list[StepValue], saved: list[Save]) -> tuple[list[StepValue], list[Save]]:
    """Number the values anew, so that the inputs of each come before it: a call's insides were noted before it."""
    new: dict[int, int] = {}
    for number in range(len(values)):
        pending = [number]
        while pending:
            missing = [i for i in values[pending[-1]].inputs if i not in new]
            pending += missing
            if not missing:
                new.setdefault(pending.pop(), len(new))
    new[-1] = -1
    ordered = [
        value._replace(
            inputs=tuple(map(new.__getitem__, value.inputs)), alias=new[value.alias], leader=new[value.leader]
        )
        for value in map(values.__getitem__, list(new)[:-1])
    ]
    return ordered, [save._replace(value=new[save.value]) for save in saved]
