"""Signs in one bit each, and the memory of what is kept."""

import numpy as np
import pytest
import torch
from torch import Tensor

from keepless.recompute.held.signs import pack_signs, positive, positive_or_nan, unpack_signs
from keepless.recompute.held.values import Value
from keepless.saved import Kept
from keepless.torch_internals import address


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("positive_of", [positive, positive_or_nan])
def test_signs_are_packed_in_one_bit_each_and_unpacked_in_the_order_of_memory(positive_of, dtype):
    """Any order and number of elements, gaps, zeros of both signs, NaN and infinities."""
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64).to(dtype)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf])
    for tensor in (x, x.to(memory_format=torch.channels_last), x[:, :, ::2], x[:1, :1, :1, :1], x.transpose(0, 3)):
        packed = pack_signs(tensor, positive_of)
        ones = unpack_signs(packed, tensor.shape, tensor.stride(), dtype)
        assert torch.equal(ones, positive_of(tensor).to(dtype))
        if tensor.is_contiguous():
            bits = np.packbits(positive_of(tensor).flatten().numpy(), bitorder="little")
            assert ones.is_contiguous() and torch.equal(packed, torch.from_numpy(bits))
        elif tensor.numel() == x.numel():
            assert ones.stride() == tensor.stride()  # dense: nothing is copied into another order


def test_another_tensor_at_the_address_of_a_freed_one_is_not_its_memory():
    tensor = torch.ones(2)
    place = address(tensor.untyped_storage())
    value = Value(Kept(tensor, (Tensor.clone, Tensor.clone)), place)
    assert value.reads_storage(place)
    del tensor
    assert not value.reads_storage(place)
