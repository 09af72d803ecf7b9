"""The handles of the tensors that a pass by a script drops or keeps, and what autograd gets for saved tensors."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from ...norms.bn_act import is_node
from ...saved import PLAIN, ShapeOnly, copied, form_of, is_ordinary, laid_out, view
from ...torch_internals import address, argument_copied_by
from ..held.signs import Positive, Signs
from ..recorder.known_values import KnownValues, checkpointed_output, saved_in
from ..recorder.lesson import Path, at
from ..table.rules import any_values, itself, overwritten
from .script import OWN, USUAL, Act, Conditions, Group, Keep, Slot, Take, unknown

DEEPEST = 250  # recipes in a chain: a plan has up to 200, and views and casts may lengthen it. They call each other.


class Packing:
    """What autograd gets for the tensors that one call saves."""

    act: Act
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: Slot | None  # of the result
    takes: Iterator[Take | None]  # for the tensors that are still to be saved
    packed: tuple[Any, ...] = ()  # what autograd has got for others
    has_failed = False
    own: Tensor | None = None  # the saved result
    given: tuple[tuple[Any, Tensor], ...] = ()  # slots whose functions are not known yet
    inside: dict[int, Slot]  # those of what the call makes and saves, by number
    instead: tuple[Slot, ...] = ()  # slots for which the result serves

    def keep_unknown(self) -> None:
        """Keep what no recipe computes after all."""
        self.own = None
        self.given = tuple([one for one in self.given if one[0].group is None and one[0].function is unknown])
        self.keep_all()

    def keep_all(self) -> None:
        """The call has not done what the script expects: autograd holds the tensors themselves."""
        given = self.given if self.own is None else [*self.given, (self.slot, self.own)]
        for slot, tensor in given:
            kept = Keep(tensor if tensor.is_leaf else tensor.detach())
            slot.function, slot.arguments = kept.get, ()
            slot.dtype, slot.stride = tensor.dtype, tensor.stride()


class Handles:
    """The handles of a forward pass. PyTorch keeps `pack`, and so this object, as long as the graph: see `clear`."""

    def __init__(self) -> None:
        # For each tensor whose handle is known, by id: a reference to it, its version, and the handle.
        self.found: dict[int, tuple[ref[Tensor], int, Any]] = {}
        # Storages of dropped tensors that autograd has saved, by address; and its slots, each with one.
        self.saved: dict[int, ref[UntypedStorage]] = {}
        self.slots: list[tuple[ref[UntypedStorage], Slot]] = []
        self.read: dict[int, list[Keep]] = {}  # tensors kept for recipes, by the address of their memory
        self.unnoted: list[Keep] = []  # those that are not in it yet: see `may_write`
        # Sign masks, by id and function. None is in `found`, because other readers need the tensor itself.
        self.masks: dict[tuple[int, Positive], tuple[ref[Tensor], int, Slot]] = {}
        self.known: KnownValues | None = None  # of the calls that the recorder has made in this pass
        self.packing: Any = None  # of the running call
        self.hook = self.pack  # made once

    def clear(self) -> None:
        """The script has ended."""
        self.found, self.saved, self.slots, self.read, self.unnoted = {}, {}, [], {}, []
        self.masks, self.known = {}, None
        del self.hook

    def pack(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor that the running call saves."""
        packing = self.packing
        take = next(packing.takes, None)  # None as well if the call saves more than when the script was learned
        is_own = take is not None and take[0] is own_result
        is_noted = not is_own and (take is None or take[1])
        one = self.found[key] if is_noted and (key := id(tensor)) in self.found else None
        if is_own:
            packing.own, handle = tensor, packing.slot
        elif one is not None and one[1] == tensor._version and one[0]() is tensor:  # without a call of `find`
            handle = one[2]
        elif take is not None:
            handle = self.made(take, tensor)
            packing.has_failed = packing.has_failed or handle is None
        else:
            handle = None if self.known is None else self.adopted(tensor)
        if handle is None or type(handle) is Keep:  # autograd gets its own, because `_copy` changes a recipe's
            handle = Keep(tensor if tensor.is_leaf else tensor.detach())
        elif type(handle) is Slot:
            handle.taken += 1
            if not handle.is_saved:
                self.note_saved(tensor, handle)
        packing.packed += (handle,)
        return handle

    def held(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor: a slot if it, or the base of which it is a view, is dropped; or itself."""
        slot, base = None, tensor._base
        if is_ordinary(tensor) and type(slot := self._known(tensor)) is not Slot:
            of = None if base is None else self._known(base)
            if base is not None and type(of) is Slot and (how := form_of(tensor, base)):
                slot = Slot(USUAL, tensor, view, (of, *how))
        if type(slot) is not Slot:
            return Keep(tensor if tensor.is_leaf else tensor.detach())
        self.note_saved(tensor, slot)
        slot.taken += 1
        return slot

    def find(self, tensor: Tensor) -> Any:
        """The handle of a tensor, if it is known."""
        one = self.found.get(id(tensor))
        return one[2] if one is not None and _is_of(one, tensor) else None

    def forget(self, tensor: Tensor) -> None:
        """The program is about to give a tensor other memory, in the same version. Recipes read the present one."""
        self.found.pop(id(tensor), None)
        self.masks.clear()
        for kept in chain(self.unnoted, *self.read.values()):
            if kept.tensor is tensor:
                kept.tensor = tensor.detach()

    def _known(self, tensor: Tensor) -> Any:
        """The handle of a tensor, also of one that the recorder knows."""
        handle = self.find(tensor)
        return self.adopted(tensor) if handle is None and self.known is not None else handle

    def made(self, take: Take, tensor: Tensor) -> Any:
        """The handle of a tensor that is seen for the first time; None if it is not the expected one."""
        if self.known is not None and take.is_noted and (handle := self.adopted(tensor)) is not None:
            return handle
        is_known = type(tensor) in PLAIN and not tensor.is_inference()
        handle = take.make(self, tensor) if is_known and take.make is not None else None
        if handle is not None and take.is_noted:
            self.found[id(tensor)] = ref(tensor), tensor._version, handle
        return handle

    def adopted(self, tensor: Tensor) -> Slot | None:
        """A handle that reads the value which the recorder has given a tensor; None if it has none, or may free it."""
        assert self.known is not None
        value = self.known.find(tensor) if is_ordinary(tensor) else None
        if value is None or value.unread:
            return None
        slot = Slot(USUAL, tensor, itself, (value,))
        value.recipes.append(ref(slot))
        value.count(1)
        self.found[id(tensor)] = ref(tensor), tensor._version, slot
        return slot

    def note_saved(self, tensor: Tensor, slot: Slot) -> None:
        """Autograd holds a slot for a tensor."""
        slot.is_saved = True
        storage = tensor.untyped_storage()
        self.saved[address(storage)] = reference = ref(storage)
        self.slots.append((reference, slot))

    def drop(
        self,
        act: Act,
        result: Tensor,
        own: Slot | None,
        arguments: list[Any],
        functions: Sequence[Callable[..., Any]],
        packing: Packing | None,
    ) -> bool:
        """Note how to compute what the call has dropped; False if the chain would be too long.

        `arguments`, `functions`: of all recipes.
        """
        for saved_by, position in act.saved:
            arguments[position] = saved_by(result.grad_fn)
        for number, position, is_copy in act.packed:
            assert packing is not None
            arguments[position] = one = packing.packed[number]
            if type(one) is Slot:
                one.taken += 1
            if is_copy and not (type(one) is Keep and one.tensor.stride() == result.stride()):
                arguments[position] = Slot(USUAL, result, laid_out, (one, result.stride()))
        depth = 1
        for one in arguments:
            if type(one) is Slot and one.depth >= depth:
                depth = 1 + one.depth
        if depth > DEEPEST:
            return False
        for make, function in zip(act.makes, functions, strict=True):
            given = arguments[make.begin : make.end]
            if make.rerun is None:
                assert own is not None
                own.function, own.arguments, own.spare, own.depth = function, given, make.spare, depth
                continue
            assert packing is not None
            slots = [own if one == OWN else packing.inside.get(one) for one in make.outputs]
            originals = {id(slot): tensor for slot, tensor in packing.given} | {id(own): result}
            forms = [None if slot is None else originals[id(slot)] for slot in slots]
            group = Group(make.rerun.around(function, forms), given, slots)
            for slot in filter(None, slots):
                slot.group, slot.depth = group, depth
        handle: Any = keep(self, result.detach()) if act.is_kept else own
        if packing is not None and packing.given:
            packing.keep_unknown()
            for slot in packing.instead:
                slot.arguments, slot.dtype, slot.stride = [handle], result.dtype, result.stride()
                slot.depth = 1 + handle.depth
        if own is None:
            return True
        self.found[id(result)] = ref(result), result._version, handle
        if act.base is not None and (base := result._base) is not None and _is_flattened(base, result):
            self.found[id(base)] = ref(base), base._version, Slot(act.base, base, Tensor.view, (own, base.shape))
        return True

    def may_write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call writes over nothing that autograd has saved and the script has dropped.

        What recipes read of the memory that it writes over is copied.
        """
        if not kwargs and args and type(args[0]) in PLAIN and not (args[0].ndim or args[0].requires_grad):
            if args[0]._base is None:
                return True  # a count
        return all([is_ordinary(one) and self.may_write_over(one) for one in overwritten(function, args, kwargs)])

    def may_write_over(self, tensor: Tensor) -> bool:
        """See `may_write`."""
        storage = tensor.untyped_storage()
        where = address(storage)
        if where in self.saved and self.saved[where]() is storage:
            return False
        if self.known is not None and self.known.memories.get(storage):
            return False
        self._copy(where)
        return True

    def before_writing(self, written: Sequence[Tensor]) -> None:
        """The recorder makes a call that writes over these tensors."""
        assert self.known is not None
        for storage in [one.untyped_storage() for one in written if is_ordinary(one)]:
            self._copy(address(storage))
            for reference, slot in self.slots:
                if reference() is storage:
                    slot.memory = self.known.memory_of(storage)

    def _copy(self, where: int) -> None:
        """Copy what recipes read of the memory with this address."""
        while self.unnoted:
            kept = self.unnoted.pop()
            try:
                place = address(kept.tensor.untyped_storage())
            except NotImplementedError:  # sparse
                continue
            if place in self.read:
                self.read[place].append(kept)
            else:
                self.read[place] = [kept]
        for kept in self.read.pop(where) if where in self.read else ():
            if kept.tensor._version == kept.version:
                with torch.inference_mode(False):
                    kept.tensor = kept.tensor.detach().clone()
                kept.version = kept.tensor._version


def _is_of(one: tuple[ref[Tensor], int, Any], tensor: Tensor) -> bool:
    """Whether a handle is for a tensor in its present version."""
    return one[0]() is tensor and one[1] == tensor._version


def _is_flattened(base: Tensor, result: Tensor) -> bool:
    """Whether a result has all values of its base, in the same order."""
    is_alike = base.numel() == result.numel() and base.dtype is result.dtype
    return is_alike and base.is_contiguous() and result.is_contiguous()


# How a handle is made for a tensor that is seen for the first time. None: it is not the expected tensor.


def keep(handles: Handles, tensor: Tensor) -> Keep:
    handles.unnoted.append(kept := Keep(tensor))
    return kept


def copy(handles: Handles, tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if type(tensor) is nn.Parameter else copied(tensor)


def shape_of(handles: Handles, tensor: Tensor) -> ShapeOnly:
    """For a recipe that draws the mask of a tensor."""
    return any_values(tensor)


def view_of(handles: Handles, tensor: Tensor, of: Take, conditions: Conditions) -> Slot | None:
    """A view of a dropped tensor, or of a copy that the running call has made."""
    base = tensor._base
    if base is None or (how := form_of(tensor, base)) is None:
        return None
    handle = handles.find(base) or handles.made(of, base)
    return None if handle is None else Slot(conditions, tensor, view, (handle, *how))


def norm(handles: Handles, tensor: Tensor, conditions: Conditions) -> Slot | None:
    """The output of one of our norms whose node can compute it."""
    node = tensor.grad_fn
    if not is_node(node) or not node.strategy.recompute_output or tensor._version != node.output_version:
        return None
    return Slot(conditions, tensor, checkpointed_output, (node, None, saved_in(node)))


# Only for tensors that autograd saves:


def own_result(handles: Handles, tensor: Tensor) -> Slot | None:
    """The result itself, whose slot is made before the call: see `Handles.pack`."""
    return None


def served(handles: Handles, tensor: Tensor) -> Slot | None:
    """The argument in whose place the result will do."""
    packing = handles.packing
    serves = packing.act.row.result_serves
    if serves is None or not serves(packing.args, packing.kwargs):
        return None
    # Another slot: the program may overwrite the result, but not the saved argument.
    slot = Slot(Conditions(1), tensor, itself)
    packing.instead += (slot,)
    packing.given += ((slot, tensor),)
    return slot


def shape(handles: Handles, tensor: Tensor) -> ShapeOnly | None:
    packing = handles.packing
    asks = packing.act.row.reads_shape_only
    is_enough = asks is not None and tensor.requires_grad and asks(packing.args, packing.kwargs)
    return ShapeOnly(tensor) if is_enough else None


def signs(handles: Handles, tensor: Tensor, positive: Positive, readers: int) -> Slot:
    one = handles.masks.get(key := (id(tensor), positive))
    if one is None or not _is_of(one, tensor):
        slot = Slot(Conditions(readers), tensor, Signs(tensor, positive, None).get)
        one = handles.masks[key] = ref(tensor), tensor._version, slot
    return one[2]


def narrowed(handles: Handles, tensor: Tensor, conditions: Conditions) -> Slot | None:
    """Indices, which are kept in a smaller type."""
    packing = handles.packing
    narrow = packing.act.row.narrow
    if narrow is None or tensor.dtype is not torch.int64:
        return None
    return Slot(conditions, tensor, itself, (Keep(tensor.to(narrow(packing.args, packing.kwargs))),))


def inside(handles: Handles, tensor: Tensor, conditions: Conditions, number: int) -> Slot:
    """A tensor that the call has made itself, and that is computed again with its result."""
    handles.packing.inside[number] = slot = Slot(conditions, tensor)
    handles.packing.given += ((slot, tensor),)
    return slot


def copy_of(
    handles: Handles, tensor: Tensor, path: Path, of: Take, function: Any, conditions: Conditions
) -> Slot | None:
    """A copy of an argument, made inside the call: cast, laid out with other strides, or by `function` reshaped."""
    argument, is_reshaped = _copied_argument(handles, tensor, path), function is Tensor.reshape
    if argument is None or (argument.dtype is not tensor.dtype if is_reshaped else argument.shape != tensor.shape):
        return None
    if (handle := handles.find(argument) or handles.made(of, argument)) is None:
        return None
    if is_reshaped:
        return Slot(conditions, tensor, Tensor.reshape, (handle, tensor.shape))
    return Slot(conditions, tensor, itself, (handle,))


def kept_in_copy(handles: Handles, tensor: Tensor, path: Path, conditions: Conditions = USUAL) -> Keep | Slot | None:
    """An argument that is kept in a copy, made inside the call. `conditions`: if the copy has other strides."""
    argument = _copied_argument(handles, tensor, path)
    if argument is None or tensor.dtype is not argument.dtype or tensor.shape != argument.shape:
        return None
    if (handle := handles.find(argument)) is not None:
        # Another slot than the argument's, which the program may overwrite
        return Slot(USUAL, tensor, laid_out, (handle, tensor.stride()))
    kept = Keep(tensor.detach())
    own: Keep | Slot = kept
    if tensor.stride() != argument.stride():
        own = Slot(conditions, argument, laid_out, (kept, argument.stride()))
    handles.found[id(argument)] = ref(argument), argument._version, own
    return kept


def _copied_argument(handles: Handles, tensor: Tensor, path: Path) -> Tensor | None:
    """The argument that has been copied."""
    argument: Tensor = at(path, handles.packing.args, handles.packing.kwargs)
    is_given = any([tensor is one for one in handles.packing.args])  # a copy of the program's
    is_copy = not is_given and argument_copied_by(tensor.grad_fn, (argument,)) is argument
    return argument if is_copy and tensor.numel() == argument.numel() else None
