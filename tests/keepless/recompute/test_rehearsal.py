"""The first pass over a shape plans itself, on fake tensors, and nothing else notices."""

import copy
import gc
import random
import threading
import warnings
from functools import cache, lru_cache, partial, wraps
from types import MethodType, SimpleNamespace
from weakref import ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from keepless import InPlaceABN, recompute_activations
from keepless.conversion.activated import MergedActivation, hand_over
from keepless.norms.backends.activations import Activation
from keepless.recompute import copied, plans
from keepless.recompute.copied import LeftBehind
from keepless.recompute.costs import peak_bytes
from keepless.recompute.rehearsal import backward_starts, rehearsed_step
from keepless.torch_internals import FakeTensorMode
from tests.keepless.recompute.ahead import Ahead, gradients, planned_sizes, plans_of


class Layers(nn.Module):
    """Equal layers. `before` is called with the network's input, and returns it."""

    def __init__(self, layers: int = 8, before=lambda module, x: x):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))
        self.before, self.calls = before, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.before(self, x)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.mean(1)


def is_planned(network: nn.Module) -> list[bool]:
    return [bool(size.plans) for size in planned_sizes(network)]


def assert_like_plain(network: nn.Module, plain: nn.Module, inputs: list[Tensor]) -> None:
    for seed, x in enumerate(inputs):
        found = []
        for one in (plain, network):
            torch.manual_seed(seed), random.seed(seed)
            found.append([*gradients(one, x), *one.buffers(), torch.get_rng_state(), torch.tensor(random.random())])
        assert all(map(torch.equal, *found))


def drawn(module: nn.Module, x: Tensor) -> Tensor:
    x = module.layers[0](F.dropout(x * random.random() + torch.rand(x.shape, generator=module.generator), 0.3))
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)  # its backward pass is measured, too


def test_a_rehearsal_leaves_nothing_for_the_garbage_collector(monkeypatch):
    """A collection takes as long as the rest of a rehearsal, if a program has many objects."""
    monkeypatch.setattr(copied.gc, "collect", lambda *_: pytest.fail("fake tensors are left"))
    within = recompute_activations(Layers(2), budget=0.99)
    gradients(within, torch.randn(4, 32))
    assert is_planned(within) == [True]


def test_hooks_that_change_calls_are_said_after_sixteen_rehearsals(rehearsals):
    """A rehearsal leaves them out."""
    within = Layers(2)
    within.layers[1].register_forward_hook(lambda layer, args, output: F.gelu(output))
    recompute_activations(within, budget=0.99)
    for _ in range(15):
        gradients(within, torch.randn(4, 32))
    with pytest.warns(UserWarning, match="16 rehearsals had other calls .* does a hook change outputs"):
        gradients(within, torch.randn(4, 32))
    gradients(within, torch.randn(4, 32))
    assert len(rehearsals) == 16


def asked(module: nn.Module, x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def test_a_rehearsal_leaves_everything_as_it_was():
    torch.manual_seed(0)
    plain = nn.Sequential(Layers(2, drawn), nn.Unflatten(0, (-1, 4)), nn.BatchNorm1d(4), InPlaceABN(4), nn.Linear(4, 4))
    plain[0].generator = torch.Generator().manual_seed(3)
    within, called = copy.deepcopy(plain), []
    for network in (plain, within):
        network[0].register_forward_hook(lambda *arguments, n=network: called.append(n))
        network[3].weight.grad = torch.ones(4)
    recompute_activations(within, budget=1.0)
    handle = register_module_forward_hook(lambda *arguments: called.append(within))
    plans_of(within).plan_for(within, (torch.randn(64, 32),), {})
    assert is_planned(within) == [True]
    handle.remove()
    assert not called and within[0].calls == 0 and torch.equal(within[3].weight.grad, torch.ones(4))
    assert_like_plain(within, plain, [torch.randn(64, 32), torch.randn(64, 32), torch.randn(16, 32)])
    assert called.count(within) == called.count(plain) == 3
    assert is_planned(within) == [True, True]


def test_every_step_of_every_size_is_within_the_budget():
    torch.manual_seed(0)
    plain = Layers(16)
    gradients(plain, torch.randn(700, 32))
    budget = peak_bytes(lambda: plain(torch.randn(700, 32)).mean().backward(), "cpu") // 2
    within = recompute_activations(plain, budget=budget)
    ahead = Ahead.of(within)
    for size in (300, 700, 700, 650, 500, 680, 300, 650):
        assert ahead.peak(within, torch.randn(size, 32)) <= 1.03 * budget
    assert is_planned(within) == [True] * 2


class Scores(nn.Module):
    """Attention without a fused kernel: its scores grow with the square of the length."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1).matmul(x).relu().mean(1)


@pytest.fixture
def rehearsals(monkeypatch) -> list[tuple[int, ...]]:
    """Sizes of the inputs that were rehearsed."""
    found: list[tuple[int, ...]] = []

    def rehearsed(network: nn.Module, args: tuple[Tensor], *others):
        found.append(tuple(args[0].shape))
        return rehearsed_step(network, args, *others)

    monkeypatch.setattr(plans, "rehearsed_step", rehearsed)
    return found


def test_a_size_follows_the_plan_of_one_that_is_not_much_larger(rehearsals):
    within = recompute_activations(Layers(2), budget=0.99)
    for size in (60, 59, 41, 40, 39, 61, 60, 38):
        gradients(within, torch.randn(size, 32))
    assert rehearsals == [(60, 32), (39, 32), (61, 32)]
    for size in range(100, 2000, 100):
        gradients(within, torch.randn(size, 32))
    assert len(is_planned(within)) == 16


def test_inputs_whose_results_are_larger_than_their_bytes_tell_are_planned_next_time(rehearsals):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 16), Scores())
    within = recompute_activations(copy.deepcopy(plain), budget=0.99)
    for shape in ((4, 32, 16), (1, 128, 16), (1, 128, 16), (4, 32, 16)):
        assert_like_plain(within, plain, [torch.randn(shape)])
    assert rehearsals == [(4, 32, 16), (1, 128, 16)]


def test_a_long_pause_is_explained_while_it_lasts(monkeypatch, caplog):
    said = threading.Event()
    monkeypatch.setattr(plans, "_PAUSE", 0.0)
    monkeypatch.setattr(plans._log, "filter", lambda record: said.set() is None)
    monkeypatch.setattr(plans, "rehearsed_step", lambda *given: said.wait(60) and rehearsed_step(*given))
    recompute_activations(Layers(2), budget=0.99)(torch.randn(4, 32))
    assert [record.getMessage()[:8] for record in caplog.records if record.levelname == "WARNING"] == [
        "planning",
        "planned ",
    ]


def test_the_backward_pass_starts_from_losses_and_not_from_what_they_are_computed_from():
    x = torch.randn(4, 3, requires_grad=True)
    logits, features = x.exp(), x * 2
    loss, penalty = logits.mean() + 1, (x * 3).sum()
    assert backward_starts([loss, logits]) == [loss]
    found = backward_starts([logits, loss, features, penalty])
    assert [id(one) for one in found] == [id(loss), id(features), id(penalty)]


def test_norms_that_to_inplace_merged_with_an_activation_are_rehearsed_as_they_run():
    with torch.device("meta"):
        x, convolution = torch.randn(2, 3, 8, 8), nn.Conv2d(3, 3, 3)
        own = nn.Sequential(convolution, InPlaceABN(3), convolution)
        merged = nn.Sequential(convolution, InPlaceABN(3), MergedActivation(nn.ReLU(inplace=True)), convolution)
    merged[1].register_forward_hook(hand_over)
    merged[2].included = (Activation("leaky_relu", 0.01),)
    steps = [rehearsed_step(network, (x,), {}) for network in (own, merged)]
    assert steps[0].memories == steps[1].memories


def test_a_network_on_the_meta_device_is_rehearsed_as_one_on_fake_tensors():
    with torch.device("meta"):
        network, x = Layers(2), torch.randn(64, 32)
    step = rehearsed_step(network, (x,), {})
    with FakeTensorMode():
        other = rehearsed_step(Layers(2), (torch.randn(64, 32),), {})
    assert step.memories == other.memories and step.calls == other.calls
    assert all(parameter.is_meta for parameter in network.parameters())


def test_a_network_that_reads_values_is_rehearsed_on_real_tensors():
    """Nothing outside notices, although it writes over its input and its buffers, and draws numbers."""

    def read(module: nn.Module, x: Tensor) -> Tensor:
        seen.append(len(seen))
        module.count += 1
        return x.mul_(2 if x.sum() > torch.rand(()) else module.count)

    seen: list[int] = []
    torch.manual_seed(0)
    plain, x = Layers(8, read), torch.rand(500, 32)
    plain.register_buffer("count", torch.zeros(()))
    within = recompute_activations(copy.deepcopy(plain), budget=0.6)
    ahead = Ahead.of(within)
    asked = 0.6 * peak_bytes(lambda: gradients(plain, x.clone()), "cpu")
    plain.count.zero_()
    for _ in range(3):
        assert ahead.peak(within, x.clone()) <= 1.03 * asked
    assert is_planned(within) == [True] and within.calls == within.count == 3
    plain.count.fill_(3)
    found = []
    for network in (within, plain):
        torch.manual_seed(1)
        mine = x.clone()
        found.append([*gradients(network, mine), mine, network.count, torch.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_a_network_that_cannot_be_rehearsed_keeps_little():
    """It repeats all but about sqrt(2 n) of its n layers."""
    torch.manual_seed(0)
    outside, x, plain = torch.ones(32, requires_grad=True), torch.rand(500, 32), Layers(32)
    plain.before = lambda module, x: x * outside
    within = recompute_activations(copy.deepcopy(plain), budget=0.6)
    ahead = Ahead.of(within)
    with pytest.warns(UserWarning, match="no plan can be made.* reads a trained tensor outside the network"):
        peaks = [ahead.peak(within, x) for _ in range(2)]
    assert max(peaks) < 0.5 * peak_bytes(lambda: gradients(plain, x), "cpu")
    assert not any(is_planned(within)) and type(outside.grad) is Tensor
    assert all(map(torch.equal, gradients(within, x), gradients(plain, x)))


def test_lazy_modules_are_refused_until_they_have_run():
    network = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with pytest.raises(ValueError, match="got lazy modules, .* first run the network on an input under torch.no_grad"):
        recompute_activations(network, budget=0.5)
    network(torch.randn(2, 4))
    gradients(recompute_activations(network, budget=1.0), torch.randn(2, 4))
    assert is_planned(network) == [True]


def test_an_example_that_cannot_be_rehearsed_is_said_and_leaves_the_network_alone():
    network = Layers(4, asked)
    with pytest.raises(ValueError, match="with the example raises RuntimeError: .*; give an example that"):
        recompute_activations(network, budget=0.5, example=torch.randn(2, 33))
    assert not network._forward_hooks and not network._forward_pre_hooks


def test_a_rehearsal_does_not_communicate(tmp_path):
    """Others may not rehearse now, and would wait."""

    def summed(module: nn.Module, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, total)
        dist.broadcast(total, 0), dist.barrier()
        return x + parts[0] if total.sum() > 0 or reads.clear() else x  # this reads a value

    reads = [0]
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        plain = Layers(4, summed)
        within = recompute_activations(copy.deepcopy(plain), budget=1.0)
        within.group = dist.group.WORLD  # shared with its copies
        assert_like_plain(within, plain, [torch.rand(64, 32)] * 3)
        assert is_planned(within) == [True]
        parallel = recompute_activations(nn.parallel.DistributedDataParallel(Layers(4)), budget=1.0)
        gradients(parallel, torch.randn(64, 32))
        assert is_planned(parallel) == [True]
        inside = recompute_activations(nn.Sequential(parallel, nn.ReLU()), budget=1.0)
        gradients(inside, torch.randn(64, 32))
        assert is_planned(inside) == [True]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("budget", [None, 0.8])
def test_plans_and_passes_of_other_kinds_live_side_by_side(budget):
    """Autocast, eval mode, no gradients, two passes in a step, accumulation, a part that is frozen later."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.GELU())
    within, x = recompute_activations(copy.deepcopy(plain), budget=budget), torch.randn(4, 3, 16, 16)

    def steps(network: nn.Module) -> list[Tensor]:
        found = []
        for number in range(4):
            network.train(number != 2)
            network[0].requires_grad_(number < 3)
            with torch.no_grad():
                network(x)
            with torch.autocast("cpu", torch.bfloat16, enabled=number == 1):
                y = network(x) + network(x)
            y.float().square().mean().backward()
            network(x[:2]).square().mean().backward()
            found += [y.detach(), *(parameter.grad.clone() for parameter in network.parameters())]
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, steps(within), steps(plain)))


@lru_cache
def decay(length: int) -> Tensor:
    return torch.arange(1.0, length + 1).reciprocal()


@cache
def calibrated(length: int) -> Tensor:
    return torch.ones(length, 1)


@lru_cache(4)
def scaled(length: int, by: float) -> Tensor:
    return torch.full((length, 1), by)


ROWS: dict[int, tuple[Tensor, ...]] = {}
FIRST: dict[int, Tensor] = {}  # inputs


def remembered(module: nn.Module, x: Tensor) -> Tensor:
    """Scale the input by tensors that are made once for a size, and remembered outside of the network."""
    if len(x) not in ROWS:
        ROWS[len(x)] = (torch.ones(len(x), 1) / 2,)
    x = x * calibrated(len(x)) * scaled(len(x), by=2.0)
    return x * decay(32) * ROWS[len(x)][0] - FIRST.setdefault(len(x), x.detach())


def test_fake_tensors_are_removed_from_caches_outside_of_the_network():
    """A user's cache keeps what it had before."""
    torch.manual_seed(0)
    calibrated(16).fill_(5.0)
    scaled(16, by=2.0).fill_(6.0)
    plain, inputs = Layers(2, remembered), [torch.randn(size, 32) for size in (2, 2, 5)]
    within = recompute_activations(copy.deepcopy(plain), budget=0.8)
    for network in (within, plain):  # this one fills the caches
        decay.cache_clear(), ROWS.clear(), FIRST.clear()
        found = [gradients(network, x) for x in inputs]
        assert network is plain or is_planned(within) == [True, True]
        kept = [decay(32), *FIRST.values(), *(one for row in ROWS.values() for one in row)]
        assert all(type(one) is Tensor for one in kept) and len(kept) == 5
        assert all(type(one) is Tensor for of_step in found for one in of_step)
    assert_like_plain(within, plain, inputs)
    assert calibrated(16)[0] == 5 and scaled(16, by=2.0)[0] == 6
    assert all(type(calibrated(size)) is type(scaled(size, by=2.0)) is Tensor for size in (2, 5))


def test_fake_tensors_that_are_kept_elsewhere_are_an_error_once_they_are_read():
    elsewhere, read = SimpleNamespace(mask=None), []

    def assigned(module: nn.Module, x: Tensor) -> Tensor:
        read.append(x.sum())  # a log, which nothing reads
        if elsewhere.mask is None:
            elsewhere.mask = torch.ones(32)
        return x * elsewhere.mask

    within = recompute_activations(Layers(2, assigned), budget=0.8)
    for _ in range(2):
        with pytest.raises(LeftBehind, match="aten.mul.Tensor reads a fake tensor that code outside the network"):
            within(torch.randn(2, 32))
    elsewhere.mask = torch.ones(32)
    assert type(within(torch.randn(2, 32))) is Tensor


class Scaled(nn.Module):
    """Multiplies by a class's attribute, which is assigned once."""

    scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if Scaled.scale is None:
            Scaled.scale = torch.ones(32)
        return x * Scaled.scale


def test_what_is_not_a_cache_is_left_alone():
    scalars: dict[str, list[Tensor]] = {"loss": []}

    def logged(module: nn.Module, x: Tensor) -> Tensor:
        scalars["loss"].append(x.detach().mean())
        return x

    within = recompute_activations(nn.Sequential(Layers(2, logged), nn.Unflatten(1, (32, 1)), nn.Flatten()), budget=0.8)
    for size in (2, 2, 4):
        gradients(within, torch.randn(size, 8, 32))
    assert sum(type(one) is Tensor for one in scalars["loss"]) == 3
    with pytest.raises(LeftBehind):
        recompute_activations(nn.Sequential(nn.Linear(32, 32), Scaled()), budget=0.8)(torch.randn(2, 32))
    assert Scaled.scale is not None
    Scaled.scale = None


@pytest.mark.filterwarnings("ignore:no plan can be made.*scripted")
@pytest.mark.parametrize("scripted", [False, True])
def test_a_forward_pass_that_is_bound_to_the_network_is_rehearsed_unless_it_is_scripted(scripted):
    """It is decorated as PyTorch's documentation of autocast has it. A copy of a scripted part runs the original."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.BatchNorm1d(32), Layers(2))
    within = copy.deepcopy(plain)
    for network in (plain, within):
        network[1].layers[0] = torch.jit.script(network[1].layers[0]) if scripted else network[1].layers[0]
        network.forward = network.forward if scripted else torch.autocast("cpu", torch.bfloat16)(network.forward)
    recompute_activations(within, budget=0.8)
    assert_like_plain(within, plain, [torch.randn(4, 32) for _ in range(4)])
    assert all(type(parameter.grad) is Tensor for parameter in within.parameters())
    assert is_planned(within) == [not scripted]


def test_given_parameters_are_rehearsed_and_anomalies_are_not_told():
    torch.manual_seed(0)
    plain, x = Layers(4), torch.randn(64, 32)
    within = recompute_activations(copy.deepcopy(plain), budget=0.9)
    with warnings.catch_warnings(record=True) as told, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        for _ in range(3):
            found = []
            for network in (plain, within):
                given = {name: 2 * parameter for name, parameter in network.named_parameters()}
                loss = torch.func.functional_call(network, given, (x,)).square().mean()
                found.append(torch.autograd.grad(loss, list(network.parameters())))
            assert all(map(torch.equal, *found))
            assert is_planned(within) == [True]  # from the first step on
    assert not told


def counts(forward):
    """Decorate a forward pass: count its calls in an attribute and in a list, and draw from a generator."""
    called, draws = [], np.random.default_rng(0)

    @wraps(forward)
    def counted(*args):
        counted.calls += 1
        called.append(draws.random())
        return forward(*args) * called[-1]

    counted.calls, counted.called = 0, called
    return counted


class Child(nn.Module):
    def __init__(self, parent: nn.Module):
        super().__init__()
        self.layer, self.parent = nn.Linear(32, 32), ref(parent)

    def forward(self, x: Tensor) -> Tensor:
        self.parent().calls += 1
        return self.layer(x)


HOOKED = SimpleNamespace(calls=0)


def referring(kind: str) -> nn.Module:
    """A network with functions, locks or groups that refer to it, or that cannot be copied."""
    network = Layers(2, lambda module, x: module.scaled(x))
    network.scaled, HOOKED.calls = network.layers[0].forward, 0
    if kind == "functions":
        network.parts = [lambda x: network.layers[0](x), lambda x, layer=network.layers[1]: layer(x)]
        network.before = lambda module, x: module.parts[1](module.parts[0](x))
    elif kind == "partial":
        network.scaled = partial(
            lambda layer, x: vars(network).update(calls=network.calls + 1) or layer(x), Child(network)
        )
    elif kind == "method":
        network.forward = MethodType(lambda module, x, plain=network.forward: plain(x), network)
    elif kind == "decorated":
        network.forward = counts(counts(network.forward))
    elif kind == "teacher":  # outside of the network
        teacher = nn.Linear(32, 32)
        network.scaled = lambda x: x - torch.no_grad()(teacher)(x)
    elif kind == "hidden":  # from `parameters`, as teachers are
        network.hidden = [nn.Linear(32, 32)]
        network.hidden[0].register_forward_hook(lambda *_: vars(HOOKED).update(calls=HOOKED.calls + 1))
        network.scaled = lambda x: network.hidden[0](x)
    elif kind == "child":
        network.scaled = Child(network)
    elif kind == "lock":
        network.state = SimpleNamespace(last=network.layers[0].weight * 2)  # its history cannot be copied
        network.scaled, network.lock, network.lists = network.layers[0], threading.RLock(), [threading.Lock()]
    return network


@pytest.mark.parametrize("kind", "functions partial method decorated teacher hidden child lock".split())
def test_what_refers_to_the_network_is_copied_with_it(kind):
    """Only the network's own passes count, and a copy with its own functions needs no warning."""
    found = []
    for budget in (None, 0.99):
        torch.manual_seed(0)
        network, x = referring(kind), torch.randn(64, 32)
        if budget:
            recompute_activations(network, budget=budget)
        found.append([*gradients(network, x), *gradients(network, x), torch.tensor([network.calls, HOOKED.calls])])
        if kind == "decorated":
            decorated = [network.forward, network.forward.__wrapped__]
            found[-1] += [torch.tensor([one.calls, *one.called]) for one in decorated]
    assert all(map(torch.equal, *found)) and is_planned(network) == [True]


def test_a_rehearsal_on_real_tensors_leaves_generators_alone_and_no_copy_behind():
    generator, weights = torch.Generator(), []

    def drawn(module: nn.Module, x: Tensor) -> Tensor:
        gc.disable()
        weights.append(ref(module.layers[0].weight))
        scale = torch.tensor([1.0])
        scale += float(x.sum() > 0)  # reads a value
        return x * scale + torch.rand(32, generator=generator)

    network = recompute_activations(Layers(2, drawn), budget=0.99)
    try:
        gradients(network, torch.randn(64, 32))
    finally:
        gc.enable()
    assert is_planned(network) == [True]
    alive = [one() for one in weights if one() is not None]
    assert len(alive) == 1 and alive[0] is network.layers[0].weight
    again = torch.Generator()
    torch.rand(32, generator=again)
    assert torch.equal(generator.get_state(), again.get_state())
