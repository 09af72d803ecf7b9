"""The handles of the tensors that a pass by a script drops or keeps, and what autograd gets for saved tensors."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from weakref import ref

from torch import Tensor, nn

from ...norms.bn_act import is_node
from ...saved import PLAIN, ShapeOnly, copied, is_ordinary, view
from ...torch_internals import address, argument_copied_by
from ..held.signs import Signs
from ..held.values import Value, checkpointed_output
from ..recorder.lesson import Form, at
from ..table.rules import overwritten
from .script import HANDLES, Act, Group, How, Keep, Pass, Slot, Take, unknown


class Packing:
    """What autograd gets for the tensors that one call saves."""

    act: Act
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: Slot | None  # of the result
    takes: Iterator[Take | None]  # for the tensors that are still to be saved
    packed: list[Any] | None = None  # what autograd gets for them, if recipes read it
    has_failed = False
    own: Tensor | None = None  # the saved result
    inside: dict[int, Slot] = {}  # noqa: RUF012  # replaced, never changed
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
            slot.function, slot.arguments, slot.reads = kept.get, (), ()


_FIRST = (0,)


def itself(tensor: Tensor) -> Tensor:
    return tensor


class Handles:
    """The handles of a forward pass. PyTorch keeps `pack`, and so this object, as long as the graph: see `clear`."""

    def __init__(self) -> None:
        # For each value whose handle is known: a reference to its tensor, the tensor's version, and the handle.
        self.found: dict[int, tuple[ref[Tensor], int, Any]] = {}
        self.saved: dict[int, ref[Tensor]] = {}  # dropped tensors that autograd may have saved, by id
        self.served: list[tuple[ref[Tensor], Slot]] = []  # saved tensors, and the slots of results that serve instead
        self.passed = Pass()
        self.packing: Any = None  # of the running call
        self.hook = self.pack  # made once

    def clear(self) -> None:
        """The script has ended."""
        self.found, self.saved, self.served = {}, {}, []
        del self.hook

    def pack(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor that the running call saves."""
        packing = self.packing
        take = next(packing.takes, None)  # None as well if the call saves more than when the script was learned
        if take is None:
            handle: Any = Keep(tensor if tensor.is_leaf else tensor.detach())
        else:
            how, number = take[0], take[1]
            handle = None
            if how == How.RESULT and not take.more:
                packing.own, handle = tensor, packing.slot
            elif how > How.COPY:
                handle = self._packed(packing, take, tensor)
            elif number not in self.found:
                handle = self.take(take, tensor)
            else:
                reference, version, found = self.found[number]
                if reference() is tensor and version == tensor._version:
                    handle = found
            if handle is None:
                packing.has_failed = True
                handle = Keep(tensor if tensor.is_leaf else tensor.detach())
        if packing.packed is not None:
            packing.packed.append(handle)
        return handle

    def held(self, tensor: Tensor) -> Any:
        """What autograd gets for a tensor that may be dropped: its slot if there is one, or the tensor itself."""
        if (known := self.saved.get(id(tensor))) is not None and known() is tensor:
            for reference, version, handle in self.found.values():
                if reference() is tensor and version == tensor._version:
                    return handle
        return Keep(tensor if tensor.is_leaf else tensor.detach())

    def take(self, take: Take, tensor: Any) -> Any:
        """A handle for a tensor that is seen for the first time; None if it is not the expected one."""
        how = take[0]
        if type(tensor) not in PLAIN:
            return None
        if how == How.HOLD:
            return Keep(tensor)
        if how == How.COPY:
            return tensor.detach().clone() if type(tensor) is nn.Parameter else copied(tensor)
        handle: Any = None
        if how in (How.FIRST, How.GUARDED):
            handle = Keep(tensor)
        elif how == How.VIEW:
            handle = self._view(take, tensor)
        elif how == How.NORM:
            handle = self._norm(take, tensor)
        if handle is not None:
            self.found[take[1]] = ref(tensor), tensor._version, handle
            if how in (How.NORM, How.GUARDED):
                self.saved[id(tensor)] = ref(tensor)
            if how == How.GUARDED and (base := tensor._base) is not None:
                self.saved[id(base)] = ref(base)
        return handle

    def slot(self, form: Form | None, function: Callable[..., Any], *arguments: Any) -> Slot:
        assert form is not None
        slot = Slot(form, self.passed)
        slot.function, slot.arguments = function, arguments
        slot.reads = _FIRST if arguments and type(arguments[0]) in HANDLES else ()
        return slot

    def _view(self, take: Take, tensor: Tensor) -> Slot | None:
        """A view of a dropped tensor, or of a copy that the running call has made."""
        base, form = tensor._base, take.form
        assert take.of is not None and form is not None
        if base is not None and take.of.how == How.COPIED:
            self._copied(take.of, base, at(take.of.path, self.packing.args, self.packing.kwargs))
        found = self.found.get(take.of.number)
        if base is None or found is None or found[0]() is not base or found[1] != base._version:
            return None
        strides, _, _, offset = take.more
        if not form.is_of(tensor) or base.stride() != strides:
            return None
        if tensor.storage_offset() - base.storage_offset() != offset:
            return None
        slot = Slot(form, self.passed)
        slot.function, slot.arguments, slot.reads = view, (found[2], *take.more), _FIRST
        return slot

    def _norm(self, take: Take, tensor: Tensor) -> Slot | None:
        """The output of one of our norms that can compute it."""
        node, form = tensor.grad_fn, take.form
        assert form is not None
        if not is_node(node) or not node.strategy.recompute_output or tensor._version != node.output_version:
            return None
        if tensor.dtype is not form.dtype or tensor.stride() != form.stride:
            return None
        return self.slot(form, checkpointed_output, node, None)

    def _packed(self, packing: "Packing", take: Take, tensor: Tensor) -> Any:
        """What autograd gets for a tensor that only this call knows. None: the tensor is not the expected one."""
        how, row, args, kwargs = take.how, packing.act.row, packing.args, packing.kwargs
        if how == How.RESULT:
            if row.result_serves is None or not row.result_serves(args, kwargs):
                return None
            # Another slot: the program may overwrite the result, but not the saved argument.
            assert packing.act.form is not None
            slot = self.slot(packing.act.form._replace(readers=1), itself)
            packing.instead += (slot,)
            packing.given += ((slot, tensor),)
            self.served.append((ref(tensor), slot))
            self.saved[id(tensor)] = ref(tensor)
            return slot
        if how == How.SHAPE:
            asks = row.reads_shape_only
            return ShapeOnly(tensor) if asks is not None and tensor.requires_grad and asks(args, kwargs) else None
        if how == How.SIGNS:
            return self._signs(take, tensor)
        if how == How.NARROW:
            return self._narrowed(packing, take, tensor)
        if how == How.INSIDE:
            if take.form is None or not take.form.is_of(tensor):
                return None
            if take.number in packing.inside:
                return next((one for one, saved in packing.given if saved is tensor), None)
            slot = Slot(take.form, self.passed)
            packing.inside = packing.inside | {take.number: slot}
            packing.given += ((slot, tensor),)
            return slot
        return self._copied(take, tensor, at(take.path, args, kwargs))

    def _signs(self, take: Take, tensor: Tensor) -> Slot | None:
        found = self.found.get(take.number)
        if found is not None:
            return found[2] if found[0]() is tensor and found[1] == tensor._version else None
        assert take.form is not None
        form = take.form._replace(shape=tensor.shape, dtype=tensor.dtype, stride=tensor.stride())
        slot = self.slot(form, Signs(tensor, take.function, None).get)
        self.found[take.number] = ref(tensor), tensor._version, slot
        self.saved[id(tensor)] = ref(tensor)
        return slot

    def _narrowed(self, packing: "Packing", take: Take, indices: Tensor) -> Slot | None:
        narrow = packing.act.row.narrow
        if narrow is None or narrow(packing.args, packing.kwargs) is not take.function:
            return None
        form = take.form
        if form is None or indices.dtype is not form.dtype or indices.stride() != form.stride:
            return None
        return self.slot(form, Tensor.to, Keep(indices.to(take.function)), form.dtype)

    def _copied(self, take: Take, tensor: Tensor, argument: Tensor) -> Any:
        """A copy of an argument, made inside the call."""
        node: Any = tensor.grad_fn
        form = take.form
        if node is None or (form is not None and (tensor.dtype is not form.dtype or tensor.stride() != form.stride)):
            return None
        if argument_copied_by(node, (argument,)) is not argument:
            return None
        found = self.found.get(take.number if take.of is None else take.of.number)
        is_known = found is not None and found[0]() is argument and found[1] == argument._version
        if tensor.numel() != argument.numel() or (found is not None and not is_known):
            return None
        if take.of is not None:
            of = found[2] if found is not None else self.take(take.of, argument)
            if of is None:
                return None
            slot = self.slot(form, take.function, of, *take.more)
            self.found[take.number] = ref(tensor), tensor._version, slot
            return slot
        if found is not None:
            return found[2] if tensor.dtype is argument.dtype else None
        handle = Keep(tensor.detach())
        self.found[take.number] = ref(argument), argument._version, handle
        return handle

    def drop(
        self,
        act: Act,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Tensor,
        own: Slot | None,
        handles: list[Any],
        packing: "Packing | None",
        states: Any,
    ) -> None:
        """Note how to compute what the call has dropped."""
        for number, make in enumerate(act.makes):
            arguments = make.arguments.copy()
            for position, take in make.taken:
                arguments[position] = handles[take]
            for position, path in make.given:
                given = at(path, args, kwargs)
                arguments[position] = tuple(given) if type(given) is list else given
            for position, saved_by in make.saved:
                arguments[position] = saved_by(result.grad_fn)
            for position, pack in make.packed:
                assert packing is not None and packing.packed is not None
                arguments[position] = packing.packed[pack]
            function = make.function if make.refreshed is None else make.refreshed()
            if make.draws:
                function = partial(states[number].call, function)
            if make.wraps is None:
                assert own is not None
                own.function, own.arguments = function, arguments
            else:
                inside = {} if packing is None else packing.inside
                slots = [own if one == act.number else inside.get(one) for one in make.outputs]
                group = Group(make.wraps(function), arguments, slots)
                for slot in slots:
                    if slot is not None:
                        slot.group = group
        handle: Any = own
        if act.is_kept:
            handle = Keep(result.detach())
        if packing is not None:
            packing.keep_unknown()
            for slot in packing.instead:
                slot.arguments, slot.reads = [handle], (0,)
        if own is None:
            return
        self.found[act.number] = found = ref(result), result._version, handle
        if act.is_saved:
            self.saved[id(result)] = found[0]
        if act.base is not None and (base := result._base) is not None:
            number, form = act.base
            self.found[number] = ref(base), base._version, self.slot(form, Tensor.view, own, form.shape)
            self.saved[id(base)] = ref(base)

    def may_write(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a call writes over nothing that autograd has saved and the script has dropped."""
        if not kwargs and args and type(args[0]) in PLAIN and not (args[0].ndim or args[0].requires_grad):
            return True  # a count
        for tensor in overwritten(function, args, kwargs):
            if not is_ordinary(tensor):
                return False
            for one in (tensor, tensor._base):
                known = self.saved.get(id(one))
                if known is not None and known() is one:
                    return False
            if not tensor.requires_grad:  # perhaps an alias, such as a detached one
                storage = address(tensor.untyped_storage())
                living = (known() for known in self.saved.values())
                if any(one is not None and address(one.untyped_storage()) == storage for one in living):
                    return False
        return True


def in_memory_of(slot: Slot, living: dict[int, Tensor]) -> Tensor | None:
    """A living tensor in the memory of a slot's forward tensor."""
    handle: Any = slot
    while (tensor := living.get(id(handle))) is None:
        if type(handle) is Keep:
            return handle.tensor
        if type(handle) is not Slot or handle.form.alias < 0:
            return None
        handle = handle.arguments[handle.form.alias]
    return tensor


class Read:
    """A value of the recorder, for a slot."""

    __slots__ = ("value",)

    def __init__(self, value: Value):
        self.value = value

    def read(self) -> Tensor:
        return self.value.get()


HANDLES.add(Read)
