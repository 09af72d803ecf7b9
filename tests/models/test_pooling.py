"""Max-pooling with a byte per result: bitwise identical to PyTorch's, and the bytes that it saves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from keepless import InPlaceABN
from keepless.saved import kept_bytes
from models.pooling import MaxPool2d
from tests.bodies import SMALL_BODIES

LAYOUTS = (torch.contiguous_format, torch.channels_last)


def with_gradient(pool, x: Tensor, layout: torch.memory_format) -> tuple[Tensor, Tensor]:
    """The result, and the gradient of its values' sum, each weighted by its number."""
    x = x.clone(memory_format=layout).requires_grad_()
    z = pool(x)
    weights = torch.arange(z.numel()).view(z.shape).to(z.dtype)
    (gradient,) = torch.autograd.grad(z, x, weights)
    return z.detach(), gradient


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(2, 17), st.integers(2, 17)),
    window=st.sampled_from([(3, 2, 1), (2, 2, 0), (3, 1, 1), (2, 3, 1), (1, 1, 0)]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    layout=st.sampled_from(LAYOUTS),
    special=st.sampled_from([0.0, float("nan"), float("-inf")]),
    seed=st.integers(0, 100),
)
def test_pooling_equals_pytorch_s_to_the_bit(shape, window, dtype, layout, special, seed):
    """Values may tie, be NaN or all infinite; and the map may be narrower than a window."""
    if min(shape[2:]) + 2 * window[2] < window[0]:
        return
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).round().to(dtype)
    x[:, :1] = special
    (z, dx), (expected, gradient) = (
        with_gradient(pool, x, layout) for pool in (MaxPool2d(*window), nn.MaxPool2d(*window))
    )
    assert z.stride() == expected.stride()
    assert shape[1] == 1 or dx.stride() == gradient.stride()  # one channel has both layouts
    assert torch.equal(z.nan_to_num(7), expected.nan_to_num(7)) and torch.equal(dx, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_keeps_a_byte_per_result(dtype):
    x = torch.randn(2, 3, 12, 10, dtype=dtype, requires_grad=True)
    assert kept_bytes(pool := MaxPool2d(3, 2, 1), lambda: pool(x * 1), [x]) == 2 * 3 * 6 * 5
    assert kept_bytes(pool := nn.MaxPool2d(3, 2, 1), lambda: pool(x * 1), [x]) == x.nbytes + 8 * 2 * 3 * 6 * 5


@pytest.mark.parametrize("name", ["resnext", "wider", "wider-a2"])
def test_bodies_keep_neither_inputs_nor_indices_of_pooling(name, monkeypatch):
    """Nothing else reads the inputs: a convolution's output, or a sum."""
    images, spared = torch.randn(2, 3, 64, 64), []
    body = SMALL_BODIES[name](InPlaceABN)
    for pool in (module for module in body.modules() if isinstance(module, nn.MaxPool2d)):
        pool.register_forward_hook(lambda _, args, z: spared.append(args[0].nbytes + 7 * z.numel()))
    kept = kept_bytes(body, lambda: body(images), [images])
    assert spared
    expected = sum(spared)
    monkeypatch.setattr(MaxPool2d, "forward", nn.MaxPool2d.forward)
    assert kept_bytes(body, lambda: body(images), [images]) - kept == expected


def test_derivatives_of_any_order_and_transforms_work():
    x, pool = torch.randn(1, 2, 6, 7, dtype=torch.float64, requires_grad=True), MaxPool2d(3, 2, 1)
    assert torch.autograd.gradgradcheck(lambda x: pool(x).square(), x)
    expected = torch.autograd.grad(pool(x).square().sum(), x)[0]
    assert torch.equal(torch.func.grad(lambda x: pool(x).square().sum())(x), expected)


def test_windows_whose_positions_exceed_a_byte_are_refused():
    MaxPool2d(16, 16, 0)
    with pytest.raises(ValueError, match="kernel_size=17: expected at most 16"):
        MaxPool2d(17, 17, 0)
