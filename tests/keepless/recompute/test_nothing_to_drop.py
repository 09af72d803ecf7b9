"""Steps that drop more than earlier ones, because they make longer graphs or larger results: they are planned anew."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations, report
from keepless.recompute.passes.advised import Advised
from keepless.recompute.step.costs import peak_bytes
from tests.keepless.recompute.ahead import After


def block(h: Tensor) -> Tensor:
    return torch.tanh(F.silu(F.gelu(F.layer_norm(h, h.shape[-1:])) * 1.5) + 0.5)


class Network(nn.Module):
    """`late`: after the change. `adapter`: comes frozen, and is trained late."""

    def __init__(self, blocks: Callable[["Network", Tensor], Tensor]):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))
        self.lstm, self.dropout = nn.LSTM(16, 16, batch_first=True), nn.Dropout(0.0)
        self.late, self.blocks = False, blocks
        self.adapter = nn.Parameter(torch.ones(16, 16)) if blocks is adapted else None

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self, self.convs[0](x))


def detached(net, h):
    h = h if net.late else h.detach()
    for _ in range(4):
        h = block(h)
    return net.convs[1](h)


def dropping(net, h):
    net.dropout.p = 0.1 if net.late else 0.0
    for conv in net.convs[1:]:
        h = net.dropout(F.silu(net.dropout(conv(h))))
    return h


def checkpointed(net, h):
    for conv in net.convs[1:]:
        h = block(conv(h)) if net.late else checkpoint(lambda u, c=conv: block(c(u)), h, use_reentrant=False)
    return h


def tokens(net, h):
    h = h.flatten(2).transpose(1, 2)[:, torch.arange(256) < (256 if net.late else 64)]
    for conv in net.convs[1:]:
        h = h + F.gelu(F.layer_norm(h, (16,)) @ conv.weight[:, :, 0, 0]).sin()
    return h


def cut_twice(net, h):
    """The dropout and the cut change independently."""
    for number, conv in enumerate(net.convs[1:]):
        h = h + net.dropout(conv(F.silu(h * 1.5)))
        h = h.detach() if net.cut and number == 2 else h
    return h


def with_signs(net, h):
    """Another layer reads an activation of which only the signs were kept."""
    h = F.relu(h)
    return h.mean() + (net.convs[1](h).square().sum() if net.late else 0.0)


def adapted(net, h):
    h = h.detach() * net.adapter
    for _ in range(3):
        h = block(h)
    return net.convs[1](h)


IMAGES = torch.linspace(-1, 1, 8 * 16 * 16 * 16).sin().view(8, 16, 16, 16)


# Longer graphs, larger results, and calls that were hidden in the planned step.
def longer(net, h):
    """A function that returns several tensors, for a longer part."""
    h = h.flatten(2).transpose(1, 2)
    return net.lstm(h[:, : 256 if net.late else 64])[0][:, :64].sin()


def exchanged(net, h):
    """One path loses its gradients, and another one, that cannot be recomputed, gets some."""
    with torch.set_grad_enabled(net.late):
        a = h.cumprod(1).cumprod(2).cumprod(3)
    with torch.set_grad_enabled(not net.late):
        b = F.silu(F.silu(F.silu(h)))
    return a + b


def branching(net, h):
    """A branch of a few large calls that cannot be recomputed."""
    for conv in net.convs[1:]:
        h = block(conv(h))
    return h + h.repeat(4, 1, 1, 1).cumprod(1).cumprod(2)[:8] if net.late else h


@pytest.mark.filterwarnings("ignore:no plan keeps|this step is within")
@pytest.mark.parametrize("kind", [longer, exchanged, branching])
def test_a_step_that_grows_beyond_its_budget_is_said(kind):
    """However it grows: no list of functions is asked."""
    budget = int(0.9 * peak_bytes(lambda: step(new_network(kind), False), IMAGES.device))
    network = recompute_activations(new_network(kind), budget=budget)
    for _ in range(3):
        step(network, False)
    with pytest.warns(UserWarning, match="may have (exceeded its budget|taken up to)"):
        step(network, True)


class Blocks(nn.Module):
    """Runs so many of its six blocks."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 192), nn.GELU(), nn.Linear(192, 48)) for _ in range(self.depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.depth]:
            x = x + block(x)
        return x.square().mean()


# A depth of three is within the budget, six are not.
SCHEDULES = [[1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 6], [3, 6] * 6, [2, 2, 3, 3, 6, 6, 6]]


@pytest.mark.parametrize("depths", SCHEDULES)
def test_a_depth_that_changes_is_planned_and_no_step_is_beyond_its_budget_in_silence(depths, monkeypatch):
    monkeypatch.setattr("keepless.recompute.step.counting.measure", lambda operators: None)
    monkeypatch.setattr("keepless.recompute.step.watch.HOST_SECONDS", 0.0)
    monkeypatch.setattr("keepless.recompute.step.counting.cost_of", lambda operator: None)
    monkeypatch.setattr("keepless.recompute.signatures.signatures.profiler_runs", lambda: False)  # as in `peak_bytes`
    torch.manual_seed(0)
    network, x = Blocks(), torch.randn(16, 64, 48)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    budget = int(0.6 * peak_bytes(lambda: network(x).backward(), "cpu"))
    recompute_activations(network, budget=budget)
    peaks = []
    for network.depth in depths:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            peaks.append(peak_bytes(lambda: network(x).backward(), "cpu"))
        assert peaks[-1] <= 1.01 * budget or "may have taken up to" in str(caught[-1].message), peaks
    assert 0.9 * budget < peaks[-1] <= 1.01 * budget  # planned, and held elsewhere no longer


def test_a_sparse_tensor_that_is_saved_after_results_have_grown_stays_where_it_is():
    torch.manual_seed(0)
    network, x, sparse = Blocks(), torch.randn(16, 64, 48), torch.eye(48).to_sparse()
    readout = recompute_activations(
        After(network, lambda loss: torch.sparse.mm(sparse, loss.expand(48, 1))), budget=0.6
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for network.depth in (2, 2, 6, 6):
            readout(x).sum().backward()


def test_what_a_detached_part_has_saved_is_freed_within_the_pass_that_teaches_advice():
    """As DoRA's norms of weights, whose graph ends with the statement that makes it."""

    def many(y: Tensor) -> Tensor:
        return y.square().mean() + sum(layer(torch.ones(256, 64)).detach().mean() for _ in range(8))

    torch.manual_seed(0)
    layer, x = nn.Linear(64, 64), torch.randn(4, 64)
    network = After(layer, many)
    plain = peak_bytes(lambda: network(x).backward(), "cpu")
    assert peak_bytes(lambda: recompute_activations(network)(x).backward(), "cpu") <= 1.05 * plain


CHANGES = [(detached, 0.7), (dropping, 0.7), (adapted, 0.8), (tokens, 0.5), (checkpointed, 0.55)]


def step(network: nn.Module, late: bool) -> None:
    network.late = late
    if network.adapter is not None:
        network.adapter.requires_grad_(late)
    torch.manual_seed(0)
    network(IMAGES).square().mean().backward()


def peak(network: nn.Module) -> int:
    return peak_bytes(lambda: step(network, True), IMAGES.device)


def new_network(kind: Callable[[Network, Tensor], Tensor]) -> Network:
    torch.manual_seed(0)
    network = Network(kind)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return network


@pytest.mark.table
@pytest.mark.parametrize("kind, share", CHANGES, ids=lambda change: getattr(change, "__name__", None))
def test_a_budget_holds_after_the_change(kind, share, monkeypatch):
    monkeypatch.setattr("keepless.recompute.step.counting.cost_of", lambda operator: None)
    plain = new_network(kind)
    for late in (False, True, True):
        step(plain, late)
    budget = int(share * peak(plain))
    ours = recompute_activations(new_network(kind), budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the checkpoint
        for late in (False,) * 4 + (True,) * 3:
            step(ours, late)
    assert peak(ours) <= 1.05 * budget


@pytest.mark.parametrize("kind", [detached, dropping, checkpointed])
def test_without_a_budget_a_step_saves_as_little_after_the_change_as_a_new_network(kind):
    changed, fresh = recompute_activations(new_network(kind)), recompute_activations(new_network(kind))
    for late in (False, False, True, True, True, True):
        step(changed, late)
    for _ in range(4):
        step(fresh, True)
    assert peak(changed) <= peak(fresh)
    assert report(changed).bytes == report(fresh).bytes


def test_a_value_is_kept_little_more_than_once_if_another_layer_needs_more_than_its_signs():
    changed, fresh = recompute_activations(new_network(with_signs)), recompute_activations(new_network(with_signs))
    for late in (False, False, False, True, True):
        step(changed, late)
    assert peak(changed) <= 1.01 * peak(fresh)


@pytest.mark.filterwarnings("ignore:no plan keeps")
def test_states_that_alternate_are_planned_twice(caplog, monkeypatch):
    """The longer step's plan holds for both."""
    monkeypatch.setattr("keepless.recompute.step.counting.cost_of", lambda operator: None)
    caplog.set_level("INFO", "keepless")
    network = recompute_activations(new_network(detached), budget=0.7)
    for late in [False, True, True, True] * 3:
        step(network, late)
    assert len([message for message in caplog.messages if "calls: a peak" in message]) == 2


class Modulated(nn.Module):
    """As in FiLM: factors for each channel, which recipes of large results may keep, but not of tiny ones."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ModuleList(nn.Linear(8, 32) for _ in range(3))
        self.layers = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        means = x[:, :8].mean((2, 3))
        for factors, layer in zip(self.factors, self.layers, strict=True):
            scale, shift = factors(means)[:, :, None, None].chunk(2, 1)
            x = layer(F.silu(x * (1 + scale) + shift))
        return x


def test_a_first_pass_on_tiny_inputs_decides_nothing_about_larger_ones():
    network, fresh = recompute_activations(Modulated()), recompute_activations(Modulated())
    small, large = torch.randn(4, 16, 4, 4), torch.randn(4, 16, 32, 32)
    for x in (small, large):
        network(x).sum().backward()
        fresh(large).sum().backward()
    assert report(network).bytes == report(fresh).bytes


def test_without_a_budget_unusual_passes_do_not_decide_for_long():
    """Dropout is there from the third pass on, in which, as in the next one, a part is detached."""
    changed, fresh = recompute_activations(new_network(cut_twice)), recompute_activations(new_network(cut_twice))
    for number in range(1, 13):
        changed.dropout.p = 0.0 if number < 3 else 0.1
        fresh.dropout.p, fresh.cut, changed.cut = 0.1, False, number in (3, 4)
        step(changed, False)
        step(fresh, False)
    assert peak(changed) <= peak(fresh)


@pytest.mark.parametrize("late", [[False, True] * 10, [False] * 3 + [True] * 17])
def test_recorded_passes_are_few(late, monkeypatch):
    """Also where calls alternate: 1, 3, 6, 11, 20, and those after a pass that makes more, or calls new functions."""
    recorded, enter = [], Advised.__enter__
    monkeypatch.setattr(Advised, "__enter__", lambda self: recorded.append(self.is_first) or enter(self))
    network = recompute_activations(new_network(longer))
    for is_late in late:
        step(network, is_late)
    assert len(recorded) == 20 and {1, 3, 6, 11, 20} <= {1 + n for n, first in enumerate(recorded) if first}
    assert sum(recorded) <= 8
