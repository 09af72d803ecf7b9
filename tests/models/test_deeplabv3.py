"""The DeepLabV3 head: the pooled branch in training and in eval mode, the sliding window's exact mean."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepless import ABN, InPlaceABN
from models.heads import DeepLabV3
from tests.bodies import trained

SIDES = st.integers(1, 10)
small_head = partial(DeepLabV3, hidden_channels=4, out_channels=6, dilations=(2, 3, 4))


def window_means(x: torch.Tensor, size: tuple[int, int] | None) -> torch.Tensor:
    """The mean in a window around each cell (one more to the right and below if even), shifted inside the map."""
    rows, columns = x.shape[2:]
    height, width = size or (100, 100)
    height, width = min(height, rows), min(width, columns)
    means = torch.empty_like(x)
    for i in range(rows):
        for j in range(columns):
            top = min(max(i - (height - 1) // 2, 0), rows - height)
            left = min(max(j - (width - 1) // 2, 0), columns - width)
            means[:, :, i, j] = x[:, :, top : top + height, left : left + width].mean((2, 3))
    return means


@given(rows=st.integers(1, 8), columns=st.integers(1, 8), size=st.none() | st.tuples(SIDES, SIDES))
@settings(max_examples=40)
def test_sliding_pooling_is_the_mean_in_a_window_around_each_cell(rows, columns, size):
    """It is global without a window, or with one that covers the map."""
    torch.manual_seed(0)
    head = trained(small_head(3, norm_act=InPlaceABN, pooling_size=size))
    x = torch.randn(2, 3, rows, columns, dtype=torch.float64)
    with torch.no_grad():
        maps = head.red_conv(head.map_bn(torch.cat([conv(x) for conv in head.map_convs], dim=1)))
        pooled = head.pool_red_conv(head.global_pooling_bn(head.global_pooling_conv(window_means(x, size))))
        torch.testing.assert_close(head(x), head.red_bn(maps + pooled), rtol=1e-12, atol=1e-12)


def test_training_pools_globally_whatever_the_window():
    outputs = []
    for pooling_size in (None, (2, 2)):
        torch.manual_seed(0)
        head = small_head(3, pooling_size=pooling_size)
        outputs.append(head(torch.randn(2, 3, 6, 6)))
    assert torch.equal(*outputs)


def test_every_parameter_gets_a_gradient_and_overwriting_norms_fit():
    def gradients(norm_act) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        head = small_head(5, norm_act=norm_act).double()
        x = torch.randn(4, 5, 6, 7, dtype=torch.float64, requires_grad=True)
        out = head(x)
        assert out.shape == (4, 6, 6, 7)
        (out * torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out)).sum().backward()
        return {"x": x.grad, **{name: parameter.grad for name, parameter in head.named_parameters()}}

    expected = gradients(ABN)
    assert all(values.isfinite().all() and values.abs().max() > 1e-6 for values in expected.values())
    for norm_act in (InPlaceABN, partial(InPlaceABN, overwrite_input=True)):
        torch.testing.assert_close(gradients(norm_act), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("pooling_size", [None, (3, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_channels_last_and_bfloat16_flow_through_in_eval_mode(pooling_size, dtype):
    torch.manual_seed(0)
    head = trained(small_head(8, pooling_size=pooling_size)).float().to(memory_format=torch.channels_last)
    x = torch.randn(2, 8, 6, 7).to(memory_format=torch.channels_last)
    with torch.no_grad():
        expected = head.double()(x.double())
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            out = head.float()(x.to(dtype))
    assert out.dtype == dtype and out.is_contiguous(memory_format=torch.channels_last)
    error = (out.double() - expected).abs().max() / expected.abs().max()
    assert error < (0.05 if dtype == torch.bfloat16 else 1e-5)
