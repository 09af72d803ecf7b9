"""What operators cost, on a clock of the tests' own and on stand-ins for a device."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from keepless.recompute import costs
from keepless.recompute.costs import estimated_seconds, peak_bytes, seconds_again, seconds_of
from keepless.recompute.rehearsal import traced_step

CUDA = torch.device("cuda", 1)


class Clock:
    """Only what is called takes time."""

    def __init__(self) -> None:
        self.now = 0.0

    def takes(self, *seconds: float):
        """A call that takes these seconds, one after the other; then always the last of them."""
        left = list(seconds)

        def call() -> None:
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return call


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    return clock


class SlowAtFirst(nn.Linear):
    def __init__(self, clock: Clock):
        super().__init__(4, 4)
        self.call = clock.takes(100, 1)

    def forward(self, x: Tensor) -> Tensor:
        self.call()
        return super().forward(x)


def test_the_first_call_warms_up_and_the_least_of_three_counts(clock):
    assert seconds_again(clock.takes(100, 3, 2, 4), torch.device("cpu")) == 2
    assert traced_step(SlowAtFirst(clock), (torch.ones(2, 4),), {})[1] == 1


def test_on_cuda_the_time_of_a_launch_is_taken_off(clock, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: clock.takes(1)())
    monkeypatch.setattr(costs, "_launch_seconds", lambda device: 1)
    assert seconds_of(clock.takes(3), CUDA)[1] == 3
    monkeypatch.setattr(costs, "_launch_seconds", lambda device: 9)
    assert seconds_of(clock.takes(3), CUDA)[1] == 0


def test_the_peak_is_that_of_the_given_device(monkeypatch):
    bytes_ = {CUDA: 5}
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: bytes_.get(device, 0))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda device=None: None)
    assert peak_bytes(lambda: bytes_.update({CUDA: 12}), CUDA) == 7


def test_fake_tensors_are_priced_by_the_rates_of_their_device(monkeypatch):
    """A copy of 2^24 bytes that takes 2 s, and a product of 2^25 operations; the device is asked once."""
    seconds = iter([2.0, 4.0])
    measured: list[Tensor] = []

    def again(call, device):
        measured.append(call())
        return next(seconds)

    monkeypatch.setattr(costs, "seconds_again", again)
    costs._rates.cache_clear()
    with FakeTensorMode():
        x = torch.empty(2**10, 2**10, dtype=torch.bfloat16)
        for _ in range(2):
            copied = estimated_seconds(torch.neg, (x,), x)
            multiplied = estimated_seconds(torch.mm, (x, x), x)
    costs._rates.cache_clear()
    assert copied == 2 * 2**21 / 2**23
    assert multiplied == 3 * 2**21 / 2**23 + 2 * 2**30 / 2**23
    assert [type(one) for one in measured] == [Tensor, Tensor] and measured[1].dtype == torch.bfloat16


def test_a_measurement_without_memory_is_made_again_later():
    """Until then the call costs what it took in the step."""
    sizes = [torch.OutOfMemoryError("CUDA out of memory"), 12]

    def measure(call):
        found = sizes.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    measured = costs._on_ones(measure)
    assert [measured("call") for _ in range(3)] == [None, 12, 12] and sizes == []


def test_a_call_is_timed_on_the_device_of_tensors_in_lists():
    on_device, on_cpu = torch.empty(2, 3, device="meta"), torch.empty(2, 3)
    call = costs.call_of(torch.cat, ([on_device, on_device],), {}, lists=True)
    assert call.device == on_device.device
    assert (
        costs.computing_device([on_cpu, on_device]) == on_device.device and costs.computing_device([]) == on_cpu.device
    )
