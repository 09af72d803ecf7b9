"""The layers on a CUDA device against float64 on the CPU; `make test PYTEST="-m gpu"`."""

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from keepless import ABN
from keepless.norms import abn as abn_module
from tests.cuda import NEEDS_CUDA
from tests.norms import OVERWRITING, STRATEGIES

pytestmark = NEEDS_CUDA

LAYERS = STRATEGIES | {"inplace_overwrite": OVERWRITING["inplace_overwrite"]}
each_layer = pytest.mark.parametrize("strategy", LAYERS)
each_backend = pytest.mark.parametrize("backend", ["auto", "eager"])


def gradients(layer, x, dz) -> list[torch.Tensor]:
    x = x.clone(memory_format=torch.preserve_format).requires_grad_()
    z = layer(x * 1)
    return [z, *torch.autograd.grad(z, [x, *layer.parameters()], dz)]


@each_layer
@each_backend
@pytest.mark.parametrize("training, pixels", [(True, 16), (True, 96), (False, 16)])  # one kernel a pass, or two
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_cpu_in_float64(strategy, backend, training, pixels, memory_format, dtype):
    torch.manual_seed(0)
    reference = ABN(32).double().train(training)
    with torch.no_grad():
        reference.weight.uniform_(0.5, 1.5).mul_(torch.randn(32).sign())
        reference.bias.uniform_(-0.5, 0.5)
    layer = LAYERS[strategy](32, backend=backend).to("cuda", torch.promote_types(dtype, torch.float32)).train(training)
    layer.load_state_dict(reference.state_dict())
    values = torch.randn(2, 4, 32, pixels, pixels, dtype=torch.float64).to(dtype)  # both sides see the same signs
    x, dz = (tensor.to(memory_format=memory_format) for tensor in values)
    expected = gradients(reference, x.double(), dz.double())
    results = gradients(layer, x.to("cuda"), dz.to("cuda"))
    tolerance = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    if strategy == "checkpoint_xhat" and dtype == torch.float16:
        tolerance = 2e-2  # of 1.2 million outputs, 21 within 4e-5 of zero change sign, also on a CPU
    for result, wanted in zip(results, expected, strict=True):
        assert (result.double().cpu() - wanted).norm() <= tolerance * wanted.norm()
    assert results[0].is_contiguous(memory_format=memory_format)


@pytest.fixture
def shared(monkeypatch) -> Iterator[None]:
    """Synchronised layers compute as in a larger group, in an NCCL group of this process alone."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    monkeypatch.setattr(abn_module, "synchronised_group", lambda group: dist.group.WORLD)
    yield
    dist.destroy_process_group()


@each_layer
@each_backend
@pytest.mark.parametrize("sync, pixels", [(False, 16), (False, 96), (True, 16)])
def test_a_layer_never_waits_for_the_device_and_a_captured_graph_replays_it(strategy, backend, sync, pixels, shared):
    layer = LAYERS[strategy](32, backend=backend, sync=sync).to("cuda")
    x, dz = torch.randn(2, 4, 32, pixels, pixels, device="cuda").unbind()
    gradients(layer, x, dz)  # compiles, and checks the count of values
    torch.cuda.set_sync_debug_mode("error")
    try:
        gradients(layer, x, dz)
    finally:
        torch.cuda.set_sync_debug_mode("default")

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = gradients(layer, x, dz)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = gradients(layer, x, dz)
    graph.replay()
    assert layer.num_batches_tracked == 4
    torch.testing.assert_close(results, expected, rtol=1e-5, atol=1e-5)
