"""Advice of earlier passes decides no value, and is found again in passes that differ from them."""

from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless.recompute.passes import advice as bits
from keepless.recompute.passes.advice import Advice, Site
from keepless.recompute.passes.advised import Advised
from keepless.recompute.signatures import signature, signatures
from keepless.recompute.step.costs import peak_bytes
from tests.keepless.recompute.agreement import agree, keep_by_chance, note_followed, note_unknown, on
from tests.keepless.recompute.ahead import After, assert_like, pair, plans_of, step, watched_count
from tests.keepless.recompute.test_random import take_steps

# Wrong advice: passes are like plain PyTorch to the bit.

ANY = [bits.HOOKS, bits.DROP, bits.SIGNS, bits.RULES, bits.MASK, bits.MEMORY, bits.COUNT, bits.ADDED]
ANY += [bits.DERIVE << number for number in range(3)]


def sites_of(advice: Advice) -> list[Site]:
    sites_by_id: dict[int, Site] = {}
    pending = [advice.root, *advice.readers.values(), *advice.no_grad_sites.values()]
    while pending:
        site = pending.pop()
        if id(site) not in sites_by_id:
            sites_by_id[id(site)] = site
            pending += [site.next, *(site.branches or {}).values()]
    return [site for site in sites_by_id.values() if site.function is not None]


def scramble(advice: Advice, draws: Random) -> None:
    """Give each site random advice, and some of them other sites that follow."""
    sites, follows_edges = sites_of(advice), draws.random() < 0.3
    likely = draws.choice([0.2, 0.5, 0.8])
    for site in sites:
        site.advice = sum(bit for bit in ANY if draws.random() < likely)
        if draws.random() < 0.05:
            site.advice |= bits.UNKNOWN
        if follows_edges and draws.random() < 0.1:
            site.next = draws.choice(sites)


@pytest.fixture
def scrambled(monkeypatch) -> list[Random]:
    """Advice is scrambled before each pass but the first by these random numbers. Each pass adds one of them."""
    draws, enter = [Random(0)], Advised.__enter__

    def scrambling(self: Advised) -> Advised:
        if not self.is_first:
            scramble(self.advice, draws[0])
            draws.append(draws[0])
        return enter(self)

    monkeypatch.setattr(Advised, "__enter__", scrambling)
    return draws


SEEDS = [(None, range(8)), ("by chance", range(3))]
SEEDS += [pytest.param(None, range(8, 500), marks=pytest.mark.slow)]
SEEDS += [pytest.param("by chance", range(3, 60), marks=pytest.mark.slow)]


@pytest.mark.table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget, seeds", SEEDS)
def test_random_programs_with_scrambled_advice_are_like_plain_ones(budget, seeds, scrambled, monkeypatch):
    for seed in seeds:
        scrambled[0] = Random(seed)
        take_steps(scrambled[0], seed, budget, monkeypatch)
    assert len(scrambled) > len(seeds)


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


def signs_beside_consumers(x: Tensor, differs: bool) -> Tensor:
    """A norm, a view, a norm of a view and an in-place operation are recomputed from what a LeakyReLU saves, too."""
    a, b, c, d = (torch.cumsum(x, dimension) for dimension in range(4))
    y = F.silu(F.group_norm(a, 2)).tanh() + F.leaky_relu(a)
    y = y + F.gelu(b.transpose(1, 2)).sin().transpose(1, 2) + F.leaky_relu(b, 0.1)
    y = y + F.silu(F.instance_norm(c.transpose(1, 2))).transpose(1, 2) * F.leaky_relu(c)
    y = y + (d * 2).add_(1).sin() + F.leaky_relu(d)
    return torch.cat([F.gelu(y) if differs else F.relu(y), y], 1)[:, 2:6].relu_().sin()


def masked(x: Tensor, differs: bool) -> Tensor:
    """Another pass needs more than the sign mask of a ReLU's result."""
    a, b = x * 1.5, x + 1
    product = Product.apply(a, b)
    positive = F.relu(product)
    return product + positive + Product.apply(positive if differs else a, b)


def computed_over_another(x: Tensor, differs: bool) -> Tensor:
    """The ReLU is computed again over its argument, which is another one then, and read more often."""
    a = torch.cumsum(x, 1)
    once, twice = F.silu(a), F.gelu(a)
    if differs:
        once, twice = twice, once
    y = F.relu(once)
    result = y.sin() + twice.sin() + twice.cos()
    return result + y.cos() + y.cos() if differs else result


def kept_for_both(x: Tensor, differs: bool) -> Tensor:
    """Autograd and a recipe keep a tensor that another pass overwrites, which PyTorch refuses."""
    x = torch.cumsum(x, 1)
    y = F.rms_norm(x, (6,))
    z = (y * 2).sin()
    torch.ops.aten.relu_((x if differs else y).detach())
    return z


def kept_in_place_of_an_argument(x: Tensor, differs: bool) -> Tensor:
    """A plan keeps the result of `relu6` in place of its argument. PyTorch keeps the argument."""
    y = F.relu6(F.silu(x).exp())
    z = y * 1
    y.add_(2 if differs else 1)
    return z + y.sin()


def written_over_without_a_gradient(x: Tensor, differs: bool) -> Tensor:
    """Calls that save nothing work in place, or get `out`, in another pass."""
    part, second = x.detach().sigmoid(), x.detach().exp()
    z = F.silu(F.silu(x) + part) - part * second
    with torch.no_grad():
        result = F.relu(part, inplace=differs)
        torch.add(x, 1, **({"out": second} if differs else {}))
    return F.gelu(z) * z.sin() + result


def memory_of_others(x: Tensor, differs: bool) -> Tensor:
    """It is shared with NumPy, and filled again before the backward pass, without a new version."""
    second = torch.full(x.shape, 0.5, dtype=x.dtype)
    array = second.numpy()
    y = (F.silu(x) + (second if differs else second * 1)).sin() + (F.gelu(x) + second.view_as(x)).sin()
    array.fill(5.0)
    return y


DIFFERING = [signs_beside_consumers, masked, computed_over_another, kept_for_both, kept_in_place_of_an_argument]
DIFFERING += [written_over_without_a_gradient, memory_of_others]


class Differing(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function, self.differs = function, False

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * 1.0, self.differs)


@pytest.mark.table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_scrambled", [False, True])
@pytest.mark.parametrize("function", DIFFERING)
def test_what_a_pass_holds_that_differs_from_earlier_ones(function, is_scrambled, monkeypatch, request):
    """Sign masks, spare tensors and what is kept are each for one consumer, however the consumers change."""
    if is_scrambled:
        request.getfixturevalue("scrambled")
    keep_by_chance(monkeypatch, Random(0))
    for budget, steps in product((None, *["1KiB"] * 3), ([False, False, True, False, True], [True, True, False])):
        plain, ours = pair(Differing(function), budget=budget)
        for plain.differs in steps:
            ours.differs = plain.differs
            agree(plain, ours, on(torch.randn(2, 4, 6, 6, dtype=torch.float64)))


# Right advice: it is found again, wherever calls are missing or new.


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
                torch.tanh(x[0, 0, 0, 0]).sigmoid()  # few bytes, as results must not be larger than planned
        return x


# `order` and `doubled`, and about how many calls the rules decide in the first such pass. Of missing calls nothing is
# asked, blocks that come earlier are found by their parameters, and a new call is learned at once.
DIFFERENCES = [([*range(8)], (), 0), ([0, 1, 4, 5, 7], (), 0), ([*range(8)], (4,), 3)]
DIFFERENCES += [([0, 2, 3, 4, 5, 6, 7], (2, 5), 6), ([0, 3, 2, 1, 4, 5, 6, 7], (), 1)]


@pytest.mark.table
@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("order, doubled, most", DIFFERENCES)
def test_the_rules_decide_only_about_new_calls(order, doubled, most, budget, monkeypatch):
    calls = note_unknown(monkeypatch)
    (plain, ours), x = pair(Blocks(), budget=budget), torch.randn(2, 4, 6, 6)
    for parameter in ours.parameters():
        parameter.grad = torch.zeros_like(parameter)  # passes of one kind
    for number in range(5):
        assert agree(plain, ours, on(x))
        assert len(calls) <= most
        for network in (plain, ours) if number > 0 or budget is None else ():  # the first step is watched
            network.order, network.doubled = order, doubled
    if budget is not None:
        assert watched_count(ours) == 1


class Chosen(nn.Module):
    """Calls those of its layers that are in `chosen`. Number 0, 2 and 13 have parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen: list[int] = []
        layers = [nn.SiLU(), nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.Softplus(), nn.ELU(), nn.ReLU(), nn.Hardswish()]
        layers += [nn.Mish(), nn.LogSigmoid(), nn.CELU(), nn.Hardsigmoid()]
        for place in (0, 2, 13):
            layers.insert(place, nn.Conv2d(4, 4, 1))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for number in self.chosen:
            x = self.layers[number](x)
        return x


@pytest.fixture
def recorded_once(monkeypatch) -> None:
    """No pass but the first is recorded by the rules."""
    monkeypatch.setattr(signature.Signature, "must_teach", lambda signature, bytes: False)


@pytest.mark.usefixtures("recorded_once")
def test_calls_are_found_by_their_parameters_and_others_among_the_next_ones(monkeypatch):
    calls, (plain, ours), first = note_unknown(monkeypatch), pair(Chosen()), [0, 1, *range(3, 15)]
    # The first pass; then one call is missing, another is new, and many are missing.
    for chosen in (first, [*first[:3], *first[4:]], range(15), [0, 1, 13, 14], [0, 13, 14]):
        calls.clear()
        plain.chosen = ours.chosen = chosen
        assert agree(plain, ours, on(torch.randn(2, 4, 3, 3)))
        assert len(calls) == (2 in chosen)  # the new one


def _of_any_size(x: Tensor) -> Tensor:
    """Calls whose recipes need shapes, strides or dtypes that no argument gives."""
    y = F.max_pool2d(F.silu(F.instance_norm(x)), 2).sigmoid()
    y = torch.cat([y, F.max_pool1d(y.flatten(2).tanh(), 2).tanh().repeat(1, 1, 2).view(y.shape)], 1)
    y = F.silu(y.transpose(2, 3) * 1.5, inplace=True) + F.adaptive_max_pool2d(y.sigmoid(), 1).sigmoid()
    y = F.dropout(y.sigmoid(), 0.3).sigmoid().permute(0, 2, 3, 1).sigmoid()
    return F.linear(F.layer_norm(y, y.shape[-1:]).relu() * y.double().sigmoid().to(y), y.new_ones(2, 6)).sin()


@pytest.mark.usefixtures("recorded_once")
def test_without_a_budget_one_step_teaches_for_all_sizes(monkeypatch):
    plain, ours = pair(nn.Sequential(Blocks(), After(nn.Conv2d(4, 3, 1), _of_any_size)))
    passes = note_followed(monkeypatch)
    for shape in ((2, 4, 8, 16), (5, 4, 16, 16), (1, 4, 12, 8)):
        assert_like(plain, ours, torch.randn(shape))
        monkeypatch.setattr(signatures, "Advice", None)
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


def test_a_pass_that_takes_the_same_advice_many_times_makes_no_endless_chain():
    """A chain of recipes is computed by recursion."""
    plain, ours = pair(Repeating())
    for steps in (2, 2, 800, 2):
        plain.steps = ours.steps = steps
        assert agree(plain, ours, on(torch.randn(3, 4)))


@pytest.mark.usefixtures("recorded_once")
def test_advice_grows_to_a_few_times_that_of_the_first_pass():
    (plain, ours), orders = pair(Chosen()), Random(0)
    for number in range(12):
        plain.chosen = ours.chosen = orders.sample(range(15), 15) if number else [0, 1, 2]
        assert agree(plain, ours, on(torch.randn(2, 4, 3, 3)))
    (last_signature,) = plans_of(ours).recent
    advice = last_signature.advice
    assert advice.site_count == 4 * advice.first_count + 1


def test_a_new_call_at_the_end_hides_no_longer_graph():
    """Functions of the program's own are not seen as calls, so a pass counts the nodes of its graph."""
    advice, x = Advice(), torch.randn(2, 4, requires_grad=True)

    def is_longer(product_count: int, has_new_call: bool) -> bool:
        with Advised(advice, inputs=[x]) as recording:
            y = torch.sigmoid(x * 2)
            for _ in range(product_count):
                y = Product.apply(y, y)
            if has_new_call:
                y.tanh()
        recording.learn(fits=False)
        return recording.is_outdated

    assert [is_longer(0, False), is_longer(0, True), is_longer(0, True), is_longer(1, True)] == [False] * 3 + [True]


def test_calls_without_gradients_have_no_place_and_no_bytes():
    """Their number may vary from step to step: the plan holds, and nothing is said."""

    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))
            self.times = 3

        def forward(self, x: Tensor) -> Tensor:
            h = torch.zeros_like(x)
            with torch.no_grad():
                for _ in range(self.times):
                    h = h + self.block(h + x)
            for _ in range(4):
                h = h + self.block(h + x)
            return h

    plain, within = pair(Repeated(), budget=0.7)
    peaks = []
    for times in (3, 3, 0, 6, 1):
        plain.times = within.times = times
        assert_like(plain, within, x := torch.ones(64, 32))
        peaks += [peak_bytes(lambda: step(within, x), "cpu")] if len(peaks) or not times else []  # noqa: B023
    assert max(peaks) - min(peaks) < 512


class Detached(nn.Module):
    """The graph of its first layers is freed during the pass."""

    def __init__(self) -> None:
        super().__init__()
        halves = [[nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(6)] for _ in range(2)]
        self.first, self.second = (nn.Sequential(*blocks) for blocks in halves)

    def forward(self, x: Tensor) -> Tensor:
        target = self.first(x).mean(0).detach()
        return (self.second(x) - target).square().mean(0)


def test_a_part_whose_graph_is_freed_during_the_pass_stays_within_the_budget():
    """Autograd saves its results until then, and afterwards nothing holds what they are computed from."""
    plain, within = pair(Detached(), budget=0.5)
    x = torch.randn(512, 32)
    assert_like(plain, within, *[x] * 3)
    plain_peak, *peaks = [peak_bytes(lambda: step(network, x), "cpu") for network in (plain, within, within)]  # noqa: B023
    assert max(peaks) <= 0.5 * plain_peak


def test_what_a_freed_call_has_saved_as_it_is_needs_no_rules():
    """Only the argmin of these distances is used. With a rule, a later pass would hold what cdist saves."""
    advice, x = Advice(), torch.randn(8, 4, requires_grad=True)
    with Advised(advice, inputs=[x]) as recording:
        torch.cdist(torch.mm(x, x.T), torch.mm(x, x.T)).argmin(1)
    recording.learn(fits=False)
    assert len(sites_of(advice)) == 4 and not any(site.advice & bits.RULES for site in sites_of(advice))


def test_calls_that_set_an_attribute_of_a_tensor_are_found_again(monkeypatch):
    """Each time, the function of `tensor.requires_grad = …` is another object."""

    def with_constants(x: Tensor) -> Tensor:
        for _ in range(8):
            constant = torch.eye(8)
            constant.requires_grad = False
            x = F.gelu(x @ constant)
        return x

    passes = note_followed(monkeypatch)
    plain, within = pair(After(nn.Linear(8, 8), with_constants), budget=0.7)
    assert_like(plain, within, *torch.randn(5, 64, 8))
    assert all(passes) and watched_count(within) == 1
