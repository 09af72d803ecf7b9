"""A learned step as a list with an entry for each call, and what autograd holds for the tensors that it drops.

A `Keep` is to a script what `Kept` is to a recording, and a `Slot` what a `Value` with a `Recipe` is. Both are handles.

Every check of a script is made where it matters: a call must be of the expected function, a tensor that a recipe reads
must be the object that the script expects, in the expected version, and a result must have the expected form. So the
values that a script computes are right whatever the program does; where something differs, the recorder takes over.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...saved import autocast_as, check_version, laid_out
from ...torch_internals import at_end_of_backward, backward_number
from ..held.values import Memory
from ..recorder.lesson import Form, Opening, Path
from ..recorder.plan import Plan
from ..recorder.report import KeptTensor
from ..table.functions import Row

_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled


class Keep:
    """A tensor that is kept, for autograd or a recipe."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version

    def get(self) -> Tensor:
        """The tensor. RuntimeError if it was modified in place."""
        tensor = self.tensor
        if tensor._version != self.version:
            check_version(tensor, self.version)
        return tensor

    read = get


def computed(form: Form, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """The result of a function, under the forward pass's settings."""
    if _is_grad_enabled() or form.autocast[0] or _is_autocast_enabled(form.device):
        with torch.no_grad(), autocast_as(form.autocast, form.device):
            return function(*arguments)
    return function(*arguments)


class Pass:
    """The recomputed tensors that a backward pass holds for later readers."""

    __slots__ = ("held", "number")

    def __init__(self) -> None:
        self.number = -1
        self.held: list[weakref.ref[Slot]] = []  # weak, because a slot keeps what it is computed from

    def hold(self, slot: "Slot", tensor: Tensor, readers: int) -> None:
        """Hold a slot's tensor until so many readers have read it, or the pass ends."""
        if (number := backward_number()) == -1:
            return
        if number != self.number:
            self.number, self.held = number, []
            at_end_of_backward(partial(_release, self.held))
        slot.tensor, slot.version, slot.left = tensor, tensor._version, readers
        self.held.append(weakref.ref(slot))


def _release(slots: "list[weakref.ref[Slot]]") -> None:
    for reference in slots:
        if (slot := reference()) is not None:
            slot.tensor = None
    slots.clear()


def unknown() -> Tensor:
    raise AssertionError("the call that saved this tensor has raised an error")


class Slot:
    """A dropped tensor, and how to compute it again: `function(*arguments)`, with `Slot`s and `Keep`s among these.

    It is computed for its first reader in a backward pass, and held until the last one has read it. How many there are
    is known from the pass in which the script was learned; a wrong number costs time or memory, never a wrong value.
    """

    __slots__ = (
        *("__weakref__", "arguments", "form", "function", "group", "left", "memory", "passed", "reads", "tensor"),
        "version",
    )

    def __init__(self, form: Form, passed: Pass):
        self.form, self.passed = form, passed
        self.tensor: Tensor | None = None  # once it is computed: with its version, and the number of readers left
        self.version = self.left = 0
        self.memory: Memory | None = None  # of the forward tensor, once the recorder has taken over
        self.group: Group | None = None
        self.arguments: Sequence[Any] = ()
        self.reads: Sequence[int] = form.reads  # positions of the arguments with a method `read`
        self.function: Callable[..., Any] = unknown

    def get(self) -> Tensor:
        """For autograd. RuntimeError if the forward tensor, or one that it is computed from, was modified in place."""
        if self.memory is not None and self.memory.overwritten:
            raise RuntimeError("a tensor needed for the gradient was modified by an inplace operation")
        return self.read()

    def read(self) -> Tensor:
        """For recipes: the tensor as it was when the call was made."""
        tensor = self.tensor
        if tensor is not None:
            if tensor._version != self.version:
                check_version(tensor, self.version)  # a backward function may have overwritten its input
            self.left -= 1
            if self.left == 0:
                self.tensor = None
            return tensor
        if self.group is not None:
            tensor = self.group.compute(self)
        else:
            given = [*self.arguments]
            for position in self.reads:
                given[position] = given[position].read()
            form = self.form
            if _is_grad_enabled() or form.autocast[0] or _is_autocast_enabled(form.device):
                tensor = computed(form, self.function, given)
            else:
                tensor = self.function(*given)
            if tensor.dtype is not form.dtype:
                tensor = tensor.to(form.dtype)
            if tensor.stride() != form.stride:
                tensor = laid_out(tensor, form.stride)
        if self.form.readers > 1:
            self.passed.hold(self, tensor, self.form.readers - 1)
        return tensor

    def look(self) -> Tensor:
        """The tensor, for a reader that the script does not know."""
        if self.tensor is not None:
            self.left += 1
        return self.read()


HANDLES: set[type] = {Keep, Slot}  # what has a method `read`


class Group:
    """A call that computes several dropped tensors at once."""

    __slots__ = ("__weakref__", "arguments", "function", "slots")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], slots: "Sequence[Slot | None]"):
        self.function, self.arguments = function, arguments
        # Autograd holds the slots, which hold this group. None: autograd has not asked for that tensor.
        self.slots = [None if slot is None else weakref.ref(slot) for slot in slots]

    def compute(self, wanted: Slot) -> Tensor:
        given = [one.read() if type(one) in HANDLES else one for one in self.arguments]
        found = computed(wanted.form, self.function, given)
        own: Tensor | None = None
        for reference, tensor in zip(self.slots, found, strict=True):
            slot = None if reference is None else reference()
            if slot is wanted:
                own = tensor
            elif slot is not None and slot.tensor is None and slot.form.readers:
                slot.passed.hold(slot, tensor, slot.form.readers)
        assert own is not None
        return own


class How:
    """How a tensor's handle is found."""

    KNOWN = 0  # an earlier entry has made it
    FIRST = 1  # the tensor is kept; it is noted when it is seen for the first time
    GUARDED = 2  # as FIRST; but the recorder has kept a copy instead, so a call that writes over it ends the script
    VIEW = 3  # a view of a dropped tensor, or of a copy
    NORM = 4  # the output of a norm whose node can compute it
    HOLD = 5  # it is kept for this reader alone
    COPY = 6  # a copy is kept
    # Only for tensors that autograd saves:
    SHAPE = 7  # only the shape is needed
    SIGNS = 8  # only the signs are needed
    COPIED = 9  # a copy of an argument, made inside the call
    INSIDE = 10  # made inside the call, and computed again with its result
    NARROW = 11  # indices, which are kept in a smaller type
    RESULT = 12  # the result, or an argument in whose place the result will do


class Take(NamedTuple):
    """How to find the handle of a tensor."""

    how: int
    number: int = -1  # of the value
    path: Path = -1  # of the argument
    of: "Take | None" = None  # VIEW: the number of its base; COPIED: the argument
    function: Any = None  # VIEW and COPIED: what computes it from that, with `more` arguments
    more: tuple[Any, ...] = ()
    form: Form | None = None

    @property
    def is_elsewhere(self) -> bool:
        """Whether autograd's tensor is not in the memory of this value's tensor."""
        if self.how == How.VIEW:
            return self.of is not None and self.of.is_elsewhere
        return self.how == How.COPIED or (self.how == How.RESULT and bool(self.more))


class Make(NamedTuple):
    """How to compute what an entry drops."""

    function: Callable[..., Any]
    arguments: list[Any]  # constants, and None for the others
    taken: Sequence[tuple[int, int]]  # positions of arguments whose handles are taken, and the number of the `Take`
    given: Sequence[tuple[int, Path]]  # positions of constants that are this call's own
    saved: Sequence[tuple[int, Any]]  # positions of tensors that the result's node tells, and how it is asked
    packed: Sequence[tuple[int, int]]  # positions of tensors that the call has saved, and their numbers
    outputs: Sequence[int]  # numbers of the values that it computes: one, or several if it is a group
    is_group: bool
    draws: bool = False
    refreshed: Callable[[], Callable[..., Any]] | None = None  # makes the function anew for each call
    wraps: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None  # what a group does around the function


class Act:
    """What the script does in a call, beside running it."""

    def __init__(self, function: Callable[..., Any] | None, row: Row):
        self.function, self.row = function, row
        self.packs: Sequence[Take | None] | None = None  # None: the call runs without hooks
        self.takes: Sequence[tuple[Path, Take, int]] = ()  # the argument, its handle, and the position in `blank`
        self.makes: Sequence[Make] = ()
        self.consts: Sequence[tuple[Path, Any]] = ()  # arguments that must not change
        self.names: tuple[str, ...] = ()  # of keyword arguments
        self.grads: Sequence[tuple[Path, bool]] = ()  # arguments that must need gradients, or must not
        self.form: Form | None = None  # of the result, if it is dropped, or kept in place of an argument
        self.number = -1  # of the result's value
        self.is_kept = False  # the result is kept in place of an argument
        self.draws = False  # random numbers
        self.device = "cpu"
        self.count = 0  # of positional arguments
        self.reads_packed = False  # recipes read what autograd gets for saved tensors
        self.blank: list[Any] | None = []  # the list into which handles are put; None: this call's own arguments
        # If only the result is dropped, and all arguments of its recipe are taken, constant or saved: its function.
        # `blank` are its arguments then.
        self.simple: Any = None
        self.given: Sequence[tuple[int, Path]] = ()  # positions in `blank` of constants that are this call's own
        self.saved: Sequence[tuple[int, Callable[[Any], Any]]] = ()
        self.base: tuple[int, Form] | None = None  # the number and form of the result's base
        self.written = False  # the result is the first argument
        self.guards = False  # the call writes over a tensor that is not checked otherwise
        self.is_saved = False  # autograd may hold the result's slot, or the slot of a view of it
        self.autocast: tuple[bool, torch.dtype | None] = (False, None)
        self.stream = -1  # index of the CUDA device; -1 for others
        self.only: tuple[Any, ...] | None = None  # the call only runs, but it must have these arguments

    def has_own_arguments(self, make: Make) -> bool:
        """Whether a recipe has the arguments of the call itself, in the same places, but handles for its tensors."""
        own = [(position, self.takes[take][0]) for position, take in make.taken] + [*make.given]
        return not self.names and sorted(own) == [(number, number) for number in range(self.count)]


WRITES = Act(None, Row())  # of calls that only write over a tensor


class Entry(NamedTuple):
    """A call of a learned step."""

    function: Callable[..., Any] | None  # None: it is `opened`
    act: Act | None  # None: it only runs
    opened: Callable[..., Any] | None = None  # a function whose inner calls are entries of their own
    opening: Opening | None = None  # these calls, if they can be made without it,
    run: Callable[..., Any] | None = None  # and a function that makes them
    asks: bool = False  # it only asks for an attribute, and may come and go
    calls: int = -1  # number of the plan's last call so far
    total: int = 0  # bytes of all results so far


END = Entry(None, None)  # after the last call


class Script(NamedTuple):
    """A learned step."""

    entries: list[Entry]
    functions: list[Any]  # of the entries without the last, `END`
    kept: Sequence[KeptTensor]
    plan: Plan | None  # that the learned pass has followed
    has_hooks: bool  # during the whole pass, because dropped tensors are saved outside of calls
