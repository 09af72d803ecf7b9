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
from .derivation import DERIVING, keep_for_recipe, value_by_advice, value_of
from .registry import NOT_KNOWN, Registry, is_parameter

MUCH = 16  # tensors this many times smaller than a result may be kept for its recipe


class Finder:
    """Finds what the recipe of a call reads, and counts what it would keep (rules 4 and 5)."""

    def __init__(self, registry: Registry, call: Call, result: Any) -> None:
        self.registry = registry
        self.call = call
        self.result = result
        self.room = call.room(result)
        self.alone = 0  # bytes kept only for the recipe
        self.unread: list[Value] = []

    def saved(self, node: Any, name: str) -> Any:
        packed = packed_by(node, name)
        if isinstance(packed, Tensor):  # there are no hooks, and the program cannot reach it
            return packed
        value = saved_value(packed)
        if not isinstance(value, (Value, Kept)):
            raise NotRepeated("its call saves by other hooks")
        return value

    def __call__(self, tensor: Tensor, may_keep: bool = False) -> Any:
        registry = self.registry
        if registry.storages.may_change_unseen(tensor):
            raise NotRepeated("its input may change unseen")
        copy_it = registry.copy_parameters and is_parameter(tensor)
        if tensor.requires_grad and not copy_it:
            for saved, kept, _ in self.call.packed:
                if saved is tensor and isinstance(kept, Kept):  # such as a parameter
                    return registry.storages.stays(tensor)
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
        if may_copy or not (
            stays or tensor.requires_grad or registry.storages.has_made(tensor)
        ):  # it may change unseen
            copy = registry.keep_copy(tensor)
            self.alone += 0 if stays else copy.bytes
            return copy
        kept = keep_for_recipe(registry, tensor)
        self.alone += 0 if stays else _bytes(tensor)
        if isinstance(kept, Value) and kept.unread:
            registry.log.keep(kept, tensor)
        return kept

    def values_of(self, tensors: Sequence[Tensor]) -> list[Any]:
        return [self(tensor, may_keep=True) for tensor in tensors]

    def _available(self, tensor: Tensor) -> Value | None:
        """The value of an argument, if a recipe may read it; with a plan, it may be kept for that."""
        registry = self.registry
        if tensor is self.result:
            value = self.call.before or registry.names.find(tensor, overwrites=1)  # its copy's
            if value is not None and registry.is_lost(value, tensor):
                value = None
            elif value is not None:
                registry.note_read_when_overwritten(value, tensor)
        else:
            value = value_of(registry, tensor)
        if not registry.by_plan:
            return None if value is not None and value.unread else value
        if value is None and tensor is not self.result:
            is_large = MUCH * _bytes(tensor) > self.room  # e.g. a mask: a copy for each call would take too much
            if registry.storages.is_made(tensor) or (is_large and registry.storages.has_made(tensor)):
                value = registry.keep(tensor)
        if value is not None and value.unread:
            registry.log.keep(value, tensor)
        return value


class AdvisedFinder(Finder):
    """Finds what a recipe reads, and keeps it whatever it costs: an earlier pass has found that it is worth while.

    It copies no parameters for FSDP, as there is no advice about a network that it shards.
    """

    def __init__(
        self, registry: Registry, saved_leaves: Sequence[Tensor] = (), result: Any = None, before: Value | None = None
    ) -> None:
        """`saves`: what hooks have seen of the call. `before`: the value of the result before it was written over."""
        self.registry = registry
        self.saved_leaves = saved_leaves
        self.result = result
        self.before = before
        self.node_packs: Sequence[Any] | None = None  # what the result's node holds, once somebody asks
        self.is_noted = True  # something is saved or kept in the memory of what the call has written over

    def values_of(self, tensors: Sequence[Tensor]) -> list[Any]:
        by_id = self.registry.names.by_id  # the usual case here, as there may be many
        values: list[Any] = []
        for tensor in tensors:
            reference, version, value = by_id.get(id(tensor), NOT_KNOWN)
            is_known = value is not None and reference() is tensor and version == tensor._version
            values.append(value if is_known and tensor is not self.result else self(tensor))
        return values

    def __call__(self, tensor: Tensor, may_keep: bool = False) -> Any:
        registry = self.registry
        if tensor is self.result:  # its own value, if it is known already, would be its own input
            before = self.before or registry.names.find(tensor, overwrites=1)
            if before is None or (self.is_noted and registry.is_lost(before, tensor)):
                raise NotRepeated("its input is overwritten")
            return before
        reference, version, value = registry.names.by_id.get(id(tensor), NOT_KNOWN)
        if value is not None and reference() is tensor and version == tensor._version:
            return value
        kind = type(tensor)
        if kind is nn.Parameter:
            if MUCH * tensor.nbytes > self.result.nbytes or self._is_saved(tensor):
                return registry.storages.stays(tensor)
            return copied(tensor)
        node = tensor.grad_fn
        if (
            node is None
            or kind is not Tensor
            or tensor.layout is not torch.strided
            or registry.storages.exposed.by_address
        ):
            return self._of_another(tensor)
        if tensor._base is not None or type(node) in DERIVING or tensor.is_nested:
            return self._of_another(tensor)
        return registry.keep(tensor, True)

    def _is_saved(self, tensor: Tensor) -> bool:
        """Whether the call has saved a parameter: then it must not change before the backward pass anyway."""
        if self.node_packs is None:
            self.node_packs = self.saved_leaves or packs_of(self.result.grad_fn)
        for pack in self.node_packs:
            if pack is tensor:
                return True
        return False

    def _of_another(self, tensor: Tensor) -> Any:
        """What a recipe reads for a view, a tensor without a gradient, or another one that is not a usual result."""
        registry = self.registry
        needs_grad = tensor.requires_grad
        if registry.storages.may_change_unseen(tensor):
            raise NotRepeated("its input may change unseen")
        is_of_parameter = is_parameter(tensor)
        if needs_grad and not tensor.is_leaf and not is_of_parameter:
            return value_by_advice(registry, tensor) or registry.keep(tensor, True)
        if needs_grad and self._is_saved(tensor):
            return registry.storages.stays(tensor)
        value = None if needs_grad or tensor._base is None else value_by_advice(registry, tensor)
        if value is not None:
            return value
        if MUCH * _bytes(tensor) <= self.result.nbytes and (tensor.is_leaf or not needs_grad):
            return copied(tensor)
        if is_of_parameter:
            return keep_for_recipe(registry, tensor)
        return registry.keep(tensor, True) if needs_grad or registry.storages.has_made(tensor) else copied(tensor)


def packs_of(node: Any) -> Sequence[Any]:
    """What a node holds: tensors, those inside `Kept`, or other objects that hooks have packed."""
    if node is None:
        return ()
    return [pack.packed if type(pack) is Kept else pack for pack in packed_in_node(node)]


def _bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()
