"""Values that the node of a tensor tells, whichever call made it."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules._functions import SyncBatchNorm

from .bn_act import is_node, recompute_output
from .followed import normalised
from .values import Recipe, Value, laid_out

if TYPE_CHECKING:
    from .recording import Recording

PLAIN = (Tensor, FakeTensor)  # other subclasses may compute anything

_SYNCHRONISED = SyncBatchNorm._backward_cls


def value_by_node(recording: "Recording", tensor: Tensor, node: Any) -> Value | None:
    """The value of a tensor that its node, or the one before, tells how to compute from what is kept."""
    if tensor._is_view():
        return _of_view(recording, tensor)
    if is_node(node):
        if node.strategy.recompute_output and tensor._version == node.output_version:
            return Value(Recipe(recompute_output, (node,), tensor, new=True))
    elif tensor._version:
        return None
    elif type(node) is _SYNCHRONISED:
        return _of_synchronised_norm(recording, tensor, node)
    elif recording.arguments:
        name = type(node).__name__
        if name == "ToCopyBackward0":
            return _of_copied_argument(recording, tensor, node)
        if name == "CloneBackward0":
            return _of_copied_argument(recording, tensor, node) or _of_copied_attention(tensor, node)
    return None


def _of_view(recording: "Recording", tensor: Tensor) -> Value | None:
    base = tensor._base
    if base is None or type(base) not in PLAIN or tensor.dtype != base.dtype:
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
    x, weight, mean, invstd, *_ = (saved.data for saved in node._raw_saved_tensors)
    bias = None if weight is None else getattr(node.next_functions[2][0], "variable", None)
    if bias is None:
        return None
    return Value(Recipe(normalised, (x, mean, invstd, weight, recording.lend(bias)), tensor, new=True))


def _of_copied_argument(recording: "Recording", tensor: Tensor, node: Any) -> Value | None:
    """A copy made inside the running call: autocast converts arguments, silu_ copies the one that it overwrites."""
    source, number = node.next_functions[0]
    for argument in recording.arguments:
        if not isinstance(argument, Tensor) or argument.grad_fn is not source or argument.output_nr != number:
            continue
        if argument.shape != tensor.shape or argument.device != tensor.device:
            continue
        value = recording.value_of(argument)
        if argument.dtype == tensor.dtype:
            return value or recording.known.remember(argument, recording.keep(tensor))
        if value is not None:
            return Value(Recipe(Tensor.to, (value, tensor.dtype), tensor))
    return None


def _of_copied_attention(tensor: Tensor, node: Any) -> Value | None:
    """What `F.multi_head_attention_forward` gives its last layer: the attention's kept output, permuted and copied."""
    permuted = node.next_functions[0][0]
    if type(permuted).__name__ != "PermuteBackward0":
        return None
    attention, number = permuted.next_functions[0]
    kept = getattr(attention, "_raw_saved_output", None)
    dims = permuted._saved_dims
    if number != 0 or kept is None or not type(attention).__name__.startswith("ScaledDotProduct"):
        return None
    if not isinstance(kept.data, Value) or sorted(dims) != list(range(tensor.dim())):
        return None
    return Value(Recipe(_permuted, (kept.data, dims), tensor, new=True))


def _permuted(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.permute(dims).clone(memory_format=torch.contiguous_format)
