"""A learned step as a list with an entry for each call, and what autograd holds for the tensors that it drops.

A `Keep` is to a script what `Kept` is to a recording, and a `Slot` what a `Value` with a `Recipe` is. Both are handles.

Every check of a script is made where it matters: a call must be of the expected function, a tensor that a recipe reads
must be the object that the script expects, in the expected version. Shapes, dtypes and strides are those of the pass's
own tensors. So the values that a script computes are right whatever the program does. A call that differs is recorded,
and gets an entry of its own.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...saved import autocast_as, check_version, laid_out
from ..held.values import Holder, Memory, Value
from ..recorder.lesson import Opening, Path
from ..recorder.plan import Plan
from ..recorder.recipes import Rerun
from ..recorder.report import KeptTensor
from ..table.functions import Row

_is_grad_enabled, _is_autocast_enabled = torch.is_grad_enabled, torch.is_autocast_enabled


class Keep:
    """A tensor that is kept, for autograd or a recipe."""

    __slots__ = ("tensor", "version")
    depth = 0

    def __init__(self, tensor: Tensor):
        self.tensor, self.version = tensor, tensor._version

    def get(self) -> Tensor:
        """The tensor. RuntimeError if it was modified in place."""
        tensor = self.tensor
        if tensor._version != self.version:
            check_version(tensor, self.version)
        return tensor

    read = get


class Conditions(NamedTuple):
    """Under which a dropped tensor is computed again, and by how many readers it is read in a backward pass."""

    readers: int = 0
    autocast: tuple[bool, torch.dtype | None] = (False, None)  # during the forward pass
    device: str = "cpu"
    is_fresh: bool = False  # the computed tensor shares no memory with another


USUAL = Conditions()


def unknown() -> Tensor:
    raise AssertionError("the call that saved this tensor has raised an error")


class Slot(Holder):
    """A dropped tensor, and how to compute it again: `function(*arguments)`, with `Slot`s and `Keep`s among these.

    It is computed for its first reader in a backward pass, and held until the last one has read it. How many there are
    is known from the pass in which the script was learned; a wrong number costs time or memory, never a wrong value.
    """

    __slots__ = (
        "arguments",
        "conditions",
        "depth",
        "dtype",
        "function",
        "group",
        "is_saved",
        "memory",
        "spare",
        "stride",
        "taken",
    )

    def __init__(
        self,
        conditions: Conditions,
        like: Tensor | None = None,
        function: Callable[..., Any] = unknown,
        arguments: Sequence[Any] = (),
    ):
        """`like`: the dropped tensor, if it exists; the computed one gets its dtype and strides."""
        self.conditions, self.function, self.arguments = conditions, function, arguments
        if like is not None:
            self.dtype, self.stride = like.dtype, like.stride()
        self.tensor, self.is_saved = None, False  # autograd holds it
        self.spare: Callable[..., Any] | None = None  # computes it over its first argument, if nothing else reads that
        self.taken = 0  # so many recipes read it, or tensors that autograd has saved
        self.depth = 1  # recipes in the longest chain that computes it
        for one in arguments:
            if type(one) in HANDLES:
                self.depth = max(self.depth, 1 + one.depth)
                if type(one) is Slot:
                    one.taken += 1
        self.memory: Memory | None = None  # of the forward tensor, if the recorder has made a call that writes over it
        self.group: Group | None = None

    def get(self) -> Tensor:
        """For autograd. RuntimeError if the forward tensor, or one that it is computed from, was modified in place."""
        if self.memory is not None and self.memory.overwritten:
            raise RuntimeError("a tensor needed for the gradient was modified by an inplace operation")
        return self.read()

    def read(self) -> Tensor:
        """For recipes: the tensor as it was when the call was made."""
        if self.tensor is not None:
            return self.again(self.tensor)
        (readers, autocast, device, _), group = self.conditions, self.group
        holder: Slot | Group = self if group is None else group
        given = [*holder.arguments]
        for position, one in enumerate(given):  # one frame of Python for each slot of a chain, which may be long
            if type(one) in HANDLES:
                given[position] = one.read()
        function = holder.function
        if self.spare is not None and type(first := self.arguments[0]) is Slot:
            is_spare = first.taken == 1 and first.conditions.is_fresh and first.tensor is None  # nothing holds it
            function = self.spare if is_spare else function
        if _is_grad_enabled() or autocast[0] or _is_autocast_enabled(device):
            with torch.no_grad(), autocast_as(autocast, device):
                found = function(*given)
        else:
            found = function(*given)
        tensor = found if group is None else group.share(self, found)
        if tensor.dtype is not self.dtype:
            tensor = tensor.to(self.dtype)
        if tensor.stride() != self.stride:
            tensor = laid_out(tensor, self.stride)
        if readers > 1:
            self.hold(tensor, readers - 1)
        return tensor

    def look(self) -> Tensor:
        """The tensor, for a reader that the script does not know."""
        if self.tensor is not None:
            self.left += 1
        return self.read()


HANDLES = {Keep, Slot, Value}  # what has a method `read`; values, where the recorder has made a call


class Group:
    """A call that computes several dropped tensors at once."""

    __slots__ = ("__weakref__", "arguments", "function", "slots")

    def __init__(self, function: Callable[..., Any], arguments: Sequence[Any], slots: "Sequence[Slot | None]"):
        self.function, self.arguments = function, arguments
        # Autograd holds the slots, which hold this group. None: autograd has not asked for that tensor.
        self.slots = [None if slot is None else weakref.ref(slot) for slot in slots]

    def share(self, wanted: Slot, found: Sequence[Tensor]) -> Tensor:
        """The tensor for the slot that is read; the others hold theirs until their own readers have read them."""
        own: Tensor | None = None
        for reference, tensor in zip(self.slots, found, strict=True):
            slot = None if reference is None else reference()
            if slot is wanted:
                own = tensor
            elif slot is not None and slot.tensor is None:
                slot.hold(tensor, slot.conditions.readers)
        assert own is not None
        return own


class Take(NamedTuple):
    """How to find the handle of a tensor."""

    make: Callable[[Any, Tensor], Any] | None = None  # makes it when the tensor is seen first; see `handles`
    is_noted: bool = True  # it is the tensor's handle from now on, and not made if the tensor has one


OWN, UNREAD = -1, -2  # outputs of a recipe: the result of the call; one that nothing reads


class Make(NamedTuple):
    """How to compute what an entry drops."""

    function: Callable[..., Any]
    begin: int  # its arguments among all of the entry: from this position
    end: int  # to this one, excluded
    outputs: Sequence[int]  # of a group: the numbers of what the call saves inside, `OWN` or `UNREAD`
    rerun: Rerun | None  # runs the function if it is a group
    prepared: Callable[[Any], Callable[..., Any]] | None = None  # makes the function anew for each call
    spare: Callable[..., Any] | None = None  # computes the result over the first argument

    def ready(self, given: Any) -> Callable[..., Any]:
        """The function, before a call with these arguments."""
        return self.function if self.prepared is None else self.prepared(given)


class Act:
    """What the script does in a call, beside running it."""

    def __init__(self, function: Callable[..., Any] | None, row: Row):
        self.function, self.row = function, row
        self.packs: Sequence[Take | None] | None = None  # None: the call runs without hooks
        self.makes: list[Make] = []
        # The arguments of all recipes: constants, and None for what follows, with positions in this list.
        self.blank: list[Any] = []
        self.takes: list[tuple[Path, Take, int]] = []  # arguments of the call whose handles are taken
        self.given: list[tuple[Path, int, Any]] = []  # read from the present call; and the learned ones
        self.saved: list[tuple[Any, int]] = []  # how the result's node is asked for a tensor that it has saved
        # What autograd gets for a tensor that the call saves: its number; whether it is a copy of the first argument
        self.packed: list[tuple[int, int, bool]] = []
        self.consts: Sequence[tuple[Path, Any]] = ()  # arguments that must not change
        self.names: tuple[str, ...] = ()  # of keyword arguments
        self.layouts: Sequence[tuple[Path, bool, Any]] = ()  # of the arguments, if the way depends on them
        self.conditions: Conditions | None = None  # of the result, if it is dropped, or kept in place of an argument
        self.simple: Callable[..., Any] | None = None  # if the result alone is dropped: its function, a shorter way
        self.is_kept = False  # the result is kept in place of an argument
        self.device = "cpu"
        self.count = -1  # of positional arguments; -1: they are not compared
        self.base: Conditions | None = None  # of the result's base
        self.written = False  # the result is the first argument
        self.guards = False  # the call writes over a tensor
        self.autocast: tuple[bool, torch.dtype | None] = (False, None)
        self.stream = -1  # index of the CUDA device; -1 for others
        self.only: tuple[Any, ...] | None = None  # the call only runs, but it must have these arguments
        self.alike: Sequence[tuple[Path, Path]] = ()  # pairs of arguments that must be the same tensor
        self.counts: Sequence[tuple[Path, int]] = ()  # lengths of lists of tensors
        self.run: Callable[..., Any] | None = None  # makes the call: see `as_code`


WRITES = Act(None, Row())  # of calls that only write over a tensor
MAY_WRITE = Act(None, Row())  # of calls that have written over nothing, but have an argument `inplace`


class Entry(NamedTuple):
    """A call of a learned step."""

    function: Callable[..., Any] | None  # None: it is `opened`
    act: Act | None  # None: it only runs
    opened: Callable[..., Any] | None = None  # a function whose inner calls are entries of their own
    parameter: weakref.ref[nn.Parameter] | None = None  # the first that the call reads
    opening: Opening | None = None  # these calls, if they can be made without it,
    run: Callable[..., Any] | None = None  # and a function that makes them
    asks: bool = False  # it only asks for an attribute, and may come and go


END = Entry(None, None)  # after the last call


class Script(NamedTuple):
    """A learned step."""

    entries: list[Entry]
    functions: list[Any]  # of the entries without the last, `END`
    learned: int  # number of entries that come from the recorded pass
    kept: Sequence[KeptTensor]
    plan: Plan | None  # that the learned pass has followed
    has_hooks: bool  # during the whole pass, because dropped tensors are saved outside of calls
    readers: dict[int, tuple[Any, int]]  # of parameters, by id: a reference, and the number of the first entry
