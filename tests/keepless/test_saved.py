"""Copies of tensors that recipes read."""

import pytest
import torch

from keepless.saved import copied
from tests.keepless.recompute.programs import WithMeta

LAYOUTS = {
    "with gaps": torch.randn(8, 16)[:, ::2],
    "transposed": torch.randn(8, 16).t(),
    "expanded": torch.randn(8, 1).expand(8, 16),
    "of one column": torch.randn(8, 16)[:, :1],
    "with metadata": torch.randn(8, 16)[:, ::2].as_subclass(WithMeta),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_copy_has_equal_values_and_strides_and_is_plain(name):
    """Matrix products round otherwise for other strides."""
    tensor = LAYOUTS[name]
    copy = copied(tensor)
    assert type(copy) is torch.Tensor and torch.equal(copy, tensor) and copy.stride() == tensor.stride()
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()
