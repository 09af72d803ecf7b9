"""Derive the value of a tensor from others: of a view, of a norm's output by its node, or of a copy made in a call.

What such a value is computed from may be kept for it.
"""

import weakref
from collections.abc import Sequence
from typing import Any

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
    packed_by_function,
)
from ..held.calls import Call
from ..held.values import Again, Recipe, Value, kept_bytes_below, saved_value
from .advice import derived_from
from .registry import NOT_KNOWN, Registry, is_parameter

# With a plan, the source of a copy (e.g. a projection to q, k and v, copied in parts) is kept instead of the copy, if
# it has at most this many times the bytes: it may itself be recomputed.
_COPIES_ARE_WORTH = 4
DERIVING = {node_class(BatchNormActivation), SYNCHRONISED}  # nodes from which the values of results are derived


def value_of(registry: Registry, tensor: Tensor) -> Value | None:
    """The value of a tensor, if it is kept already or can be computed from others; otherwise None."""
    value = registry.names.find(tensor)
    if value is not None or tensor.is_leaf:
        return value
    derivation = _derivation(registry, tensor)
    if derivation is None:
        return None
    value = Value(Recipe(derivation, tensor)) if isinstance(derivation, Again) else derivation
    return registry.remember(tensor, value)


def value_by_advice(registry: Registry, tensor: Tensor) -> Value | None:
    """`value_of` for calls with advice: faster if the tensor is a view of one that has a value."""
    base = tensor._base
    if base is None:
        return value_of(registry, tensor)
    by_id = registry.names.by_id
    reference, version, base_value = by_id.get(id(base), NOT_KNOWN)
    if base_value is None or reference() is not base or version != tensor._version:
        return value_of(registry, tensor)
    form = form_of(tensor, base)
    if form is None:
        return None
    value = Value(Recipe(Again(view, (base_value, *form)), tensor))
    by_id[id(tensor)] = weakref.ref(tensor), tensor._version, value
    return value


def recipe_input(registry: Registry, tensor: Tensor) -> Value | Kept:
    """What a recipe reads for a tensor: its value. If it has none, it is kept for the recipe."""
    if registry.copy_parameters and is_parameter(tensor):
        return Kept(copied(tensor), None)
    value = value_of(registry, tensor)
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
    base = tensor._base
    form = None if base is None else form_of(tensor, base)
    if base is None or form is None:
        return None
    value = value_of(registry, base)
    if value is None:
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
    return Again(normalised, (x, mean, invstd, weight, recipe_input(registry, bias)), fresh=True)


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
    value = _smaller_value_of(registry, argument, tensor)
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


def _smaller_value_of(registry: Registry, argument: Tensor, copy: Tensor) -> Value | None:
    """The value of an argument, if keeping it takes no more bytes than its copy (with a plan: a few times more)."""
    value = value_of(registry, argument)
    call = registry.call
    if call is not None and call.is_advised and call.site.advice & derived_from(call.arguments, argument):
        # An earlier pass has found that it is worth while.
        keeps_argument = value is None and not (is_parameter(argument) or call.overwrites)
        return registry.keep(argument) if keeps_argument else value
    registry.storages.note_all()
    most = _COPIES_ARE_WORTH * copy.nbytes if registry.by_plan else copy.nbytes
    return None if value is None or kept_bytes_below([value], only_unread=True) > most else value


def _of_equal_copy(registry: Registry, value: Value | None, argument: Tensor, copy: Tensor) -> Again | Value:
    """The value of a copy. If nothing else keeps the argument, it is kept in the copy instead.

    Kernels round otherwise for other strides, so argument and copy are each restored with their own.
    """
    call = registry.call
    registry.storages.note_all()
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
