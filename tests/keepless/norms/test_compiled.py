"""The formulas against the reference: operator by operator, and compiled by TorchInductor."""

from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config

from keepless import CheckpointedABN, InPlaceABN, recompute_activations, report
from keepless.norms.backends import compiled as compiled_backend
from keepless.norms.backends.activations import INVERTIBLE_ACTIVATIONS, Activation
from keepless.norms.backends.compiled import CompiledBackend, compiler_available
from keepless.norms.backends.interface import UNTRACKED, Affine, BackwardInputs, Running
from tests.backend_cases import EAGER, assert_backward, assert_forward, assert_pieces, case, keep, need_a_compiler

LEAKY = Activation("leaky_relu", 0.01)
SHAPE = (3, 5, 4, 6)
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


@pytest.fixture
def op_by_op(monkeypatch):
    """The formulas as in the graph of an outer torch.compile, run one operator at a time."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)


@pytest.fixture
def compiler():
    need_a_compiler()


@pytest.fixture
def without_code(monkeypatch):
    """Dynamo guards and counts as ever, but PyTorch's operators run its graphs."""

    def uncompiled(function, *, dynamic, fullgraph, options):
        return compile_(function, backend="aot_eager", dynamic=dynamic, fullgraph=fullgraph)

    compile_ = torch.compile
    monkeypatch.setattr(compiled_backend, "compiler_available", lambda device_type: True)
    monkeypatch.setattr(torch, "compile", uncompiled)
    forget_compilations()
    yield
    forget_compilations()


def forget_compilations() -> None:
    compiled_backend._compiled.cache_clear()
    torch._dynamo.reset()


each_way = pytest.mark.parametrize("needs", ["without_code", pytest.param("compiler", marks=pytest.mark.slow)])


@pytest.mark.parametrize("activation", INVERTIBLE_ACTIVATIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_formulas_equal_the_reference(op_by_op, layout, activation):
    example = case(SHAPE, dtype=torch.float64, memory_format=LAYOUTS[layout], activation=activation, param=0.3)
    assert_forward(CompiledBackend(), example)
    for kept in ("x", "x_hat", "z"):
        assert_pieces(CompiledBackend(), example, keep(example, kept))
    normalise = partial(CompiledBackend().normalise, mean=example.beta, invstd=example.gamma, affine=example.affine)
    overwritten = example.x.clone()
    assert normalise(overwritten, overwrite=True) is overwritten and torch.equal(overwritten, normalise(example.x))
    torch.testing.assert_close(CompiledBackend().moments(example.x), EAGER.moments(example.x))
    running = [[torch.zeros_like(example.beta), torch.ones_like(example.gamma)] for _ in range(2)]
    for backend, statistics in zip((CompiledBackend(), EAGER), running, strict=True):
        backend.forward(example.x, example.affine, 1e-5, Running(*statistics, 0.1))
    torch.testing.assert_close(*running)


@pytest.mark.parametrize("shape", [(6, 5), (6, 5, 1, 1), (1, 5, 4, 6), (2, 5, 3, 4, 2)])
def test_other_shapes(op_by_op, shape):
    example = case(shape, dtype=torch.float64)
    assert_forward(CompiledBackend(), example)
    assert_backward(CompiledBackend(), example, keep(example, "z"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_half_precision_computes_in_float32(op_by_op, layout, dtype):
    """The result equals float32 arithmetic on the same values, rounded once."""
    example = case(SHAPE, dtype=dtype, memory_format=LAYOUTS[layout])
    x, dz, gamma, beta, _ = example
    z, *statistics = CompiledBackend().forward(x, Affine(gamma, beta, LEAKY), 1e-5, UNTRACKED)
    kept = keep(example, "z")
    dx, *sums = CompiledBackend().backward(kept, dz)
    wide_z, *wide_statistics = EAGER.forward(x.float(), Affine(gamma, beta, LEAKY), 1e-5, UNTRACKED)
    wide_dx, *wide_sums = EAGER.backward(kept._replace(values=kept.values.float()), dz.float())
    for ours, wide in ((z, wide_z), (dx, wide_dx)):
        torch.testing.assert_close(ours, wide.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
    torch.testing.assert_close([*statistics, *sums], [*wide_statistics, *wide_sums])  # and are float32


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.float64, 1e-10)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_variance_of_a_large_mean(op_by_op, layout, dtype, tolerance):
    x = (torch.randn(8, 4, 40, 40, dtype=torch.float64) + 1000).to(dtype, memory_format=LAYOUTS[layout])
    _, var = CompiledBackend().moments(x)
    expected = x.double().var((0, 2, 3), correction=0)
    torch.testing.assert_close(var.double(), expected, rtol=tolerance, atol=0)


@pytest.mark.parametrize("layout", [pytest.param("contiguous", marks=pytest.mark.slow), "channels_last"])
def test_traced_into_an_outer_graph(layout):
    """One graph without breaks (fullgraph), with and without writing z over x."""
    x, dz, gamma, beta, _ = case(SHAPE, dtype=torch.float64, memory_format=LAYOUTS[layout])

    def step(backend, x, dz, gamma, beta, overwrite):
        z, mean, invstd = backend.forward(x, Affine(gamma, beta, LEAKY), 1e-5, UNTRACKED, overwrite)
        kept = BackwardInputs(z, True, beta, gamma.reciprocal(), Affine(gamma, beta, LEAKY), invstd)
        return z, *backend.backward(kept, dz)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    expected = step(EAGER, x, dz, gamma, beta, False)
    torch.testing.assert_close(compiled(CompiledBackend(), x, dz, gamma, beta, False), expected)
    overwritten = x.clone()
    torch.testing.assert_close(compiled(CompiledBackend(), overwritten, dz, gamma, beta, True), expected)
    torch.testing.assert_close(overwritten, expected[0])


@each_way
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_compilation_for_all_shapes(request, monkeypatch, layout, needs):
    """12 shapes, gradients of any layout, training and evaluation: one compilation per function."""
    monkeypatch.setattr(compiled_backend, "FEW_CHANNELS_LAST", 0)  # as for large tensors
    request.getfixturevalue(needs)
    forget_compilations()  # of other tests
    ours = CompiledBackend()
    before = counters["stats"]["unique_graphs"]
    for i in range(12):
        shape = (2 + i % 3, 3 + i, 2 + i % 7, 3 + i % 5)
        x, dz, gamma, beta, _ = example = case(shape, memory_format=LAYOUTS[layout])
        dz = (dz, dz.contiguous(), torch.ones(()).expand(shape))[i % 3]
        running = [torch.zeros(shape[1]) for _ in range(4)]
        z, mean, invstd = expected = EAGER.forward(x, example.affine, 1e-5, Running(*running[:2], 0.1))
        result = ours.forward(x, Affine(gamma.requires_grad_(), beta, LEAKY), 1e-5, Running(*running[2:], 0.1))
        torch.testing.assert_close(result, expected)
        torch.testing.assert_close(running[2:], running[:2])
        assert result[0].stride() == x.stride()
        gamma, kept = gamma.detach(), keep(example, "z")
        torch.testing.assert_close(ours.backward(kept, dz), EAGER.backward(kept, dz), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.normalise(x, mean, invstd, Affine(gamma, beta, LEAKY)), z)
    functions = {"contiguous": 3, "channels_last": 2}[layout]  # channels_last uses PyTorch's moments
    assert counters["stats"]["unique_graphs"] - before == functions


@each_way
def test_sizes_of_1_do_not_use_up_the_recompilations(request, needs):
    """Layers that keep x or z, in every combination of sizes of 1 with more than one value per channel."""
    request.getfixturevalue(needs)
    sizes = [size for size in product((1, 3), (1, 4), (1, 5), (6,))]
    layouts = LAYOUTS if needs == "compiler" else ["contiguous"]
    layers = (CheckpointedABN, InPlaceABN) if needs == "compiler" else (InPlaceABN,)
    for (n, c, h, w), layout, cls in product(sizes, layouts, layers):
        x = torch.randn(n, c, h, w).contiguous(memory_format=LAYOUTS[layout])
        results = []
        for backend in ("eager", "compiled"):
            leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
            z = cls(c, backend=backend)(leaf)
            results.append((z, *torch.autograd.grad(z, leaf, torch.arange(z.numel()).view(z.shape).float())))
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_writes_over_the_input(compiler):
    """z is in x, and x's version changes, so an earlier operation that kept x raises in its backward pass."""
    x, _, gamma, beta, _ = case(SHAPE)
    expected, version = EAGER.forward(x, Affine(gamma, beta, LEAKY), 1e-5, UNTRACKED), x._version
    result = CompiledBackend().forward(x, Affine(gamma, beta, LEAKY), 1e-5, UNTRACKED, overwrite=True)
    assert result[0] is x and x._version > version
    torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_result_is_a_tensor_of_its_own(without_code, layout):
    """Autograd refuses writes over a view that a custom function returns, and a view has no recipe."""
    x = torch.randn(2, 4, 4, 4, requires_grad=True).to(memory_format=LAYOUTS[layout])
    z = CheckpointedABN(4, backend="compiled")(x)
    z.add_(1).sum().backward()
    prepared = recompute_activations(nn.Sequential(CheckpointedABN(4, backend="compiled"), nn.Conv2d(4, 4, 1)))
    prepared(x)
    assert report(prepared).bytes == x.nbytes


def test_message_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiled_backend, "compiler_available", compiler_available.__wrapped__)  # asks anew
    forget_compilations()
    with monkeypatch.context() as patch:
        patch.delattr(torch._inductor, "compile")  # as in another PyTorch
        assert not compiled_backend.compiler_available("cpu")
    with inductor_config.patch({"cpp.cxx": ("/nonexistent/g++",), "force_disable_caches": True}):
        assert not compiled_backend.compiler_available("cpu")
        with pytest.raises(ValueError, match=r"for cpu on this machine.*g\+\+.*backend='eager'"):
            CompiledBackend().moments(torch.randn(2, 3, 4, 5))
