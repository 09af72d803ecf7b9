"""What a layer launches on a device, counted without one."""

import dataclasses
from collections import Counter
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from keepless import InPlaceABN
from keepless.norms import abn, bn_act, synchronisation
from keepless.torch_internals import FakeTensorMode

triton = pytest.importorskip("triton")
from keepless.norms.backends import triton_kernels  # noqa: E402
from keepless.norms.backends.triton_kernels import Launch  # noqa: E402


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels that would be launched; what they write is left unset."""
    names = []
    monkeypatch.setattr(Launch, "__call__", lambda launch, *arguments: names.append(launch.kernel.__name__))
    monkeypatch.setattr(triton_kernels, "_processors", lambda device: 132)
    return names


SMALL, LARGE = (2, 8, 4, 4), (2, 8, 120, 120)  # whole channels by one program, and in parts
FORWARD, BACKWARD = ["_partial_moments_kernel", "_normalise_kernel"], ["_partial_sums_kernel", "_input_gradient_kernel"]


@pytest.mark.parametrize(
    "shape, kernels, partials", [(SMALL, [FORWARD[1], BACKWARD[1]], 0), (LARGE, FORWARD + BACKWARD, 2)]
)
def test_a_layer_launches_two_or_four_kernels_and_allocates_what_they_write(
    launched, monkeypatch, shape, kernels, partials
):
    """Host time is counted by the operators of PyTorch beside them."""
    monkeypatch.setattr(triton_kernels, "supports", lambda x: True)
    layer, x = InPlaceABN(8, backend="triton"), torch.randn(shape).requires_grad_()
    dz = torch.ones(shape)
    for _ in range(2):  # the first prepares
        launched.clear()
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            torch.autograd.grad(layer(x), [x, *layer.parameters()], dz)
    assert launched == kernels
    operators = Counter(event.name for event in profile.function_events if event.name.startswith("aten::"))
    # empty_like makes z, mean, invstd, dx, dgamma and dbeta. new_empty and empty make the partial results of the two
    # passes. add_ counts the minibatch.
    wanted = {"aten::empty_like": 6, "aten::new_empty": partials, "aten::empty": partials, "aten::add_": 1}
    assert operators - Counter(("aten::empty_strided",) * 6) == Counter(wanted) - Counter()


def driver(launched: list[tuple]) -> Mock:
    """Replaces CUDA's driver, and notes what is launched."""
    mock = Mock()
    mock.utils = mock
    mock.get_current_target.return_value = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    mock.get_current_device.return_value = 99  # no device of this machine, so its caches stay as they are
    mock.get_current_stream.return_value = 7
    mock.get_device_properties.return_value = {"max_shared_mem": 1 << 20}
    mock.load_binary.side_effect = lambda name, *arguments: (object(), name, 32, 0, 1024)
    mock.launcher_cls = lambda source, metadata: lambda *arguments: launched.append(arguments)
    return mock


def test_triton_looks_at_the_arguments_of_the_first_launch_only(monkeypatch, tmp_path):
    """Later ones take the binary that it found: one for each alignment of the tensors, with and without statistics."""
    if triton.knobs.runtime.interpret or not triton.knobs.nvidia.ptxas.path:
        pytest.skip("needs Triton's compiler")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    launches, bound = [], []
    monkeypatch.setattr(triton.runtime.driver, "_active", driver(launches))
    run = triton.JITFunction.run
    monkeypatch.setattr(
        triton.JITFunction, "run", lambda *arguments, **named: bound.append(arguments) or run(*arguments, **named)
    )
    kernel = triton_kernels._normalise_kernel
    aligned, vectors = torch.empty(2, 2, 8, 4, 4), torch.empty(6, 16).unbind()
    shifted = torch.empty(513)[1:].view(2, 2, 8, 4, 4)
    prepared = triton_kernels._normalise(triton_kernels._key(aligned[0]), "leaky_relu", False)
    launch = dataclasses.replace(prepared, compiled={})
    for x, z in (aligned, shifted):
        for running in (vectors[4:], (None, None)):
            for repeated in (False, True):
                bound.clear(), launches.clear()
                launch((x, z, *vectors[:4], None, *running), (0.1, 1e-5, 0.0, 0.5))
                assert bool(bound) != repeated
                ((grid, stream, arguments),) = [(call[:3], call[3], call[9:]) for call in launches]
                assert (grid, stream) == ((8, 1, 1), 7) and len(arguments) == len(kernel.arg_names)
                values = dict(zip(kernel.arg_names, arguments, strict=True))
                assert values["x"] is x and values["running_var"] is running[1] and values["param"] == 0.5
                assert values["length"] == 4 and values["ACTIVATION"] == "leaky_relu" and values["FOLD"] == 1
    assert len(launch.compiled) == 4


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


@pytest.mark.parametrize("shape, moments", [(SMALL, FORWARD[:1]), (LARGE, [*FORWARD[:1], "_moments_kernel"])])
def test_a_synchronised_norm_launches_seven_or_eight_kernels_and_waits_for_none(launched, monkeypatch, shape, moments):
    """Forward, on fake CUDA tensors, which raise if they are read: moments, their exchange, what all ranks' moments
    give and whether they are enough, z, and a counter."""
    monkeypatch.setattr(bn_act, "backend_for", lambda name, x: triton_kernels.TritonBackend())
    monkeypatch.setattr(abn, "backend_for", lambda name, x: triton_kernels.TritonBackend())
    monkeypatch.setattr(abn, "synchronised_group", lambda group: group)
    monkeypatch.setattr(synchronisation.dist, "get_world_size", lambda group: 8)
    monkeypatch.setattr(synchronisation.dist, "all_gather_single", lambda *tensors, group: None, raising=False)
    with FakeTensorMode(), torch.device("cuda"):
        layer, x = InPlaceABN(8, sync=True, group=dist.ProcessGroup(0, 1)), torch.empty(shape)
        with Launches() as operators:
            layer(x)
    assert operators.names == ["new_full", "cat", "_assert_async", "add_"]
    assert launched == [*moments, "_joint_statistics_kernel", "_normalise_kernel"]
