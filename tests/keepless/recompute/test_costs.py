"""What operators cost, on a clock of the tests' own and on stand-ins for a device."""

import gc
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from keepless.recompute.step import costs
from keepless.recompute.step.costs import peak_bytes, seconds_for, seconds_of, shortest_seconds, work_of

CUDA = torch.device("cuda", 1)


@pytest.fixture
def ticks(monkeypatch):
    """Sets the times that the clock will show."""
    return lambda *times: monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=iter(times).__next__))


def test_the_first_call_warms_up_and_the_least_of_three_counts(ticks):
    ticks(0, 3, 3, 5, 5, 9)
    calls: list[int] = []
    assert shortest_seconds(lambda: calls.append(1), torch.device("cpu")) == 2 and len(calls) == 4


def test_on_cuda_the_time_of_a_launch_is_taken_off(ticks, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    for launch, seconds in ((1, 3), (9, 0)):
        ticks(0, 4)
        monkeypatch.setattr(costs, "_launch_seconds", lambda device: launch)  # noqa: B023
        assert seconds_of(lambda: None, CUDA)[1] == seconds


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

    monkeypatch.setattr(costs, "shortest_seconds", again)
    costs._rates.cache_clear()
    with FakeTensorMode():
        x = torch.empty(2**10, 2**10, dtype=torch.bfloat16)
        for _ in range(2):
            copied = seconds_for(*work_of(torch.ops.aten.neg.default, (x,), {}, x), x)
            multiplied = seconds_for(*work_of(torch.ops.aten.mm.default, (x, x), {}, x), x)
    costs._rates.cache_clear()
    assert copied == 2 * 2**21 / 2**23
    assert multiplied == 3 * 2**21 / 2**23 + 2 * 2**30 / 2**23
    assert [type(tensor) for tensor in measured] == [Tensor, Tensor] and measured[1].dtype == torch.bfloat16


def operator(function, *args) -> costs.Operator:
    measurable = costs.operator_of(function, args, {})
    assert measurable is not None
    return measurable


def test_an_operator_is_measured_on_other_tensors():
    """`logsumexp` makes two tensors of its argument's size; a matrix without an inverse counts nothing."""
    x = torch.randn(64, 1000)
    operators = [operator(torch.ops.aten.logsumexp.default, x, [1]), operator(torch.ops.aten.linalg_inv_ex.default, x)]
    costs.measure(operators)
    temporaries = peak_bytes(lambda: torch.logsumexp(x, 1), "cpu") - 64 * 4
    measured_costs = [costs.cost_of(measured) for measured in operators]
    assert measured_costs[0].temporaries == pytest.approx(temporaries, abs=64)
    assert [cost.seconds == 0 for cost in measured_costs] == [False, True]


@pytest.mark.parametrize("short, runs", [(0.0, 2), (math.inf, 5)])
def test_an_operator_runs_twice_to_be_measured_a_short_one_five_times(short, runs, monkeypatch):
    """Once to warm up, also if its results were asked for. The second call is the one whose memory is watched."""
    x = torch.randn(64, 1002 + runs)
    logsumexp, calls, run = operator(torch.ops.aten.logsumexp.default, x, [1]), [], costs.Operator.call_on_ones
    monkeypatch.setattr(costs, "_SHORT", short)

    def counted(self):
        call = run(self)
        return lambda: calls.append(gc.isenabled()) or call()

    monkeypatch.setattr(costs.Operator, "call_on_ones", counted)
    assert costs.results_of(logsumexp).shape == (64,)
    costs.measure([logsumexp, logsumexp])
    costs.measure([logsumexp])
    assert len(calls) == runs
    assert not any(calls) and gc.isenabled()  # memory of garbage would count as freed by the operator


def test_a_measurement_without_memory_is_made_again_later(monkeypatch):
    x = torch.randn(64, 1001)
    logsumexp, run = operator(torch.ops.aten.logsumexp.default, x, [1]), costs.Operator.call_on_ones

    def fails(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(costs.Operator, "call_on_ones", fails)
    costs.measure([logsumexp])
    assert costs.cost_of(logsumexp) is None
    monkeypatch.setattr(costs.Operator, "call_on_ones", run)
    costs.measure([logsumexp])
    assert costs.cost_of(logsumexp).seconds > 0


def test_an_operator_is_timed_on_the_device_of_tensors_in_lists():
    on_device, on_cpu = torch.empty(2, 3, device="meta"), torch.empty(2, 3)
    assert operator(torch.ops.aten.cat.default, [on_device, on_device]).device == on_device.device
    assert (
        costs.computing_device([on_cpu, on_device]) == on_device.device and costs.computing_device([]) == on_cpu.device
    )
