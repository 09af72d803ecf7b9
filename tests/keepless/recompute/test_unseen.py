"""What a call depends on besides its arguments: modes, and memory that changes unseen."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from keepless import CheckpointedABN, recompute_activations, recomputing
from tests.keepless.recompute.agreement import agree, by_backward, on, once, under
from tests.keepless.recompute.ahead import gradients, pair
from tests.keepless.recompute.programs import OfFunctions, OfOperators, OfOthers


class Network(nn.Module):
    """`inside`: a context for a part of the forward pass."""

    def __init__(self, function: Callable[["Network", Tensor], Tensor]):
        super().__init__()
        self.function, self.inside, self.passes = function, nullcontext, 0
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), CheckpointedABN(8, backend="eager"), nn.Conv2d(8, 8, 3)
        self.register_buffer("table", torch.rand(8, 6, 6))
        self.bias = nn.Parameter(torch.rand(8, 6, 6))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        return self.function(self, x)


def activated(net: Network, x: Tensor) -> Tensor:
    h = F.gelu(F.silu(net.conv(x)))
    with net.inside():
        h = F.silu(F.silu(h) * 2)
    return net.last(net.norm(F.gelu(h)))


def assert_equal(plain: Network, ours: Network, steps: int, wraps: Any = once) -> None:
    for _ in range(steps):
        assert agree(plain, ours, on(torch.randn(2, 3, 8, 8), False), wraps=wraps)


@pytest.mark.table
@pytest.mark.parametrize("is_inside", [False, True])
@pytest.mark.parametrize("options", [{}, {"budget": 0.6}, {"checkpointed_only": True}], ids=str)
@pytest.mark.parametrize("mode", [OfFunctions, OfOperators])
@pytest.mark.filterwarnings("ignore:no plan keeps|a step with")
def test_under_a_mode_that_may_change_results_nothing_is_recomputed(mode, options, is_inside):
    plain, ours = pair(Network(activated), **options)
    assert_equal(plain, ours, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for inner_mode in (mode, mode, OfOthers):  # at the same depth
            if is_inside:
                plain.inside = ours.inside = inner_mode
            assert_equal(plain, ours, 2, once if is_inside else partial(under, inner_mode))
    plain.inside = ours.inside = nullcontext
    assert_equal(plain, ours, 2)
    texts = [str(warning.message) for warning in caught]
    names = [text.split()[4].rstrip(",") for text in texts if "is recomputed under" in text]
    seen = "checkpointed_only" not in options or not is_inside  # its norm is outside of the part
    assert names in ([] if (is_inside and mode is OfFunctions) or not seen else [mode.__name__], ["OfOthers"])


@pytest.mark.filterwarnings("error")
def test_a_mode_is_named_only_where_something_would_be_recomputed():
    net = recompute_activations(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    with OfOperators():
        net(torch.randn(2, 4)).sum().backward()
    with pytest.warns(UserWarning, match="OfOperators"), OfOperators(), recomputing():
        F.linear(F.silu(F.linear(torch.randn(2, 4), net[0].weight)), net[2].weight).sum().backward()


def test_a_function_mode_around_the_backward_pass_changes_nothing():
    def under_it(losses: list[Tensor], sources: list[Tensor]) -> list[Tensor | None]:
        with OfFunctions():
            return by_backward(losses, sources)

    assert agree(*pair(Network(activated)), on(torch.randn(2, 3, 8, 8), False), under_it)


@pytest.mark.parametrize("budget", [None, 0.6])
@pytest.mark.filterwarnings("ignore:no plan keeps this step")
def test_pytorchs_observers_see_the_same_step(budget, caplog):
    """Within a budget from the second one on: the first one is watched."""
    caplog.set_level("INFO", "keepless")
    counts = []
    for first in (0, 3):
        net = recompute_activations(Network(activated), budget=budget)
        for step in range(5):
            with FlopCounterMode(display=False) if step >= first else nullcontext() as counter:
                gradients(net, torch.randn(2, 3, 8, 8))
            if budget and step == 0:
                continue
            counts += [] if counter is None else [counter.get_total_flops()]
    assert len(set(counts)) == 1 and len(counts) == (6 if budget else 7)
    assert len([message for message in caplog.messages if "calls: a peak" in message]) == (2 if budget else 0)


# Writes through `.data` between the uses of a tensor, through aliases, and by giving it other memory.


def by_an_alias(net, x):
    q = F.silu(net.conv(x))
    alias, first = q.data, torch.sigmoid(q) * q
    alias.add_(1)
    second = torch.tanh(q) * first
    alias.mul_(0.3)
    return second * q


def of_a_norms_input(net, x):
    h = net.conv(x)
    z = net.norm(h)
    y = F.gelu(z) * z
    h.data.neg_()
    return net.last(y) + net.last(z)


def of_what_a_result_serves_for(net, x):
    q = net.conv(x) * 3
    y = F.leaky_relu(F.relu6(q), 0.1)
    q.data.neg_()
    return net.last(y * y)


def of_a_buffer_between(net, x):
    h = F.silu(net.conv(x))
    y = F.gelu(h * net.table) * net.table[:4].repeat(2, 1, 1)
    net.table.data.mul_(0.9).add_(0.1)  # as codebooks are moved
    y = F.gelu(y * net.table)
    net.table.data.mul_(0.9)
    return y * net.table


def of_a_norms_input_whose_output_is_gone(net, x):
    h = F.silu(net.conv(x))
    y = F.gelu(net.last(F.gelu(net.norm(h)))) + net.last(net.norm(h * 2))
    if net.passes != 2:
        h.data.neg_()
    return y.sin()


def given_late(net, x):
    q = F.silu(net.conv(x))
    gated = torch.sigmoid(q) * q * net.table
    if net.passes > 3:
        q.data = q.data.round()
    return torch.tanh(q) * gated


def by_an_alias_alone(net, x):
    q = F.silu(net.conv(x))
    alias, y = q.detach(), torch.tanh(q * 1.5) * torch.sigmoid(q)
    del q
    alias.data.neg_()
    return F.gelu(y)


def given_without_a_gradient(net, x):
    h = F.silu(net.conv(x))
    mask, y = (h.detach() > 0).to(h.dtype), F.gelu(h * net.table)
    y = F.gelu(y * mask)
    mask.data, net.table.data = mask * 0.5, net.table * 1.1
    return y * mask * net.table


def given_what_is_saved(net, x):
    q = F.silu(net.conv(x))
    grown = torch.exp(q)
    y, q = torch.sigmoid(grown) * grown, q + 1
    q.data = grown
    with torch.no_grad():
        q.mul_(0.5)
    return F.gelu(q) * y


def of_a_leaf_of_the_pass(net, x):
    h = F.silu(net.conv(x))
    leaf = h.detach().exp().requires_grad_()
    y = F.gelu(h * leaf)
    leaf.data.mul_(0.5)
    return y * leaf


THROUGH_DATA = [by_an_alias, of_a_norms_input, of_what_a_result_serves_for, of_a_buffer_between, given_late]
THROUGH_DATA += [of_a_norms_input_whose_output_is_gone, by_an_alias_alone, given_without_a_gradient]
THROUGH_DATA += [given_what_is_saved, of_a_leaf_of_the_pass]


@pytest.mark.table
@pytest.mark.parametrize("budget", [None, 0.6])
@pytest.mark.parametrize("function", THROUGH_DATA, ids=lambda function: function.__name__)
@pytest.mark.filterwarnings("ignore:no plan keeps")
def test_what_the_program_changes_through_data_is_what_pytorch_saves(function, budget):
    assert_equal(*pair(Network(function), budget=budget), steps=6)
