"""Pack the tensors that autograd saves in a recorded pass: as they are, as shapes, or as values."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ...saved import Kept, TensorSpec, current_stream, is_ordinary
from ...torch_internals import address, without_function_modes
from ..held.calls import Call, Inside
from ..held.signs import Positive, Signs
from ..held.values import Again, Recipe, Saved, Value
from ..table.functions import Row
from .finder import derive_value
from .registry import NOT_KNOWN, Registry


def pack(registry: Registry, tensor: Tensor) -> Saved | Kept | TensorSpec:
    """The saved-tensor hook of a pass that is recorded by the rules."""
    call = registry.call
    if call is not None:
        by_id = registry.by_id
        is_known = id(tensor) in by_id or id(tensor._base) in by_id
        saved = make_holder(registry, tensor)
        call.packed.append((tensor, saved, is_known))
        return saved
    with without_function_modes():  # the recording sees no calls of ours
        saved = make_holder(registry, tensor)
    if isinstance(saved, Saved):
        registry.saved_outside.append(weakref.ref(saved))
    return saved


def make_holder(registry: Registry, tensor: Tensor) -> Saved | Kept | TensorSpec:
    """Make what autograd holds in place of a tensor that it saves: the tensor itself, only its shape, or its value."""
    call = registry.call or Call(type(None), Row(), (), {})  # outside of calls: an empty one
    call.save_count += 1
    row = call.row
    if registry.outer is None and is_simple(registry, tensor):
        return registry.kept_class(tensor, None)
    if not is_ordinary(tensor):
        kept = registry.kept_class(tensor, registry.outer)
        registry.log.note_subclass(kept, tensor)
        return kept
    if row.reads_shape_only is not None and tensor.requires_grad and row.reads_shape_only(call.args, call.kwargs):
        return TensorSpec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
    if row.narrow is None or tensor.dtype is not torch.int64:
        return _save_with_value(registry, tensor, call)
    value = registry.find_value(tensor)
    if value is None:
        indices = registry.keep_copy(tensor, row.narrow(call.args, call.kwargs))
        value = registry.remember(tensor, Value(Recipe(Again(Tensor.to, (indices, torch.int64)), tensor)))
    return Saved(value, registry.storages.memories, tensor)


def is_simple(registry: Registry, tensor: Tensor) -> bool:
    """Whether a saved tensor needs no value: parameters, their views, short vectors, and statistics of rows.

    Recipes read copies of these. So they need not notice when batch norms update running statistics, or views. The
    network's inputs have values.
    """
    base = tensor._base
    if not tensor.is_leaf:
        return isinstance(base, nn.Parameter)
    size = tensor.numel()
    if isinstance(tensor, nn.Parameter) or (tensor.ndim < 2 and size < registry.short_length):
        return True
    if tensor.ndim > 1 and tensor.size(-1) == 1 and size < registry.short_row_count:
        return True
    is_of_vector = base is not None and base.ndim < 2 and base.numel() < registry.short_row_count
    return is_of_vector and address(tensor.untyped_storage()) not in registry.storages.input_addresses


def make_sign_mask(registry: Registry, tensor: Tensor, positive: Positive | None) -> Value | None:
    """Keep only the sign mask of a saved tensor, and return its value; None if there can be none."""
    if positive is None or not is_ordinary(tensor):
        return None
    by_id = registry.by_id
    key = id(tensor), positive
    reference, version, value = by_id.get(key, NOT_KNOWN)
    if value is None or reference() is not tensor or version != tensor._version:
        value = Value(Signs(tensor, positive, None))
        by_id[key] = weakref.ref(tensor), tensor._version, value
    return value


def _save_with_value(registry: Registry, tensor: Tensor, call: Call) -> Saved:
    """What autograd holds for a tensor: its value, which is made if there is none yet."""
    row = call.row
    log = registry.log
    value = derive_value(registry, tensor)
    if value is None:
        value = _keep_for_views(registry, tensor, call)
    elif not value.consumer_count and value.is_unread:
        log.note(value, tensor)
    base: Any = tensor._base
    base_value = None if base is None else registry.find_value(base)
    if base_value is not None and base_value is not value and not base_value.consumer_count:
        if isinstance(base_value.source, Kept):
            log.note(base_value, base)  # the view is computed from it
    saved = Saved(value, registry.storages.memories, tensor)
    serves = row.result_serves is not None and row.result_serves(call.args, call.kwargs)
    if serves and (registry.by_plan or isinstance(value.source, Recipe)):
        call.replaceable.append(saved)
    elif row.positive is not None and value.positive in (None, row.positive):
        saved.reads_signs = True
        value.positive = row.positive
        value.stream = current_stream(tensor)
        value.sign_consumer_count += 1
        registry.sign_values.append(weakref.ref(value))
    return saved


def _keep_for_views(registry: Registry, tensor: Tensor, call: Call) -> Value:
    """Keep a tensor; if it is a view of its whole base, keep the base, so that other views can be made from it."""
    base: Any = tensor._base
    is_base = base is not None and base.numel() == tensor.numel() and registry.storages.is_made(base)
    kept = base if is_base else tensor
    value = registry.keep(kept)
    value.why = value.why or registry.log.why_kept(tensor)
    registry.log.note(value, kept)
    if call.row.inside:
        call.inside.append(Inside(value, call.save_count - 1, is_base))
    if not is_base:
        return value
    view_value = derive_value(registry, tensor)
    if view_value is None:  # a view that cannot be made again, such as a conjugate
        view_value = registry.keep(tensor)
        registry.log.note(view_value, tensor)
    return view_value
