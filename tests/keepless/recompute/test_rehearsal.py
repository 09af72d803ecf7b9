"""The first pass over a shape plans itself, on fake tensors, and nothing else notices."""

import copy
import gc
import random
import threading
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import cache, lru_cache, partial, wraps
from queue import SimpleQueue
from types import MethodType, SimpleNamespace
from weakref import WeakKeyDictionary, WeakSet, ref

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

from keepless import InPlaceABN, recompute_activations, report
from keepless.conversion.activated import merge
from keepless.recompute.signatures import plans as plans_module
from keepless.recompute.signatures import signature
from keepless.recompute.step import copied
from keepless.recompute.step.copied import LeftBehind
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.step.rehearsal import backward_starts, rehearsed_step
from keepless.torch_internals import current_hooks
from tests.keepless.recompute.agreement import note_unknown
from tests.keepless.recompute.ahead import After, Layers, assert_like, gradients, pair, peak_of, plans, step


def drawn(network: Layers, x: Tensor) -> Tensor:
    x = network.layers[0](F.dropout(x * random.random() + torch.rand(x.shape, generator=network.generator), 0.3))
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3)  # its backward pass is measured, too


def with_generator() -> Layers:
    network = Layers(2, drawn)
    network.generator = torch.Generator().manual_seed(3)
    return network


def reading_values() -> Layers:
    """It is rehearsed on real tensors. It writes over its input and a buffer, and draws numbers from outside."""
    generator = torch.Generator()

    def read(network: Layers, x: Tensor) -> Tensor:
        network.count += 1
        return x.mul_(2 if x.sum() > torch.rand(()) else network.count) + torch.rand(32, generator=generator)

    network = Layers(2, read)
    network.register_buffer("count", torch.zeros(()))
    return network


def bound(scripted: bool = False) -> nn.Module:
    """It is decorated as PyTorch's documentation of autocast has it. A copy of a scripted part runs the original."""
    network = nn.Sequential(nn.BatchNorm1d(32), Layers(2))
    if scripted:
        network[1].layers[0] = torch.jit.script(network[1].layers[0])
    else:
        network.forward = torch.autocast("cpu", torch.bfloat16)(network.forward)
    return network


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


def referring(kind: str) -> nn.Module:
    """A network with functions, locks or groups that refer to it, or that cannot be copied."""
    network = Layers(2, lambda module, x: module.scaled(x))
    network.scaled = network.layers[0].forward
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
        network.hidden[0].register_forward_hook(lambda *_: vars(network).update(calls=network.calls + 1))
        network.scaled = lambda x: network.hidden[0](x)
    elif kind == "child":
        network.scaled = Child(network)
    else:  # what cannot be copied
        network.state = SimpleNamespace(last=network.layers[0].weight * 2, own=[doubled, torch.jit.script(halved)])
        network.scaled, network.lock, network.lists = network.layers[0], threading.RLock(), [threading.Lock()]
    return network


# Weak references in collections, and how they are found there.
REFERENCES: dict[str, tuple[Callable, Callable]] = {
    "object": (lambda one: SimpleNamespace(of=ref(one)), lambda held: held.of()),
    "dictionary": (lambda one: {"of": ref(one)}, lambda held: held["of"]()),
    "keys": (lambda one: WeakKeyDictionary({one: 1}), lambda held: next(iter(held))),
    "list": (lambda one: [ref(one)], lambda held: held[0]()),
    "set": (lambda one: WeakSet([one]), lambda held: next(iter(held))),
}


def holding_itself(kind: str) -> Layers:
    refer, find = REFERENCES[kind]

    def count(network: Layers, x: Tensor) -> Tensor:
        find(network.held).calls += 1
        return x * network.calls

    network = Layers(2, count)
    network.held = refer(network)
    return network


@torch.library.custom_op("rehearsed::doubled", mutates_args=[])
def doubled(x: Tensor) -> Tensor:
    return x * 2


def halved(x: Tensor) -> Tensor:
    return x / 2


KINDS = "functions partial method decorated teacher hidden child lock".split()
PASSES: dict[str, Callable[[], nn.Module]] = {
    "draws": with_generator,
    "reads values": reading_values,
    "a bound forward pass": bound,
    "scripted": partial(bound, scripted=True),
    **{kind: partial(referring, kind) for kind in KINDS},
    **{f"refers by {kind}": partial(holding_itself, kind) for kind in REFERENCES},
}


def states(network: nn.Module) -> list[object]:
    """What the passes of a network have counted."""
    found, forward = [getattr(network, "calls", 0)], network.forward
    while hasattr(forward, "called"):
        found += [forward.calls, *forward.called]
        forward = forward.__wrapped__
    return found


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("name", PASSES)
def test_passes_count_and_draw_as_if_there_were_no_rehearsal(name):
    """A copy has functions and weak references of its own. Nothing fake stays in the network."""
    networks = []
    for budget in (None, 0.99):
        torch.manual_seed(0)
        networks.append(PASSES[name]())
        if budget is not None:
            recompute_activations(networks[-1], budget=budget)
    plain, within = networks
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert_like(plain, within, *(torch.rand(size, 32) for size in (64, 64, 64, 16)))
    assert any("scripted modules cannot be rehearsed" in str(one.message) for one in said) is (name == "scripted")
    assert states(within) == states(plain)
    assert plans(within) == [0 if name == "scripted" else 1] * 2
    assert all(type(parameter.grad) is Tensor for parameter in within.parameters())


def test_a_rehearsal_leaves_nothing_for_the_garbage_collector(monkeypatch):
    """A collection takes as long as the rest of a rehearsal, if a program has many objects."""
    monkeypatch.setattr(copied.gc, "collect", lambda *_: pytest.fail("fake tensors are left"))
    within = recompute_activations(Layers(2), budget=0.99)
    gradients(within, torch.randn(4, 32))
    assert plans(within) == [1]


@pytest.mark.filterwarnings("ignore:a part of the network")
def test_a_rehearsal_that_fails_inside_hooks_of_the_program_leaves_none():
    """On torch 2.11 and Python 3.12, checkpoints do not remove their own if an error goes through them."""

    def read(network: Layers, x: Tensor) -> Tensor:
        hooks = saved_tensors_hooks(Tensor.detach, Tensor.detach)
        hooks.__enter__()
        total = x.sum().item()
        hooks.__exit__()
        return x * total

    plain, within = pair(Layers(2, read), budget=0.5)
    for _ in range(3):
        x = torch.randn(2, 32)
        assert torch.equal(within(x), plain(x)) and current_hooks() is None


def hooked(network: Layers) -> Layers:
    network.layers[1].register_forward_hook(lambda layer, args, output: F.gelu(output))
    return network


def unseen(graph: nn.Module, inputs: list[Tensor]) -> Callable:
    """A compiler whose code no mode sees."""

    def run(*arguments):
        with torch._C.DisableTorchFunction():
            return graph(*arguments)

    return run


def compiled(network: Layers) -> Layers:
    network.layers[1].compile(backend=unseen)
    return network


UNLIKE = {
    hooked: r"first in the network \(Layers\), .* leave out hooks: do in forward what those of layers.1 \(Linear\)",
    compiled: r"under torch.compile cannot be seen: leave layers.1 \(Linear\) uncompiled",
}


@pytest.mark.parametrize("change", [hooked, pytest.param(compiled, marks=pytest.mark.slow)])
def test_steps_unlike_their_rehearsals_are_said_once_this_is_certain(change, rehearsals):
    """The first rehearsal is on fake tensors, the second on real ones; a third would not help."""
    within = recompute_activations(change(Layers(2)), budget=0.99)
    gradients(within, torch.randn(4, 32))
    with pytest.warns(UserWarning, match=UNLIKE[change]):
        gradients(within, torch.randn(4, 32))
    gradients(within, torch.randn(4, 32))
    assert len(rehearsals) == 2


class Experts(nn.Module):
    """Each step takes one of three experts, whose activation functions differ."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(32, 32), activation())))
            for activation in (nn.GELU, nn.SiLU, nn.Tanh)
        )
        self.chosen = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.experts[self.chosen](x)


def test_a_path_that_stays_gets_its_plan_and_each_path_is_within_the_budget(rehearsals, monkeypatch):
    """A step is rehearsed if the last one has left its plan, in over a quarter of its calls, but only once.

    Other paths are then followed, too: from their second step on at most one call is interpreted.
    """
    torch.manual_seed(0)
    plain, x, interpreted, seen = Experts(), torch.randn(700, 32), note_unknown(monkeypatch), set()
    budget = peak_bytes(lambda: gradients(plain, x), "cpu") // 2
    within = recompute_activations(plain, budget=budget)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number, within.chosen in enumerate((0, 0, 1, 1, 1, 2, 0, 2, 1, 0, 2, 1)):
            interpreted.clear()
            assert peak_of(within, x) <= 1.03 * budget
            assert len(rehearsals) == (1 if number < 3 else 2)
            assert len(interpreted) <= 1 or within.chosen not in seen
            seen |= {within.chosen} if number > 3 else set()
    (text,) = [str(one.message) for one in said]
    assert "steps take several paths, first in experts.2.1 (Tanh): only one has a plan" in text and plans(within) == [1]


def test_a_path_that_comes_late_gets_a_plan_after_many_steps(rehearsals, monkeypatch):
    monkeypatch.setattr(signature, "_PATIENCE", 6)
    within = recompute_activations(Experts(2), budget=0.99)
    for within.chosen in (0, 1, 1, 2, 2, 2):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "steps take several paths")
            gradients(within, torch.randn(8, 32))
    assert len(rehearsals) == 2
    within.experts[0][1] = nn.Sigmoid()
    for within.chosen in (0, 0, 0):
        gradients(within, torch.randn(8, 32))
    assert len(rehearsals) == 3 and plans(within) == [1]


def test_an_argument_that_is_true_or_false_chooses_a_plan(rehearsals):
    class Chosen(Experts):
        def forward(self, x: Tensor, is_second: bool) -> Tensor:
            return self.experts[int(is_second)](x)

    within = recompute_activations(Chosen(2), budget=0.99)
    for is_second in (False, True) * 3:
        within(torch.randn(8, 32), is_second=is_second).sum().backward()
        assert not any(line.why == "no plan" for line in report(within).lines)
    assert len(rehearsals) == 2


@pytest.fixture
def rehearsals(monkeypatch) -> list[tuple[int, ...]]:
    """Sizes of the inputs that were rehearsed."""
    found: list[tuple[int, ...]] = []

    def rehearsed(network: nn.Module, args: tuple[Tensor], *others, **options):
        found.append(tuple(args[0].shape))
        return rehearsed_step(network, args, *others, **options)

    monkeypatch.setattr(plans_module, "rehearsed_step", rehearsed)
    return found


def test_a_size_follows_the_plan_of_one_that_is_not_much_larger(rehearsals):
    within, kept = recompute_activations(Layers(2), budget=0.99), {}
    for size in (60, 40, 40, 39, *range(41, 60), 61, 60, 60, 38):
        gradients(within, torch.randn(size, 32))
        kept[size] = report(within).bytes
    assert rehearsals == [(60, 32), (39, 32), (91, 32)]
    assert kept[60] * 40 == kept[40] * 60
    for exponent in range(17):
        gradients(within, torch.randn(int(10 * 1.6**exponent), 32))
    assert len(plans(within)) == 16


@pytest.mark.filterwarnings("ignore:this step is within")
def test_inputs_whose_results_are_larger_than_their_bytes_tell_are_planned_next_time(rehearsals):
    """The scores of attention without a fused kernel grow with the square of the length."""
    attended = After(nn.Linear(16, 16), lambda x: (x @ x.transpose(1, 2)).softmax(-1).matmul(x).relu().mean(1))
    plain, within = pair(attended, budget=0.99)
    assert_like(plain, within, *map(torch.randn, [(4, 32, 16), (1, 128, 16), (1, 128, 16), (4, 32, 16)]))
    assert rehearsals == [(4, 32, 16), (1, 128, 16)]


def test_a_long_pause_is_explained_while_it_lasts(monkeypatch, caplog):
    said = threading.Event()
    monkeypatch.setattr(plans_module, "_PAUSE", 0.0)
    monkeypatch.setattr(plans_module._log, "filter", lambda record: said.set() is None)
    monkeypatch.setattr(plans_module, "rehearsed_step", lambda *given: said.wait(60) and rehearsed_step(*given))
    recompute_activations(Layers(2), budget=0.99)(torch.randn(4, 32))
    begins = [record.getMessage()[:8] for record in caplog.records if record.levelname == "WARNING"]
    assert begins == ["planning", "planned "]


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
        merged = nn.Sequential(convolution, InPlaceABN(3), nn.ReLU(inplace=True), convolution)
    merge(merged[1], merged[2])
    steps = [rehearsed_step(network, (x,), {}) for network in (own, merged)]
    assert steps[0].memories == steps[1].memories


def test_views_and_empty_tensors_are_those_of_the_fake_tensor_mode():
    """A rehearsal makes them without most of the mode's steps."""

    def made(mode: FakeTensorMode) -> list:
        with mode:
            x = torch.empty(4, 6, dtype=torch.float16)
            found = [x, x.view(8, 3), x.t(), x[1:, ::2], x[None].expand(3, 4, 6), *x.chunk(2, 1), x.detach()]
            found += [x.view(-1), *x.unbind(), x.view(torch.int16), torch.empty_strided((2, 3), (1, 2), device="cpu")]
            found += [x.to(x.dtype), torch.ops.aten.lift_fresh(x), x.add_(1), x.relu_(), x.view(-1).mul_(x.view(-1))]
        assert all(is_fake(one) and one.fake_mode is mode for one in found)
        where = [one.untyped_storage()._cdata == x.untyped_storage()._cdata for one in found]
        kinds = [(one.shape, one.stride(), one.storage_offset(), one.dtype, one.device, one is x) for one in found]
        return [*where, *kinds]

    assert made(copied._Rehearsal()) == made(FakeTensorMode())


WEIGHTS: SimpleQueue[tuple[ref, int]] = SimpleQueue()  # of real networks, with their addresses; never taken back


def drained(queue: SimpleQueue) -> list:
    return [queue.get() for _ in range(queue.qsize())]


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.filterwarnings("ignore:this step is within")
def test_a_rehearsal_on_real_tensors_shares_parameters_that_are_not_written(writes, request):
    """The first step says that it takes more than the budget. The garbage collector need not run."""

    def read(network: Layers, x: Tensor) -> Tensor:
        gc.disable()
        weight = network.layers[0].weight
        if not is_fake(x):
            WEIGHTS.put((ref(weight), weight.data_ptr()))
        if writes:
            with torch.no_grad():
                weight.view(-1).mul_(1 - 1 / 64)
        return x * float(x.sum() > 0)

    request.addfinalizer(gc.enable)
    plain, within = pair(Layers(4, read), budget=0.6)
    within.circle = [within]
    own, x = within.layers[0].weight, torch.rand(500, 32)
    drained(WEIGHTS)
    with pytest.warns(UserWarning, match="the first steps with a shape take up to .* because it reads values"):
        found = step(within, x)
    weights = drained(WEIGHTS)
    addresses = [address for _, address in weights]  # a rehearsal that would write is made again
    assert addresses.count(own.data_ptr()) == 2 and len(addresses) == 2 + writes
    if not writes:
        assert [id(one()) for one, _ in weights if type(one()) is nn.Parameter] == [id(own)]
    assert all(map(torch.equal, found, step(plain, x))) and plans(within) == [1]


@pytest.mark.filterwarnings("error")
def test_a_network_that_does_something_else_on_fake_tensors_is_rehearsed_on_real_ones():
    """From the second step on, after a warning; an example at once. Hugging Face's attention asks if it is traced."""
    network = Layers(8, lambda network, x: x.sin() if is_fake(x) else x.cos())
    x, late = torch.randn(64, 32, requires_grad=True), recompute_activations(copy.deepcopy(network), budget=0.6)
    with pytest.warns(
        UserWarning, match="first steps .* on fake tensors it makes other calls; plan before the training"
    ):
        gradients(late, x), gradients(late, x)
    early = recompute_activations(network, budget=0.6, example=x)
    for within in (late, early):
        within(x)
        assert plans(within) == [1] and not any(line.why == "no plan" for line in report(within).lines)


def test_a_network_that_cannot_be_rehearsed_keeps_little():
    """It repeats all but about sqrt(2 n) of its n layers."""
    torch.manual_seed(0)
    outside, x, plain = torch.ones(32, requires_grad=True), torch.rand(500, 32), Layers(32)
    plain.before = lambda network, x: x * outside
    within = recompute_activations(copy.deepcopy(plain), budget=0.6)
    with pytest.warns(UserWarning, match="no plan can be made.* reads a trained tensor outside the network"):
        peaks = [peak_of(within, x) for _ in range(2)]
    assert max(peaks) < 0.5 * peak_bytes(lambda: gradients(plain, x), "cpu")
    assert plans(within) == [0] and type(outside.grad) is Tensor
    assert_like(plain, within, x)


def test_lazy_modules_are_refused_until_they_have_run():
    network = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with pytest.raises(ValueError, match="got lazy modules, .* first run the network on an input under torch.no_grad"):
        recompute_activations(network, budget=0.5)
    network(torch.randn(2, 4))
    gradients(recompute_activations(network, budget=1.0), torch.randn(2, 4))
    assert plans(network) == [1]


def test_an_example_that_cannot_be_rehearsed_is_said_and_leaves_the_network_alone():
    network = Layers(4, lambda network, x: x if x.sum() > 0 else -x)
    with pytest.raises(ValueError, match="with the example raises RuntimeError: .*; give an example that"):
        recompute_activations(network, budget=0.5, example=torch.randn(2, 33))
    assert not network._forward_hooks and not network._forward_pre_hooks


def test_why_a_step_is_rehearsed_on_real_tensors_is_said():
    def raises(network: Layers, x: Tensor) -> Tensor:
        if is_fake(x):
            raise NotImplementedError("no kernel.\nSee the manual.")
        return x

    within = recompute_activations(Layers(8, raises), budget=0.5)
    with pytest.warns(UserWarning, match="on real tensors, because .*NotImplementedError: no kernel; plan before"):
        within(torch.rand(500, 32))


def test_tensor_parallel_networks_have_no_plan_and_are_named_so(one_process):
    torch.manual_seed(0)
    plain, x = Layers(2), torch.randn(4, 32)
    within = copy.deepcopy(plain)
    for network in (plain, within):
        parallelize_module(network.layers[1], init_device_mesh("cpu", (1,)), ColwiseParallel())
    recompute_activations(within, budget=0.5)
    with pytest.warns(UserWarning, match="no plan can be made.*tensor parallel"):
        outputs = within(x)
    assert torch.equal(outputs, plain(x))


def test_a_rehearsal_does_not_communicate(one_process):
    """Others may not rehearse now, and would wait."""

    def summed(network: Layers, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, total)
        dist.broadcast(total, 0), dist.barrier()
        return x + parts[0] if total.sum() > 0 or reads.clear() else x  # this reads a value

    reads = [0]
    plain, within = pair(Layers(4, summed), budget=1.0)
    within.group = dist.group.WORLD  # shared with its copies
    assert_like(plain, within, *[torch.rand(64, 32)] * 3)
    assert plans(within) == [1]
    parallel = recompute_activations(DistributedDataParallel(Layers(4)), budget=1.0)
    for network in (parallel, recompute_activations(nn.Sequential(parallel, nn.ReLU()), budget=1.0)):
        gradients(network, torch.randn(64, 32))
        assert plans(network) == [1]


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


def remembered(network: Layers, x: Tensor) -> Tensor:
    """Scale the input by tensors that are made once for a size, and remembered outside of the network."""
    if len(x) not in ROWS:
        ROWS[len(x)] = (torch.ones(len(x), 1) / 2,)
    x = x * calibrated(len(x)) * scaled(len(x), by=2.0)
    return x * decay(32) * ROWS[len(x)][0] - FIRST.setdefault(len(x), x.detach())


@pytest.mark.filterwarnings("ignore:no plan keeps")
def test_fake_tensors_are_removed_from_caches_outside_of_the_network():
    """A user's cache keeps what it had before."""
    torch.manual_seed(0)
    calibrated(16).fill_(5.0)
    scaled(16, by=2.0).fill_(6.0)
    (plain, within), inputs = pair(Layers(2, remembered), budget=0.8), [torch.randn(size, 32) for size in (2, 2, 5)]
    for x in inputs:
        gradients(within, x)
    kept = [decay(32), *FIRST.values(), *(one for row in ROWS.values() for one in row)]
    kept += [cached for size in (2, 5) for cached in (calibrated(size), scaled(size, by=2.0))]
    assert all(type(one) is Tensor for one in kept) and len(kept) == 9 and plans(within) == [1, 1]
    assert_like(plain, within, *inputs)
    assert calibrated(16)[0] == 5 and scaled(16, by=2.0)[0] == 6


class Held:
    """Attributes outside of a network: of a class, and of objects."""

    __slots__ = ("last", "steps")
    scale: Tensor | None = None

    def __init__(self) -> None:
        self.last, self.steps = None, 0


KEPT: list[Tensor] = []
HELD, SPACE, RECENT, NAMES = Held(), SimpleNamespace(steps=0), deque(maxlen=2), {"a": 0}
DRAWN, NUMBERS, DRAWS, ARRAY = random.Random(3), np.random.default_rng(3), [], np.zeros(2)
STEPS, CURRENT = 0, ContextVar("current", default=0)


def counting(forward):
    steps = 0

    def counted(network, x):
        nonlocal steps
        steps = steps + 1
        return forward(network, x) * steps

    return counted


class Counted(nn.Module):
    """Changes state outside of itself; its methods are not copied with it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 32)

    @counting
    def forward(self, x: Tensor) -> Tensor:
        global STEPS
        STEPS += 1
        HELD.steps += 1
        HELD.last, SPACE.last = x.mean(), [x.sum()]
        SPACE.steps += 1
        CURRENT.set(CURRENT.get() + 1)
        RECENT.append(x.detach())
        [NAMES.update({name: NAMES.pop(name) + 1}) for name in [*NAMES]]  # to the end
        NAMES[f"{STEPS}"] = 0
        ARRAY[0] += 1
        DRAWS.append(DRAWN.random() + NUMBERS.random())
        if Held.scale is None:
            Held.scale = torch.ones(32)
        return self.layer(x) * Held.scale


def test_state_outside_of_a_network_is_as_if_there_were_no_rehearsal():
    torch.manual_seed(0)
    within, x = recompute_activations(Counted(), budget=0.8), torch.randn(4, 32)
    for number in (1, 2):
        assert torch.equal(within(x), within.layer(x) * number)
    assert plans(within) == [1]
    assert STEPS == HELD.steps == SPACE.steps == CURRENT.get() == ARRAY[0] == 2
    assert [*NAMES.items()] == [("a", 2), ("1", 1), ("2", 0)]
    same = random.Random(3), np.random.default_rng(3)
    assert DRAWS == [sum(one.random() for one in same) for _ in range(2)]
    assert all(type(one) is Tensor for one in (HELD.last, *SPACE.last, *RECENT, Held.scale)) and len(RECENT) == 2


def test_a_fake_tensor_that_is_kept_where_nothing_names_it_is_said_and_there_is_no_plan():
    """It is removed from lists and dictionaries. What nobody can remove is an error once it is read."""

    def keep(network: Layers, x: Tensor) -> Tensor:
        globals()["KEPT"].append(x.mean())
        return x

    (plain, within), x = pair(Layers(2, keep), budget=0.8), torch.randn(4, 32)
    with pytest.warns(UserWarning, match="no plan.* a list holds a fake tensor, which code outside") as said:
        assert_like(plain, within, x, x)
    assert len(said) == 1 and plans(within) == [0] and [type(one) for one in KEPT] == [Tensor] * 4
    ended = copied._Rehearsal()
    fake, ended.has_ended = ended.from_tensor(x), True
    with pytest.raises(LeftBehind, match="aten.mul.Tensor reads a fake tensor, which code outside the network"):
        fake * 2


def test_a_rehearsal_calls_no_hooks_on_new_nodes():
    """PyTorch has them since 2.14."""
    hook_on_nodes = getattr(torch.autograd.graph, "node_creation_hook", nullcontext)
    found: list[list[str]] = []
    for network in pair(Layers(2), budget=0.8):
        found.append([])
        with hook_on_nodes(lambda node: found[-1].append(node.name())):
            gradients(network, torch.randn(4, 32))
    assert found[0] == found[1] and plans(network) == [1]


def test_given_parameters_are_rehearsed_and_anomalies_are_not_told():
    (plain, within), x = pair(Layers(4), budget=0.9), torch.randn(64, 32)
    with warnings.catch_warnings(record=True) as told, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        for _ in range(3):
            found = []
            for network in (plain, within):
                given = {name: 2 * parameter for name, parameter in network.named_parameters()}
                loss = torch.func.functional_call(network, given, (x,)).square().mean()
                found.append(torch.autograd.grad(loss, list(network.parameters())))
            assert all(map(torch.equal, *found))
            assert plans(within) == [1]  # from the first step on
    assert not told


@pytest.mark.parametrize("is_real", [False, True])
def test_a_rehearsal_leaves_cached_weights_as_they_are(is_real):
    """PyTorch finds them by ids of modules and tensors."""
    x, layer, normed = torch.randn(3, 4), nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4))
    with parametrize.cached():
        rehearsed_step(normed, (x,), {}, is_real=is_real)
        weight = normed.weight
        rehearsed_step(normed, (x,), {}, is_real=is_real)
        assert normed.weight is weight
    weight.sum().backward()
    assert normed.parametrizations.weight.original0.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        rehearsed_step(layer, (x,), {}, is_real=is_real)
        after = layer(x)
    assert before.grad_fn.next_functions[0] == after.grad_fn.next_functions[0]  # the cast of the bias
    assert torch.is_autocast_cache_enabled()


def test_a_dry_run_keeps_no_code_of_the_program_alive():
    exec("def activation(x):\n    return gelu(x) * 2", made := {"gelu": nn.functional.gelu})
    network = nn.Sequential(After(nn.Linear(16, 16), made["activation"]), nn.Linear(16, 16))
    recompute_activations(network, budget=0.9)
    network(torch.randn(8, 16)).sum().backward()
    code = ref(made["activation"].__code__)
    del network, made
    gc.collect()
    assert code() is None
