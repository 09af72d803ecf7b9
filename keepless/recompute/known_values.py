"""Registry of the values of a forward pass: pack, find, keep and lend, and what follows from autograd's nodes."""

import sys
import weakref
from collections.abc import Callable, Container, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from ..inputs import tensors_in
from ..norms.bn_act import is_node, recompute_output
from ..saved import ByStorage, Kept, form_of, is_ordinary, view
from ..torch_internals import (
    Hooks,
    address,
    is_synchronised_norm,
    next_node_number,
    node_number,
    packed_by_function,
)
from .calls import Call, Inside
from .report import Log
from .rules import normalised
from .values import Again, Memory, Recipe, Saved, SavedView, ShapeOnly, Value, saved_value, unread_bytes

_FEW = 2**12  # entries of a tensor that a recipe may as well copy; by a plan, vectors of as many (an LSTM's) count
_COPIES_ARE_WORTH = 4  # by a plan: of a projection to queries, keys and values, say, which may be computed again itself
_NODES = frozenset(["BatchNormActivationBackward", "SyncBatchNormBackward"]) | {
    f"{name}Backward0" for name in ("ToCopy", "Clone", "UnsafeView")
}


class Trace(Protocol):
    """Sees what a recording does: see `StepTrace`, which traces a step for a budget."""

    unseen: str  # what hides calls from it, such as a checkpoint; empty if nothing does

    def run(self, call: Call, is_made: Callable[[Tensor], bool]) -> Any:
        """Run a call and measure it."""

    def ended(self, result: Any) -> None:
        """A call has ended, and its result has a value."""

    def holds_for(self, kept: Kept, tensor: Tensor) -> None:
        """Autograd saves a tensor that has no value."""

    def keeps(self, value: Value, tensor: Tensor) -> None: ...

    def follows(self, value: Value, tensor: Tensor) -> None:
        """A value got a recipe that no call gave it: see `KnownValues.value_of`."""

    def moves(self, value: Value, copy: Tensor) -> None: ...

    def overwrites(self, value: Value, tensor: Tensor) -> bool:
        """A call has overwritten a tensor of this value. Returns whether the value can still be computed again."""

    def saves(self, saved: Saved | ShapeOnly, tensor: Tensor, in_call: bool) -> None:
        """Autograd saves a tensor, in a call or by itself."""

    def forward_ends(self) -> None: ...

    def unpack(self, saved: Any) -> Tensor:
        """The unpack hook."""


class _Entry(weakref.ref[Tensor]):
    """A reference to a tensor, with its value in one version."""

    __slots__ = ("key", "storage", "value", "version")

    key: int  # id of the tensor
    storage: int  # address; assigning to `data` changes it, but not the version
    value: Value
    version: int


class KnownValues:
    """Registry of one forward pass: each living tensor's value, and what is kept in its storage.

    Args:
        inputs: the network's inputs, which are not made in the forward pass.
        outer: the saved-tensor hooks around the recording.
        copy_parameters: recipes get copies of parameters, because FSDP frees the gathered ones after each use.
        planned: numbers of the nodes whose results a plan keeps, which get a value once something reads them. None: no
            plan decides (rule 13).
        trace: sees what happens.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor],
        outer: Hooks | None,
        copy_parameters: bool,
        planned: Container[int] | None,
        trace: Trace | None,
    ):
        self.start = next_node_number()
        self.outside = {address(tensor.untyped_storage()) for tensor in inputs if is_ordinary(tensor)}
        self.outer, self.copy_parameters, self.trace = outer, copy_parameters, trace
        self.by_plan = planned is not None
        self.late: Container[int] = () if planned is None else planned
        # A vector without a grad_fn is saved directly, without a `Value`, if it has fewer elements.
        self.short = _FEW if self.by_plan else sys.maxsize
        self.log = Log()
        self.call: Call | None = None  # that is running
        self.entries: dict[int, _Entry] = {}  # by id of the tensor
        self.memories: ByStorage[Memory] = ByStorage()
        self.dead: list[_Entry] = []  # of tensors that have been freed
        self.signs: list[weakref.ref[Value]] = []  # values that are read for their signs
        self.gone: list[Value] = []  # values in `signs` whose tensors have been freed
        self.made: ByStorage[bool] = ByStorage()  # made without gradient by calls that were seen

    def clear(self) -> None:
        """The forward pass has ended. Tensors that were modified unseen, e.g. by another thread, are refused later.

        Hooks around the recording, such as a checkpoint's, might give them back without a difference in versions.
        """
        for value in filter(None, (reference() for reference in self.signs)):
            value.settle(self.outer, at_end=True)
        if self.outer is not None:
            kept = [reference() for memory in self.memories.values() for reference in memory.values]
            for value in filter(None, kept):
                if isinstance(value.source, Kept) and value.source.is_modified():
                    value.source.spoil()
        for found in (self.entries, self.memories, self.dead, self.signs, self.gone, self.made):
            found.clear()
        self.outer = self.trace = None

    def value_of(self, tensor: Tensor) -> Value | None:
        """The value of a tensor, if it is kept already or can be computed from others; otherwise None."""
        if (value := self.find(tensor)) is None:
            if tensor.is_leaf:
                return None
            if self.late and self.is_late(tensor):
                return self.keep(tensor)
            if (found := self._by_node(tensor)) is None:
                return None
            value = self.remember(tensor, Value(Recipe(found, tensor)) if isinstance(found, Again) else found)
        if self.trace is not None and value.number < 0 and isinstance(value.source, Recipe):
            self.trace.follows(value, tensor)
        return value

    def find(self, tensor: Tensor, *, overwrites: int = 0) -> Value | None:
        """The value of a tensor now, or `overwrites` versions ago; None if it is not known."""
        entry = self.entries.get(id(tensor))
        if entry is None or entry.version != tensor._version - overwrites or entry() is not tensor:
            return None
        return entry.value if entry.storage == address(tensor.untyped_storage()) else None

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a tensor was made during this forward pass."""
        node = tensor.grad_fn
        if node is None or node_number(node) < self.start or not is_ordinary(tensor):
            return False
        return not self.outside or address(tensor.untyped_storage()) not in self.outside

    def is_late(self, tensor: Tensor) -> bool:
        """Whether a tensor is kept by a plan, and gets a value once something reads it."""
        return not tensor.is_leaf and node_number(tensor.grad_fn) in self.late

    def remember(self, tensor: Tensor, value: Value) -> Value:
        """Note the value of a tensor in its present version."""
        entry = _Entry(tensor, self.dead.append)  # no function of Python, in which a Ctrl-C would be swallowed
        entry.key = key = id(tensor)
        entry.value, entry.version, entry.storage = value, tensor._version, address(tensor.untyped_storage())
        self.entries[key] = entry
        return value

    def keep(self, tensor: Tensor) -> Value:
        """Keep a tensor, and remember its value."""
        storage = tensor.untyped_storage()
        own = 0 if tensor.is_leaf and tensor.requires_grad else storage.nbytes()
        value = Value(Kept(tensor, None), address(storage), own)
        if self.outer is not None:
            if self.call is not None:  # the running call may yet get a recipe
                self.call.unsettled += ((value, tensor),)
            else:
                value.source = Kept(tensor, self.outer)
        self.memory_of(tensor).values.append(weakref.ref(value))
        if self.trace is not None:
            self.trace.keeps(value, tensor)
        return self.remember(tensor, value)

    def lend(self, tensor: Tensor) -> Value | Kept:
        """Keep a tensor for a recipe, if it has no value yet."""
        if self.copy_parameters and isinstance(tensor, nn.Parameter):
            return Kept(tensor.detach().clone(), None)
        value = self.value_of(tensor)
        if value is None and isinstance(tensor, nn.Parameter):  # it stays where it is
            return Kept(tensor, None)
        return value or self.keep(tensor)

    def memory_of(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        return self.memories.get(storage) or self.memories.put(storage, Memory())

    def _by_node(self, tensor: Tensor) -> Again | Value | None:
        """How to recover a tensor from its autograd node, or the value of another tensor that equals it."""
        node: Any = tensor.grad_fn
        name, is_view = type(node).__name__, tensor._is_view()
        if not (is_view or name in _NODES) or not self.is_made(tensor):
            return None
        if is_view:
            base = tensor._base
            if base is None or (form := form_of(tensor, base)) is None or (value := self.value_of(base)) is None:
                return None
            return Again(view, (value, *form))
        packed = packed_by_function(node) if is_node(node) or is_synchronised_norm(node) else ()
        if is_node(node):
            if not node.strategy.recompute_output or tensor._version != node.output_version:
                return None
            return Again(_checkpointed_output, (node, saved_value(packed[0]) if packed else None))
        if tensor._version:
            return None
        if packed:
            return self._of_synchronised_norm(node, packed)
        if self.call is not None and name in ("ToCopyBackward0", "CloneBackward0"):
            return self._of_copied_argument(tensor, node, self.call)
        if self.call is not None and name == "UnsafeViewBackward0":
            return self._of_reshaped_argument(tensor, node, self.call)
        return None

    def _of_synchronised_norm(self, node: Any, packed: tuple[Any, ...]) -> Again | None:
        """The output of `nn.SyncBatchNorm`: its node has everything but the bias, which only a trained one leads to."""
        x, weight, mean, invstd, *_ = map(saved_value, packed)
        if not all(isinstance(saved, (Value, Kept)) for saved in (x, mean, invstd)):
            return None
        bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
        return None if bias is None else Again(normalised, (x, mean, invstd, weight, self.lend(bias)), fresh=True)

    def _of_copied_argument(self, tensor: Tensor, node: Any, call: Call) -> Again | Value | None:
        """A copy of an argument, made inside the running call: by autocast, or by `silu_` before it overwrites it."""
        argument = _argument_copied_by(node, call)
        if argument is None or argument.shape != tensor.shape or argument.device != tensor.device:
            return None
        value = self._smaller_value_of(argument, tensor)
        if argument.dtype != tensor.dtype:
            return None if value is None else Again(Tensor.to, (value, tensor.dtype))
        if value is None or (not value.unread and value.reads_storage(address(argument.untyped_storage()))):
            return self.remember(argument, self.keep(tensor))
        if value.unread:  # keep the copy instead
            value.source, value.storage = Kept(tensor, None), address(tensor.untyped_storage())
            self.memory_of(tensor).values.append(weakref.ref(value))
        if self.trace is not None:
            self.trace.moves(value, tensor)
        return value

    def _of_reshaped_argument(self, tensor: Tensor, node: Any, call: Call) -> Again | None:
        """A contiguous, reshaped copy of an argument, made inside the running call, as matrix products do."""
        copy = node.next_functions[0][0]
        argument = _argument_copied_by(copy, call) if type(copy).__name__ == "CloneBackward0" else None
        if argument is None or argument.numel() != tensor.numel() or argument.dtype != tensor.dtype:
            return None
        value = self._smaller_value_of(argument, tensor)
        return None if value is None else Again(Tensor.reshape, (value, tensor.shape))

    def _smaller_value_of(self, argument: Tensor, copy: Tensor) -> Value | None:
        """The value of an argument, if keeping it takes no more bytes than its copy (by a plan: a few times more)."""
        value = self.value_of(argument)
        most = _COPIES_ARE_WORTH * copy.nbytes if self.by_plan else copy.nbytes
        return None if value is None or unread_bytes([value]) > most else value

    def pack(self, tensor: Tensor) -> Saved | Kept | ShapeOnly:
        """Return the object that autograd saves in place of a tensor."""
        call = self.call
        if call is not None:
            call.saves += 1
        if self.outer is None:  # the quick way, for the many vectors, parameters, and views of these
            if not tensor.is_leaf:
                is_simple = isinstance(tensor._base, nn.Parameter)
            elif tensor.dim() < 2 and tensor.numel() < self.short:
                is_simple = True
            else:
                is_simple = isinstance(tensor, nn.Parameter) or (  # or statistics of a layer norm's rows, say
                    self.trace is None and tensor.dim() > 1 and tensor.size(-1) == 1 and tensor.numel() < _FEW
                )
            if is_simple:
                kept = Kept(tensor, None)
                if call is not None and tensor.requires_grad:
                    call.parameters += ((tensor, kept),)
                elif self.trace is not None:
                    self.trace.holds_for(kept, tensor)
                return kept
        if not is_ordinary(tensor):
            kept = Kept(tensor, self.outer)
            self.log.keep_other(kept, tensor, None if call is None else call.function)
            return kept
        value = self.find(tensor)
        if call is not None and (packed := self._without_value(tensor, value, call)) is not None:
            return packed
        if value is None:
            value = self.value_of(tensor) or self._keep_with_base(tensor)
        if not value.readers and value.unread:
            self.note_need(value, tensor)
        saved = Saved(value, self.memory_of(tensor))
        if call is not None:
            positive, result_serves = call.row.positive, call.row.result_serves
            if (
                result_serves is not None
                and (self.by_plan or isinstance(value.source, Recipe))
                and call.answers(result_serves)
            ):
                call.replaceable += (saved,)
            elif positive is not None and value.positive in (None, positive):
                saved.reads_signs, value.positive = True, positive
                value.sign_readers += 1
                self.signs.append(weakref.ref(value))
        if self.trace is not None:
            self.trace.saves(saved, tensor, call is not None)
        return saved

    def _without_value(self, tensor: Tensor, value: Value | None, call: Call) -> ShapeOnly | Kept | SavedView | None:
        """The object for a tensor of which the call needs the shape alone, or that needs no value of its own."""
        row = call.row
        if (asks := row.reads_shape_only) is not None and tensor.requires_grad and call.answers(asks):
            shape = ShapeOnly(tensor)
            if self.trace is not None:
                self.trace.saves(shape, tensor, True)
            return shape
        may_do_with_less = row.positive is not None or row.result_serves is not None
        if value is not None or may_do_with_less or self.outer is not None or self.trace is not None:
            return None
        if self.late and self.is_late(tensor):
            kept = Kept(tensor, None)
            self.log.keep(kept, tensor, call.function)
            return kept
        base = tensor._base  # of a view that the call itself has made, say, so that no recipe reads it
        if base is None or (form := form_of(tensor, base)) is None or (of_base := self.value_of(base)) is None:
            return None
        if not of_base.readers and of_base.unread:
            self.note_need(of_base, base)
        return SavedView(of_base, self.memory_of(tensor), form)

    def _keep_with_base(self, tensor: Tensor) -> Value:
        """Keep a tensor; if it is a view of all of its base, keep the base, so that its other views follow too."""
        base = tensor._base
        if base is not None and base.numel() == tensor.numel() and self.is_made(base):
            self._keep_itself(base, True)
            if (value := self.value_of(tensor)) is not None:
                return value
        return self._keep_itself(tensor, False)

    def _keep_itself(self, tensor: Tensor, is_base: bool) -> Value:
        value, call = self.keep(tensor), self.call
        if is_base:
            self.note_need(value, tensor)
        if call is not None and call.row.inside is not None:
            call.inside += (Inside(value, call.saves - 1, is_base),)
        return value

    def note_need(self, value: Value, tensor: Tensor) -> None:
        """Log a kept value when it gets its first reader."""
        self.log.keep(value, tensor, None if self.call is None else self.call.function)

    def settle_gone(self) -> None:
        """Forget tensors that have been freed, and settle their values that are read for signs: see `Value.settle`."""
        while self.dead:
            entry = self.dead.pop()
            if self.entries.get(entry.key) is entry:
                del self.entries[entry.key]
                if entry.value.sign_readers:
                    self.gone.append(entry.value)
        self.gone = [value for value in self.gone if not value.settle(self.outer)]

    def note_made(self, call: Call, result: object) -> None:
        """Note the memory of results that a call has made without gradient, e.g. of masks."""
        if call.row.only_asks:
            return
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if not isinstance(tensor, Tensor) or tensor.requires_grad or not tensor.dim() or not is_ordinary(tensor):
                continue  # single numbers, such as counts of minibatches, are copied anyway
            storage = tensor.untyped_storage()
            if not self.made.get(storage):
                given = filter(is_ordinary, tensors_in(call.arguments))
                if all(self.is_made(a) for a in given if address(a.untyped_storage()) == address(storage)):
                    self.made.put(storage, True)

    def has_made(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory that was noted so, which NumPy and others do not see."""
        storage = tensor.untyped_storage()
        return bool(self.made.get(storage)) and storage.resizable()


def _argument_copied_by(node: Any, call: Call) -> Tensor | None:
    """The argument of the running call that is a node's input, perhaps expanded to the shape that it has."""
    source, number = node.next_functions[0]
    if type(source).__name__ == "ExpandBackward0":
        source, number = source.next_functions[0]
    leaf = getattr(source, "variable", None)
    for argument in call.arguments:
        if isinstance(argument, Tensor):
            if argument is leaf or (argument.grad_fn is source and argument.output_nr == number):
                return argument
    return None


def _checkpointed_output(node: Any, kept: Tensor | None) -> Tensor:
    """`kept`: saved by the node, which finds it by itself; as an argument it is computed before, if it is not kept."""
    return recompute_output(node)
