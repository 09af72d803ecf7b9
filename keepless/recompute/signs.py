"""Store which values of a tensor are positive, in one bit each: by Triton kernels on CUDA, elsewhere by operators."""

import importlib.util
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from ..norms.backends import triton_launches
from ..saved import Kept, current_stream, laid_out, wait_for
from ..torch_internals import Hooks, dispatch_modes_on, without_function_modes

Positive = Callable[[Tensor], Tensor]  # which values count as positive: activations differ in NaN


def positive_or_nan(tensor: Tensor) -> Tensor:
    """For ReLU, which passes on the gradient where the input is NaN."""
    return (tensor <= 0).logical_not_()


def positive(tensor: Tensor) -> Tensor:
    """For leaky ReLU, which scales the gradient where the input is NaN, as for negative values."""
    return tensor > 0


def pack_signs(tensor: Tensor, positive_of: Positive) -> Tensor:
    """The signs, uint8 ((count + 7) // 8,). `positive_of`: one of the functions above."""
    if _kernels_run_on(tensor):
        values = tensor if _is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()
        signs = torch.empty(-(-tensor.numel() // 8), dtype=torch.uint8, device=tensor.device)
        with torch.cuda.device_of(tensor):
            _kernels().pack(values, signs, positive_of is positive_or_nan)
        return signs
    found = positive_of(tensor).flatten()
    found = F.pad(found, (0, -found.numel() % 8)).view(-1, 8)
    return (found * _bits(tensor.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(signs: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """1 where the packed tensor is positive, otherwise 0. The strides are those of that tensor, unless it had gaps."""
    if _kernels_run_on(signs):
        if not _is_dense(shape, stride):
            stride = torch.empty(shape, device="meta").stride()
        values = torch.empty_strided(shape, stride, dtype=dtype, device=signs.device)
        with torch.cuda.device_of(signs):
            _kernels().unpack(signs, values)
        return values
    ones = (signs.unsqueeze(-1) & _bits(signs.device)).ne(0).flatten()
    return ones[: shape.numel()].view(shape).to(dtype)


def unpacking_bytes(tensor: Tensor) -> int:
    """Temporary bytes of `unpack_signs`, besides its result: without kernels, two bytes for each value."""
    return 0 if _has_kernels(tensor) else 16 * -(-tensor.numel() // 8)


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and importlib.util.find_spec("triton") is not None


def _kernels_run_on(tensor: Tensor) -> bool:
    """Whether to use kernels: not under dispatch modes, which cannot see inside a kernel."""
    if not _has_kernels(tensor) or type(tensor) is not Tensor or dispatch_modes_on():
        return False
    return tensor.numel() > 0 and triton_launches(tensor.device)


def _kernels() -> ModuleType:
    from . import sign_kernels  # imports triton

    return sign_kernels


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements have no gaps in memory, in any order of its dimensions."""
    size = 1
    for step, length in sorted((step, length) for step, length in zip(stride, shape, strict=True) if length != 1):
        if step != size:
            return False
        size *= length
    return True


def _bits(device: torch.device) -> Tensor:
    """1, 2, 4 … 128."""
    return torch.ones(8, dtype=torch.uint8, device=device) << torch.arange(8, dtype=torch.uint8, device=device)


class ShapeOnly:
    """Saved in place of a tensor of which the gradient needs the shape and strides, but not the values."""

    __slots__ = ("__weakref__", "device", "dtype", "shape", "stride")

    def __init__(self, tensor: Tensor):
        self.shape, self.stride, self.dtype, self.device = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def get(self) -> Tensor:
        """A tensor with arbitrary values. The same strides select the same algorithm."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


class Signs:
    """Which values of a tensor are positive, in one bit each."""

    __slots__ = ("bits", "like", "stream")

    def __init__(self, tensor: Tensor, positive_of: Positive, hooks: Hooks | None):
        self.like, self.stream = ShapeOnly(tensor), current_stream(tensor)
        with torch.no_grad(), without_function_modes():
            self.bits = Kept(pack_signs(tensor.detach(), positive_of), hooks)

    @property
    def bytes(self) -> int:
        return -(-self.like.shape.numel() // 8)

    def get(self) -> Tensor:
        """1 where the tensor is positive, otherwise 0."""
        with torch.no_grad(), without_function_modes():
            bits = self.bits.get()
            wait_for(self.stream, bits)
            tensor = unpack_signs(bits, self.like.shape, self.like.stride, self.like.dtype)
            return laid_out(tensor, self.like.stride)
