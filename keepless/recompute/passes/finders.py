"""Find what a recipe reads for each argument of a call: a value, or a tensor that is kept for it."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...saved import Kept, copied
from ...torch_internals import packed_by, packed_in_node
from ..held.calls import Call
from ..held.values import Value, saved_value
from ..table.rules import NotRepeated
from .registry import DERIVING, KnownValues, is_parameter

MUCH = 16  # tensors this many times smaller than a result may be kept for its recipe


class Finder:
    """Finds what the recipe of a call reads, and counts what it would keep (rules 4 and 5)."""

    def __init__(self, known: KnownValues, call: Call, result: Any) -> None:
        self.known, self.call, self.result = known, call, result
        self.room = call.room(result)
        self.alone = 0  # bytes kept only for the recipe
        self.unread: list[Value] = []

    def saved(self, node: Any, name: str) -> Any:
        packed = packed_by(node, name)
        if isinstance(packed, Tensor):  # there are no hooks, and the program cannot reach it
            return packed
        found = saved_value(packed)
        if not isinstance(found, (Value, Kept)):
            raise NotRepeated("its call saves by other hooks")
        return found

    def __call__(self, tensor: Tensor, may_keep: bool = False) -> Any:
        known = self.known
        if known.may_change_unseen(tensor):
            raise NotRepeated("its input may change unseen")
        copy_it = known.copy_parameters and is_parameter(tensor)
        if tensor.requires_grad and not copy_it:
            for saved, kept, _ in self.call.packed:
                if saved is tensor and isinstance(kept, Kept):  # such as a parameter
                    return known.stays(tensor)
        value = self._available(tensor)
        if value is not None and not copy_it:
            if value.consumers == value.sign_consumers:
                self.unread.append(value)
            return value
        stays = is_parameter(tensor) or (tensor.requires_grad and tensor.is_leaf)
        is_small = MUCH * _bytes(tensor) <= self.room
        if tensor is self.result:
            raise NotRepeated("its input is overwritten")
        if not (is_small or ((may_keep or stays) and not copy_it)):
            raise NotRepeated("its input is not kept")
        may_copy = is_small and (tensor.is_leaf or not tensor.requires_grad)
        found: Value | Kept
        if may_copy or not (stays or tensor.requires_grad or known.has_made(tensor)):  # it may change unseen
            found = copy = known.copied(tensor)
            self.alone += 0 if stays else copy.bytes
        else:
            found = known.keep_for_recipe(tensor)
            self.alone += 0 if stays else _bytes(tensor)
            if isinstance(found, Value) and found.unread:
                known.log.keep(found, tensor)
        return found

    def each(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [self(tensor, may_keep=True) for tensor in tensors]

    def _available(self, tensor: Tensor) -> Value | None:
        """The value of an argument, if a recipe may read it; with a plan, it may be kept for that."""
        known = self.known
        if tensor is self.result:
            value = self.call.before or known.find(tensor, overwrites=1)  # its copy's
            value = None if value is None or known.is_lost(value, tensor) else value
        else:
            value = known.value_of(tensor)
        if not known.by_plan:
            return None if value is not None and value.unread else value
        if value is None and tensor is not self.result:
            is_large = MUCH * _bytes(tensor) > self.room  # e.g. a mask: a copy for each call would take too much
            if known.is_made(tensor) or (is_large and known.has_made(tensor)):
                value = known.keep(tensor)
        if value is not None and value.unread:
            known.log.keep(value, tensor)
        return value


class AdvisedFinder(Finder):
    """Finds what a recipe reads, and keeps it whatever it costs: an earlier pass has found that it is worth while.

    It copies no parameters for FSDP, as there is no advice about a network that it shards.
    """

    def __init__(
        self, known: KnownValues, saves: Sequence[Tensor] = (), result: Any = None, before: Value | None = None
    ) -> None:
        """`saves`: what hooks have seen of the call. `before`: the value of the result before it was written over."""
        self.known, self.saves, self.result, self.before = known, saves, result, before
        self.held: Sequence[Any] | None = None  # what the result's node holds, once somebody asks
        self.is_noted = True  # something is saved or kept in the memory of what the call has written over

    def each(self, tensors: Sequence[Tensor]) -> list[Any]:
        found = self.known.found  # the usual case here, as there may be many
        return [
            one[2]
            if (one := found.get(id(tensor))) is not None
            and one[0]() is tensor
            and one[1] == tensor._version
            and tensor is not self.result
            else self(tensor)
            for tensor in tensors
        ]

    def __call__(self, tensor: Tensor, may_keep: bool = False) -> Any:
        known = self.known
        if tensor is self.result:  # its own value, if it is known already, would be its own input
            before = self.before or known.find(tensor, overwrites=1)
            if before is None or (self.is_noted and known.is_lost(before, tensor)):
                raise NotRepeated("its input is overwritten")
            return before
        if (one := known.found.get(id(tensor))) is not None and one[0]() is tensor and one[1] == tensor._version:
            return one[2]
        kind = type(tensor)
        if kind is nn.Parameter:
            if MUCH * tensor.nbytes > self.result.nbytes or self._is_saved(tensor):
                return known.stays(tensor)
            return copied(tensor)
        node = tensor.grad_fn
        if node is None or kind is not Tensor or tensor.layout is not torch.strided or known.exposed.found:
            return self._of_another(tensor)
        if tensor._base is not None or type(node) in DERIVING or tensor.is_nested:
            return self._of_another(tensor)
        return known.kept_later(tensor)

    def _is_saved(self, tensor: Tensor) -> bool:
        """Whether the call has saved a parameter: then it must not change before the backward pass anyway."""
        if self.held is None:
            self.held = self.saves or packs_of(self.result.grad_fn)
        for one in self.held:
            if one is tensor:
                return True
        return False

    def _of_another(self, tensor: Tensor) -> Any:
        """What a recipe reads for a view, a tensor without a gradient, or another one that is not a usual result."""
        known, needs_grad = self.known, tensor.requires_grad
        if known.may_change_unseen(tensor):
            raise NotRepeated("its input may change unseen")
        is_own = is_parameter(tensor)
        if needs_grad and not tensor.is_leaf and not is_own:
            return known.derived(tensor) or known.kept_later(tensor)
        if needs_grad:
            if self._is_saved(tensor):
                return known.stays(tensor)
        elif tensor._base is not None and not needs_grad and (found := known.derived(tensor)) is not None:
            return found
        if MUCH * _bytes(tensor) <= self.result.nbytes and (tensor.is_leaf or not needs_grad):
            return copied(tensor)
        if is_own:
            return known.keep_for_recipe(tensor)
        return known.kept_later(tensor) if needs_grad or known.has_made(tensor) else copied(tensor)


def packs_of(node: Any) -> Sequence[Any]:
    """What a node holds: tensors, those inside `Kept`, or other objects that hooks have packed."""
    return [one.packed if type(one) is Kept else one for one in packed_in_node(node)] if node is not None else ()


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
