"""Find what a recipe reads for each argument of a call: a value, or a tensor that is kept for it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...saved import Kept, copied
from ...torch_internals import packed_by, single_tensors_packed_by
from ..held.values import Value, saved_value
from ..table.rules import NotRepeated
from .derivation import DERIVING, recipe_input, value_by_advice, value_of
from .registry import NOT_KNOWN, Registry, is_parameter

_OVERWRITTEN = "its input is overwritten"
MUCH = 16  # tensors this many times smaller than a result may be kept for its recipe


@dataclass(eq=False)
class Finder:
    """Finds what the recipe of a call reads for each argument: a value, or a tensor that is kept for it (rule 4).

    If the rules decide, it counts what it would keep, and refuses what is too much (rule 5). By advice it keeps that
    whatever it costs, because an earlier pass has found that it is worth while.
    """

    registry: Registry
    result: Any = None
    room: int | None = None  # bytes that can be freed if the call is repeated; None: by advice
    saved_leaves: Sequence[Tensor] = ()  # what the call has saved as it is, such as parameters
    before: Value | None = None  # the value of the result before the call has written over it
    is_memory_read: bool = True  # something is saved or kept in the memory of what the call has written over
    kept_bytes: int = 0  # only for the recipe
    unread_values: list[Value] = field(default_factory=list)
    node_packs: Sequence[Any] | None = None  # by advice: what the result's node holds, once somebody asks

    def saved(self, node: Any, name: str) -> Any:
        """What a recipe reads for a tensor that a node has saved. NotRepeated: the program's hooks have packed it."""
        packed = packed_by(node, name)
        if isinstance(packed, Tensor):  # there are no hooks, and the program cannot reach it
            return packed
        value = saved_value(packed)
        if not isinstance(value, (Value, Kept)):
            raise NotRepeated("its call saves by other hooks")
        return value

    def values_of(self, tensors: Sequence[Tensor]) -> list[Any]:
        """What a recipe reads for each of these arguments, which may be kept for it."""
        by_id = self.registry.names.by_id  # the usual case by advice, as there may be many
        values: list[Any] = []
        for tensor in tensors:
            reference, version, value = by_id.get(id(tensor), NOT_KNOWN)
            is_known = value is not None and reference() is tensor and version == tensor._version
            is_usual = is_known and self.room is None and tensor is not self.result
            values.append(value if is_usual else self(tensor, may_keep=True))
        return values

    def __call__(self, tensor: Tensor, may_keep: bool = False) -> Any:
        if self.room is not None:
            return self._find_argument(tensor, may_keep, self.room)
        registry = self.registry
        if tensor is self.result:  # its own value, if it is known already, would be its own input
            return self._value_before(tensor)
        reference, version, value = registry.names.by_id.get(id(tensor), NOT_KNOWN)
        if value is not None and reference() is tensor and version == tensor._version:
            return value
        kind = type(tensor)
        if kind is nn.Parameter:
            if MUCH * tensor.nbytes > self.result.nbytes or self._is_saved(tensor):
                return registry.storages.keep_in_place(tensor)
            return copied(tensor)
        node = tensor.grad_fn
        is_usual = node is not None and kind is Tensor and tensor.layout is torch.strided and tensor._base is None
        if is_usual and not (registry.storages.exposed.by_address or type(node) in DERIVING or tensor.is_nested):
            return registry.keep_by_advice(tensor)
        return self._find_argument(tensor, True, self.result.nbytes)

    def _find_argument(self, tensor: Tensor, may_keep: bool, room: int) -> Any:
        """What the recipe reads for an argument. NotRepeated: `may_keep` is False, and it is not much smaller."""
        registry = self.registry
        storages = registry.storages
        by_advice = self.room is None
        if storages.may_change_unseen(tensor):
            raise NotRepeated("its input may change unseen")
        copies = registry.copy_parameters and is_parameter(tensor)
        if tensor.requires_grad and not copies and (tensor.is_leaf or isinstance(tensor._base, nn.Parameter)):
            is_saved = self._is_saved(tensor) if by_advice else any([leaf is tensor for leaf in self.saved_leaves])
            if is_saved:
                return storages.keep_in_place(tensor)
        value = None if copies else self._available_value(tensor)
        if value is not None:
            if not by_advice and value.consumer_count == value.sign_consumer_count:
                self.unread_values.append(value)
            return value
        if tensor is self.result:
            raise NotRepeated(_OVERWRITTEN)
        stays = is_parameter(tensor) or (tensor.requires_grad and tensor.is_leaf)
        is_small = MUCH * _bytes(tensor) <= room
        if not (is_small or ((may_keep or stays) and not copies)):
            raise NotRepeated("its input is not kept")
        may_copy = is_small and (tensor.is_leaf or not tensor.requires_grad)
        may_change = not (may_copy or stays or tensor.requires_grad or storages.is_made_without_gradient(tensor))
        if may_copy or may_change:
            if by_advice:
                return copied(tensor)
            copy = registry.keep_copy(tensor)
            self.kept_bytes += 0 if stays else copy.bytes
            return copy
        if not (stays or tensor.requires_grad):
            storages.teach_maker(tensor)
        if by_advice and not is_parameter(tensor):
            return registry.keep_by_advice(tensor)
        kept = recipe_input(registry, tensor)
        if not by_advice:
            self.kept_bytes += 0 if stays else _bytes(tensor)
            if isinstance(kept, Value) and kept.is_unread:
                registry.log.note(kept, tensor)
        return kept

    def _available_value(self, tensor: Tensor) -> Value | None:
        """The value of an argument, if a recipe may read it; with a plan, it may be kept for that."""
        registry = self.registry
        if self.room is None:
            follows = not tensor.is_leaf or not (tensor.requires_grad or tensor._base is None)
            return value_by_advice(registry, tensor) if follows else None
        value = self._value_before(tensor) if tensor is self.result else value_of(registry, tensor)
        if value is not None and tensor is self.result:
            registry.note_read_when_overwritten(value, tensor)
        if not registry.by_plan:
            return None if value is not None and value.is_unread else value
        if value is None:
            is_large = MUCH * _bytes(tensor) > self.room  # e.g. a mask: a copy for each call would take too much
            is_made = registry.storages.is_made(tensor)
            if is_made or (is_large and registry.storages.is_made_without_gradient(tensor)):
                if not is_made:
                    registry.storages.teach_maker(tensor)
                value = registry.keep(tensor)
        if value is not None and value.is_unread:
            registry.log.note(value, tensor)
        return value

    def _value_before(self, result: Tensor) -> Value:
        """The value of the result before the call has written over it. NotRepeated: it cannot be read any more."""
        value = self.before or self.registry.names.find(result, overwrites=1)  # its copy's
        if value is None or (self.is_memory_read and self.registry.is_lost(value, result)):
            raise NotRepeated(_OVERWRITTEN)
        return value

    def _is_saved(self, tensor: Tensor) -> bool:
        """By advice: whether the call has saved a parameter, which must not change before the backward pass then."""
        if self.node_packs is None:
            self.node_packs = self.saved_leaves or packs_of(self.result.grad_fn)
        for pack in self.node_packs:
            if pack is tensor:
                return True
        return False


def packs_of(node: Any) -> Sequence[Any]:
    """What a node holds: tensors, those inside `Kept`, or other objects that hooks have packed."""
    if node is None:
        return ()
    return [pack.packed if type(pack) is Kept else pack for pack in single_tensors_packed_by(node)]


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
