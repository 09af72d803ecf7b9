"""Whatever happens around a step, a network with a budget is like the plain network."""

import copy
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from keepless import plan, recompute_activations, report
from keepless.recompute.calls import random_state
from keepless.recompute.costs import peak_bytes
from keepless.torch_internals import current_hooks
from tests.keepless.recompute.ahead import planned_sizes


class Layers(nn.Module):
    """`call` is called first, with the number of the forward pass."""

    def __init__(self, call=lambda number: None):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.call, self.calls = call, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y = F.gelu(self.first(x))
        self.call(self.calls)
        return self.second(F.gelu(self.second(y)))


X = torch.linspace(-1, 1, 4 * 40 * 16, dtype=torch.float64).view(4, 40, 16)


def pair(budget: float | None = 1.0, **options) -> tuple[nn.Module, nn.Module]:
    """The network, prepared with this budget, and the plain one."""
    torch.manual_seed(0)
    plain = Layers(**options).double()
    return recompute_activations(copy.deepcopy(plain), budget=budget), plain


def plans(network: nn.Module) -> int:
    return sum(len(size.plans) for size in planned_sizes(network))


def gradients(network: nn.Module, x: Tensor = X) -> list[Tensor]:
    output = network(x)
    loss = output.values() if output.is_nested and output.layout == torch.jagged else output
    loss = loss.to_padded_tensor(0.0) if loss.is_nested else loss
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(loss.square().mean(), trained, materialize_grads=True))


def assert_like_plain(within: nn.Module, plain: nn.Module, x: Tensor = X) -> None:
    for ours, theirs in zip(gradients(within, x), gradients(plain, x), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("error, fails_in", [(ValueError, 1), (ValueError, 2), (KeyboardInterrupt, 2)])
@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("budget", [None, 1.0])
def test_a_step_that_raises_is_planned_the_next_time(error, fails_in, at_once, budget):
    """The step raises before or after it calls a function, or Ctrl-C ends it, after which modules call no hooks.

    The rehearsal of the first step raises, too. As it has no output, no message speaks of one.
    """

    def call(number: int) -> None:
        if number == fails_in:
            raise error

    within, plain = pair(budget, call=call)
    if at_once:
        for network in (within, plain):
            network.first.register_forward_pre_hook(lambda layer, args, n=network: call(n.calls))
    for number in (1, 2, 3, 4, 5):
        if number != fails_in:
            assert_like_plain(within, plain)
            continue
        for network in (within, plain):
            with pytest.raises(error), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                network(X)
            assert not said
        assert error is KeyboardInterrupt or current_hooks() is None
    assert budget is None or plans(within) == 1


def test_a_network_inside_vmap_needs_no_plan():
    network = recompute_activations(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 2, 1)), budget=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            torch.vmap(network)(torch.randn(3, 3, 8, 8)).sum().backward()


def test_what_is_trained_from_now_on_is_planned_anew():
    """Layers that were frozen did not save their inputs."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8)], nn.Linear(64, 1))
    x = torch.randn(256, 64, requires_grad=True)
    network = copy.deepcopy(plain)
    recompute_activations(network, budget=12 * x.nbytes)
    for frozen in (True, False):
        for number in range(1, 8):
            network[number].requires_grad_(not frozen)
        for parameter in network.parameters():
            parameter.grad = torch.zeros_like(parameter)
        network(x).sum().backward()  # planned, as no profiler runs
        for _ in range(4):
            assert peak_bytes(lambda: network(x).sum().backward(), "cpu") < 12.5 * x.nbytes
    assert len(planned_sizes(network)) == 2


class Deepened(nn.Module):
    """A network whose steps are longer from the fifth on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for _ in range(2 if self.calls < 5 else 16):
            x = F.gelu(self.layer(x))
        return x.square()


def test_a_step_that_fits_as_it_is_is_recorded_once_it_strays():
    """Few of the long step's results are then kept, and the next step is rehearsed."""
    torch.manual_seed(0)
    plain = Deepened().double()
    within = recompute_activations(copy.deepcopy(plain), budget="1GiB")
    for _ in range(4):
        assert_like_plain(within, plain)
        assert {line.why for line in report(within).lines} == {"planned", "cannot be computed again"}
    assert_like_plain(within, plain)
    assert {line.why for line in report(within).lines} == {"no plan"}
    assert report(within).bytes == 3 * X.nbytes  # of 13 results in a row one is kept
    assert plans(within) == 1
    assert_like_plain(within, plain)
    assert plans(within) == 2
    assert {line.why for line in report(within).lines} == {"planned", "cannot be computed again"}


def test_a_step_that_is_profiled_is_not_rehearsed():
    """One profiler inside another would end it, and in its warm-up crash the process."""
    within, plain = pair()
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], schedule=schedule) as profile:
        with pytest.warns(UserWarning, match="a PyTorch profiler is running: the budget is planned once it has ended"):
            assert_like_plain(within, plain)
        profile.step()
        assert_like_plain(within, plain)
        profile.step()
    assert plans(within) == 0
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        for _ in range(2):
            assert_like_plain(within, plain)
        torch.ones(3).erfinv()
    assert "aten::erfinv" in {event.name for event in profile.events()} and plans(within) == 0
    assert_like_plain(within, plain)
    assert plans(within) == 1


def test_nothing_is_planned_while_a_graph_is_captured(monkeypatch):
    """Measuring would wait for the device. Masks that are drawn again might get other numbers, so they are kept."""
    within, plain = pair()
    monkeypatch.setattr("keepless.recompute.plans.is_capturing", lambda: True)
    with pytest.warns(UserWarning, match="a CUDA graph is captured without a plan: run three steps before"):
        assert_like_plain(within, plain)
    assert plans(within) == 0
    monkeypatch.undo()
    for _ in range(3):
        assert_like_plain(within, plain)
    assert plans(within) == 1
    monkeypatch.setattr("keepless.recompute.calls.is_capturing", lambda: True)
    assert random_state(torch.ones(2)) is None


@pytest.mark.parametrize("budget", [None, 1.0])
def test_threads_measure_one_after_the_other(budget):
    """`nn.DataParallel` calls networks in threads. Two that start a profiler at once crash the process."""
    within, plain = pair(budget)
    raised: list[BaseException] = []

    def work(size: int) -> None:
        try:
            for _ in range(10):
                assert_like_plain(within, plain, X[:size])
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(size,)) for size in (1, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    assert not is_in_torch_dispatch_mode()  # PyTorch's flag, which modes of threads would leave behind


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_kept_as_they_are(layout):
    within, plain = pair()
    for network in (within, recompute_activations(copy.deepcopy(plain))):
        for _ in range(4):
            x = torch.nested.nested_tensor([X[0, :3], X[1, :5]], layout=layout)
            assert_like_plain(network, plain, x)


def test_a_plan_leaves_its_example_alone():
    network = Layers().double()
    x = X.clone().requires_grad_()
    y = x * x  # its graph has one backward pass
    plan(network, x)
    plan(network, y)
    y.sum().backward()
    assert torch.equal(x.grad, 2 * x)
