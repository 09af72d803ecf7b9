"""The Triton kernels against eager float64: interpreted on the CPU, compiled with `-m gpu` on a device."""

import importlib.util
from itertools import cycle

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from keepless import InPlaceABN
from keepless.norms import backends
from keepless.norms.backends.activations import ACTIVATIONS, INVERTIBLE_ACTIVATIONS, Activation
from keepless.norms.backends.interface import UNTRACKED, Affine, BackwardInputs, Running
from keepless.norms.synchronisation import REFUSED
from tests import backend_cases
from tests.backend_cases import EAGER, PARAMS, assert_backward, assert_close, assert_forward, assert_pieces, case, keep
from tests.cuda import NEEDS_CUDA

triton = pytest.importorskip("triton")
from keepless.norms.backends import tilings, triton_kernels  # noqa: E402

FORMATS = CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last
KEPT = [(name, "z") for name in INVERTIBLE_ACTIVATIONS] + [(name, "x") for name in ACTIVATIONS]


@pytest.fixture(scope="module")
def copies():
    """The module `triton_kernels`, for each device; for the CPU a second copy, whose kernels are interpreted."""
    name = f"{triton_kernels.__name__}_interpreted"
    spec = importlib.util.spec_from_file_location(name, triton_kernels.__file__)
    copy = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "interpret", True)
        spec.loader.exec_module(copy)
    return {"cpu": copy, "cuda": triton_kernels}


def interpret_language(patch: pytest.MonkeyPatch) -> None:
    """Interpret the functions of `triton.language` itself too (sum, zeros), until the patch is undone.

    The interpreter does not revert its own changes to `triton.language.core`, after which nothing would compile, so the
    patch restores those as well. Skips the test if Triton is 3.6 (of torch 2.11) and NumPy 2.4 or newer, which refuses
    how that Triton turns a loop's bounds into integers.
    """
    if triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6 interprets no loops with NumPy 2.4: install numpy<2.4 or torch>=2.12")
    patch.setattr(triton.knobs.runtime, "interpret", True)
    for module in (triton.language, triton.language.core):
        for name, function in filter(lambda item: callable(item[1]), vars(module).copy().items()):
            again = triton.jit(function.fn) if isinstance(function, triton.JITFunction) else function
            patch.setattr(module, name, again)


NOT_INTERPRETED = pytest.mark.skipif(triton_kernels.INTERPRETED, reason="TRITON_INTERPRET is set")
CUDA = pytest.param("cuda", marks=[*NEEDS_CUDA, NOT_INTERPRETED])


@pytest.fixture(params=["cpu", CUDA])
def device(request, copies, monkeypatch) -> str:
    if request.param == "cpu":
        interpret_language(monkeypatch)
    return request.param


@pytest.fixture
def backend(device, copies):
    return copies[device].TritonBackend()


@pytest.fixture(params=["parts", "whole"])
def many_tiles(request, device, copies, monkeypatch) -> bool:
    """Small tiles: small tensors have several per part and several parts per channel, or are taken whole."""
    module, whole = copies[device], request.param == "whole"
    monkeypatch.setattr(tilings, "WHOLE", tilings.WHOLE if whole else 0)
    monkeypatch.setattr(tilings, "BYTES_PER_THREAD", 4)
    monkeypatch.setattr(module, "_processors", lambda device: 2)
    forget(module)
    yield whole
    forget(module)


def forget(module) -> None:
    for cached in (tilings.tiling, *(value for name, value in vars(module).items() if name.startswith("_"))):
        getattr(cached, "cache_clear", lambda: None)()


def test_every_activation_in_one_and_in_pieces(backend, device, many_tiles):
    """Elements are activated in tiles of any shape, so each activation needs one size of tiles and memory format."""
    for activation, memory_format in zip([*ACTIVATIONS][many_tiles::2], cycle(FORMATS), strict=False):
        example = case((3, 2, 3, 7), device, memory_format=memory_format, activation=activation)
        assert_forward(backend, example)
        for kept in (*(kept for name, kept in KEPT if name == activation), "x_hat"):
            assert_pieces(backend, example, keep(example, kept))


@pytest.mark.parametrize("activation, kept", [("leaky_relu", "z"), ("elu", "z"), ("tanh", "z"), ("sigmoid", "x")])
def test_half_precision_tensors_with_float32_vectors(backend, device, activation, kept):
    for dtype, memory_format in ((torch.bfloat16, CONTIGUOUS), (torch.float16, CHANNELS_LAST)):
        example = case((3, 4, 2, 7), device, dtype, memory_format, activation)
        assert_forward(backend, example)
        assert_backward(backend, example, keep(example, kept))


@pytest.mark.parametrize(
    "shape, memory_format",
    [
        ((2, 1), CONTIGUOUS),
        ((1, 5, 1, 1), CONTIGUOUS),  # a single value per channel
        ((4, 5, 3, 2), CHANNELS_LAST),
        ((2, 5, 2, 3, 3), torch.channels_last_3d),
        # Several parts of several tiles
        ((5, 2, 3, 43), CONTIGUOUS),  # several tiles in L, the second almost empty
        pytest.param((21, 2, 3, 13), CONTIGUOUS, marks=pytest.mark.slow),  # several in N, a ragged one in both
        ((3, 20, 5, 11), CHANNELS_LAST),
    ],
    ids=str,
)
def test_shapes(backend, device, copies, many_tiles, shape, memory_format):
    example = case(shape, device, memory_format=memory_format)
    for reads in (1, 2):
        tiling = copies[device]._tiling(copies[device]._key(example.x), reads)
        least = tiling.tiles_per_part if many_tiles else min(tiling.parts, tiling.tiles_per_part)
        assert example.x.numel() < 1000 or least > 1
        assert tiling.parts == 1 or not many_tiles
    assert_forward(backend, example)
    assert_pieces(backend, example, keep(example, "z", eps=0.1))  # a variance of 0 must not amplify rounding
    assert_moments(backend, example.x, 1e-5)


def assert_moments(backend, x: Tensor, tolerance: float, least: float = 0.0) -> None:
    (mean, var), (wanted_mean, wanted_var) = backend.moments(x), EAGER.moments(x.double())
    assert_close(mean, wanted_mean, 1e-6, x.double().abs().mean((0, *range(2, x.dim()))).clamp(min=1))
    assert_close(var, wanted_var, tolerance, wanted_var + least)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_moments_do_not_cancel(backend, device, many_tiles, memory_format):
    x = case((6, 3, 5, 30), device, memory_format=memory_format).x + 1000
    assert_moments(backend, x, 1e-5)
    x[0] = 0  # an image unlike the others
    x[:, 1] = 3000
    x[:, 2] = x[:, 2] - torch.linspace(900, 1100, 6, device=device).view(-1, 1, 1)  # a different mean in each image
    assert_moments(backend, x, 1e-4, 1e-4)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_running_statistics_equal_pytorch_s(backend, device, many_tiles, memory_format):
    bn = nn.BatchNorm2d(4, momentum=0.3).to(device).double()
    running_mean, running_var = torch.zeros(4, device=device), torch.ones(4, device=device)
    for seed in range(2):
        x, _, gamma, beta, activation = case((3, 4, 5, 6), device, memory_format=memory_format, seed=seed)
        x = x * 2 + 5
        bn(x.double())
        backend.forward(x, Affine(gamma, beta, activation), 1e-5, Running(running_mean, running_var, 0.3))
    torch.testing.assert_close(running_mean.double(), bn.running_mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(running_var.double(), bn.running_var, rtol=1e-5, atol=0)

    huge_mean, huge_var = torch.full((2, 4), 3e7, device=device).unbind()  # with momentum 1 the old ones do not matter
    for mean, var in ((running_mean, running_var), (huge_mean, huge_var)):
        _, of_minibatch, _ = backend.forward(x, Affine(gamma, beta, activation), 1e-5, Running(mean, var, 1.0))
        assert torch.equal(mean, of_minibatch)
    assert torch.equal(running_var, huge_var)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_writes_over_its_input(backend, device, many_tiles, memory_format):
    x, _, gamma, beta, activation = case((3, 4, 5, 6), device, memory_format=memory_format)
    affine = Affine(gamma, beta, activation)
    wanted, mean, invstd = backend.forward(x, affine, 1e-5, UNTRACKED)
    for write in (
        lambda x: backend.forward(x, affine, 1e-5, UNTRACKED, overwrite=True)[0],
        lambda x: backend.normalise(x, mean, invstd, affine, overwrite=True),
    ):
        out = x.clone(memory_format=torch.preserve_format)
        assert write(out) is out
        assert torch.allclose(out, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "training, with_gaps",
    [
        (True, lambda x: x.repeat(1, 2, 1, 1)[:, :4]),  # between channels
        (True, lambda x: x.repeat(1, 1, 2, 1)[:, :, :5]),  # between rows
        (False, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)),
    ],
)
def test_a_layer_writes_over_an_input_with_gaps(device, copies, monkeypatch, training, with_gaps):
    monkeypatch.setattr(backends, "_triton_kernels", lambda: copies[device])
    example = case((3, 4, 5, 6), device)
    results = []
    for overwrite_input in (False, True):
        layer = InPlaceABN(4, overwrite_input=overwrite_input, backend="triton").to(device).train(training)
        layer.load_state_dict({"weight": example.gamma, "bias": example.beta}, strict=False)
        leaf = example.x.clone().requires_grad_()
        x = with_gaps(leaf * 1) if overwrite_input else leaf
        z = layer(x)
        assert (z.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()) == overwrite_input
        results.append((z, *torch.autograd.grad(z, [leaf, layer.weight, layer.bias], example.dz)))
    torch.testing.assert_close(*results)


def test_the_probe_launches_a_kernel(device, copies, monkeypatch):
    """`backend="auto"` asks it whether Triton works."""
    copies[device].launch_small_kernel(torch.device(device))

    def refuse(*args, **options):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(copies[device].Launch, "__call__", refuse)
    with pytest.raises(RuntimeError, match="C compiler"):
        copies[device].launch_small_kernel(torch.device(device))


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradients_in_another_memory_format(backend, device, memory_format):
    example = case((3, 4, 5, 6), device, memory_format=memory_format)
    kept = keep(example, "z")
    for dz in (
        example.dz.contiguous(memory_format=CHANNELS_LAST if memory_format == CONTIGUOUS else CONTIGUOUS),
        example.dz[:, :, :1, :1].expand(3, 4, 5, 6),
        torch.ones((), device=device).expand(3, 4, 5, 6),
        example.dz.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert_backward(backend, example, kept, dz)


@pytest.mark.parametrize("gamma", [-1e-3, 1e-5])
def test_tiny_gamma(backend, device, gamma):
    """The inverse divides z's rounding errors by gamma; with beta = 0 they stay relative to x_hat."""
    gamma, beta = torch.full((4,), gamma, device=device), torch.zeros(4, device=device)
    example = case((3, 4, 3, 4), device)._replace(gamma=gamma, beta=beta)
    assert_forward(backend, example)
    assert_backward(backend, example, keep(example, "z"))


def test_gamma_is_floored_within_the_kernels(backend, device):
    """Both signs of zero, values at and above the floor, and NaN; as many kernels as without a floor."""
    gamma = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 1e-3, -0.5, torch.nan], device=device)
    example = case((3, 7, 3, 4), device)._replace(gamma=gamma)
    affine = example.affine._replace(floor=1e-3)
    z, mean, invstd = backend.forward(example.x, affine, 1e-5, UNTRACKED)
    wanted, _, _ = EAGER.forward(example.x, affine.with_floored_gamma(), 1e-5, UNTRACKED)
    torch.testing.assert_close(z, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(backend.normalise(example.x, mean, invstd, affine), z, equal_nan=True)
    kept = BackwardInputs(z, True, example.beta, None, affine, invstd)
    results, explicit = backend.backward(kept, example.dz), EAGER.backward(kept.with_floored_gamma(), example.dz)
    pieces = backend.sums(kept, example.dz)
    for result, wanted in zip((*results, *pieces), (*explicit, *explicit[:0:-1]), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("ranks, channels", [(2, 3), (5, 130)])
def test_statistics_over_ranks(backend, device, ranks, channels):
    """Ranks with different numbers of values; means that are far apart; with and without running statistics."""
    generator = torch.Generator().manual_seed(0)
    moments = torch.rand(ranks, 2 * channels, dtype=torch.float64, generator=generator) * 100
    counts = torch.randint(2, 10**6, (ranks, 1), generator=generator)
    gathered = torch.cat([moments, counts], dim=1).to(device)
    results = []
    for tried in (EAGER, backend):
        vectors = torch.full((2, channels), 2.0, device=device)
        tracked = tried.joint_statistics(gathered, torch.float32, 1e-5, Running(*vectors.unbind(), 0.3))
        results.append([*tracked, vectors, *tried.joint_statistics(gathered, torch.float32, 1e-5, UNTRACKED)])
    assert results[1][2].dtype == torch.float64 and results[1][2].shape == ()
    torch.testing.assert_close(*results, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # of NumPy, in the interpreter
@pytest.mark.parametrize("counts, total", [((1, 0, 1), 2), ((1, 0, 0), 0), ((REFUSED, 9, 9), 0)])
def test_the_total_is_zero_if_ranks_have_too_few_values_or_refuse(backend, device, counts, total):
    gathered = torch.tensor([[0.5, 0.0, count] for count in counts], dtype=torch.float64, device=device)
    for tried in (EAGER, backend):
        assert tried.joint_statistics(gathered, torch.float32, 1e-5, UNTRACKED)[2] == total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_saturated_values_give_finite_gradients(backend, device, dtype):
    for activation, asymptotes in (("elu", [-1.0]), ("sigmoid", [0.0, 1.0]), ("tanh", [-1.0, 1.0])):
        example = case((3, 4, 2, 3), device, dtype, activation=activation)
        kept = keep(example, "z")
        for i, asymptote in enumerate(asymptotes):
            kept.values[i] = asymptote
        kept.values[:, 3] = asymptotes[0]  # a whole channel
        assert all(result.isfinite().all() for result in backend.backward(kept, example.dz))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_to_the_last_places(backend, device, activation):
    """Near zero, where exp(y) - 1 and log(1 + y) cancel, and far from it."""
    size = torch.logspace(-7, 1, 400, dtype=torch.float64).float()
    y = torch.cat([-size, size]).reshape(-1, 1).to(device)
    zeros, ones = torch.zeros(1, device=device), torch.ones(1, device=device)
    phi = Activation(activation, PARAMS.get(activation, 0.01))
    z = backend.normalise(y, zeros, ones, Affine(ones, zeros, phi))
    exact = EAGER.normalise(y.double(), zeros.double(), ones.double(), Affine(ones.double(), zeros.double(), phi))
    tolerance = 1e-6 if device == "cpu" else 2e-6  # a device's exponential is good to 2^-22
    assert_close(z, exact, tolerance, exact.abs())
    if activation in INVERTIBLE_ACTIVATIONS:
        small = y.abs().squeeze() < 4
        z, y = z[small], y[small]
        kept = BackwardInputs(z, True, zeros, ones, Affine(ones, zeros, phi), ones)
        inverse = backend.input_gradient(kept, 0 * z, zeros, -ones)  # x_hat * 1 = y
        wanted = EAGER.input_gradient(backend_cases.double(kept), 0 * z.double(), zeros.double(), -ones.double())
        assert_close(inverse, wanted, tolerance, wanted.abs() + (0.2 if activation == "sigmoid" else 0))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_not_a_number_is_not_hidden(backend, device, activation):
    example = case((2, 3, 4, 5), device, activation=activation)
    x, dz = example.x.clone(), example.dz.clone()
    x[0, 0, 0, 0] = dz[0, 1, 0, 0] = torch.nan
    z, _, _ = backend.forward(x, example.affine, 1e-5, UNTRACKED)
    assert z[:, 0].isnan().all() and z[:, 1:].isfinite().all()
    dx, dgamma, dbeta = backend.backward(keep(example, "x")._replace(values=x), dz)
    assert dx[:, 1].isnan().all() and dgamma[1].isnan() and dbeta[1].isnan() and dx[:, 2].isfinite().all()
    assert dx[:, 0].isnan().all()


def test_statistics_of_a_channel_with_nan_are_the_eager_ones(backend, device, many_tiles):
    example = case((3, 4, 2, 7), device)
    x, statistics = example.x.clone(), []
    x[0, 0, 0, 0] = x[2, 1, 1, 6] = torch.nan
    for tried in (backend, EAGER):
        running = Running(torch.zeros(4, device=device), torch.ones(4, device=device), 0.1)
        _, _, invstd = tried.forward(x, example.affine, 1e-5, running)
        statistics.append([*tried.moments(x), invstd, *running[:2]])
    for statistic, wanted in zip(*statistics, strict=True):
        assert statistic.isnan().tolist() == wanted.isnan().tolist() == [True, True, False, False]


# On a device

on_a_device = pytest.mark.parametrize("device", [CUDA], indirect=True)


@on_a_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(
    "shape",
    [
        *((16, 64, 112, 112), (8, 256, 65, 65), (64, 512, 28, 28), (1024, 512, 7, 7), (4, 256, 97, 97)),
        (256, 2048, 1, 1),
        *((128, 1024, 14, 14), (32, 1024, 14, 14), (128, 2048, 7, 7), (32, 2048, 7, 7)),  # whole channels
    ],
)
def test_realistic_shapes(backend, device, shape, memory_format, dtype):
    for activation, kept in (("leaky_relu", "z"), ("elu", "z"), ("relu", "x")):
        example = case(shape, device, dtype, memory_format, activation)
        assert_forward(backend, example)
        assert_backward(backend, example, keep(example, kept))


@on_a_device
@pytest.mark.parametrize("memory_format", FORMATS)
def test_more_than_two_billion_elements(backend, device, memory_format):
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    shape = (33, 64, 1024, 1024)
    x = torch.empty(shape, dtype=torch.bfloat16, device=device, memory_format=memory_format).normal_()
    gamma, beta = torch.full((64,), -0.5, device=device), torch.full((64,), 0.1, device=device)
    phi = Activation("leaky_relu")
    z, mean, invstd = backend.forward(x, Affine(gamma, beta, phi), 1e-5, UNTRACKED)
    assert mean.abs().max() < 1e-3 and (invstd - 1).abs().max() < 1e-3
    kept = BackwardInputs(z, True, beta, 1 / gamma, Affine(gamma, beta, phi), invstd)
    dx = backend.input_gradient(kept, z, beta, beta)
    for image in (0, 31, 32):  # offsets pass 2^31 in the last
        part = slice(image, image + 1)
        wanted = EAGER.normalise(x[part], mean, invstd, Affine(gamma, beta, phi))
        torch.testing.assert_close(z[part], wanted, rtol=2**-7, atol=1e-2)
        wanted = EAGER.input_gradient(kept._replace(values=z[part]), z[part], beta, beta)
        torch.testing.assert_close(dx[part], wanted, rtol=2**-6, atol=1e-2)
