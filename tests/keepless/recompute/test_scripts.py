"""Passes that differ from their script: only the calls that differ are recorded, and what they hold is right."""

import copy
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import recompute_activations
from keepless.recompute.passes.advice import END, Advice
from keepless.recompute.passes.advised import Advised
from keepless.recompute.signatures import signature
from tests.keepless.recompute.agreement import Setup, agree, agrees, keep_by_chance, note_followed, note_unknown, run
from tests.keepless.recompute.ahead import After, assert_like, learned, rehearsals
from tests.keepless.recompute.programs import Moves, Program, drawn, hides, program
from tests.keepless.recompute.test_functions import on


class Blocks(nn.Module):
    """Runs its eight blocks in `order`, and makes two more calls after each block in `doubled`."""

    def __init__(self) -> None:
        super().__init__()
        self.order, self.doubled = range(8), ()
        self.blocks = nn.ModuleList(nn.Sequential(*self._half(), nn.SiLU(), *self._half(), nn.GELU()) for _ in range(8))

    def _half(self) -> list[nn.Module]:
        return [nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)]

    def forward(self, x: Tensor) -> Tensor:
        for number in self.order:
            x = self.blocks[number](x)
            if number in self.doubled:
                x = torch.tanh(x).sigmoid()
        return x


# `order` and `doubled`, and how many calls the recorder makes in the first such pass. Removed calls cost nothing, and a
# new call is learned at once.
DIFFERENCES = [([*range(8)], (), 0), ([0, 1, 2, 4, 5, 6, 7], (), 0), ([0, 1, 4, 5, 7], (), 0), ([*range(8)], (4,), 2)]
DIFFERENCES += [([0, 2, 3, 4, 5, 6, 7], (2, 5), 4), ([0, 3, 2, 1, 4, 5, 6, 7], (), 1)]


@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("order, doubled, most", DIFFERENCES)
def test_only_the_calls_that_differ_are_recorded(order, doubled, most, budget, monkeypatch):
    calls = note_unknown(monkeypatch)
    plain, x = Blocks(), torch.randn(2, 4, 6, 6)
    ours = recompute_activations(copy.deepcopy(plain), budget=budget)
    for parameter in ours.parameters():
        parameter.grad = torch.zeros_like(parameter)  # passes of one kind
    for _ in range(4):
        assert agree(plain, ours, on(x))
        assert len(calls) <= most
        for network in (plain, ours):
            network.order, network.doubled = order, doubled
    if budget is not None:
        assert rehearsals(ours) == [1]


def _of_any_size(x: Tensor) -> Tensor:
    """Calls whose recipes need shapes, strides or dtypes that no argument gives."""
    y = F.max_pool2d(F.silu(F.instance_norm(x)), 2).sigmoid()
    y = torch.cat([y, F.max_pool1d(y.flatten(2).tanh(), 2).tanh().repeat(1, 1, 2).view(y.shape)], 1)
    y = F.silu(y.transpose(2, 3) * 1.5, inplace=True) + F.adaptive_max_pool2d(y.sigmoid(), 1).sigmoid()
    y = F.dropout(y.sigmoid(), 0.3).sigmoid().permute(0, 2, 3, 1).sigmoid()
    return F.linear(F.layer_norm(y, y.shape[-1:]).relu() * y.double().sigmoid().to(y), y.new_ones(2, 6)).sin()


def test_without_a_budget_one_recorded_step_is_enough_for_all_sizes(monkeypatch):
    """Also where a recipe needs shapes, strides or dtypes that no argument gives."""
    plain = nn.Sequential(Blocks(), After(nn.Conv2d(4, 3, 1), _of_any_size))
    ours, passes = recompute_activations(copy.deepcopy(plain)), note_followed(monkeypatch)
    for shape in ((2, 4, 8, 16), (5, 4, 16, 16), (1, 4, 12, 8)):
        assert_like(plain, ours, torch.randn(shape))
        monkeypatch.setattr(signature, "Advice", None)
    assert all(passes) and len(passes) >= 2


class Repeating(nn.Module):
    """Takes as many steps as it is told, with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.steps = nn.Parameter(torch.ones(4)), 2

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.steps):
            x = F.silu(x * self.weight)
        return x.sin()


def test_entries_that_a_pass_repeats_make_no_endless_chain():
    """A chain is computed by recursion."""
    plain = Repeating()
    ours = recompute_activations(copy.deepcopy(plain))
    for steps in (2, 2, 800, 2, 2):
        plain.steps = ours.steps = steps
        assert agree(plain, ours, on(torch.randn(3, 4)))


@pytest.fixture
def departures(monkeypatch) -> set[int]:
    """Numbers of entries of a script whose calls are taken for others."""
    numbers: set[int] = set()
    go_on = Advised.__torch_function__

    def differ(self, function, types, args=(), kwargs=None):
        site = self.at.next
        if not self.is_first and site.number in numbers and site.function is function:
            self.note_difference()
            self.at = other = self.advice.added(self.at, function, site.row, args, 0)
            other.next = site.next
            return self.advised(other, function, args, kwargs or {})
        return go_on(self, function, types, args, kwargs)

    monkeypatch.setattr(Advised, "__torch_function__", differ)
    return numbers


def copied(advice: Advice | None) -> Advice | None:
    """A copy of what passes have taught."""
    if advice is None:
        return None
    found, pending, other = {id(END): END}, [advice.root, *advice.readers.values()], copy.copy(advice)
    while pending:
        site = pending.pop()
        if id(site) not in found:
            found[id(site)] = copy.copy(site)
            pending += [site.next, *(site.others or {}).values()]
    for site in found.values():
        if site is not END:
            site.next = found[id(site.next)]
            site.others = site.others and {name: found[id(one)] for name, one in site.others.items()}
    other.root = found[id(advice.root)]
    other.readers = {key: found[id(one)] for key, one in advice.readers.items()}
    return other


def agrees_wherever_it_differs(
    plain: nn.Module, setup: Setup, departures: set[int], most: int, budget=None, may_refuse: bool = False
) -> int:
    """Compare passes that differ from their script, each in other calls; return how many calls there are.

    What each has learned is followed by another pass.
    """
    ours, expected = recompute_activations(copy.deepcopy(plain), budget=budget), run(copy.deepcopy(plain), setup)

    def compare() -> None:
        ours.load_state_dict(plain.state_dict())
        agrees(expected, run(ours, setup), may_refuse)

    compare()
    objects, count = learned(ours)
    states, entries = [dict(vars(one)) for one in objects], range(count)
    states = [state | {"advice": copied(state["advice"])} for state in states]
    for number in Random(len(entries)).sample(entries, min(most, len(entries))):
        for end in (number + 1, len(entries)):
            for one, state in zip(objects, states, strict=True):
                vars(one).update({name: copy.copy(value) for name, value in state.items()})
                one.advice = copied(one.advice)
            departures.update(range(number, end))
            compare()
            departures.clear()
            compare()
    return len(entries)


def _signs_beside_consumers(x: Tensor) -> Tensor:
    """A norm, a view, a norm of a view and an in-place operation are recomputed from what a LeakyReLU saves, too."""
    a, b, c, d = (torch.cumsum(x, dimension) for dimension in range(4))
    y = F.silu(F.group_norm(a, 2)).tanh() + F.leaky_relu(a)
    y = y + F.gelu(b.transpose(1, 2)).sin().transpose(1, 2) + F.leaky_relu(b, 0.1)
    y = y + F.silu(F.instance_norm(c.transpose(1, 2))).transpose(1, 2) * F.leaky_relu(c)
    y = y + (d * 2).add_(1).sin() + F.leaky_relu(d)
    return torch.cat([F.relu(y), y], 1)[:, 2:6].relu_().sin()


class Product(torch.autograd.Function):
    """Saves both arguments, outside of the calls that a recording sees."""

    @staticmethod
    def forward(context, x, y):
        context.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(context, gradient):
        x, y = context.saved_tensors
        return gradient * y, gradient * x


def _masked(x: Tensor, differs: bool) -> Tensor:
    """The learned pass saves only the sign mask of a ReLU's result."""
    a, b = x * 1.5, x + 1
    product = Product.apply(a, b)
    positive = F.relu(product)
    return product + positive + Product.apply(positive if differs else a, b)


def _computed_over_another(x: Tensor, differs: bool) -> Tensor:
    """The ReLU is computed again over its argument, which is another one now, and read more often."""
    a = torch.cumsum(x, 1)
    once, twice = F.silu(a), F.gelu(a)
    if differs:
        once, twice = twice, once
    y = F.relu(once)
    result = y.sin() + twice.sin() + twice.cos()
    return result + y.cos() + y.cos() if differs else result


def _kept_for_both(x: Tensor, differs: bool) -> Tensor:
    """Autograd and a recipe keep a tensor that a differing pass overwrites, which PyTorch refuses."""
    x = torch.cumsum(x, 1)
    y = F.rms_norm(x, (6,))
    z = (y * 2).sin()
    torch.ops.aten.relu_((x if differs else y).detach())
    return z


def _kept_in_place_of_an_argument(x: Tensor, differs: bool) -> Tensor:
    """A plan keeps the result of `relu6` in place of its argument. PyTorch keeps the argument."""
    y = F.relu6(F.silu(x).exp())
    z = y * 1
    y.add_(2 if differs else 1)
    return z + y.sin()


def _given_other_memory(x: Tensor, differs: bool) -> Tensor:
    """A tensor gets other data in the same version."""
    y = F.silu(x)
    if differs:
        y.data = y.data * 2
    return y.sin() + y.cos()


def _read_before_it_gets_other_memory(x: Tensor, differs: bool) -> Tensor:
    """A recipe has read a saved tensor, which then gets other data."""
    y = (x @ x.detach()).sigmoid()
    z = F.silu(y * 1.5)
    if differs:
        y.data = torch.ones_like(y)
    return z.sin()


def _written_over_by_an_activation(x: Tensor, differs: bool) -> Tensor:
    """A call that saves nothing works in place in another pass."""
    part = x.detach().sigmoid()
    z = F.silu(F.silu(x) + part) - part
    with torch.no_grad():
        other = F.relu(part, inplace=differs)
    return F.gelu(z) * z.sin() + other


def _written_over_as_out(x: Tensor, differs: bool) -> Tensor:
    """A call that saves nothing gets `out` in another pass."""
    part = x.detach().sigmoid()
    z = F.silu(F.silu(x) + part) - part
    with torch.no_grad():
        torch.add(x, 1, **({"out": part} if differs else {}))
    return F.gelu(z) * z.sin()


def _part_without_versions(x: Tensor, differs: bool) -> Tensor:
    """A part of a concatenation is made in inference mode."""
    with torch.inference_mode(differs):
        part = torch.ones_like(x)
    return torch.cat([F.silu(x), part], 1).sin()


def _written_over_without_versions(x: Tensor, differs: bool) -> Tensor:
    """SiLU works in place on what another pass has made in inference mode."""
    with torch.inference_mode(differs):
        part = F.silu(x * 2, inplace=True)
    return F.silu(x).sin() + part


DIFFERING = [
    _part_without_versions,
    _written_over_without_versions,
    _masked,
    _computed_over_another,
    _kept_for_both,
    _kept_in_place_of_an_argument,
    _given_other_memory,
    _read_before_it_gets_other_memory,
    _written_over_by_an_activation,
    _written_over_as_out,
]


class Differing(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.differs = function, False

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1.0, self.differs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", DIFFERING)
def test_what_a_pass_holds_that_differs_from_its_script(function, monkeypatch):
    """Sign masks, spare tensors and what is kept are each for one consumer, however the consumers change."""
    keep_by_chance(monkeypatch, Random(0))
    for budget, steps in product((None, *["1KiB"] * 3), ([False, False, True, False, True], [True, True, False])):
        plain = Differing(function)
        ours = recompute_activations(copy.deepcopy(plain), budget=budget)
        for plain.differs in steps:
            ours.differs = plain.differs
            agree(plain, ours, on(torch.randn(2, 4, 6, 6, dtype=torch.float64)))


# `silu_` saves a copy of a norm's permuted result, which is then overwritten twice.
WRITTEN_TWICE: Moves = [("unary", 31, 1, 1), ("unary", 1, 2, 3), ("in place", 8, 2, 8), ("in place", 2, 4, 4)]


def test_a_pass_may_differ_from_its_script_in_any_call(departures, monkeypatch):
    keep_by_chance(monkeypatch, Random(0))
    beside, setup = After(nn.Identity(), _signs_beside_consumers), on(torch.randn(2, 4, 6, 6, dtype=torch.float64))
    assert agrees_wherever_it_differs(beside, setup, departures, 100) > 25
    assert agrees_wherever_it_differs(beside, setup, departures, 10, "1KiB") > 25
    assert agrees_wherever_it_differs(Program(), program(WRITTEN_TWICE), departures, 100) > 10


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 100), marks=pytest.mark.slow)])
def test_random_programs_that_differ_from_their_scripts(seeds, departures, monkeypatch):
    for seed in seeds:
        draws = Random(seed)
        moves, budget = drawn(draws, 2, 12), draws.choice([None, "1KiB"])
        print(seed, budget, moves)
        keep_by_chance(monkeypatch, draws)
        agrees_wherever_it_differs(Program(), program(moves), departures, 6, budget, hides(moves))


class Attention(nn.Module):
    """Between steps, the arguments of attention can change."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 2, dropout=0.3, batch_first=True)
        self.is_mixed = self.is_apart = self.is_causal = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.exp()
        other = x * 1 if self.is_apart else x
        mask = torch.ones(16, 16).triu(1).bool() if self.is_causal else None
        with torch.autocast("cpu", enabled=self.is_mixed):
            y, _ = self.attention(x, other, other, attn_mask=mask, need_weights=False)
        return y.float().sigmoid()


@pytest.mark.parametrize("budget", [None, 0.9])
@pytest.mark.parametrize("change", ["is_mixed", "is_apart", "is_causal"])
def test_attention_whose_inner_calls_change(change, budget):
    """It is written in Python: each call inside has an entry."""
    plain = Attention()
    network, inputs = recompute_activations(copy.deepcopy(plain), budget=budget), torch.randn(5, 8, 16, 32)
    assert_like(plain, network, *inputs)
    for one in (network, plain):
        setattr(one, change, True)
    assert_like(plain, network, *inputs[:3])
