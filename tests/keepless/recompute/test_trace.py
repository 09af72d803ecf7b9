"""Whatever happens around a step or changes between steps, a prepared network is like the plain one."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from keepless import recompute_activations
from keepless.recompute.passes.recipes import random_state
from keepless.recompute.step.costs import peak_bytes
from tests.keepless.recompute.ahead import Layers, assert_like, pair, plans, plans_of, step

X = torch.linspace(-1, 1, 4 * 40 * 32).view(4, 40, 32)


@pytest.mark.filterwarnings("ignore:a PyTorch profiler is running")
def test_what_is_trained_from_now_on_is_planned_anew():
    """Layers that were frozen did not save their inputs."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)], nn.Linear(64, 1))
    x = torch.randn(256, 64, requires_grad=True)
    network = recompute_activations(copy.deepcopy(plain), budget=12 * x.nbytes)
    for frozen in (True, False):
        for number in range(1, 8):
            network[number].requires_grad_(not frozen)
        step(network, x)  # planned, as no profiler runs
        for _ in range(4):
            assert peak_bytes(lambda: network(x).sum().backward(), "cpu") < 12.5 * x.nbytes
    assert len(plans_of(network).recent) == 2


OUTPUTS = [(nn.ReLU(), None), (nn.ReLU(True), None), (nn.LeakyReLU(0.1), 1.0), (nn.LeakyReLU(0.1), "1GiB")]


@pytest.mark.parametrize("activation, budget", OUTPUTS, ids=str)
def test_an_output_may_be_overwritten_where_the_activation_is_computed_again(activation, budget):
    """And in every step that fits as it is. The product's gradients are the same, if the plain network raises no error.

    The plain network with ReLU does, because ReLU saves its result; with a smaller budget LeakyReLU's would be kept.
    """
    plain, prepared = pair(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), activation), budget=budget)
    x = torch.randn(2, 3, 9, 9)
    for _ in range(3):
        prepared.zero_grad()
        prepared(x).mul_(2).square().mean().backward()
    (plain(x) * 2).square().mean().backward()
    for found, expected in zip(prepared.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


def test_a_step_that_is_profiled_is_watched_and_planned_later():
    """Planning measures. One profiler inside another would end it, and in its warm-up crash the process."""
    plain, within = pair(Layers(3), budget=1.0)
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profile:
        with pytest.warns(UserWarning, match="a PyTorch profiler is running: the budget is planned once it has ended"):
            assert_like(plain, within, X, X)
        profile.step()
        assert_like(plain, within, X)
        profile.step()
    assert plans(within) == [0]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        assert_like(plain, within, X, X)
        torch.ones(3).erfinv()
    assert "aten::erfinv" in {event.name for event in profile.events()} and plans(within) == [0]
    assert_like(plain, within, X)
    assert plans(within) == [1]


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch):
    """Measuring would wait for the device. Masks that are drawn again might get other numbers, so they are kept."""
    plain, within = pair(Layers(3), budget=1.0)
    monkeypatch.setattr("keepless.recompute.signatures.signatures.is_capturing", lambda: True)
    with pytest.warns(UserWarning, match="a CUDA graph is captured without a plan: run three steps before"):
        assert_like(plain, within, X)
    assert plans(within) == [0]
    monkeypatch.undo()
    assert_like(plain, within, X, X, X)
    assert plans(within) == [1]
    monkeypatch.setattr("keepless.recompute.passes.recipes.is_capturing", lambda: True)
    assert random_state(torch.ones(2)) is None


def test_a_capture_after_the_watched_step_is_not_called_a_profiler(monkeypatch):
    plain, within = pair(Layers(3), budget=1.0)
    assert_like(plain, within, X)
    monkeypatch.setattr("keepless.recompute.signatures.signatures.is_capturing", lambda: True)
    with pytest.warns(UserWarning) as warnings:
        assert_like(plain, within, X)
    assert ["a CUDA graph is captured" in str(warning.message) for warning in warnings] == [True]


@pytest.mark.parametrize("budget", [None, 1.0])
def test_threads_measure_one_after_the_other(budget):
    """`nn.DataParallel` calls networks in threads. Two that start a profiler at once crash the process."""
    plain, within = pair(Layers(3), budget=budget)

    def work(size: int) -> None:
        for _ in range(10):
            losses = [one(X[:size]).square().mean() for one in (plain, within)]
            trained = map(torch.autograd.grad, losses, ([*one.parameters()] for one in (plain, within)))
            assert all(map(torch.equal, *trained))

    with ThreadPoolExecutor(4) as threads:
        [*threads.map(work, (1, 2, 3, 4))]
    assert not is_in_torch_dispatch_mode()  # PyTorch's flag, which modes of threads would leave behind


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:no plan can be made")
@pytest.mark.parametrize("budget", [None, 1.0])
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_kept_as_they_are(layout, budget):
    plain, within = pair(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)), budget=budget)
    for _ in range(4):
        found = []
        for network in (plain, within):
            y = network(torch.nested.nested_tensor([X[0, :3], X[1, :5]], layout=layout))
            y = y.values() if layout is torch.jagged else y.to_padded_tensor(0.0)
            found.append(torch.autograd.grad(y.square().mean(), list(network.parameters())))
        assert all(map(torch.equal, *found))
