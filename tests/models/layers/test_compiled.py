"""The formulas against the reference: operator by operator, and compiled by TorchInductor."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from models.layers import CheckpointedABN, InPlaceABN
from models.layers.activations import INVERTIBLE_ACTIVATIONS, Activation
from models.layers.backends import compiled as compiled_backend
from models.layers.backends.compiled import CompiledBackend, compiler_available, prefers_compiled
from models.layers.backends.eager import EagerBackend
from models.layers.backends.interface import Kept

REPOSITORY = Path(__file__).resolve().parents[3]
LEAKY = Activation("leaky_relu", 0.01)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def problem(shape=(3, 5, 4, 6), layout="contiguous", dtype=torch.float64):
    """x and dL/dz, gamma of both signs, and beta."""
    generator = torch.Generator().manual_seed(0)
    x, dz = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype, memory_format=LAYOUTS[layout])
        for _ in range(2)
    )
    vectors = torch.promote_types(dtype, torch.float32)
    gamma = torch.rand(shape[1], generator=generator, dtype=vectors) + 0.5
    gamma[::2] *= -1
    beta = torch.randn(shape[1], generator=generator, dtype=vectors)
    return x, dz, gamma, beta


def kept_as(what: str, x, z, mean, invstd, gamma, beta, activation) -> Kept:
    if what == "x":
        return Kept(x, False, mean, invstd, gamma, beta, invstd, activation)
    if what == "x_hat":
        shape = (1, -1, *(1,) * (x.dim() - 2))
        x_hat = (x - mean.view(shape)) * invstd.view(shape)
        return Kept(x_hat, False, torch.zeros_like(beta), torch.ones_like(gamma), gamma, beta, invstd, activation)
    return Kept(z, True, beta, gamma.reciprocal(), gamma, beta, invstd, activation)


@pytest.fixture
def op_by_op(monkeypatch):
    """The formulas as an outer torch.compile would trace them, run one operator at a time."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.fixture
def compiler():
    if not compiler_available("cpu"):
        pytest.skip("needs a C++ compiler")


@pytest.mark.parametrize("kept", ["x", "x_hat", "z"])
@pytest.mark.parametrize("name", INVERTIBLE_ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formulas_equal_the_reference(op_by_op, layout, name, kept):
    x, dz, gamma, beta = problem(layout=layout)
    activation = Activation(name, 0.3)
    eager, ours = EagerBackend(), CompiledBackend()
    running = [torch.zeros(5, dtype=torch.float64) for _ in range(4)]
    z, mean, invstd = eager.forward(x, gamma, beta, *running[:2], 0.1, 1e-5, activation)
    result = ours.forward(x, gamma, beta, *running[2:], 0.1, 1e-5, activation)
    torch.testing.assert_close(result, (z, mean, invstd))
    torch.testing.assert_close(running[2:], running[:2])
    torch.testing.assert_close(ours.moments(x), eager.moments(x))
    torch.testing.assert_close(ours.normalise(x, mean, invstd, gamma, beta, activation), z)
    assert result[0].stride() == x.stride()

    saved = kept_as(kept, x, z, mean, invstd, gamma, beta, activation)
    means = torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(ours.sums(saved, dz), eager.sums(saved, dz))
    torch.testing.assert_close(ours.input_gradient(saved, dz, *means), eager.input_gradient(saved, dz, *means))
    torch.testing.assert_close(ours.backward(saved, dz), eager.backward(saved, dz))


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1, 1), (1, 5, 4, 6), (2, 5, 3, 4, 2)])
def test_other_shapes(op_by_op, shape):
    x, dz, gamma, beta = problem(shape)
    z, mean, invstd = CompiledBackend().forward(x, gamma, beta, None, None, 0.1, 1e-5, LEAKY)
    torch.testing.assert_close(z, EagerBackend().forward(x, gamma, beta, None, None, 0.1, 1e-5, LEAKY)[0])
    kept = kept_as("z", x, z, mean, invstd, gamma, beta, LEAKY)
    torch.testing.assert_close(CompiledBackend().backward(kept, dz), EagerBackend().backward(kept, dz))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_computes_in_float32(op_by_op, layout, dtype):
    """The result equals float32 arithmetic on the same values, rounded once."""
    x, dz, gamma, beta = problem(layout=layout, dtype=dtype)
    z, mean, invstd = CompiledBackend().forward(x, gamma, beta, None, None, 0.1, 1e-5, LEAKY)
    wide = EagerBackend().forward(x.float(), gamma, beta, None, None, 0.1, 1e-5, LEAKY)
    assert z.dtype == dtype and mean.dtype == invstd.dtype == torch.float32
    torch.testing.assert_close(z, wide[0].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close((mean, invstd), wide[1:])
    kept = kept_as("z", x, z, mean, invstd, gamma, beta, LEAKY)
    dx, dgamma, dbeta = CompiledBackend().backward(kept, dz)
    wide = EagerBackend().backward(kept._replace(values=z.float()), dz.float())
    assert dx.dtype == dtype
    torch.testing.assert_close(dx, wide[0].to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close((dgamma, dbeta), wide[1:])


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_variance_of_a_large_mean(op_by_op, layout, dtype, tolerance):
    x = (torch.randn(8, 4, 40, 40, dtype=torch.float64) + 1000).to(dtype, memory_format=LAYOUTS[layout])
    _, var = CompiledBackend().moments(x)
    expected = x.double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(var.double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_native_moments_of_half_precision(dtype):
    x = problem(layout="channels_last", dtype=dtype)[0]
    mean, var = CompiledBackend().moments(x)
    assert mean.dtype == var.dtype == torch.float32
    torch.testing.assert_close((mean, var), EagerBackend().moments(x.float()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_traced_into_an_outer_graph(layout):
    """One graph without breaks (fullgraph), with and without writing z over x."""
    x, dz, gamma, beta = problem(layout=layout)

    def step(backend, x, dz, gamma, beta, out):
        z, mean, invstd = backend.forward(x, gamma, beta, None, None, 0.1, 1e-5, LEAKY, out)
        kept = kept_as("z", None, z, mean, invstd, gamma, beta, LEAKY)
        return z, *backend.backward(kept, dz)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    expected = step(EagerBackend(), x, dz, gamma, beta, None)
    torch.testing.assert_close(compiled(CompiledBackend(), x, dz, gamma, beta, None), expected)
    overwritten = x.clone()
    torch.testing.assert_close(compiled(CompiledBackend(), overwritten, dz, gamma, beta, overwritten), expected)
    torch.testing.assert_close(overwritten, expected[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_compilation_for_all_shapes(compiler, monkeypatch, layout):
    """30 shapes, gradients of any layout, training and evaluation: one compilation per function."""
    monkeypatch.setattr(compiled_backend, "FEW_CHANNELS_LAST", 0)  # as for large tensors
    compiled_backend._compiled.cache_clear()  # of other tests
    torch._dynamo.reset()
    eager, ours = EagerBackend(), CompiledBackend()
    before = counters["stats"]["unique_graphs"]
    for i in range(30):
        shape = (2 + i % 3, 3 + i, 2 + i % 7, 3 + i % 5)
        x, dz, gamma, beta = problem(shape, layout, torch.float32)
        dz = (dz, dz.contiguous(), torch.ones(()).expand(shape))[i % 3]
        running = [torch.zeros(shape[1]) for _ in range(4)]
        z, mean, invstd = expected = eager.forward(x, gamma, beta, *running[:2], 0.1, 1e-5, LEAKY)
        result = ours.forward(x, gamma.requires_grad_(), beta, *running[2:], 0.1, 1e-5, LEAKY)
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(running[2:], running[:2])
        assert result[0].stride() == x.stride()
        gamma = gamma.detach()
        kept = kept_as("z", x, z, mean, invstd, gamma, beta, LEAKY)
        torch.testing.assert_close(ours.backward(kept, dz), eager.backward(kept, dz), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.normalise(x, mean, invstd, gamma, beta, LEAKY), z)
    functions = {"contiguous": 3, "channels_last": 2}[layout]  # channels_last uses PyTorch's moments
    assert counters["stats"]["unique_graphs"] - before == functions


def test_sizes_of_1_do_not_use_up_the_recompilations(compiler):
    """Layers that keep x or z, in every combination of sizes of 1 with more than one value per channel."""
    for n, c, h, w in itertools.product((1, 3), (1, 4), (1, 5), (1, 6)):
        if n * h * w == 1:
            continue
        for layout in LAYOUTS:
            for cls in (CheckpointedABN, InPlaceABN):
                x = torch.randn(n, c, h, w).contiguous(memory_format=LAYOUTS[layout])
                results = []
                for backend in ("eager", "compiled"):
                    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
                    z = cls(c, backend=backend)(leaf)
                    results.append((z, *torch.autograd.grad(z, leaf, torch.arange(z.numel()).view(z.shape).float())))
                torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


def test_writes_over_the_input(compiler):
    """z is in x, and x's version changes, so an earlier operation that kept x raises in its backward pass."""
    x, _, gamma, beta = problem(dtype=torch.float32)
    expected = EagerBackend().forward(x, gamma, beta, None, None, 0.1, 1e-5, LEAKY)
    version = x._version
    z, *statistics = CompiledBackend().forward(x, gamma, beta, None, None, 0.1, 1e-5, LEAKY, out=x)
    assert z is x and x._version > version
    torch.testing.assert_close((z, *statistics), expected)


def test_preferred_for_large_tensors(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert prefers_compiled(torch.empty(2, 64, 56, 56))
    assert not prefers_compiled(torch.empty(2, 8, 16, 16))


def test_message_without_a_compiler(tmp_path):
    code = (
        "import torch; from models.layers.backends import compiled\n"
        "print(compiled.compiler_available('cpu'))\n"
        "compiled.CompiledBackend().moments(torch.randn(2, 3, 4, 5))"
    )
    environment = {**os.environ, "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=120
    )
    assert run.stdout == "False\n"
    assert "ValueError" in run.stderr and "g++" in run.stderr and "backend='eager'" in run.stderr
