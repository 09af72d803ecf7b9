"""Triton kernels that pack the signs of a tensor into one bit each, or unpack them, in one pass over memory.

Elements are taken in memory order. Each byte holds eight signs, the first in its lowest bit.
"""

# Triton reads a kernel's annotations as types to compile for, so only compile-time constants have them.
# mypy: allow-untyped-defs

import triton
import triton.language as tl
from torch import Tensor

BYTES = 256  # bytes of signs per program, i.e. 2048 elements


@triton.jit
def _pack_kernel(values, signs, count, NAN_IS_POSITIVE: tl.constexpr, BLOCK: tl.constexpr):
    """Write which values are positive. `count`: number of elements."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)[None, :]
    place = byte[:, None] * 8 + bit
    value = tl.load(values + place, place < count, 0.0)
    if value.dtype != tl.float64:  # exact except for float64, whose tiny values would become 0
        value = value.to(tl.float32)
    positive = value > 0
    if NAN_IS_POSITIVE:
        positive = positive | (value != value)
    packed = tl.sum(positive.to(tl.int32) << bit, axis=1)
    tl.store(signs + byte, packed.to(tl.uint8), byte * 8 < count)


@triton.jit
def _unpack_kernel(signs, values, count, BLOCK: tl.constexpr):
    """Write 1 for each positive value, and 0 for others."""
    byte = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 8)[None, :]
    place = byte[:, None] * 8 + bit
    packed = tl.load(signs + byte, byte * 8 < count, 0).to(tl.int32)
    ones = (packed[:, None] >> bit) & 1
    tl.store(values + place, ones.to(tl.float32).to(values.dtype.element_ty), place < count)


def pack(values: Tensor, signs: Tensor, nan_is_positive: bool) -> None:
    """Write the signs of `values`, which must have no gaps in memory, to a vector of (count + 7) // 8 bytes."""
    count = values.numel()
    _pack_kernel[triton.cdiv(count, 8 * BYTES),](values, signs, count, NAN_IS_POSITIVE=nan_is_positive, BLOCK=BYTES)


def unpack(signs: Tensor, values: Tensor) -> None:
    """Write 1 or 0 to `values`, which must have no gaps in memory."""
    count = values.numel()
    _unpack_kernel[triton.cdiv(count, 8 * BYTES),](signs, values, count, BLOCK=BYTES)
