"""Steps that drop more than earlier ones, because they make longer graphs or larger results: they are planned anew."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations, report
from keepless.recompute.step.costs import peak_bytes


def block(h: Tensor) -> Tensor:
    return torch.tanh(F.silu(F.gelu(F.layer_norm(h, h.shape[-1:])) * 1.5) + 0.5)


class Network(nn.Module):
    """`late`: after the change."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(16, 16, 3, padding=1) for _ in range(5))
        self.dropout, self.late, self.adapter = nn.Dropout(0.0), False, None

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.convs[0](x))


class Detached(Network):
    def blocks(self, h):
        h = h if self.late else h.detach()
        for _ in range(4):
            h = block(h)
        return self.convs[1](h)


class Dropping(Network):
    def blocks(self, h):
        self.dropout.p = 0.1 if self.late else 0.0
        for conv in self.convs[1:]:
            h = self.dropout(F.silu(self.dropout(conv(h))))
        return h


class Checkpointed(Network):
    def blocks(self, h):
        for conv in self.convs[1:]:
            h = block(conv(h)) if self.late else checkpoint(lambda u, c=conv: block(c(u)), h, use_reentrant=False)
        return h


class Tokens(Network):
    def blocks(self, h):
        h = h.flatten(2).transpose(1, 2)[:, torch.arange(256) < (256 if self.late else 64)]
        for conv in self.convs[1:]:
            h = h + F.gelu(F.layer_norm(h, (16,)) @ conv.weight[:, :, 0, 0]).sin()
        return h


class WithSigns(Network):
    """Another layer reads an activation of which only the signs were kept."""

    def blocks(self, h):
        h = F.relu(h)
        return h.mean() + (self.convs[1](h).square().sum() if self.late else 0.0)


class Adapted(Network):
    """An adapter comes, frozen; `late`: and is trained."""

    def blocks(self, h):
        h = h.detach()
        for number in range(3):
            h = block(h if self.adapter is None or number else h * self.adapter)
        return self.convs[1](h)


IMAGES = torch.linspace(-1, 1, 8 * 16 * 16 * 16).sin().view(8, 16, 16, 16)


# Longer graphs, larger results, and calls that were hidden in the planned step.
class Longer(Network):
    """A function that returns several tensors, for a longer part."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(16, 16, batch_first=True)

    def blocks(self, h):
        h = h.flatten(2).transpose(1, 2)
        return self.lstm(h[:, : 256 if self.late else 64])[0][:, :64].sin()


class Exchanged(Network):
    """One path loses its gradients, and another one, that cannot be recomputed, gets some."""

    def blocks(self, h):
        with torch.set_grad_enabled(self.late):
            a = h.cumprod(1).cumprod(2).cumprod(3)
        with torch.set_grad_enabled(not self.late):
            b = F.silu(F.silu(F.silu(h)))
        return a + b


class Branching(Network):
    """A branch of a few large calls that cannot be recomputed."""

    def blocks(self, h):
        for conv in self.convs[1:]:
            h = block(conv(h))
        return h + h.repeat(4, 1, 1, 1).cumprod(1).cumprod(2)[:8] if self.late else h


@pytest.mark.filterwarnings("ignore:no plan keeps|this step is within")
@pytest.mark.parametrize("kind", [Longer, Exchanged, Branching])
def test_a_step_that_grows_beyond_its_budget_is_said(kind):
    """However it grows: no list of functions is asked."""
    budget = int(0.9 * peak_bytes(lambda: step(made(kind), False), IMAGES.device))
    network = recompute_activations(made(kind), budget=budget)
    for _ in range(3):
        step(network, False)
    with pytest.warns(UserWarning, match="planned may have exceeded its budget"):
        step(network, True)


CHANGES = [(Detached, 0.7), (Dropping, 0.7), (Adapted, 0.8), (Tokens, 0.5), (Checkpointed, 0.55)]


def step(network: nn.Module, late: bool) -> None:
    network.late = late
    if isinstance(network, Adapted):
        network.adapter.requires_grad_(late)
    torch.manual_seed(0)
    network(IMAGES).square().mean().backward()


def peak(network: nn.Module) -> int:
    return peak_bytes(lambda: step(network, True), IMAGES.device)


def made(kind: type[Network]) -> Network:
    torch.manual_seed(0)
    network = kind()
    if kind is Adapted:
        network.adapter = nn.Parameter(torch.ones(16, 16))
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return network


@pytest.mark.table
@pytest.mark.parametrize("kind, share", CHANGES, ids=lambda one: getattr(one, "__name__", None))
def test_a_budget_holds_after_the_change(kind, share, monkeypatch):
    monkeypatch.setattr("keepless.recompute.step.counting.cost_of", lambda operator: None)
    plain = made(kind)
    for late in (False, True, True):
        step(plain, late)
    budget = int(share * peak(plain))
    ours = recompute_activations(made(kind), budget=budget)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the checkpoint
        for late in (False,) * 4 + (True,) * 3:
            step(ours, late)
    assert peak(ours) <= 1.05 * budget
    for network in (plain, ours):
        network.zero_grad(set_to_none=False)
        step(network, True)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize("kind", [Detached, Dropping, Checkpointed])
def test_without_a_budget_a_step_saves_as_little_after_the_change_as_a_new_network(kind):
    """And again before it: states may alternate."""
    changed, fresh = recompute_activations(made(kind)), recompute_activations(made(kind))
    for late in (False, False, True, True, True, True):
        step(changed, late)
    for _ in range(4):
        step(fresh, True)
    assert peak(changed) <= peak(fresh)
    assert report(changed).bytes == report(fresh).bytes
    for late in (False, True, False, True):
        step(changed, late)
        plain = made(kind)
        step(plain, late)
        for parameter in (*changed.parameters(), *plain.parameters()):
            parameter.grad = torch.zeros_like(parameter)
        for network in (changed, plain):
            step(network, late)
        pairs = zip(changed.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(found.grad, expected.grad) for found, expected in pairs)


def test_a_value_is_kept_little_more_than_once_if_another_layer_needs_more_than_its_signs():
    changed, fresh = recompute_activations(made(WithSigns)), recompute_activations(made(WithSigns))
    for late in (False, False, False, True, True):
        step(changed, late)
    assert peak(changed) <= 1.01 * peak(fresh)


def test_states_that_alternate_are_planned_twice(caplog, monkeypatch):
    """The longer step's plan holds for both."""
    monkeypatch.setattr("keepless.recompute.step.counting.cost_of", lambda operator: None)
    caplog.set_level("INFO", "keepless")
    network = recompute_activations(made(Detached), budget=0.7)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for late in [False, True, True] * 4:
            step(network, late)
    assert len([one for one in caplog.messages if "calls: a peak" in one]) == 2
    assert not [one for one in said if "several paths" in str(one.message)]
