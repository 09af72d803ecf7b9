"""Calls of which more than the result can be computed again, equal to the bit."""

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepless.recompute.recipes import ByPlan
from keepless.recompute.recording import Recording
from keepless.recompute.rehearsal import counted_step
from keepless.recompute.report import KeptTensor
from keepless.recompute.search import Choice
from keepless.recompute.step import Kind, Step
from tests.keepless.recompute.ahead import After


def repeated(network: nn.Module, x: Tensor) -> tuple[Step, Sequence[KeptTensor]]:
    """Keep nothing that can be computed again. Returns the counted step, and what is kept.

    Equal to the bit are the loss, gradients, and random numbers that are drawn before and after the backward pass.
    """
    step = counted_step(network, (x,), {})
    plan = Choice(0, 0.0, tuple(value.kind == Kind.KEPT for value in step.values)).plan(step)
    recording, results = Recording(ByPlan([plan]), inputs=[x]), []
    for context in (recording, nullcontext()):
        torch.manual_seed(1)
        with context:
            loss = network(x).square().mean()
        before = torch.rand(1, device=x.device)
        gradients = torch.autograd.grad(loss, network.parameters())
        results.append([loss, before, *gradients, torch.rand(1, device=x.device)])
    assert all(map(torch.equal, *results))
    return step, recording.kept


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x, x, x, need_weights=self.training)[0]


@pytest.mark.parametrize(("needs_weights", "inside"), [(True, "softmax"), (False, "scaled_dot_product_attention")])
def test_the_functions_inside_multi_head_attention_are_computed_again(needs_weights, inside):
    network = SelfAttention(64, 2, batch_first=True).train(needs_weights)
    step, kept = repeated(network, torch.randn(4, 32, 64))
    assert {"linear", inside} < {function.__name__ for function, *_ in step.calls}
    sizes = {one.bytes for one in kept if one.kept_for in (inside, "bmm", "contiguous")}
    assert sizes <= {1024}  # log-sum-exp


def heads() -> nn.Module:
    return After(nn.Linear(32, 96), lambda y: F.scaled_dot_product_attention(*y.chunk(3, -1)).sin())


def test_attention_is_computed_again_with_gradients_by_which_it_chooses_its_backend(monkeypatch):
    modes = []

    def attention(*args, **kwargs):
        modes.append(torch.is_grad_enabled() and args[0].requires_grad)
        return F.scaled_dot_product_attention(*args, **kwargs)

    monkeypatch.setattr("keepless.recompute.rules.by_present_backends", lambda function: attention)
    repeated(nn.Sequential(heads(), heads()), torch.randn(2, 64, 32))
    assert modes and all(modes)


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, -x, dropout_p=0.3, is_causal=True)


def by_one_backend(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # which saves other tensors inside than the backend that is chosen without it
        return F.scaled_dot_product_attention(x, x * 2, -x)


# Functions of x (8, 4, 64, 64), and the number of tensors of its size that are kept.
DRAWS = {
    "dropout": (lambda x: F.dropout(x, 0.3), 0),
    "dropout in place": (lambda x: F.dropout(x * 1.5, 0.3, inplace=True), 1),  # its mask
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), 0),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), 2),  # has no rule
    "attention": (attention, 0),
    "attention by one backend": (by_one_backend, 0),
    "transposed": (lambda x: F.dropout(x.transpose(1, 3), 0.3), 0),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), 0),
    "its own generator": (lambda x: x * torch.bernoulli(x.sigmoid(), generator=torch.Generator(x.device)), 1),
    "cross entropy": (lambda x: F.cross_entropy(x.flatten(0, 2), torch.arange(64, device=x.device).repeat(32)), 0),
}


class Drawing(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(8, 4, 64, 64)), DRAWS[name][0]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.w * x).exp().sum()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_again(name, device):
    """The forward pass draws as many numbers as without a plan, and draws between the passes change nothing."""
    network = Drawing(name).to(device)
    _, kept = repeated(network, torch.tensor(1.25, device=device))
    if device == "cpu":
        assert sum(one.bytes >= network.w.nbytes for one in kept) == DRAWS[name][1]


class Masked(nn.Module):
    """Two layers share a mask that is made without gradient, and takes a quarter of the scores' bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, scores: Tensor) -> Tensor:
        mask = torch.zeros(8, 1, 64, 64).masked_fill(torch.ones(64, 64).triu(1).bool(), -1e9)
        for _ in range(2):
            scores = ((scores * self.scale) + mask).softmax(-1).exp()
        return scores


def test_large_masks_are_kept_once_for_what_is_computed_from_them():
    x = torch.randn(8, 4, 64, 64)
    step, kept = repeated(Masked(), x)
    assert all(value.kind in (Kind.KEPT, Kind.FREE) for value in step.values if value.call >= 0)
    adds = [value for value in step.values if value.call >= 0 and step.calls[value.call][0] is Tensor.add]
    assert [value.kind for value in adds] == [Kind.FREE, Kind.FREE]
    assert sum(one.bytes == x.nbytes // 4 for one in kept) == 1
