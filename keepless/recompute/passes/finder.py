"""Find what recipes read: a value that is known, or derived from others, or a tensor that is kept for them.

A value is derived of a view, of a norm's output by its node, and of a copy made in a call. What it is computed from may
be kept for it.
"""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ...norms.backends.eager import normalised
from ...norms.bn_act import BatchNormActivation, is_node, recompute_output
from ...saved import ByStorage, Kept, copied, form_of, laid_out, view
from ...torch_internals import (
    SYNCHRONISED,
    argument_copied_by,
    changing_mode,
    node_class,
    node_number,
    packed_by,
    packed_by_function,
    single_tensors_packed_by,
)
from ..held.calls import Call
from ..held.values import Again, Recipe, Value, kept_bytes_below, saved_value
from ..table.rules import NotRepeated
from .advice import derived_from
from .registry import NOT_KNOWN, Registry, is_parameter

_OVERWRITTEN = "its input is overwritten"
MUCH = 16  # tensors this many times smaller than a result may be kept for its recipe
# With a plan, the source of a copy (e.g. a projection to q, k and v, copied in parts) is kept instead of the copy, if
# it has at most this many times the bytes: it may itself be recomputed.
_COPIES_ARE_WORTH = 4
DERIVING = {node_class(BatchNormActivation), SYNCHRONISED}  # nodes from which the values of results are derived


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
    values: list[Value] = field(default_factory=list)  # that were there for the recipe
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
        by_id = self.registry.by_id  # the usual case by advice, as there may be many
        values: list[Any] = []
        for tensor in tensors:
            reference, version, value = by_id.get(id(tensor), NOT_KNOWN)
            is_known = value is not None and reference() is tensor and version == tensor._version
            is_usual = is_known and self.room is None and tensor is not self.result
            values.append(value if is_usual else self(tensor, may_keep=True))
        return values

    def __call__(self, tensor: Tensor, may_keep: bool = False) -> Any:
        """What the recipe reads for an argument: see the class. `may_keep`: it may be kept though it is not small."""
        if self.room is not None:
            return self._find_argument(tensor, may_keep, self.room)
        registry = self.registry
        if tensor is self.result:  # its own value, if it is known already, would be its own input
            return self._value_before(tensor)
        reference, version, value = registry.by_id.get(id(tensor), NOT_KNOWN)
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
        """What the recipe reads for an argument. NotRepeated: it may change unseen, or is overwritten, or not kept.

        It is kept if it is much smaller than the `room` in bytes, or if it `may_keep`.
        """
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
        value = None if copies else self._find_or_keep_value(tensor)
        if value is not None:
            if not by_advice:
                self.values.append(value)
            return value
        if tensor is self.result:
            raise NotRepeated(_OVERWRITTEN)
        stays = is_parameter(tensor) or (tensor.requires_grad and tensor.is_leaf)
        is_small = MUCH * _storage_bytes(tensor) <= room
        if not (is_small or ((may_keep or stays) and not copies)):
            raise NotRepeated("its input is not kept")
        is_cheap_to_copy = is_small and (tensor.is_leaf or not tensor.requires_grad)
        if is_cheap_to_copy or not (stays or tensor.requires_grad or storages.is_made_without_gradient(tensor)):
            return self._copy(tensor, stays)  # also because the program may change it
        if not (stays or tensor.requires_grad):
            storages.teach_maker(tensor)
        return self._keep(tensor, stays)

    def _copy(self, tensor: Tensor, stays: bool) -> Any:
        """Copy an argument for the recipe. If the rules decide, the bytes count, unless the argument stays anyway."""
        if self.room is None:
            return copied(tensor)
        copy = self.registry.keep_copy(tensor)
        self.kept_bytes += 0 if stays else copy.bytes
        return copy

    def _keep(self, tensor: Tensor, stays: bool) -> Any:
        """Keep an argument for the recipe. If the rules decide, the bytes count, unless the argument stays anyway."""
        registry = self.registry
        if self.room is None:
            return _keep_for_recipe(registry, tensor) if is_parameter(tensor) else registry.keep_by_advice(tensor)
        kept = _keep_for_recipe(registry, tensor)
        self.kept_bytes += 0 if stays else _storage_bytes(tensor)
        if isinstance(kept, Value) and kept.is_unread:
            registry.log.note(kept, tensor)
        return kept

    def _find_or_keep_value(self, tensor: Tensor) -> Value | None:
        """The value of an argument, if a recipe may read it. With a plan, the argument may be kept for that."""
        registry = self.registry
        if self.room is None:
            may_follow = not tensor.is_leaf or (tensor._base is not None and not tensor.requires_grad)
            return derive_by_advice(registry, tensor) if may_follow else None
        value = self._value_before(tensor) if tensor is self.result else derive_value(registry, tensor)
        if value is not None and tensor is self.result:
            registry.note_read_when_overwritten(value, tensor)
        if not registry.by_plan:
            return None if value is not None and value.is_unread else value
        if value is None:
            is_made = registry.storages.is_made(tensor)
            is_large = MUCH * _storage_bytes(tensor) > self.room  # e.g. a mask, of which each call would keep a copy
            if is_made or (is_large and registry.storages.is_made_without_gradient(tensor)):
                if not is_made:
                    registry.storages.teach_maker(tensor)
                value = registry.keep(tensor)
        if value is not None and value.is_unread:
            registry.log.note(value, tensor)
        return value

    def _value_before(self, result: Tensor) -> Value:
        """The value of the result before the call has written over it. NotRepeated: it cannot be read any more."""
        value = self.before or self.registry.find_value(result, overwrites=1)  # its copy's
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


def _storage_bytes(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def derive_value(registry: Registry, tensor: Tensor) -> Value | None:
    """Find the value of a tensor, or derive it from others, and remember it. None if it is neither."""
    value = registry.find_value(tensor)
    if value is not None or tensor.is_leaf:
        return value
    derivation = _derivation(registry, tensor)
    if derivation is None:
        return None
    value = Value(Recipe(derivation, tensor)) if isinstance(derivation, Again) else derivation
    return registry.remember(tensor, value)


def derive_by_advice(registry: Registry, tensor: Tensor) -> Value | None:
    """`derive_value` for a call with advice: faster if the tensor, which has no value, is a view of one that has.

    Such a view shares the memory of its base, whose value is known in this version, so it needs no look at exposed
    memory; and entries of freed views may stay until the pass ends. A view that sizes and strides do not describe has
    no recipe here: None, and it is kept.
    """
    base = tensor._base
    if base is None:
        return derive_value(registry, tensor)
    by_id = registry.by_id
    reference, version, base_value = by_id.get(id(base), NOT_KNOWN)
    if base_value is None or reference() is not base or version != tensor._version:
        return derive_value(registry, tensor)
    form = form_of(tensor, base)
    if form is None:
        return None
    value = Value(Recipe(Again(view, (base_value, *form)), tensor))
    by_id[id(tensor)] = weakref.ref(tensor), tensor._version, value
    return value


def _keep_for_recipe(registry: Registry, tensor: Tensor) -> Value | Kept:
    """Return what a recipe reads for a tensor: its value, or the tensor itself, which is kept for the recipe."""
    if registry.copy_parameters and is_parameter(tensor):
        return Kept(copied(tensor), None)
    value = derive_value(registry, tensor)
    if value is None and isinstance(tensor, nn.Parameter):
        return registry.storages.keep_in_place(tensor)
    return value or registry.keep(tensor)


def _derivation(registry: Registry, tensor: Tensor) -> Again | Value | None:
    """How to recompute a tensor that is no call's result, or the value of another tensor that equals it."""
    storages = registry.storages
    node: Any = tensor.grad_fn
    if not storages.is_made(tensor):
        return None
    if tensor._is_view():
        return _of_base(registry, tensor)
    if storages.exposed.by_address and storages.may_change_unseen(tensor):
        return None
    if is_node(node):
        return _of_our_norm(registry, tensor, node) if node.strategy.recompute_output else None
    if tensor._version != 0:
        return None
    if type(node) is SYNCHRONISED:
        return _of_synchronised_norm(registry, node)
    return None if registry.call is None else _of_copied_argument(registry, tensor, node, registry.call)


def _of_base(registry: Registry, tensor: Tensor) -> Again | Value | None:
    """The view of a base that has a value; or this value, if a subclass has returned a view of a whole result."""
    base: Any = tensor._base
    form = form_of(tensor, base)
    value = None if form is None else derive_value(registry, base)
    if form is None or value is None:
        return None
    # Tensor subclasses return views of whole results, but not when a checkpoint repeats the pass, which must save the
    # same tensors.
    is_whole = form == (base.stride(), base.shape, base.stride(), 0)
    return value if registry.outer is not None and is_whole else Again(view, (value, *form))


def _of_our_norm(registry: Registry, tensor: Tensor, node: Any) -> Again | None:
    """The output of a norm that computes it again in its own backward pass, such as `CheckpointedABN`."""
    if isinstance(node.output_version, type):
        registry.refused_mode = node.output_version
    if tensor._version != node.output_version:
        return None
    exposed = registry.storages.exposed
    packs = [Kept(pack, None) if isinstance(pack, Tensor) else pack for pack in packed_by_function(node)]
    if not packs or not all([hasattr(pack, "get") for pack in packs]):  # hooks of the program have packed them
        return Again(checkpointed_output, (node, None, (), exposed))
    x = _argument_in(registry, packs[0])
    return None if x is None else Again(checkpointed_output, (node, x, packs[1:], exposed))


def checkpointed_output(node: Any, x: Tensor | None, vectors: Sequence[Any], exposed: ByStorage[bool]) -> Tensor:
    """The output of a checkpointed norm.

    `x`: its argument; None if hooks of the program have packed it. `vectors`: what else the node has saved.
    `exposed`: of the pass. If it is not empty, the node may read another argument.
    """
    if x is not None and (exposed.by_address or not packed_by_function(node)):  # a backward pass has freed them
        return recompute_output(node, [x, *[vector.get() for vector in vectors]])
    return recompute_output(node)


def _of_synchronised_norm(registry: Registry, node: Any) -> Again | None:
    """The output of `nn.SyncBatchNorm`. Its node saves all but the bias, which is found only if it is trained."""
    mode = changing_mode()
    if mode is not None:
        registry.refused_mode = mode
        return None
    packed = packed_by_function(node)
    x = _argument_in(registry, packed[0])
    weight, mean, invstd = map(saved_value, packed[1:4])
    bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
    if bias is None or not all([isinstance(saved, (Value, Kept)) for saved in (x, mean, invstd)]):
        return None
    return Again(normalised, (x, mean, invstd, weight, _keep_for_recipe(registry, bias)), fresh=True)


def _argument_in(registry: Registry, packed: Any) -> Any:
    """What a recipe reads for an argument that a norm's node holds; None if its values may change unseen."""
    storages = registry.storages
    value = saved_value(packed)
    kept = value.source if isinstance(value, Value) else value
    if type(kept) is not Kept or kept.hooks is not None:
        return value
    if storages.exposed.by_address and storages.may_change_unseen(kept.packed):
        return None
    if value is kept:
        value = Value(kept)
        storages.unnoted.append(value)
    return value


def _of_copied_argument(registry: Registry, tensor: Tensor, node: Any, call: Call) -> Again | Value | None:
    """A copy of an argument, made inside the running call: cast by autocast, reshaped by matrix products, or made by
    `silu_` before it overwrites it.
    """
    if node_number(node) < call.first_node_number:  # a copy that the program made, perhaps of an earlier version
        return None
    argument = argument_copied_by(node, call.arguments)
    if argument is None or argument.numel() != tensor.numel() or argument.device != tensor.device:
        return None
    value = _source_of_copy(registry, argument, tensor)
    is_reshaped = type(node).__name__ == "UnsafeViewBackward0"
    derivation: Again | Value | None = None
    if not is_reshaped and argument.dtype == tensor.dtype:
        derivation = _of_equal_copy(registry, value, argument, tensor)
    elif value is not None and argument.dtype == tensor.dtype:
        derivation = Again(Tensor.reshape, (value, tensor.shape))
    elif value is not None and not is_reshaped:
        derivation = Again(Tensor.to, (value, tensor.dtype))
    if derivation is not None:
        call.copied[id(tensor)] = argument
    return derivation


def _source_of_copy(registry: Registry, argument: Tensor, copy: Tensor) -> Value | None:
    """The value of an argument, if keeping it takes no more bytes than its copy (with a plan: a few times more).

    By advice it is kept for the copy, if it has no value yet.
    """
    value = derive_value(registry, argument)
    call = registry.call
    if call is not None and call.is_advised and call.site.advice & derived_from(call.arguments, argument):
        # An earlier pass has found that it is worth while.
        keeps_argument = value is None and not (is_parameter(argument) or call.overwrites)
        return registry.keep(argument) if keeps_argument else value
    registry.storages.note_unnoted()
    most = _COPIES_ARE_WORTH * copy.nbytes if registry.by_plan else copy.nbytes
    return None if value is None or kept_bytes_below([value], only_unread=True) > most else value


def _of_equal_copy(registry: Registry, value: Value | None, argument: Tensor, copy: Tensor) -> Again | Value:
    """The value of a copy. If nothing else keeps the argument, it is kept in the copy instead.

    Kernels round otherwise for other strides, so argument and copy are each restored with their own.
    """
    call = registry.call
    registry.storages.note_unnoted()
    is_fixed = value is not None and registry.is_fixed(value, argument)
    is_alike = copy.stride() == argument.stride()
    if value is None or is_fixed or (value.is_unread and not is_alike and call and call.overwrites):
        kept = registry.keep(copy)
        if is_alike:
            registry.remember(argument, kept)
        elif value is None:
            registry.remember(argument, Value(Recipe(Again(laid_out, (kept, argument.stride())), argument)))
        return kept
    if not is_alike:
        return Again(laid_out, (value, copy.stride()))
    registry.move_to_copy(value, copy)
    return value
