"""A program's first step is watched: whatever the program does, it is the baseline's, and the next one is planned."""

import copy
import errno
import gc
import os
import pkgutil
import random
import re
import threading
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from keepless import (
    AdditiveCoupling,
    CheckpointedABN,
    InPlaceABN,
    ReversibleSequence,
    recompute_activations,
    report,
)
from keepless.recompute.held import elsewhere
from keepless.recompute.signatures import plans as plans_module
from keepless.recompute.step import watch
from keepless.recompute.step.costs import peak_bytes
from keepless.torch_internals import current_hooks, dispatch_modes
from tests.keepless.recompute.ahead import After, Layers, gradients, pair, peak_of, plans

X = torch.linspace(-1, 1, 64 * 16).sin().view(64, 16)
Part = Callable[["Blocks", int, Tensor], Tensor]


class Blocks(nn.Module):
    """Blocks with statistics and dropout. `part` calls one of them."""

    def __init__(self, part: Part = lambda network, place, x: network.blocks[place](x)):
        super().__init__()
        blocks = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.GELU()) for _ in range(4)]
        self.blocks, self.part, self.log, self.steps = nn.ModuleList(blocks), part, [], 0

    def forward(self, x: Tensor) -> Tensor:
        for place in range(len(self.blocks)):
            x = self.part(self, place, x)
        return x


def simple(network: Any, x: Tensor) -> None:
    network(x).square().mean().backward()


class Case(NamedTuple):
    """A program: what it trains, and its step. `warning`: a pattern of the one that it gets."""

    step: Callable[[Any, Tensor], None] = simple
    make: Callable[[], nn.Module] = Blocks
    budget: float = 0.8
    warning: str = ""


# Several passes


def several(network: Blocks, x: Tensor) -> None:
    (network(x).square().mean() + network(x / 2).square().mean()).backward()


def in_flight(network: Blocks, x: Tensor) -> None:
    """As in a pipeline."""
    waiting = [network(x / number).square().mean() for number in range(1, 7)]
    for loss in waiting:
        loss.backward()


def accumulated(network: Blocks, x: Tensor) -> None:
    simple(network, x)
    simple(network, x / 2)


def twice(network: Blocks, x: Tensor) -> None:
    loss = network(x).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def penalised(network: nn.Module, x: Tensor) -> None:
    x = x.clone().requires_grad_()
    loss = network(x).square().mean()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    (loss + gradient.square().sum()).backward()


def evaluated(network: Blocks, x: Tensor) -> None:
    """Without gradients, and then with some, for which no backward pass comes."""
    with torch.no_grad():
        network(x)
    network.eval()(x)
    simple(network.train(), x)


# Errors


def failing(error: type[BaseException], is_late: bool, network: Blocks, x: Tensor) -> None:
    """In the first two steps a forward pass raises an error in its third block, or the backward pass."""
    network.steps += 1
    plain = network.part

    def fail(*_: object) -> None:
        raise error("of the program")

    def raising(network: Blocks, place: int, x: Tensor) -> Tensor:
        x = plain(network, place, x)
        if place == 2 and network.steps < 3:
            x.register_hook(fail) if is_late else fail()
        return x

    network.part = raising
    try:
        simple(network, x)
    except error as raised:
        network.log.append(str(raised))
    network.part = plain
    simple(network, x)


def changed(network: Blocks, x: Tensor) -> None:
    """Weights change between the forward and the backward pass, which is refused, in the first two steps."""
    network.steps += 1
    loss = network(x).square().mean()
    with torch.no_grad():
        network.blocks[1][0].weight.mul_(1) if network.steps < 3 else None
    try:
        loss.backward()
    except RuntimeError as error:
        network.log.append("modified by an inplace operation" in str(error))
        network.zero_grad()  # a planned step may raise it earlier


# Functions and hooks


class Reads(torch.autograd.Function):
    """Reads what it has saved twice, and notes the strides. Its tensors overlap, have gaps, and are saved again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[Any]) -> Tensor:
        large = x.repeat(32, 1)  # such are held elsewhere
        images = large.view(32, 16, 8, 8).contiguous(memory_format=torch.channels_last)
        forms = large, large.t(), large[::2, 1:], large[:, :1].expand(-1, 16), large[5:], images, large
        ctx.save_for_backward(*forms)
        ctx.log = log
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for tensor, repeated in zip(ctx.saved_tensors, ctx.saved_tensors, strict=True):
            ctx.log.append((tensor.shape, tensor.stride(), torch.equal(tensor, repeated), tensor.double().sum().item()))
        return gradient * ctx.saved_tensors[4][: len(gradient)].cos(), None


def reading(network: Blocks, place: int, x: Tensor) -> Tensor:
    return Reads.apply(network.blocks[place](x), network.log)


def hooked(network: Blocks, place: int, x: Tensor) -> Tensor:
    x = network.blocks[place](x)
    x.register_hook(lambda gradient: (network.log.append(gradient.sum().item()), gradient / 2)[1])
    if place == 1:
        x.retain_grad()
        network.last = [x]
    return x


def with_hooks() -> Blocks:
    """Hooks on parameters and modules; what they see is compared, and how often they run."""
    network = Blocks()

    def log(name: str, *values: Any) -> None:
        network.log.append((name, *(value.sum().item() for value in values if isinstance(value, Tensor))))

    network.blocks[0][0].weight.register_hook(lambda gradient: (log("weight", gradient), gradient * 2)[1])
    network.blocks[1][0].weight.register_post_accumulate_grad_hook(lambda weight: log("came", weight.grad))
    network.blocks[2].register_full_backward_hook(lambda _, before, after: log("module", *before, *after))
    network.blocks[1].register_full_backward_pre_hook(lambda _, gradients: log("before", *gradients))
    network.blocks[3].register_forward_hook(lambda _, __, output: log("forward", output))
    return network


def with_optimizer() -> Blocks:
    """It steps in the backward pass."""
    network = Blocks()

    def step(parameter: Tensor) -> None:
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None

    for parameter in network.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    return network


# Contexts


def under(context: Callable[[], Any], network: Blocks, x: Tensor) -> None:
    with context():
        accumulated(network, x)


def autocast(network: Blocks, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        loss = network(x).float().square().mean() + network(x / 2).float().square().mean()
    loss.backward()


def scaled(network: Blocks, x: Tensor) -> None:
    """The first step overflows, and is skipped."""
    if not network.log:
        network.log += [torch.amp.GradScaler("cpu", init_scale=1e38, backoff_factor=1e-36)]
        network.log += [torch.optim.SGD(network.parameters(), 0.1)]
    scaler, optimizer = network.log[:2]
    scaler.scale(network(x * 100).square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def with_parameters(network: Blocks, x: Tensor) -> None:
    parameters = {name: 2 * parameter for name, parameter in network.named_parameters()}
    torch.func.functional_call(network, parameters, (x,)).square().mean().backward()


def again(use_reentrant: bool, network: Blocks, place: int, x: Tensor) -> Tensor:
    block = network.blocks[place]
    return checkpoint(block, x, use_reentrant=use_reentrant) if place in (1, 2) else block(x)


def reversible() -> nn.Module:
    couplings = [AdditiveCoupling(nn.Sequential(nn.Linear(8, 8), nn.ReLU())) for _ in range(3)]
    return nn.Sequential(nn.Linear(16, 16), ReversibleSequence(couplings), nn.GELU(), nn.Linear(16, 16))


def in_place() -> nn.Module:
    layers = [nn.Conv1d(16, 16, 1), InPlaceABN(16), nn.Conv1d(16, 16, 1), CheckpointedABN(16), nn.Conv1d(16, 16, 1)]
    return After(nn.Unflatten(0, (8, 8)), nn.Sequential(After(nn.Identity(), lambda x: x.transpose(1, 2)), *layers))


def smooth() -> nn.Module:
    return nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.Tanh(), nn.Softplus())))


def parted(network: nn.Module, x: Tensor) -> None:
    """One of the outputs, and a part of it, has a loss; another one is kept."""
    outputs = network(x)
    network.last = [outputs["second"].detach()]
    outputs["first"][0].square().mean().backward()


HIDDEN = r"a part of the network's forward pass is not planned"
CASES = {
    "one": Case(),
    "several": Case(several),
    "in flight": Case(in_flight),
    "chained": Case(lambda network, x: simple(lambda inputs: network(network(inputs)), x)),
    "after others": Case(lambda network, x: simple(network, x @ torch.eye(16).requires_grad_())),
    "accumulated": Case(accumulated),
    "twice": Case(twice, budget=1.0),
    "penalised": Case(penalised, smooth),
    "evaluated": Case(evaluated),
    "fails": Case(partial(failing, ZeroDivisionError, False)),
    "interrupted": Case(partial(failing, KeyboardInterrupt, False)),
    "fails late": Case(partial(failing, ZeroDivisionError, True)),
    "interrupted late": Case(partial(failing, KeyboardInterrupt, True)),
    "changed": Case(changed),
    "reads": Case(make=lambda: Blocks(reading), budget=0.98),
    "hooked": Case(make=lambda: Blocks(hooked)),
    "hooks": Case(make=with_hooks),
    "optimizer": Case(make=with_optimizer),
    "anomaly": Case(partial(under, partial(torch.autograd.set_detect_anomaly, True))),
    "autocast": Case(autocast),
    "scaled": Case(scaled),
    "parameters": Case(with_parameters),
    "checkpoint": Case(make=lambda: Blocks(partial(again, False)), warning=HIDDEN),
    "reentrant": Case(make=lambda: Blocks(partial(again, True)), warning=HIDDEN),
    "reversible": Case(make=reversible, budget=0.98, warning=HIDDEN + "|a step with more results"),
    "in place": Case(make=in_place, budget=0.98),
    "parted": Case(parted, lambda: After(Blocks(), lambda y: {"first": y * 2, "second": y.exp(), "other": 3})),
}


@pytest.fixture
def watched(monkeypatch) -> list[watch.Watch]:
    """The steps that are watched."""
    watches: list[watch.Watch] = []
    plain = watch.Watch.__init__
    monkeypatch.setattr(watch.Watch, "__init__", lambda self, *args: (watches.append(self), plain(self, *args))[1])
    return watches


def results(network: nn.Module) -> list[Any]:
    """What a step leaves."""
    kept = [getattr(tensor, "grad", None) for tensor in getattr(network, "last", [])]
    parameters = [*network.parameters()]
    tensors = [*parameters, *(parameter.grad for parameter in parameters), *network.buffers(), *kept]
    return [None if tensor is None else tensor.detach().clone() for tensor in tensors] + [torch.get_rng_state()]


def run(network: nn.Module, step: Callable[[Any, Tensor], None], steps: int = 5) -> list[list[Any]]:
    results_by_step = []
    for seed in range(steps):
        torch.manual_seed(seed)
        network.zero_grad()
        step(network, X * (1 + seed))
        results_by_step.append(results(network))
    return results_by_step


@pytest.mark.table
@pytest.mark.parametrize("name", CASES)
def test_a_watched_step_is_the_programs_and_a_plan_follows(name, watched):
    case = CASES[name]
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(case.make())
    plain, within = networks
    recompute_activations(within, budget=case.budget)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for expected, actual in zip(run(plain, case.step), run(within, case.step), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    if name != "scaled":
        assert getattr(within, "log", None) == getattr(plain, "log", None)
    assert not dispatch_modes() and current_hooks() is None
    texts = [str(warning.message) for warning in warned if "Anomaly" not in str(warning.message)]
    assert bool(texts) is bool(case.warning) and all(re.match(case.warning, text) for text in texts)
    assert watched[-1].state is watch.State.COUNTED and len(watched) <= 3 and sum(plans(within)) in (1, 2)


def test_evaluations_with_gradients_are_watched_once_and_a_training_then_gets_its_plan(watched):
    """Nothing is held for them."""
    within = recompute_activations(Layers(2), budget=0.9)
    for _ in range(20):
        within(X.view(32, 32))
    assert len(watched) == 1 and watched[0].state is watch.State.LOST and plans(within) == [0]
    for _ in range(3):
        gradients(within, X.view(32, 32))
    assert len(watched) == 2 and plans(within) == [1]


def test_a_network_that_each_step_calls_without_a_backward_pass_first_gets_its_plan(watched):
    """A GAN's generator makes images for its discriminator, here two batches, before its own backward pass."""
    within = recompute_activations(Layers(2), budget=0.9)
    for _ in range(5):
        within(X.view(32, 32)), within(X.view(32, 32))
        gradients(within, X.view(32, 32))
    lost, counted = watch.State.LOST, watch.State.COUNTED
    assert [ended.state for ended in watched] == [lost, lost, lost, counted] and plans(within) == [1]


LARGE = torch.linspace(-1, 1, 256 * 32).sin().view(256, 32)


def test_a_watched_step_takes_less_than_later_ones_and_keeps_the_budget():
    torch.manual_seed(0)
    plain, within = pair(Layers(8), budget=0.7)

    def step(network: nn.Module) -> None:
        network.zero_grad()
        network(LARGE).square().mean().backward()

    peaks = [peak_bytes(partial(step, network), "cpu") for network in (plain, within)]
    assert peaks[1] < 0.5 * peaks[0] < peak_of(within, LARGE) <= 0.7 * peaks[0]


FAULTS: dict[str, tuple[str, str]] = {
    "a call": ("keepless.recompute.step.trace.prepare_to_repeat", "RUNS"),
    "an operator": ("keepless.recompute.step.counting.Allocations.note_operator", "RUNS"),
    "a saved tensor": ("keepless.recompute.step.trace.Gone", "RUNS"),
    "a node": ("keepless.recompute.step.watch.Watch.enter_pass", "AWAITS"),
    "a gradient": ("keepless.recompute.step.watch.is_ordinary", "AWAITS"),
    "a copy": ("keepless.recompute.held.elsewhere.Elsewhere.copy_of", "RUNS"),
    "the end": ("keepless.recompute.step.trace.Trace.backward_ends", "AWAITS"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_watching_ends_the_watch_and_not_the_step(name, monkeypatch, watched):
    where, state = FAULTS[name]
    plain, within = pair(Layers(3), budget=0.8)
    kind, attribute = where.rsplit(".", 1)

    def fail(*_: object) -> None:
        if not watched or watched[-1].state is watch.State[state]:
            raise ValueError("planted")

    with monkeypatch.context() as planted, warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        original = pkgutil.resolve_name(kind)
        before = getattr(original, attribute)
        planted.setattr(original, attribute, lambda *args: (fail(), before(*args))[1])
        for _ in range(3):
            assert all(map(torch.equal, gradients(within, LARGE), gradients(plain, LARGE)))
    (text,) = [str(warning.message) for warning in warned]
    assert re.match("no plan can be made.*planted", text) and len(watched) == 1
    assert watched[0].state is watch.State.FAILED and not dispatch_modes() and current_hooks() is None


def saves_its_result(x: Tensor) -> Tensor:
    return (x * 2).sigmoid()


@pytest.mark.parametrize("writes", [lambda y: y.mul_(2), lambda y: y.detach().mul_(2)])
def test_what_the_program_writes_over_after_a_watched_pass_is_refused_as_by_pytorch(writes):
    numbers: list[list[str]] = []  # and words of the messages
    for network in pair(After(nn.Linear(32, 32), saves_its_result), budget=0.8):
        outputs = network(LARGE)
        writes(outputs)
        with pytest.raises(RuntimeError) as raised:
            outputs.sum().backward()
        words = r"modified by an inplace operation|is at version \d|expected version \d"
        numbers.append(re.findall(words, str(raised.value)))
    assert numbers[0] == numbers[1] and len(numbers[0]) == 3


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def is_read_only(folder: Path, monkeypatch) -> None:
    def refused(**_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(folder))

    monkeypatch.setattr(elsewhere.tempfile, "TemporaryFile", refused)  # root may write everywhere


FOLDERS: dict[str, Callable[[Path, Any], None]] = {
    "No such file": lambda folder, monkeypatch: monkeypatch.setenv("TMPDIR", str(folder / "missing")),
    "Permission denied": is_read_only,
    "No space left": lambda folder, monkeypatch: monkeypatch.setattr(os, "posix_fallocate", no_space),
}


@pytest.mark.parametrize("reason", FOLDERS)
def test_without_a_file_watched_steps_hold_tensors_in_memory_and_say_so_once(reason, tmp_path, monkeypatch):
    elsewhere._say_that_there_is_no_file.cache_clear()
    FOLDERS[reason](tmp_path, monkeypatch)
    plain, *prepared = (Layers(2) for _ in range(3))
    with pytest.warns(UserWarning, match=f"in memory, not in a file .*{reason}.*: set TMPDIR to a folder") as warned:
        for within in prepared:
            within.load_state_dict(plain.state_dict())
            recompute_activations(within, budget=0.8)
            for _ in range(2):
                assert all(map(torch.equal, gradients(within, LARGE), gradients(plain, LARGE)))
            assert plans(within) == [1]
    assert len(warned) == 1, [str(warning.message) for warning in warned]


def test_where_host_memory_is_full_a_watch_ends_and_an_example_is_planned_by_a_dry_step(tmp_path, monkeypatch):
    is_read_only(tmp_path, monkeypatch)
    monkeypatch.setattr(elsewhere, "free_host_bytes", lambda: 2**17)
    plain, within = pair(Layers(4), budget=0.8)
    with pytest.warns(UserWarning) as warned:
        for _ in range(3):
            assert all(map(torch.equal, gradients(within, LARGE), gradients(plain, LARGE)))
    texts = [str(warning.message) for warning in warned if "not in a file" not in str(warning.message)]
    assert len(texts) == 1 and "host memory has no room for what a watched step saves: recompute_" in texts[0]
    assert "example=" in texts[0] and plans(within) == [0]
    recompute_activations(within, budget=0.8, example=LARGE)
    assert plans(within) == [1]
    assert all(map(torch.equal, gradients(within, LARGE), gradients(plain, LARGE)))


def test_watched_steps_leave_no_files_and_no_memory():
    network = Layers(2)

    def opened() -> tuple[int, int]:
        gc.collect()
        lines = Path("/proc/self/maps").read_text().splitlines()
        return len(os.listdir("/proc/self/fd")), sum("(deleted)" in line for line in lines)

    before = opened()
    for _ in range(10):
        gradients(recompute_activations(network, budget=0.8), LARGE)
    assert all(after <= count for after, count in zip(opened(), before, strict=True))


def test_a_device_without_values_holds_nothing_elsewhere_and_has_a_plan(monkeypatch):
    monkeypatch.setattr(elsewhere.Elsewhere, "copy_of", lambda *_: pytest.fail("a tensor without values is held"))
    for context in (torch.device("meta"), FakeTensorMode()):
        with context:
            within = recompute_activations(Layers(4), budget=0.8, strict=True)
            for _ in range(3):
                gradients(within, torch.empty(64, 32))
            assert plans(within) == [1]


def test_a_report_says_that_a_watched_step_holds_tensors_elsewhere():
    within = recompute_activations(Layers(2), budget=0.8)
    gradients(within, LARGE)
    reasons = {line.why for line in report(within).lines}
    assert reasons == {"made without a gradient", "held elsewhere: this step is watched"}
    gradients(within, LARGE)
    assert "planned" in {line.why for line in report(within).lines}


def test_a_compiled_block_computes_the_same_in_a_watched_step():
    def backend(graph: nn.Module, inputs: list[Tensor]) -> nn.Module:
        calls.append(len(inputs))
        return graph

    calls: list[int] = []
    plain, within = pair(Layers(3), budget=0.9)
    for network in (plain, within):
        network.layers[1].compile(backend=backend)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*torch.compile")
        for _ in range(3):
            assert all(map(torch.equal, gradients(within, LARGE), gradients(plain, LARGE)))
    assert len(calls) == 2 and plans(within) == [1]


# Examples


class Stateful(nn.Module):
    """Tied weights, an RNN, an embedding that writes to its weights, statistics, and random numbers of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.rnn = nn.Embedding(9, 16, max_norm=0.5), nn.GRU(16, 16, batch_first=True)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 9, bias=False)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.tied = nn.Linear(16, 48, bias=False)
        self.tied.weight = self.rnn.weight_hh_l0 = nn.Parameter(torch.randn(48, 16) / 9)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.rnn(self.words(x))[0], 0.3) * (1 + random.random() + np.random.rand())
        x = self.norm(self.frozen(x).transpose(1, 2)).transpose(1, 2)
        return self.head(F.gelu(F.linear(x, self.tied.weight)[..., :16]))


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.filterwarnings("ignore:no plan keeps this step")
def test_an_example_leaves_the_network_and_its_hooks_as_they_are(parallel, request):
    if parallel:
        request.getfixturevalue("one_process")
    torch.manual_seed(0)
    plain, ids, seen = Stateful(), torch.arange(40).view(5, 8) % 9, []
    within = copy.deepcopy(plain)
    for parameter in within.parameters():
        if parameter.requires_grad:
            parameter.register_hook(seen.append)
            parameter.register_post_accumulate_grad_hook(seen.append)
    networks = [DistributedDataParallel(network) if parallel else network for network in (plain, within)]
    ids_by_name = [(name, id(parameter)) for name, parameter in within.named_parameters(remove_duplicate=False)]
    flat = [*map(id, within.rnn._flat_weights)]
    recompute_activations(networks[1], budget=0.9, example=ids)
    assert plans(networks[1]) == [1] and not seen and all(weight.grad is None for weight in within.parameters())
    named = within.named_parameters(remove_duplicate=False)
    assert ids_by_name == [(name, id(parameter)) for name, parameter in named]
    assert flat == [*map(id, within.rnn._flat_weights)]
    for expected, actual in zip(plain.state_dict().values(), within.state_dict().values(), strict=True):
        assert torch.equal(actual, expected)
    for number in range(3):
        states = []
        for network, module in zip(networks, (plain, within), strict=True):
            torch.manual_seed(number), random.seed(number), np.random.seed(number)
            network.zero_grad()
            network(ids).square().mean().backward()
            states.append(results(module))
        torch.testing.assert_close(states[1], states[0], rtol=0, atol=0)
    assert plans(networks[1]) == [1] and seen


def test_an_example_that_raises_an_error_is_said_and_leaves_the_network_alone():
    network = Layers(4, lambda network, x: x if x.sum() > 0 else -x)
    with pytest.raises(ValueError, match="with the example raises RuntimeError: .*; give an example that"):
        recompute_activations(network, budget=0.5, example=torch.randn(2, 33))
    assert not network._forward_hooks and not network._forward_pre_hooks
    assert all(type(weight) is nn.Parameter and weight.grad is None for weight in network.parameters())


# Which steps are watched


class Experts(nn.Module):
    """Each step takes one of three experts, whose activation functions differ."""

    def __init__(self, layers: int = 24) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(*(layer for _ in range(layers) for layer in (nn.Linear(32, 32), activation())))
            for activation in (nn.GELU, nn.SiLU, nn.Tanh)
        )
        self.chosen = 0

    def forward(self, x: Tensor, is_second: bool = False) -> Tensor:
        return self.experts[int(is_second) or self.chosen](x)


@pytest.mark.filterwarnings("ignore:a step with more results")
def test_each_path_is_within_the_budget(watched, monkeypatch):
    """Another path has a plan of its own once planning is cheap; until then it keeps little."""
    monkeypatch.setattr(plans_module.Planner, "is_cheap", lambda planner: len(watched) < 2)
    torch.manual_seed(0)
    plain, x = Experts(), torch.randn(700, 32)
    budget = peak_bytes(lambda: gradients(plain, x), "cpu") // 2
    within = recompute_activations(plain, budget=budget)
    for number, within.chosen in enumerate((0, 0, 1, 1, 1, 2, 0, 2, 1, 0, 2, 1)):
        assert peak_of(within, x) <= 1.03 * budget
        assert len(watched) == (1 if number < 3 else 2)
    assert plans(within) == [1]


@pytest.mark.filterwarnings("ignore:a step with more results")
def test_a_pass_on_another_path_cancels_no_watch_that_is_due(watched, monkeypatch):
    """The due one has lost its graph. Planning, which takes long here, was cheap before."""
    is_cheap = True
    monkeypatch.setattr(plans_module.Planner, "is_cheap", lambda planner: is_cheap)
    within = recompute_activations(Experts(4), budget=0.9)
    for within.chosen in (0, 0, 1):
        gradients(within, LARGE)
    is_cheap = False
    output = within(LARGE)  # watched, but no backward pass comes
    within.chosen = 2
    gradients(within, LARGE)
    del output
    for _ in range(2):
        gradients(within, LARGE)
    assert len(watched) == 3


def test_an_argument_that_is_true_or_false_chooses_a_plan(watched):
    within = recompute_activations(Experts(2), budget=0.99)
    for is_second in (False, True) * 3:
        within(LARGE, is_second=is_second).sum().backward()
        assert not any(line.why == "no plan" for line in report(within).lines)
    assert len(watched) == 2 and plans(within) == [1, 1]


def test_a_size_follows_the_plan_of_one_that_is_not_much_larger(watched, monkeypatch):
    monkeypatch.setattr(plans_module.Planner, "is_cheap", lambda planner: True)
    within, kept = recompute_activations(Layers(2), budget=0.99), {}
    for size in (60, 60, 40, 40, 39, *range(41, 60), 60, 38, 38, 39):
        gradients(within, torch.randn(size, 32))
        kept[size] = report(within).bytes
    assert len(watched) == 2 and kept[60] * 40 == kept[40] * 60
    for exponent in range(17):
        for _ in range(2):
            gradients(within, torch.randn(int(10 * 1.6**exponent), 32))
    assert sum(plans(within)) in (16, 17)  # the last one is planned after it is counted


def test_a_long_pause_is_explained_while_it_lasts(monkeypatch, caplog):
    is_explained = threading.Event()
    step_of = watch.Watch.step
    monkeypatch.setattr(plans_module, "_PAUSE", 0.0)
    monkeypatch.setattr(plans_module._log, "filter", lambda record: is_explained.set() is None)
    monkeypatch.setattr(watch.Watch, "step", lambda *args: is_explained.wait(60) and step_of(*args))
    within = recompute_activations(Layers(2), budget=0.99)
    gradients(within, LARGE), gradients(within, LARGE)
    begins = [record.getMessage()[:8] for record in caplog.records if record.levelname == "WARNING"]
    assert begins == ["planning", "planned "]


def test_lazy_modules_are_refused_until_they_have_run():
    network = nn.Sequential(nn.LazyLinear(3), nn.ReLU())
    with pytest.raises(ValueError, match="got lazy modules, .* first run the network on an input under torch.no_grad"):
        recompute_activations(network, budget=0.5)
    network(LARGE)
    recompute_activations(network, budget=1.0)
    for _ in range(2):
        gradients(network, LARGE)
    assert plans(network) == [1]


def test_watching_keeps_no_code_of_the_program_alive():
    namespace: dict[str, Any] = {"gelu": F.gelu}
    exec("def activation(x):\n    return gelu(x) * 2", namespace)
    network = nn.Sequential(After(nn.Linear(32, 32), namespace["activation"]), nn.Linear(32, 32))
    recompute_activations(network, budget=0.9)
    for _ in range(2):
        network(LARGE).sum().backward()
    code = ref(namespace["activation"].__code__)
    del network, namespace
    gc.collect()
    assert code() is None


@pytest.mark.parametrize("function", [F.rrelu, torch.rrelu_])
def test_what_an_operator_writes_after_its_node_has_saved_it_is_read_as_written(function):
    """Autograd saves the noise of a random leaky ReLU before the operator draws it."""
    plain = After(nn.Linear(8, 2000), lambda y: function(y, 0.0, 1.0, True))
    prepared = recompute_activations(copy.deepcopy(plain), budget=1.0)
    for _ in range(3):
        for network in (plain, prepared):
            torch.manual_seed(0)
            network.zero_grad()
            network(torch.randn(4, 8)).square().sum().backward()
        for expected, actual in zip(plain.parameters(), prepared.parameters(), strict=True):
            torch.testing.assert_close(actual.grad, expected.grad, rtol=0, atol=0)
