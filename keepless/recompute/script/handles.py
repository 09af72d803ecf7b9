"""The handles of the tensors that a pass by a script drops or keeps, and what autograd gets for saved tensors."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, UntypedStorage, nn

from ...norms.bn_act import is_node
from ...saved import PLAIN, ShapeOnly, copied, form_of, is_ordinary, laid_out, view
from ...torch_internals import address, argument_copied_by
from ..held.signs import Positive, Signs
from ..recorder.known_values import checkpointed_output, saved_in
from ..recorder.lesson import Path, at
from ..table.rules import any_values, itself, overwritten
from .script import USUAL, Act, Conditions, Group, Keep, Slot, Take, unknown


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
        # For each value whose handle is known: a reference to its tensor, the tensor's version, and the handle.
        self.found: dict[int, tuple[ref[Tensor], int, Any]] = {}
        # Storages of dropped tensors that autograd may have saved, by address; and such tensors' slots, each with one.
        self.saved: dict[int, ref[UntypedStorage]] = {}
        self.slots: list[tuple[ref[UntypedStorage], Slot]] = []
        # Storages of tensors kept for recipes, by address; and those whose storages are not noted yet: see `may_write`.
        self.read: dict[int, ref[UntypedStorage]] = {}
        self.unnoted: list[Keep] = []
        self.packing: Any = None  # of the running call
        self.hook = self.pack  # made once

    def clear(self) -> None:
        """The script has ended."""
        self.found, self.saved, self.slots, self.read, self.unnoted = {}, {}, [], {}, []
        del self.hook

    def pack(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor that the running call saves."""
        packing = self.packing
        take = next(packing.takes, None)  # None as well if the call saves more than when the script was learned
        if take is None:
            handle: Any = Keep(tensor if tensor.is_leaf else tensor.detach())
        elif take[1] is own_result:
            packing.own, handle = tensor, packing.slot
        elif take[0] in self.found:  # without a call of `take`
            reference, version, found = self.found[take[0]]
            handle = found if version == tensor._version and reference() is tensor else None
        else:
            handle = self.take(take, tensor)
        if handle is None:
            packing.has_failed = True
            handle = Keep(tensor if tensor.is_leaf else tensor.detach())
        packing.packed += (handle,)
        return handle

    def held(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor: a slot if it, or the base of which it is a view, is dropped; or itself."""
        if is_ordinary(tensor) and self.has_saved(tensor):
            known = {
                id(one()): handle
                for one, version, handle in self.found.values()
                if version == tensor._version and not has_signs(handle)
            }
            base = tensor._base
            if id(tensor) in known:
                return known[id(tensor)]
            if base is not None and type(of := known.get(id(base))) is Slot and (how := form_of(tensor, base)):
                slot = Slot(USUAL, tensor, view, (of, *how))
                self.note_saved(tensor, slot)
                return slot
        return Keep(tensor if tensor.is_leaf else tensor.detach())

    def take(self, take: Take, tensor: Any) -> Any:
        """The handle of a tensor; None if it is not the expected one."""
        number, make, _ = take
        if (found := self.found.get(number)) is not None:
            return found[2] if found[1] == tensor._version and found[0]() is tensor else None
        handle = None if make is None or type(tensor) not in PLAIN else make(self, tensor)
        if handle is not None and number >= 0:
            self.found[number] = ref(tensor), tensor._version, handle
        return handle

    def copy(self, number: int) -> None:
        """Keep a copy of a tensor that recipes read, before the program overwrites it."""
        _, _, kept = self.found.pop(number, (None, 0, None))
        if type(kept) is Keep and kept.tensor._version == kept.version:
            self.read.pop(address(kept.tensor.untyped_storage()), None)
            with torch.inference_mode(False):
                kept.tensor = kept.tensor.detach().clone()
            kept.version = kept.tensor._version

    def note_saved(self, tensor: Tensor, slot: Slot | None) -> None:
        """Autograd may hold a slot for a tensor."""
        storage = tensor.untyped_storage()
        self.saved[address(storage)] = reference = ref(storage)
        if slot is not None:
            self.slots.append((reference, slot))

    def has_saved(self, tensor: Tensor) -> bool:
        """Whether autograd may have saved a dropped tensor in the memory of this one."""
        return _is_in(self.saved, tensor.untyped_storage())

    def drop(
        self,
        act: Act,
        result: Tensor,
        own: Slot | None,
        arguments: list[Any],
        functions: Sequence[Callable[..., Any]],
        packing: Packing | None,
    ) -> None:
        """Note how to compute what the call has dropped. `arguments`, `functions`: of all recipes."""
        for saved_by, position in act.saved:
            arguments[position] = saved_by(result.grad_fn)
        for number, position, is_copy in act.packed:
            assert packing is not None
            arguments[position] = one = packing.packed[number]
            if is_copy and not (type(one) is Keep and one.tensor.stride() == result.stride()):
                arguments[position] = Slot(USUAL, result, laid_out, (one, result.stride()))
        for make, function in zip(act.makes, functions, strict=True):
            given = arguments[make.begin : make.end]
            if make.rerun is None:
                assert own is not None
                own.function, own.arguments = function, given
                continue
            assert packing is not None
            slots = [own if one == act.number else self._slot_of(one) for one in make.outputs]
            originals = {id(slot): tensor for slot, tensor in packing.given} | {id(own): result}
            forms = [None if slot is None else originals[id(slot)] for slot in slots]
            group = Group(make.rerun.around(function, forms), given, slots)
            for slot in filter(None, slots):
                slot.group = group
        handle: Any = Keep(result.detach()) if act.is_kept else own
        if packing is not None and packing.given:
            packing.keep_unknown()
            for slot in packing.instead:
                slot.arguments, slot.dtype, slot.stride = [handle], result.dtype, result.stride()
        if own is None:
            return
        self.found[act.number] = ref(result), result._version, handle
        if act.is_saved:
            self.note_saved(result, own)
        if act.base is not None and (base := result._base) is not None and _is_flattened(base, result):
            number, conditions = act.base
            slot = Slot(conditions, base, Tensor.view, (own, base.shape))
            self.found[number] = ref(base), base._version, slot
            self.note_saved(base, slot)

    def _slot_of(self, number: int) -> Slot | None:
        found = self.found.get(number)
        return None if found is None else found[2]

    def may_write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call writes over nothing that recipes read, or that autograd has saved and the script has dropped.

        In a step like the learned one, no call writes over what a recipe reads. But where the script has expected a
        tensor that it sees for the first time, the program may have given it another one.
        """
        if not kwargs and args and type(args[0]) in PLAIN and not (args[0].ndim or args[0].requires_grad):
            return True  # a count
        while self.unnoted:
            storage = self.unnoted.pop().tensor.untyped_storage()
            self.read[address(storage)] = ref(storage)
        written = overwritten(function, args, kwargs)
        return all([is_ordinary(one) and not (self.has_saved(one) or self.has_read(one)) for one in written])

    def has_read(self, tensor: Tensor) -> bool:
        """Whether recipes may read a kept tensor in the memory of this one."""
        return _is_in(self.read, tensor.untyped_storage())


def _is_flattened(base: Tensor, result: Tensor) -> bool:
    """Whether a result has all values of its base, in the same order."""
    is_alike = base.numel() == result.numel() and base.dtype is result.dtype
    return is_alike and base.is_contiguous() and result.is_contiguous()


def _is_in(storages: dict[int, ref[UntypedStorage]], storage: UntypedStorage) -> bool:
    known = storages.get(address(storage))
    return known is not None and known() is storage


# How a handle is made for a tensor that is seen for the first time. None: it is not the expected tensor.


def keep(handles: Handles, tensor: Tensor) -> Keep:
    handles.unnoted.append(kept := Keep(tensor))
    return kept


def keep_guarded(handles: Handles, tensor: Tensor) -> Keep:
    """The recorder has kept a copy instead, so a call that writes over it ends the script."""
    handles.note_saved(tensor, None)
    return Keep(tensor)


def copy(handles: Handles, tensor: Tensor) -> Tensor:
    return tensor.detach().clone() if type(tensor) is nn.Parameter else copied(tensor)


def shape_of(handles: Handles, tensor: Tensor) -> ShapeOnly:
    """For a recipe that draws the mask of a tensor."""
    return any_values(tensor)


def view_of(handles: Handles, tensor: Tensor, of: Take, conditions: Conditions) -> Slot | None:
    """A view of a dropped tensor, or of a copy that the running call has made."""
    base = tensor._base
    if base is None or (how := form_of(tensor, base)) is None or (handle := handles.take(of, base)) is None:
        return None
    slot = Slot(conditions, tensor, view, (handle, *how))
    handles.slots.append((ref(tensor.untyped_storage()), slot))  # autograd may hold it
    return slot


def norm(handles: Handles, tensor: Tensor, conditions: Conditions) -> Slot | None:
    """The output of one of our norms whose node can compute it."""
    node = tensor.grad_fn
    if not is_node(node) or not node.strategy.recompute_output or tensor._version != node.output_version:
        return None
    slot = Slot(conditions, tensor, checkpointed_output, (node, None, saved_in(node)))
    handles.note_saved(tensor, slot)
    return slot


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
    handles.note_saved(tensor, slot)
    return slot


def shape(handles: Handles, tensor: Tensor) -> ShapeOnly | None:
    packing = handles.packing
    asks = packing.act.row.reads_shape_only
    is_enough = asks is not None and tensor.requires_grad and asks(packing.args, packing.kwargs)
    return ShapeOnly(tensor) if is_enough else None


def has_signs(handle: Keep | Slot) -> bool:
    """Whether a handle has only the signs of its tensor, which no other reader may get."""
    return type(handle) is Slot and isinstance(getattr(handle.function, "__self__", None), Signs)


def signs(handles: Handles, tensor: Tensor, positive: Positive, readers: int) -> Slot:
    slot = Slot(Conditions(readers), tensor, Signs(tensor, positive, None).get)
    handles.note_saved(tensor, slot)
    return slot


def narrowed(handles: Handles, tensor: Tensor, conditions: Conditions) -> Slot | None:
    """Indices, which are kept in a smaller type."""
    packing = handles.packing
    narrow = packing.act.row.narrow
    if narrow is None or tensor.dtype is not torch.int64:
        return None
    slot = Slot(conditions, tensor, itself, (Keep(tensor.to(narrow(packing.args, packing.kwargs))),))
    handles.note_saved(tensor, slot)
    return slot


def inside(handles: Handles, tensor: Tensor, conditions: Conditions) -> Slot:
    """A tensor that the call has made itself, and that is computed again with its result."""
    slot = Slot(conditions, tensor)
    handles.packing.given += ((slot, tensor),)
    return slot


def copy_of(
    handles: Handles, tensor: Tensor, path: Path, of: Take, function: Any, conditions: Conditions
) -> Slot | None:
    """A copy of an argument, made inside the call: cast, laid out with other strides, or by `function` reshaped."""
    argument, is_reshaped = _copied_argument(handles, tensor, path), function is Tensor.reshape
    if argument is None or (argument.dtype is not tensor.dtype if is_reshaped else argument.shape != tensor.shape):
        return None
    if (handle := handles.take(of, argument)) is None:
        return None
    if is_reshaped:
        return Slot(conditions, tensor, Tensor.reshape, (handle, tensor.shape))
    return Slot(conditions, tensor, itself, (handle,))


def kept_in_copy(
    handles: Handles, tensor: Tensor, path: Path, number: int, conditions: Conditions = USUAL
) -> Keep | Slot | None:
    """An argument that is kept in a copy, made inside the call.

    `number`: of the argument. `conditions`: of the argument, if the copy has other strides.
    """
    argument = _copied_argument(handles, tensor, path)
    if argument is None or tensor.dtype is not argument.dtype or tensor.shape != argument.shape:
        return None
    if number in handles.found:  # another slot than the argument's, which the program may overwrite
        handle = handles.take(Take(number), argument)
        return None if handle is None else Slot(USUAL, tensor, laid_out, (handle, tensor.stride()))
    kept = Keep(tensor.detach())
    own: Keep | Slot = kept
    if tensor.stride() != argument.stride():
        own = Slot(conditions, argument, laid_out, (kept, argument.stride()))
        handles.note_saved(argument, own)
    handles.found[number] = ref(argument), argument._version, own
    return kept


def _copied_argument(handles: Handles, tensor: Tensor, path: Path) -> Tensor | None:
    """The argument that has been copied."""
    argument: Tensor = at(path, handles.packing.args, handles.packing.kwargs)
    is_given = any([tensor is one for one in handles.packing.args])  # a copy of the program's
    is_copy = not is_given and argument_copied_by(tensor.grad_fn, (argument,)) is argument
    return argument if is_copy and tensor.numel() == argument.numel() else None
