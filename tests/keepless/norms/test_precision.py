"""The layers in finite precision: ranges of inversion, saturation, float32 errors, bfloat16 gradients."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from keepless import ABN, CheckpointedABN, InPlaceABN
from keepless.norms.backends import activations
from keepless.norms.backends.activations import INVERTIBLE_ACTIVATIONS, Activation
from tests.backend_cases import PARAMS, run_formulas_as_they_stand
from tests.norms import IN_PLACE, STRATEGIES

HALF = [torch.bfloat16, torch.float16]
ALL_DTYPES = [torch.float64, torch.float32, *HALF]

# Range of y in which float64 gradients equal autograd's, to 1e-10 of the largest gradient.
EXACT_RANGES = {"sigmoid": (-20.0, 20.0), "tanh": (-12.0, 12.0), "elu": (-15.0, math.inf)}
EXACT_RANGES |= dict.fromkeys(("leaky_relu", "identity"), (-math.inf, math.inf))


def activation(name: str) -> Activation:
    return Activation(name, PARAMS.get(name, 0.0))


def invertible_range(activation: Activation, dtype: torch.dtype) -> tuple[float, float]:
    """Smallest and largest y that `invert_activation` returns for z of this dtype; beyond them y is lost."""
    gap = torch.finfo(dtype).eps / 2
    ranges = {"elu": (math.log(gap), math.inf), "sigmoid": (2 * math.log(gap), -math.log(gap))}
    ranges["tanh"] = -math.atanh(1 - gap), math.atanh(1 - gap)
    return ranges.get(activation.name, (-math.inf, math.inf))


def layer_with(cls, name: str, channels: int, **options) -> nn.Module:
    return cls(channels, activation=name, activation_param=PARAMS.get(name, 0.0), **options)


@pytest.mark.parametrize("name", INVERTIBLE_ACTIVATIONS)
def test_gradients_are_exact_in_the_stated_range(name):
    low, high = (max(-100.0, bound) if bound < 0 else min(100.0, bound) for bound in EXACT_RANGES[name])
    reach = min(-low, high) if name != "elu" else -low
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64).view(-1, 1).requires_grad_()  # uniform: |x_hat| < sqrt(3)
    dz = torch.randn(2001, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    results = []
    for strategy in ("std", *IN_PLACE):
        layer = layer_with(STRATEGIES[strategy], name, 1).double()
        nn.init.constant_(layer.weight, reach / math.sqrt(3))
        results.append(torch.autograd.grad(layer(x), [x, *layer.parameters()], dz))
    for expected, *gradients in zip(*results, strict=True):
        for ours in gradients:
            assert (ours - expected).abs().max() <= 1e-10 * expected.abs().max()


@pytest.mark.parametrize("name", INVERTIBLE_ACTIVATIONS)
@pytest.mark.parametrize("dtype", ALL_DTYPES)
def test_the_inverse_undoes_the_activation_in_the_invertible_range(name, dtype):
    """The error is the rounding of z: half an ulp in z becomes half an ulp / phi'(y) in y."""
    y = torch.linspace(-3, 3, 601, dtype=torch.float64).to(dtype)
    z = activations.activate_(activation(name), y.clone())
    slope = activations.activation_backward(activation(name), z.double(), torch.ones_like(z, dtype=torch.float64))
    error = (activations.invert_activation(activation(name), z).double() - y.double()).abs()
    eps = torch.finfo(dtype).eps
    least = eps if name == "elu" and not F.elu(torch.tensor(-1e-20)) else eps**2  # exp(y) - 1 in older versions
    assert (error <= 2 * eps * (z.double().abs() / slope + y.double().abs()) + least).all()

    low, high = invertible_range(activation(name), dtype)
    largest = torch.tensor([-1e4, 1e4], dtype=dtype)
    y = activations.invert_activation(activation(name), activations.activate_(activation(name), largest.clone()))
    assert y.isfinite().all()
    expected = [max(low, -1e4), min(high, 1e4)]
    torch.testing.assert_close(y.double(), torch.tensor(expected, dtype=torch.float64), rtol=0.02, atol=0)


@pytest.mark.parametrize("variant", ["I", "II"])
@pytest.mark.parametrize("backend", ["eager", "compiled"])
@pytest.mark.parametrize(
    "weight, dx_error, dweight_error", [(1, 7e-8, 6e-6), (1e-3, 1.1e-7, 3e-5), (1e-5, 1e-5, 1.6e-3)]
)
def test_float32_errors_stay_below_the_release_s(backend, variant, weight, dx_error, dweight_error, monkeypatch):
    """Relative errors (2-norm) at beta = 0.1, below the values measured on the released package."""
    run_formulas_as_they_stand(monkeypatch)
    standard, inplace = ABN(16).double(), InPlaceABN(16, variant=variant, gamma_floor=1e-8, backend=backend)
    generator = torch.Generator().manual_seed(0)
    x, dz = torch.randn(2, 8, 16, 32, 32, generator=generator).unbind()
    results = []
    for layer, dtype in ((standard, torch.float64), (inplace, torch.float32)):
        nn.init.constant_(layer.weight, weight)
        nn.init.constant_(layer.bias, 0.1)
        leaf = x.to(dtype).requires_grad_()
        results.append(torch.autograd.grad(layer(leaf), [leaf, layer.weight], dz.to(dtype)))
    errors = [(ours.double() - expected).norm() / expected.norm() for expected, ours in zip(*results, strict=True)]
    assert errors[0] <= dx_error and errors[1] <= dweight_error


class PreActivationBlock(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def residual_network(norm_act, seed: int, ratio: float, depth: int = 30, channels: int = 32) -> nn.Module:
    """Pre-activation, 30 layers; one channel in eight of every norm has beta = 0.3 and |gamma| = ratio * beta."""
    torch.manual_seed(seed)
    convolutions = [nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(depth)]
    blocks = [PreActivationBlock(norm_act(channels), conv) for conv in convolutions]
    stem = nn.Conv2d(3, channels, 3, padding=1)
    network = nn.Sequential(stem, *blocks, norm_act(channels), nn.Conv2d(channels, 10, 1))
    with torch.no_grad():
        for layer in filter(lambda module: isinstance(module, ABN), network.modules()):
            layer.weight.uniform_(0.5, 1.5).mul_(torch.randn(channels).sign())
            layer.bias.normal_(0, 0.3)
            layer.bias[::8] = 0.3
            layer.weight[::8] = 0.3 * ratio * layer.weight[::8].sign()
    return network


def network_gradients(network: nn.Module, seed: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(4, 3, 24, 24, generator=generator)
    labels = torch.randint(0, 10, (4, 24, 24), generator=generator)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        logits = network(images)
    return list(torch.autograd.grad(F.cross_entropy(logits.float(), labels), list(network.parameters())))


def angle(ours: list[torch.Tensor], reference: list[torch.Tensor]) -> float:
    a, b = (torch.cat([t.flatten().double() for t in tensors]) for tensors in (ours, reference))
    return math.degrees(math.acos(min(1.0, (a @ b / a.norm() / b.norm()).item())))


def angles(norm_act, reference: list, seed: int, ratio: float, dtype: torch.dtype) -> tuple[float, float, bool]:
    """Degrees between the half-precision and float32 gradients: of everything, of the convolutions; all finite?"""
    gradients = network_gradients(residual_network(norm_act, seed, ratio), seed, dtype)
    of_convolutions = ([gradient for gradient in network if gradient.dim() == 4] for network in (gradients, reference))
    return (
        angle(gradients, reference),
        angle(*of_convolutions),
        all(gradient.isfinite().all() for gradient in gradients),
    )


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 5))])
def test_bfloat16_gradients_of_a_deep_network_point_where_standard_ones_do(seed):
    """Where |gamma| >= 0.01 |beta|, our angle to float32's gradients is at most 0.5 degrees above standard norms'.

    Where gamma is smaller, dL/dx (seen in the convolutions' gradients) keeps this bound. dL/dgamma stays finite, but
    loses its digits, because z cannot hold gamma * x_hat next to beta.
    """
    for ratio in (0.01, 1e-4):
        reference = network_gradients(residual_network(ABN, seed, ratio), seed, torch.float32)
        standard = angles(ABN, reference, seed, ratio, torch.bfloat16)
        for strategy in IN_PLACE:
            inplace = angles(STRATEGIES[strategy], reference, seed, ratio, torch.bfloat16)
            assert inplace[1] <= standard[1] + 0.5 and inplace[2]
            assert ratio < 0.01 or inplace[0] <= standard[0] + 0.5


@settings(max_examples=80)  # the bounds are close
@given(
    cls=st.sampled_from([ABN, CheckpointedABN, InPlaceABN]),
    shape=st.tuples(*(st.integers(1, 6),) * 4).filter(lambda s: s[0] * s[2] * s[3] > 1),
    dtype=st.sampled_from(ALL_DTYPES),
    memory_format=st.sampled_from([torch.contiguous_format, torch.channels_last]),
    skipped=st.booleans(),
    scale=st.sampled_from([1e-3, 1.0, 1e3]),
    offset=st.sampled_from([0.0, -3.0]),
    name=st.sampled_from(INVERTIBLE_ACTIVATIONS),
)
def test_any_shape_dtype_stride_and_scale(cls, shape, dtype, memory_format, skipped, scale, offset, name):
    """Forward pass and input gradient match float64 to the dtype's rounding."""
    generator = torch.Generator().manual_seed(sum(shape))
    x = (torch.randn(shape, generator=generator, dtype=torch.float64) + offset) * scale
    if skipped:  # every second column of a wider map
        x = x.repeat_interleave(2, dim=3)[..., ::2]
    x = x.to(dtype).contiguous(memory_format=memory_format) if not skipped else x.to(dtype)
    reference, layer = layer_with(ABN, name, shape[1]).double(), layer_with(cls, name, shape[1])
    layer = layer.double() if dtype == torch.float64 else layer
    dz = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    results = []
    for norm, source in ((reference, x.double()), (layer, x)):
        leaf = source.detach().requires_grad_()
        z = norm(leaf)
        results.append((z, *torch.autograd.grad(z, leaf, dz.to(source.dtype))))
    (z, dx), (our_z, our_dx) = results
    assert our_z.dtype == our_dx.dtype == dtype and our_z.shape == our_dx.shape == shape
    eps = torch.finfo(dtype).eps
    invstd = torch.rsqrt(x.double().var((0, 2, 3), correction=0) + reference.eps).view(1, -1, 1, 1)
    # Rounding of the mean moves x_hat by eps * |mean| / sigma.
    conditioned = 1 + x.double().abs().amax((0, 2, 3), keepdim=True) * invstd * (dtype not in HALF)
    assert ((our_z.double() - z).abs() <= 3 * eps * conditioned * (1 + z.abs())).all()
    assert ((our_dx.double() - dx).abs() <= 12 * eps * conditioned * invstd * (1 + dz.double().abs().amax())).all()
