"""Which backend computes a layer, and that a layer computes the same with each."""

import copy
import warnings
from functools import cache
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from keepless import ABN, CheckpointedABN, InPlaceABN
from keepless.norms import backends, bn_act
from keepless.norms.backends import backend_for, tilings
from keepless.norms.backends.compiled import CompiledBackend
from keepless.norms.backends.eager import EagerBackend
from tests.norms import IN_PLACE, STRATEGIES

LARGE, SMALL = (2, 64, 96, 96), (2, 8, 8, 8)


def test_auto_takes_compiled_loops_for_large_tensors_where_there_is_a_compiler(monkeypatch):
    """Layers compute eagerly where tools look at operations."""
    monkeypatch.setattr(backends, "compiler_available", lambda device_type: True)
    assert isinstance(backend_for("auto", torch.empty(LARGE)), CompiledBackend)
    assert isinstance(backend_for("auto", torch.empty(SMALL)), EagerBackend)
    assert isinstance(backend_for("auto", torch.empty(LARGE, device="meta")), EagerBackend)
    assert isinstance(backend_for("compiled", torch.empty(0, *LARGE[1:])), EagerBackend)
    for tool in (FakeTensorMode(), FlopCounterMode(display=False)):
        with tool:
            assert isinstance(backend_for("auto", torch.empty(LARGE)), EagerBackend)
    monkeypatch.setattr(backends, "compiler_available", lambda device_type: False)
    assert isinstance(backend_for("auto", torch.empty(LARGE)), EagerBackend)


@pytest.mark.parametrize("error", [None, "Failed to find C compiler. Please specify\nor otherwise."])
def test_a_device_is_tried_once_and_an_error_is_said(monkeypatch, error):
    probe, device = Mock(side_effect=error and RuntimeError(error)), torch.device("cuda:1")
    monkeypatch.setattr(backends, "_triton_kernels", lambda: SimpleNamespace(launch_small_kernel=probe))
    monkeypatch.setattr(backends, "triton_launches", cache(backends.triton_launches.__wrapped__))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [backends.triton_launches(device) for _ in range(3)] == [error is None] * 3
    probe.assert_called_once_with(device)
    assert len(caught) == (error is not None)
    for line in (str(warning.message) for warning in caught):
        assert "cuda:1 (Failed to find C compiler. Please" in line and "backend='eager'" in line and "\n" not in line


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_backend_that_cannot_compute_says_so(strategy):
    layer = STRATEGIES[strategy]
    with pytest.raises(ValueError, match="backend='cuda' is not known"):
        layer(4, backend="cuda")
    if backends._triton_kernels() is None:
        with pytest.raises(ValueError, match="needs the package triton"):
            layer(4, backend="triton")
    elif not backends._triton_kernels().INTERPRETED:
        with pytest.raises(ValueError, match="float32 tensor on cpu: expected .* on CUDA"):
            layer(4, backend="triton")(torch.randn(2, 4, 3, 3))


@pytest.mark.parametrize("cls", [CheckpointedABN, InPlaceABN])
def test_backends_are_given_vectors_without_gaps(cls, monkeypatch):
    """Kernels assume contiguous vectors; weights may be columns of a matrix (e.g. from a hypernetwork)."""
    backend = Mock(wraps=EagerBackend(), floors_gamma=False)
    monkeypatch.setattr(bn_act, "backend_for", lambda name, x: backend)
    vectors = {"weight": torch.rand(4, 2)[:, 0], "bias": torch.tensor(0.3).expand(4)}
    layer, x = cls(4), torch.randn(2, 4, 3, 3)
    z = torch.func.functional_call(layer, vectors, x)
    gamma, beta, *_ = backend.forward.call_args.args[1]
    assert gamma.is_contiguous() and beta.is_contiguous()
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


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", IN_PLACE)
def test_traced_layers_are_graphs_of_pytorchs_operators(name, training, monkeypatch):
    """The older ONNX export reads them. While tracing, nothing asks for a compiler or remembers the answer."""
    monkeypatch.setattr(backends, "compiler_available", pytest.fail)
    monkeypatch.setattr(backends, "prefers_compiled", lambda x: True)
    layer, x = STRATEGIES[name](4, backend="auto").train(training), torch.randn(2, 4, 3, 3)
    traced = torch.jit.trace(layer, x, check_trace=False)
    monkeypatch.undo()
    torch.testing.assert_close(traced(x), layer(x))
    assert training or "aten::batch_norm" in str(traced.inlined_graph)


def test_export_with_dynamic_sizes_and_channels_last():
    layer, dynamic = InPlaceABN(4).eval(), torch.export.Dim.DYNAMIC
    x, smaller = (torch.randn(shape).to(memory_format=torch.channels_last) for shape in ((2, 4, 8, 8), (3, 4, 5, 7)))
    exported = torch.export.export(layer, (x,), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},))
    torch.testing.assert_close(exported.module()(smaller), layer(smaller))


@pytest.mark.parametrize("name", ["checkpoint", "inplace"])
def test_an_exported_training_has_the_gradients_and_statistics_of_the_layer(name):
    layer, x = STRATEGIES[name](3).double(), torch.randn(2, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([-2.0, 1e-7, 0.5]))  # one below the floor of in-place layers
    exported = torch.export.export(copy.deepcopy(layer), (x,)).module()
    results = []
    for program in (layer, exported):
        for _ in range(2):
            loss = program(x).pow(3).sum()
        results.append(
            [*torch.autograd.grad(loss, [x, program.weight, program.bias]), program.running_mean, program.running_var]
        )
    torch.testing.assert_close(results[1], results[0])


def test_maps_of_which_triton_s_kernels_cannot_count_the_pixels_are_refused():
    assert tilings.tiling((1, 1, 2**31 - 1), 4, 132, 1).shape == (1, 1, 2**31 - 1)
    with pytest.raises(ValueError, match=r"maps of 2147483648 pixels: expected fewer than 2\^31; use backend='eager'"):
        tilings.tiling((1, 1, 2**31), 4, 132, 1)


def test_offsets_within_a_tile_of_triton_s_kernels_have_32_bits():
    """An image of 2^20 channels of 8x8 has 2^26 elements, so a tile has no more than 16 of them."""
    for channels, images in ((2**10, 64), (2**20, 16), (2**25, 1)):
        assert tilings.tiling((64, channels, 64), 2, 132, 1).tile[0] == images
