"""What the training does with PyTorch's private parts: averages of weights, and failed captures."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import Mock, call

import pytest
import torch

from models.private_torch import capturing, move_towards
from tests.cuda import NEEDS_CUDA


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_tensors_move_towards_others_as_each_does(device, dtype):
    torch.manual_seed(0)
    starts, ends = ([torch.randn(n, dtype=dtype, device=device) for n in (1, 7, 1000)] for _ in range(2))
    for share in (0.1, 0.001, 0.0):
        moved = [start.clone() for start in starts]
        move_towards(moved, ends, torch.tensor(share, dtype=torch.float64, device=device))
        expected = [torch.lerp(start, end, share) for start, end in zip(starts, ends, strict=True)]
        torch.testing.assert_close(moved, expected, rtol=0, atol=0 if device == "cpu" else 4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("ends", [True, False])
def test_after_a_failed_capture_the_device_is_as_before(monkeypatch, ends):
    """PyTorch leaves the stream, the generator and the pool in the capture if it cannot end it."""
    device = Mock(name="device")
    device.clone_state.return_value, device.pool.return_value, device.current.return_value = "state", "pool", "before"
    device.end_pool.side_effect = RuntimeError("not currently recording") if ends else None

    @contextmanager
    def graph(*_: object, **__: object) -> Iterator[None]:
        try:
            yield
        finally:
            if not ends:
                raise RuntimeError("the capture cannot be ended")

    functions = {"CUDAGraph": object, "graph": graph, "default_generators": [device], "current_device": lambda: 0}
    functions |= {"graph_pool_handle": device.pool, "current_stream": device.current, "set_stream": device.set_stream}
    for name, value in functions.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name, value in {"_cuda_endAllocateToPool": device.end_pool, "_cuda_releasePool": device.release}.items():
        monkeypatch.setattr(torch._C, name, value, raising=False)
    with pytest.raises(ValueError if ends else RuntimeError), capturing(None):
        raise ValueError("of a module")
    after = [call.set_stream("before"), call.graphsafe_set_state("state"), call.end_pool(0, "pool")]
    assert device.mock_calls[-4 + ends :] == after + [call.release(0, "pool")] * (not ends)
