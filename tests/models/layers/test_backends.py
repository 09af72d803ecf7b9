"""Which backend computes a layer, and that a layer computes the same with each."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from models.layers import ABN, CheckpointedABN, InPlaceABN, backends, bn_act
from models.layers.backends import backend_for
from models.layers.backends.compiled import CompiledBackend, compiler_available
from models.layers.backends.eager import EagerBackend
from tests.backend_cases import run_formulas_as_they_stand
from tests.norms import STRATEGIES

LARGE, SMALL = (2, 64, 96, 96), (2, 8, 8, 8)


def test_auto_takes_compiled_loops_for_large_tensors_where_there_is_a_compiler(monkeypatch):
    monkeypatch.setattr(backends, "compiler_available", lambda device_type: True)
    assert isinstance(backend_for("auto", torch.empty(LARGE)), CompiledBackend)
    assert isinstance(backend_for("auto", torch.empty(SMALL)), EagerBackend)
    monkeypatch.setattr(backends, "compiler_available", lambda device_type: False)
    assert isinstance(backend_for("auto", torch.empty(LARGE)), EagerBackend)


@pytest.mark.parametrize("works", [True, False])
def test_auto_on_cuda_tries_triton_once_and_otherwise_computes_eagerly(monkeypatch, works):
    probed = []

    def probe(device):
        probed.append(device)
        if not works:
            raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable\nor otherwise.")

    fused, x = EagerBackend(), SimpleNamespace(device=torch.device("cuda:1"))  # no CUDA here: a tensor by its device
    kernels = SimpleNamespace(probe=probe, runs_on=lambda x: True, TritonBackend=lambda: fused)
    monkeypatch.setattr(backends, "_triton", lambda: kernels)
    backends._triton_launches.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            chosen = [backends._fastest(x) for _ in range(3)]
    finally:
        backends._triton_launches.cache_clear()
    assert probed == [torch.device("cuda:1")]
    assert all((backend is fused) == works for backend in chosen)
    assert len(caught) == (not works)
    for warning in caught:
        line = str(warning.message)
        assert "cuda:1 (Failed to find C compiler. Please" in line and "backend='eager'" in line and "\n" not in line


def test_tools_that_look_at_operations_see_them(monkeypatch):
    monkeypatch.setattr(backends, "compiler_available", lambda device_type: True)
    with FakeTensorMode():
        assert isinstance(backend_for("compiled", torch.empty(LARGE)), EagerBackend)
    with FlopCounterMode(display=False):
        assert isinstance(backend_for("auto", torch.empty(LARGE)), EagerBackend)
    assert isinstance(backend_for("auto", torch.empty(LARGE, device="meta")), EagerBackend)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backend_that_cannot_compute_says_so(strategy):
    layer = STRATEGIES[strategy]
    with pytest.raises(ValueError, match="backend='cuda' is not known; choose one of auto, eager, compiled, triton"):
        layer(4, backend="cuda")
    if backends._triton() is None:
        with pytest.raises(ValueError, match="needs the package triton"):
            layer(4, backend="triton")
    elif not backends._triton().INTERPRETED:
        with pytest.raises(ValueError, match="float32 tensor on cpu: expected .* on CUDA"):
            layer(4, backend="triton")(torch.randn(2, 4, 3, 3))


@pytest.mark.parametrize("op_by_op", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiled_layers_equal_eager_ones(strategy, op_by_op, monkeypatch):
    if op_by_op:
        run_formulas_as_they_stand(monkeypatch)
    elif not compiler_available("cpu"):
        pytest.skip("needs a C++ compiler")
    generator = torch.Generator().manual_seed(0)
    x, dz = torch.randn(2, 3, 16, 9, 9, generator=generator).unbind()
    for training in (True, False):
        results = []
        for backend in ("eager", "compiled"):
            layer = STRATEGIES[strategy](16, backend=backend).train(training)
            with torch.no_grad():
                layer.weight.copy_(torch.linspace(-1.5, 1.4, 16))
                layer.bias.copy_(torch.linspace(-0.5, 0.5, 16))
            leaf = x.clone().requires_grad_()
            z = layer(leaf)
            gradients = torch.autograd.grad(z, [leaf, layer.weight, layer.bias], dz)
            results.append([z, *gradients, layer.running_mean, layer.running_var])
        for ours, expected in zip(*results, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("cls", [CheckpointedABN, InPlaceABN])
def test_backends_are_given_vectors_without_gaps(cls, monkeypatch):
    """Kernels assume contiguous vectors; weights may be columns of a matrix (e.g. from a hypernetwork)."""
    seen = []

    class Recording(EagerBackend):
        def forward(self, x, gamma, beta, *args):
            seen.extend([gamma, beta])
            return super().forward(x, gamma, beta, *args)

    monkeypatch.setattr(bn_act, "backend_for", lambda name, x: Recording())
    vectors = {"weight": torch.rand(4, 2)[:, 0], "bias": torch.tensor(0.3).expand(4)}
    layer, x = cls(4), torch.randn(2, 4, 3, 3)
    z = torch.func.functional_call(layer, vectors, x)
    assert all(vector.is_contiguous() for vector in seen) and len(seen) == 2
    torch.testing.assert_close(z, torch.func.functional_call(ABN(4), vectors, x))


@pytest.mark.parametrize(
    "backend, memory_format",
    [(EagerBackend(), torch.contiguous_format), (CompiledBackend(), torch.channels_last)],  # not by compiled formulas
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_half_precision_inputs_are_not_rounded(backend, memory_format, dtype):
    x = torch.randn(4, 8, 16, 16).to(dtype, memory_format=memory_format)
    mean, var = backend.moments(x)
    expected_var, expected_mean = torch.var_mean(x.double(), (0, 2, 3), correction=0)
    assert mean.dtype == var.dtype == torch.float32
    torch.testing.assert_close(mean.double(), expected_mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(var.double(), expected_var, rtol=1e-5, atol=0)
