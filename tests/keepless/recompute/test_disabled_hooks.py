"""Forward passes that disable saved-tensor hooks."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

from keepless import recompute_activations
from tests.keepless.recompute.agreement import agree, on
from tests.keepless.recompute.ahead import pair


def nested(x: Tensor) -> Tensor:
    with disable_saved_tensors_hooks("no hooks"):
        x = F.silu(x)
        with disable_saved_tensors_hooks("none here either"):
            x = F.gelu(x).sin()
        return F.silu(x)


def under_others(x: Tensor) -> Tensor:
    with save_on_cpu():
        with pytest.raises(RuntimeError, match="no hooks"), disable_saved_tensors_hooks("no hooks"):
            pass
        return F.gelu(x).sin()


PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nested": nested,
    "under others": under_others,
    "func": lambda x: F.gelu(x).sin() + torch.func.grad(lambda x: x.sin().sum())(x),
    "outside": lambda x: F.gelu(x).sin(),
}


class Network(nn.Module):
    def __init__(self, part: Callable[[Tensor], Tensor]):
        super().__init__()
        self.first, self.norm, self.last, self.part = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), part
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(x)))
        x = self.part(x) if self.is_on else F.gelu(x).sin()
        return self.last(F.dropout(F.relu(x) * 2))


@pytest.mark.parametrize("budget", [None, 0.6])
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.filterwarnings("ignore:no plan keeps|a part of the network")
@pytest.mark.filterwarnings("ignore:a step with more results for its backward")
def test_calls_without_hooks_are_those_of_pytorch_in_any_step(name, budget):
    plain, ours = pair(Network(PARTS[name]), budget=budget)
    for is_on in [True, False, False, True, True, False]:
        plain.is_on = ours.is_on = is_on
        with disable_saved_tensors_hooks("outside") if is_on and name == "outside" else nullcontext():
            assert agree(plain, ours, on(torch.randn(16, 8), False))


@pytest.mark.parametrize("around", [save_on_cpu, lambda: saved_tensors_hooks(lambda x: x, lambda x: x)])
def test_hooks_around_a_network_decide_what_is_kept_and_its_budget_is_ignored_with_one_warning(around):
    network, x = recompute_activations(nn.Sequential(nn.Linear(8, 8), nn.GELU()), budget=0.5), torch.randn(4, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            with around():
                network(x).sum().backward()
    (warning,) = caught
    assert "the budget is ignored in passes inside a checkpoint, save_on_cpu" in str(warning.message)
