"""Prepared launches beside Triton's own, with a driver that only notes what it is given."""

from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from keepless import InPlaceABN, triton_launch
from keepless.norms import abn, bn_act, synchronisation
from keepless.norms.backends.activations import Activation
from keepless.norms.backends.interface import Affine, Running

triton = pytest.importorskip("triton")
from keepless.norms.backends import triton_kernels  # noqa: E402
from keepless.torch_internals import FakeTensorMode, load_triton_kernel  # noqa: E402
from keepless.triton_launch import Launch  # noqa: E402


class Driver:
    """An H100 that launches nothing."""

    def __init__(self):
        self.launches = []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": 228 << 10},
            load_binary=lambda name, kernel, shared, device: (1, 2, 40, 0, 1024),  # its address is 2, with 40 registers
        )

    def launcher_cls(self, source, metadata):
        return lambda *arguments: self.launches.append(arguments)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7

    def get_current_target(self):
        return triton.backends.compiler.GPUTarget("cuda", 90, 32)


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """Triton's driver, for which kernels on CPU tensors are prepared as on a device."""
    if triton_kernels.INTERPRETED:
        pytest.skip("TRITON_INTERPRET is set")

    def load(launch, examples):
        return load_triton_kernel(launch.kernel, launch.programs, examples, launch.constants | launch.options)

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(Launch, "_load", load)
    monkeypatch.setattr(triton_launch, "current_stream", lambda device: 7)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # as the CPU's index
    driver, before = Driver(), triton.runtime.driver._active
    triton.runtime.driver.set_active(driver)
    yield driver
    triton.runtime.driver._active = before


@triton.jit(do_not_specialize=["count"])
def _scale_kernel(x, absent, y, factor, count, size, BLOCK: "triton.language.constexpr", POWER: "triton.language.constexpr"):  # fmt: skip  # noqa: E501
    offsets = triton.language.program_id(0) * BLOCK + triton.language.arange(0, BLOCK)
    values = triton.language.load(x + offsets, offsets < count * size, 0.0)
    triton.language.store(y + offsets, values * factor * POWER, offsets < count * size)


def test_a_prepared_launch_gives_the_binary_what_triton_would_give_it(driver):
    x, y = torch.zeros(2, 36).unbind()
    constants, options = {"BLOCK": 16, "POWER": 2}, {"num_warps": 1, "maxnreg": 64}
    types = (torch.float32, None, torch.float32)
    launch = Launch(_scale_kernel, x.device, 3, types, 1, (2, 16), constants, options)
    assert launch.binary.registers == 40
    launch((x, None, y), (0.5,))
    _scale_kernel[3,](x, None, y, 0.5, 2, 16, **constants, **options)
    prepared, by_triton = driver.launches
    assert prepared[:5] == by_triton[:5] == (3, 1, 1, 7, 2)
    assert prepared[5] == by_triton[5]  # packed metadata
    addresses = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in by_triton[9:]]
    assert list(prepared[9:]) == [value or 0 if value is None else value for value in addresses]

    launch((x, None, y[1:]), (0.5,))  # 4 bytes on: Triton compiles without 128-bit accesses
    assert isinstance(driver.launches[-1][9], torch.Tensor)


def test_a_layer_launches_four_kernels_and_allocates_what_they_write(driver, monkeypatch):
    """Host time is counted: binaries called, and operators of PyTorch beside them."""
    monkeypatch.setattr(triton_kernels, "runs_on", lambda x: True)
    monkeypatch.setattr(Launch, "resident", None)
    layer, x = InPlaceABN(8, backend="triton"), torch.randn(2, 8, 4, 4).requires_grad_()
    dz = torch.ones(2, 8, 4, 4)
    for _ in range(2):  # the first prepares
        driver.launches.clear()
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            torch.autograd.grad(layer(x), [x, *layer.parameters()], dz)
    assert len(driver.launches) == 4 and all(isinstance(launch[9], int) for launch in driver.launches)
    operators = Counter(event.name for event in profile.function_events if event.name.startswith("aten::"))
    # z, mean, invstd, dx, dgamma, dbeta; the partial results of both passes; and the number of minibatches.
    assert operators - Counter(("aten::empty_strided",) * 6) == {
        "aten::empty_like": 6, "aten::new_empty": 2, "aten::empty": 2, "aten::add_": 1
    }  # fmt: skip


def test_the_registers_of_a_kernel_decide_how_many_parts_there_are(driver, monkeypatch):
    monkeypatch.setattr(triton_kernels, "_processors", lambda device: 132)
    x, vector = torch.empty(4, 512, 56, 56), torch.empty(512)
    key = triton_kernels._key(x)
    for resident in (None, 12):
        monkeypatch.setattr(Launch, "resident", resident)
        triton_kernels._forward_pass.cache_clear()
        guaranteed, prepared = triton_kernels._tiling(key, 1), triton_kernels._forward_pass(key, "leaky_relu", False)
        assert prepared.tiling == (guaranteed if resident is None else guaranteed.shared_by([12 * 132, 12 * 132]))
        affine = Affine(vector, vector, Activation("leaky_relu"))
        triton_kernels.TritonBackend().forward(x, affine, 1e-5, Running())
        assert [launch[0] for launch in driver.launches[-2:]] == [512 * prepared.tiling.parts] * 2
    assert prepared.tiling.parts != guaranteed.parts
    triton_kernels._forward_pass.cache_clear()


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


def test_a_synchronised_norm_launches_seven_kernels(monkeypatch):
    """Forward, on fake CUDA tensors: moments, their exchange, what all ranks' moments give, z, and a counter."""
    launched = []
    monkeypatch.setattr(Launch, "_load", lambda launch, examples: None)
    monkeypatch.setattr(Launch, "__call__", lambda launch, *arguments: launched.append(launch.kernel.__name__))
    monkeypatch.setattr(triton_kernels, "_processors", lambda device: 132)
    monkeypatch.setattr(bn_act, "backend_for", lambda name, x: triton_kernels.TritonBackend())
    monkeypatch.setattr(abn, "backend_for", lambda name, x: triton_kernels.TritonBackend())
    monkeypatch.setattr(abn, "synchronised_group", lambda group: group)
    monkeypatch.setattr(synchronisation.dist, "get_world_size", lambda group: 8)
    monkeypatch.setattr(synchronisation.dist, "all_gather_single", lambda *tensors, group: None, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)  # counts are not checked
    with FakeTensorMode(), torch.device("cuda"):
        layer, x = InPlaceABN(8, sync=True, group=dist.ProcessGroup(0, 1)), torch.empty(2, 8, 4, 4)
        with Launches() as operators:
            layer(x)
    assert operators.names == ["new_full", "cat", "add_"]
    of_ranks = ["_partial_moments_kernel", "_moments_kernel", "_joint_statistics_kernel", "_normalise_kernel"]
    assert launched == of_ranks
