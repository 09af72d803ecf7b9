"""What a layer launches on a device, counted without one."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from keepless import InPlaceABN
from keepless.norms import abn, bn_act, synchronisation
from keepless.torch_internals import FakeTensorMode

pytest.importorskip("triton")
from keepless.norms.backends import triton_kernels  # noqa: E402
from keepless.norms.backends.triton_kernels import Launch  # noqa: E402


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that would be launched; what they write is left unset."""
    names = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, *arguments: names.append(launch.kernel.__name__))
    monkeypatch.setattr(triton_kernels, "_processors", lambda device: 132)
    return names


def test_a_layer_launches_four_kernels_and_allocates_what_they_write(launched, monkeypatch):
    """Host time is counted by the operators of PyTorch beside them."""
    monkeypatch.setattr(triton_kernels, "runs_on", lambda x: True)
    layer, x = InPlaceABN(8, backend="triton"), torch.randn(2, 8, 4, 4).requires_grad_()
    dz = torch.ones(2, 8, 4, 4)
    for _ in range(2):  # the first prepares
        launched.clear()
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            torch.autograd.grad(layer(x), [x, *layer.parameters()], dz)
    forward = ["_partial_moments_kernel", "_normalise_kernel"]
    assert launched == [*forward, "_partial_sums_kernel", "_input_gradient_kernel"]
    operators = Counter(event.name for event in profile.function_events if event.name.startswith("aten::"))
    # empty_like makes z, mean, invstd, dx, dgamma and dbeta. new_empty and empty make the partial results of the two
    # passes. add_ counts the minibatch.
    assert operators - Counter(("aten::empty_strided",) * 6) == {
        "aten::empty_like": 6, "aten::new_empty": 2, "aten::empty": 2, "aten::add_": 1
    }  # fmt: skip


class Launches(TorchDispatchMode):
    """Context that counts the operators that launch a kernel on a device: all but views, allocations and exchanges."""

    NONE = ("view", "split", "select", "unbind", "detach", "empty", "new_empty", "empty_like", "alias", "promote_types")

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if function.namespace == "aten" and not name.startswith(self.NONE):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


def test_a_synchronised_norm_launches_eight_kernels_and_waits_for_none(launched, monkeypatch):
    """Forward, on fake CUDA tensors, which raise if they are read: moments, their exchange, what all ranks' moments
    give and whether they are enough, z, and a counter."""
    monkeypatch.setattr(bn_act, "backend_for", lambda name, x: triton_kernels.TritonBackend())
    monkeypatch.setattr(abn, "backend_for", lambda name, x: triton_kernels.TritonBackend())
    monkeypatch.setattr(abn, "synchronised_group", lambda group: group)
    monkeypatch.setattr(synchronisation.dist, "get_world_size", lambda group: 8)
    monkeypatch.setattr(synchronisation.dist, "all_gather_single", lambda *tensors, group: None, raising=False)
    with FakeTensorMode(), torch.device("cuda"):
        layer, x = InPlaceABN(8, sync=True, group=dist.ProcessGroup(0, 1)), torch.empty(2, 8, 4, 4)
        with Launches() as operators:
            layer(x)
    assert operators.names == ["new_full", "cat", "_assert_async", "add_"]
    of_ranks = ["_partial_moments_kernel", "_moments_kernel", "_joint_statistics_kernel", "_normalise_kernel"]
    assert launched == of_ranks
