"""Values that the node of a tensor tells, whichever call made it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules._functions import SyncBatchNorm

from .bn_act import is_node, recompute_output
from .followed import normalised, saved_value
from .values import Recipe, Value, laid_out

if TYPE_CHECKING:
    from .recording import Recording

_PLAIN = (Tensor, nn.Parameter, FakeTensor)  # other subclasses may compute anything

_SYNCHRONISED = SyncBatchNorm._backward_cls


def is_ordinary(tensor: Tensor) -> bool:
    """Whether a tensor has memory and versions. Sparse, nested, batched and inference tensors lack one of them."""
    return type(tensor) in _PLAIN and torch._C._has_storage(tensor) and not tensor.is_inference()


def value_by_node(recording: "Recording", tensor: Tensor, node: Any) -> Value | None:
    """The value of a tensor that its node, or the one before, tells how to compute from what is kept."""
    if tensor._is_view():
        return _of_view(recording, tensor)
    if is_node(node):
        if node.strategy.recompute_output and tensor._version == node.output_version:
            return Value(Recipe(recompute_output, (node,), tensor))  # the node holds the result as well
    elif tensor._version:
        return None
    elif type(node) is _SYNCHRONISED:
        return _of_synchronised_norm(recording, tensor, node)
    elif recording.arguments:
        name = type(node).__name__
        if name in ("ToCopyBackward0", "CloneBackward0"):
            return _of_copied_argument(recording, tensor, node)
        if name == "UnsafeViewBackward0":
            return _of_reshaped_argument(recording, tensor, node)
    return None


def _of_view(recording: "Recording", tensor: Tensor) -> Value | None:
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
    """A view of a tensor that was computed again, maybe with other strides than it had."""
    base = laid_out(base, strides)
    return base.as_strided(shape, stride, base.storage_offset() + offset)


def _of_synchronised_norm(recording: "Recording", tensor: Tensor, node: Any) -> Value | None:
    """The output of `nn.SyncBatchNorm`, whose node has everything but the bias, unless that is frozen."""
    x, weight, mean, invstd, *_ = (saved_value(saved) for saved in node._raw_saved_tensors)
    bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
    if bias is None:
        return None
    return Value(Recipe(normalised, (x, mean, invstd, weight, recording.lend(bias)), tensor, fresh=True))


def _of_copied_argument(recording: "Recording", tensor: Tensor, node: Any) -> Value | None:
    """A copy made inside the running call: autocast converts arguments, silu_ copies the one that it overwrites."""
    argument = _argument_copied_by(recording, node)
    if argument is None or argument.shape != tensor.shape or argument.device != tensor.device:
        return None
    value = recording.value_of(argument)
    if argument.dtype == tensor.dtype:
        return value or recording.known.remember(argument, recording.keep(tensor))
    return None if value is None else Value(Recipe(Tensor.to, (value, tensor.dtype), tensor))


def _of_reshaped_argument(recording: "Recording", tensor: Tensor, node: Any) -> Value | None:
    """A copy in another shape, made inside the running call: matrix products want rows that follow one another."""
    copy = node.next_functions[0][0]
    argument = _argument_copied_by(recording, copy) if type(copy).__name__ == "CloneBackward0" else None
    if argument is None or argument.numel() != tensor.numel() or argument.dtype != tensor.dtype:
        return None
    value = recording.value_of(argument)
    return None if value is None else Value(Recipe(Tensor.reshape, (value, tensor.shape), tensor))


def _argument_copied_by(recording: "Recording", node: Any) -> Tensor | None:
    """The argument of the running call that a node works on."""
    source, number = node.next_functions[0]
    for argument in recording.arguments:
        if isinstance(argument, Tensor) and argument.grad_fn is source and argument.output_nr == number:
            return argument
    return None
