"""Values that follow from autograd's nodes, not from calls: of views, copies and norms with nodes of their own."""

from typing import Any, Protocol

import torch
from torch import Tensor

from ..norms.bn_act import BatchNormActivationBackward, is_node, recompute_output
from ..saved import Kept, is_ordinary
from ..torch_internals import address, is_synchronised_norm, packed_by_function
from .known_values import KnownValues
from .rules import normalised, saved_value
from .values import Recipe, Value, laid_out, unread_bytes


class Recorded(Protocol):
    """What a `Recording` knows."""

    known: KnownValues
    arguments: tuple[Any, ...]  # of the call that is running

    def value_of(self, tensor: Tensor) -> Value | None: ...

    def keep(self, tensor: Tensor) -> Value: ...

    def lend(self, tensor: Tensor) -> Value: ...

    def copied(self, value: Value, tensor: Tensor) -> None: ...


def value_by_node(recording: Recorded, tensor: Tensor, node: Any) -> Value | None:
    """Recover a tensor's value from its autograd node (views, casts, SyncBatchNorm)."""
    if tensor._is_view():
        return _of_view(recording, tensor)
    if is_node(node):
        if node.strategy.recompute_output and tensor._version == node.output_version:
            packed = packed_by_function(node)
            kept = saved_value(packed[0]) if packed else None
            return Value(Recipe(_checkpointed_output, (node, kept), tensor))
    elif tensor._version:
        return None
    elif is_synchronised_norm(node) and (packed := packed_by_function(node)):
        return _of_synchronised_norm(recording, tensor, node, packed)
    elif recording.arguments:
        name = type(node).__name__
        if name in ("ToCopyBackward0", "CloneBackward0"):
            return _of_copied_argument(recording, tensor, node)
        if name == "UnsafeViewBackward0":
            return _of_reshaped_argument(recording, tensor, node)
    return None


def _checkpointed_output(node: BatchNormActivationBackward, kept: Tensor | None) -> Tensor:
    """The output of a `CheckpointedABN`, which its node also holds while it is read. `kept`: what the node saved.

    The node finds that by itself; as an argument it is known to be needed, and is computed before if it is not kept.
    """
    return recompute_output(node)


def _of_view(recording: Recorded, tensor: Tensor) -> Value | None:
    base = tensor._base
    if base is None or not is_ordinary(base) or tensor.dtype != base.dtype:
        return None
    if tensor.is_conj() or tensor.is_neg() or base.is_conj() or base.is_neg():
        return None
    if (value := recording.value_of(base)) is None:
        return None
    offset = tensor.storage_offset() - base.storage_offset()
    return Value(Recipe(_view, (value, base.stride(), tensor.shape, tensor.stride(), offset), tensor))


def _view(base: Tensor, strides: tuple[int, ...], shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    """The same view of a tensor that was computed again, perhaps with other strides."""
    base = laid_out(base, strides)
    return base.as_strided(shape, stride, base.storage_offset() + offset)


def _of_synchronised_norm(recording: Recorded, tensor: Tensor, node: Any, packed: tuple[Any, ...]) -> Value | None:
    """The output of `nn.SyncBatchNorm`: its node has everything but the bias, which only a trained one leads to."""
    x, weight, mean, invstd, *_ = map(saved_value, packed)
    if not all(isinstance(saved, (Value, Kept)) for saved in (x, mean, invstd)):
        return None
    bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
    if bias is None:
        return None
    return Value(Recipe(normalised, (x, mean, invstd, weight, recording.lend(bias)), tensor, fresh=True))


def _of_copied_argument(recording: Recorded, tensor: Tensor, node: Any) -> Value | None:
    """A copy of an argument, made inside the running call: by autocast, or by `silu_` before it overwrites it."""
    argument = _argument_copied_by(recording, node)
    if argument is None or argument.shape != tensor.shape or argument.device != tensor.device:
        return None
    value = _smaller_value_of(recording, argument, tensor)
    if argument.dtype == tensor.dtype:
        if value is not None and (value.unread or not value.reads_storage(address(argument.untyped_storage()))):
            recording.copied(value, tensor)
            return value
        return recording.known.remember(argument, recording.keep(tensor))
    return None if value is None else Value(Recipe(Tensor.to, (value, tensor.dtype), tensor))


def _of_reshaped_argument(recording: Recorded, tensor: Tensor, node: Any) -> Value | None:
    """A contiguous, reshaped copy of an argument, made inside the running call, as matrix products do."""
    copy = node.next_functions[0][0]
    argument = _argument_copied_by(recording, copy) if type(copy).__name__ == "CloneBackward0" else None
    if argument is None or argument.numel() != tensor.numel() or argument.dtype != tensor.dtype:
        return None
    value = _smaller_value_of(recording, argument, tensor)
    return None if value is None else Value(Recipe(Tensor.reshape, (value, tensor.shape), tensor))


def _smaller_value_of(recording: Recorded, argument: Tensor, copy: Tensor) -> Value | None:
    """The value of an argument, unless more would be kept for it alone than the copy has."""
    value = recording.value_of(argument)
    return None if value is None or unread_bytes([value]) > copy.nbytes else value


def _argument_copied_by(recording: Recorded, node: Any) -> Tensor | None:
    """The argument of the running call that is a node's input."""
    source, number = node.next_functions[0]
    for argument in recording.arguments:
        if isinstance(argument, Tensor) and argument.grad_fn is source and argument.output_nr == number:
            return argument
    return None
