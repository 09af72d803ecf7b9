"""Calls of which more than the result can be computed again, equal to the bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepless.recompute.counting import Counting
from keepless.recompute.recipes import ByPlan
from keepless.recompute.recording import Recording
from keepless.recompute.rehearsal import counted_step
from keepless.recompute.search import Choice
from keepless.recompute.step import Kind, Plan, Step


def with_nothing_kept(step: Step) -> Plan:
    return Choice(0, 0.0, tuple(value.kind == Kind.KEPT for value in step.values)).plan(step)


def gradients(network: nn.Module, x: Tensor, context) -> list[Tensor]:
    torch.manual_seed(1)
    with context:
        loss = network(x).square().mean()
    return list(torch.autograd.grad(loss, network.parameters()))


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x, x, x, need_weights=self.training)[0]


@pytest.mark.parametrize(("needs_weights", "inside"), [(True, "softmax"), (False, "scaled_dot_product_attention")])
def test_the_functions_inside_multi_head_attention_are_computed_again(needs_weights, inside):
    network, x = SelfAttention(64, 2, batch_first=True).train(needs_weights), torch.randn(4, 32, 64)
    step = counted_step(network, (x,), {})
    assert {"linear", inside} < {function.__name__ for function, *_ in step.calls}
    recording = Recording(ByPlan([with_nothing_kept(step)]), inputs=[x])
    assert all(map(torch.equal, gradients(network, x, recording), gradients(network, x, nullcontext())))
    assert {kept.bytes for kept in recording.kept if kept.kept_for in (inside, "bmm", "contiguous")} <= {
        1024
    }  # log-sum-exp


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, -x, dropout_p=0.3, is_causal=True)


def by_one_backend(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # which saves other tensors inside than the backend that is chosen without it
        return F.scaled_dot_product_attention(x, x * 2, -x)


# Functions of x (8, 4, 64, 64), and the calls whose insides are computed again.
DRAWS = {
    "dropout": (lambda x: F.dropout(x, 0.3), 1),
    "dropout in place": (lambda x: F.dropout(x * 1.5, 0.3, inplace=True), 0),  # its mask is kept
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), 1),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), 0),  # no function follows it
    "attention": (attention, 1),
    "attention by one backend": (by_one_backend, 1),
    "transposed": (lambda x: F.dropout(x.transpose(1, 3), 0.3), 1),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), 0),
    "its own generator": (lambda x: x * torch.bernoulli(x.sigmoid(), generator=torch.Generator(x.device)), 0),
    "cross entropy": (lambda x: F.cross_entropy(x.flatten(0, 2), torch.arange(64, device=x.device).repeat(32)), 1),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", DRAWS)
def test_random_numbers_are_drawn_again(name, device):
    """Equal to the bit; as many numbers are drawn as without a plan, and whatever is drawn before the backward pass."""
    function, insides = DRAWS[name]
    w = torch.randn(8, 4, 64, 64, device=device, requires_grad=True)

    def run(context) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(1)
        with context:
            output = function(w * 1.25).exp().sum()
        torch.rand(5, device=device)
        (gradient,) = torch.autograd.grad(output, w)
        return output.detach(), gradient, torch.rand(1, device=device)

    counting = Counting([], measures=True)
    output = counting.forward_pass(lambda: function(w * 1.25).exp().sum(), (), {})
    counting.forward_ends([output])
    with counting.made:
        torch.autograd.grad(output, w)
    plan = with_nothing_kept(counting.step())
    recording = Recording(ByPlan([plan]))
    assert all(map(torch.equal, run(recording), run(nullcontext())))
    if device == "cpu":
        large = [kept for kept in recording.kept if kept.bytes >= w.nbytes]
        assert len(large) == 1 + (insides == 0 and name != "bernoulli")  # w itself


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
    network, x = Masked(), torch.randn(8, 4, 64, 64)
    step = counted_step(network, (x,), {})
    assert all(value.kind in (Kind.KEPT, Kind.FREE) for value in step.values if value.call >= 0)
    adds = [value for value in step.values if value.call >= 0 and step.calls[value.call][0] is Tensor.add]
    assert [value.kind for value in adds] == [Kind.FREE, Kind.FREE]
    recording = Recording(ByPlan([with_nothing_kept(step)]), inputs=[x])
    assert all(map(torch.equal, gradients(network, x, recording), gradients(network, x, nullcontext())))
    assert sum(kept.bytes == x.nbytes // 4 for kept in recording.kept) == 1
