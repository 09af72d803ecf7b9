"""Whatever happens around a step, a network with a budget is like the plain network."""

import copy
import threading
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from keepless import plan, recompute_activations, report
from keepless.recompute.costs import peak_bytes
from keepless.recompute.functions import random_state
from keepless.recompute.rehearsal import counted_step, rehearsed_step
from keepless.recompute.search import Choice
from keepless.recompute.simulation import plain_peak
from keepless.recompute.step import Kind
from tests.keepless.recompute.ahead import planned_sizes, step


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


def pair(**options) -> tuple[nn.Module, nn.Module]:
    """The network within a budget, and the plain one."""
    torch.manual_seed(0)
    plain = Layers(**options).double()
    return recompute_activations(copy.deepcopy(plain), budget=1.0), plain


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
def test_a_step_that_raises_is_planned_the_next_time(error, fails_in, at_once):
    """The step raises before or after it calls a function, or Ctrl-C ends it, after which modules call no hooks.

    The rehearsal of the first step raises, too. As it has no output, no message speaks of one.
    """

    def call(number: int) -> None:
        if number == fails_in:
            raise error

    within, plain = pair(call=call)
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
    assert plans(within) == 1


class Casts(nn.Module):
    """Makes three equal calls, of which the first two return their argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = (layer(x) for layer in self.layers[:3])
        q, k = q * 2.0 + x, k * 2.0 + x
        return x + self.layers[3](F.scaled_dot_product_attention(q.float(), k.float(), v.float()))


class InsideAutocast(Layers):
    """Turns autocast on in its own forward pass, as published models do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Experts(nn.Module):
    """Every second row goes to one of two experts, none to the last; each gets a slice of a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(16, 64)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        values, _ = self.projection(x.flatten(0, 1)).split(32, 1)
        rows = len(values) // 2
        parts = zip(self.experts, (values[:rows], values[rows:], values[:0]), strict=True)
        return torch.cat([expert(part) for expert, part in parts])


class Transposed(nn.Module):
    """Multiplies transposed inputs, as vision transformers do: pixels are rows, but lie in memory as columns.

    PyTorch multiplies them in another way where weights need no gradient.
    """

    def __init__(self, multiply: Callable[[nn.Linear, Tensor], Tensor], frozen: bool) -> None:
        super().__init__()
        self.layers, self.multiply = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), multiply
        self.layers[1:].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(self.multiply(layer, x.transpose(1, 2))).transpose(1, 2).contiguous()
        return x


def weighted(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight


class KernelPerImage(nn.Module):
    """Predicts a kernel for each image. `overwrites`: inside the transform, what a concatenation was made of."""

    def __init__(self, overwrites: bool):
        super().__init__()
        self.stem, self.kernels = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 4 * 8 * 9)
        self.end, self.overwrites = nn.Conv2d(4, 2, 1), overwrites

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        both = torch.cat([h, F.silu(h)], 1)
        kernels = self.kernels(h.mean((2, 3))).view(-1, 4, 8, 3, 3)
        y = torch.vmap(lambda h, w: F.silu(F.conv2d(F.relu(h * 2)[None], w, padding=1))[0])(both, kernels)
        if self.overwrites:
            torch.vmap(lambda part: part.mul_(2))(y)
        return self.end(F.gelu(y))


IMAGES = torch.linspace(-1, 1, 3 * 3 * 8 * 8, dtype=torch.float64).sin().view(3, 3, 8, 8)
ROWS = torch.linspace(-1, 1, 2 * 8 * 64).sin().view(2, 8, 64)
UNUSUAL = {
    "calls that return their argument": (lambda: nn.Sequential(*(Casts() for _ in range(4))), X.float()),
    "autocast inside": (InsideAutocast, X.float()),
    "transposed inputs of layers": (partial(Transposed, nn.Linear.__call__, False), ROWS),
    "transposed inputs of frozen layers": (partial(Transposed, nn.Linear.__call__, True), ROWS),
    "transposed inputs of products": (partial(Transposed, weighted, False), ROWS),
    "transposed inputs of frozen products": (partial(Transposed, weighted, True), ROWS),
    "an expert without rows": (lambda: Experts().double(), X),
    "vmap inside": (lambda: KernelPerImage(False).double(), IMAGES),
    "vmap inside that overwrites": (lambda: KernelPerImage(True).double(), IMAGES),
}


@pytest.mark.filterwarnings("ignore:no plan keeps", "ignore:the network runs a part")
@pytest.mark.parametrize("budget", [None, "1KiB"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_unusual_networks_are_like_the_plain_ones_to_the_bit(name, budget):
    """Each has one plan."""
    make, x = UNUSUAL[name]
    torch.manual_seed(0)
    plain = make()
    within = recompute_activations(copy.deepcopy(plain), budget=budget)
    for _ in range(5):
        assert all(map(torch.equal, gradients(within, x), gradients(plain, x)))
    if budget is not None:
        (size,) = planned_sizes(within)
        assert not size.strays and size.rehearsals == 1 and len(size.plans) == 1


def test_a_network_inside_vmap_needs_no_plan():
    network = recompute_activations(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SiLU(), nn.Conv2d(4, 2, 1)), budget=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            torch.vmap(network)(IMAGES.float()).sum().backward()


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
    """Its steps are long ones from the fifth on."""

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
    monkeypatch.setattr("keepless.recompute.functions.is_capturing", lambda: True)
    assert random_state(torch.ones(2)) is None


def test_attention_is_computed_again_with_gradients_by_which_it_chooses_its_backend(monkeypatch):
    modes = []

    def attention(*args, **kwargs):
        modes.append(torch.is_grad_enabled() and args[0].requires_grad)
        return F.scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr("keepless.recompute.rules.by_present_backends", lambda function: attention)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.project = nn.Linear(32, 96)

        def forward(self, x):
            return F.scaled_dot_product_attention(*self.project(x).chunk(3, -1)).sin()

    network, x = nn.Sequential(Heads(), Heads()), torch.randn(2, 64, 32)
    counted = counted_step(network, (x,), {})
    plan = Choice(0, 0.0, tuple(value.kind == Kind.KEPT for value in counted.values)).plan(counted)
    step(network, x, plan)
    assert modes and all(modes)


def test_threads_measure_one_after_the_other():
    """Two that start a profiler at once crash the process."""
    within, plain = pair()
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


def test_the_plain_peak_has_statistics_that_are_saved_without_gradient():
    """Those of norms that take as many bytes as their inputs."""
    network = nn.Sequential(*(layer for _ in range(9) for layer in (nn.BatchNorm1d(512), nn.SiLU())))
    x = torch.randn(2, 512)
    step(network, x)
    traced = counted_step(network, (x,), {})
    assert plain_peak(traced) == pytest.approx(peak_bytes(lambda: step(network, x), "cpu"), rel=0.05)


class Distances(nn.Linear):
    """`torch.cdist` is written in Python, and takes memory while it runs and in its backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cdist(super().forward(x), self.weight).mean()


def test_the_plain_peak_has_what_functions_written_in_python_take_while_they_run():
    network, x = Distances(64, 64), torch.randn(512, 64)
    network(x).backward()
    traced = counted_step(network, (x,), {})
    assert plain_peak(traced) == pytest.approx(peak_bytes(lambda: network(x).backward(), "cpu"), rel=0.05)


class ReadAgain(nn.Linear):
    """Its result is read three times; the gradients of the last two are added up long before that of the first."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).exp()
        return y.repeat(1, 4).exp().sum() + (y.square() + y.sin()).sum()


@pytest.mark.parametrize("of_step", [counted_step, rehearsed_step])
def test_the_plain_peak_has_sums_of_gradients_that_wait_for_more(of_step):
    network, x = ReadAgain(16, 64), torch.randn(256, 16)
    network(x).backward()
    traced = of_step(network, (x,), {})
    assert plain_peak(traced) == pytest.approx(peak_bytes(lambda: network(x).backward(), "cpu"), rel=0.01)


class Noisy(nn.Linear):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__(64, 64)
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.bernoulli(x.sigmoid(), generator=self.generator)


def test_measured_calls_leave_the_network_s_generators_alone():
    states = []
    for network in (Noisy(), recompute_activations(Noisy(), budget=1.0)):
        for _ in range(4):
            network(torch.randn(64, 64, requires_grad=True)).sum().backward()
        states.append(network.generator.get_state())
    assert torch.equal(*states)
