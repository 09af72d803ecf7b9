"""Sign masks: which values of a tensor are positive, in one bit each."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ...saved import Kept, TensorSpec, current_stream, laid_out, wait_for
from ...torch_internals import Hooks, without_function_modes

Positive = Callable[[Tensor], Tensor]  # which values count as positive: activations differ in NaN

# Eight values are packed as the eight bytes of an integer.
_ONES = 0x0101010101010101  # 1 in each byte
_ONE_EACH = 0x8040201008040201 - 2**64  # bit 0 of byte 0, bit 1 of byte 1, ...
_GATHER = 0x0102040810204080  # moves bit 0 of byte i to bit i of the highest byte


def positive_or_nan(tensor: Tensor) -> Tensor:
    """For ReLU, which passes on the gradient where the input is NaN."""
    return (tensor <= 0).logical_not_()


def positive(tensor: Tensor) -> Tensor:
    """For leaky ReLU, which scales the gradient where the input is NaN, as for negative values."""
    return tensor > 0


def pack_signs(tensor: Tensor, positive_of: Positive) -> Tensor:
    """The sign mask, uint8 ((count + 7) // 8,). `positive_of`: one of the functions above."""
    values = tensor if _is_dense(tensor.shape, tensor.stride()) else tensor.contiguous()
    count = values.numel()
    mask = positive_of(values).as_strided((count,), (1,))
    eights = F.pad(mask, (0, -count % 8)).view(torch.int64) if count % 8 else mask.view(torch.int64)
    return eights.mul_(_GATHER).bitwise_right_shift_(56).to(torch.uint8)


def unpack_signs(signs: Tensor, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """1 where the packed tensor is positive, otherwise 0. The strides are those of that tensor, unless it had gaps."""
    if not _is_dense(shape, stride):
        stride = torch.empty(shape, device="meta").stride()
    eights = signs.to(torch.int64).mul_(_ONES).bitwise_and_(_ONE_EACH)
    eights.add_(_ONES * 127).bitwise_right_shift_(7).bitwise_and_(_ONES)  # 1 in each byte that is not 0
    return eights.view(torch.uint8).as_strided(shape, stride).to(dtype)


def unpacking_bytes(tensor: Tensor) -> int:
    """Temporary bytes of `unpack_signs`, besides its result: one for each value."""
    return 8 * -(-tensor.numel() // 8)


def _is_dense(shape: torch.Size, stride: tuple[int, ...]) -> bool:
    """Whether a tensor's elements have no gaps in memory, in any order of its dimensions."""
    return torch.ops.aten.is_non_overlapping_and_dense(torch.empty_strided(shape, stride, device="meta"))


class Signs:
    """A sign mask in place of a tensor."""

    __slots__ = ("bits", "like", "stream")

    def __init__(self, tensor: Tensor, positive_of: Positive, hooks: Hooks | None):
        self.like = TensorSpec(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        self.stream = current_stream(tensor)
        with torch.inference_mode(False), torch.no_grad(), without_function_modes():  # perhaps in a later call's modes
            self.bits = Kept(pack_signs(tensor.detach(), positive_of), hooks)

    @property
    def bytes(self) -> int:
        return -(-self.like.shape.numel() // 8)

    def get(self) -> Tensor:
        """1 where the tensor is positive, otherwise 0."""
        bits = self.bits.get()  # outside: a checkpoint's hook runs the network again, and this is recorded
        with torch.no_grad(), without_function_modes():
            wait_for(self.stream, bits)
            tensor = unpack_signs(bits, self.like.shape, self.like.stride, self.like.dtype)
            return laid_out(tensor, self.like.stride)
