"""Plans go to files and checkpoints as plain containers, and come back only for the network that they are of."""

import copy
import io
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import budget_state, load_budget_state, plan, recompute_activations
from keepless.budget import plans as of_plans
from keepless.budget.saved_plans import function_name
from keepless.recompute.rules import EXPENSIVE, FOLLOWED
from tests.keepless.budget.ahead import Ahead, gradients


class Layers(nn.Module):
    """Equal layers; with `skips`, their inputs are read once more, at the end."""

    def __init__(self, layers: int = 4, skips: bool = False):
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers)), skips

    def forward(self, x: Tensor) -> Tensor:
        read = [x]
        for layer in self.layers:
            read.append(F.gelu(layer(read[-1])))
        for _ in self.layers:
            read[-1] = read[-1] * (read.pop(-2) if self.skips else read[-1])
        return read[-1].mean(1)


def stored(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_functions_are_told_apart_by_their_names():
    functions = {*FOLLOWED, *EXPENSIVE}
    assert len(set(map(function_name, functions))) == len(functions)


def test_a_saved_plan_is_in_force_from_the_first_step_on(tmp_path, monkeypatch):
    torch.manual_seed(0)
    plain, x = Layers(), torch.randn(500, 32)
    found = plan(plain, x, [0.9, 0.8])
    found.save(tmp_path / "plan.pt")
    monkeypatch.setattr(of_plans, "frontier", None)  # nothing is searched
    within = recompute_activations(copy.deepcopy(plain), budget=str(tmp_path / "plan.pt"))
    plans = Ahead.of(within)
    plans.load(torch.load(tmp_path / "plan.pt", weights_only=True))
    assert plans.peak(within, x) == pytest.approx(found.rows[-1].peak, rel=0.01)
    assert all(map(torch.equal, gradients(within, x), gradients(plain, x)))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_resumed_network_takes_the_same_bytes(steps, monkeypatch):
    """After the first step, which was rehearsed, and after the others, of which one was traced."""
    torch.manual_seed(0)
    inputs = [torch.randn(size, 32) for size in (300, 500)]
    networks = [recompute_activations(Layers(), budget=600_000) for _ in range(2)]
    straight, resumed = map(Ahead.of, networks)
    for _ in range(steps):
        for x in inputs:
            straight.peak(networks[0], x)
    resumed.load(stored(straight.state()))
    assert stored(resumed.state()) == stored(straight.state())
    networks[1].load_state_dict(networks[0].state_dict())
    if steps == 3:
        monkeypatch.setattr(of_plans, "frontier", None)
    for x in inputs * (2 if steps == 3 else 1):
        assert resumed.peak(networks[1], x) == straight.peak(networks[0], x) <= 600_000
        assert all(
            torch.equal(a.grad, b.grad) for a, b in zip(*(network.parameters() for network in networks), strict=True)
        )


@pytest.mark.parametrize(
    ("other", "what"), [(lambda: Layers(5), "other calls"), (lambda: Layers(skips=True), "other tensors")]
)
def test_plans_of_another_network_are_made_anew_with_a_word(other, what):
    torch.manual_seed(0)
    x, within = torch.randn(500, 32), recompute_activations(Layers(), budget=0.6)
    gradients(within, x)
    plain = other()
    changed = recompute_activations(copy.deepcopy(plain), budget=0.6)
    load_budget_state(changed, stored(budget_state(within)))
    with pytest.warns(UserWarning, match=f"the network, which makes {what} now: the network is planned anew"):
        found = gradients(changed, x)
    assert all(map(torch.equal, found, gradients(plain, x)))
    fresh = recompute_activations(copy.deepcopy(plain), budget=0.6)
    gradients(fresh, x)
    (mine,), (wanted,) = (budget_state(network)["shapes"] for network in (changed, fresh))
    assert mine["plans"][0]["calls"] == wanted["plans"][0]["calls"]
    with warnings.catch_warnings(action="error"):
        gradients(changed, x)


def test_what_is_no_plan_for_this_is_said(tmp_path, monkeypatch):
    network = recompute_activations(Layers(), budget=0.6)
    gradients(network, torch.randn(500, 32))
    state = budget_state(network)
    for part, value, why in (
        ("torch", "2.0", "were made with torch 2.0"),
        ("budget", 0.5, "are for the budget 0.5, and this network's is 0.6"),
        ("shapes", [{}], "cannot be read here"),
    ):
        with pytest.warns(UserWarning, match=why):
            load_budget_state(network, state | {part: value})
    assert budget_state(network) == state
    with pytest.raises(ValueError, match="its format is 'other', expected"):
        load_budget_state(network, state | {"format": "other"})
    with pytest.raises(ValueError, match="without a budget"):
        budget_state(recompute_activations(Layers()))
    torch.save({"weights": 1}, tmp_path / "weights.pt")
    (tmp_path / "text").write_text("6GiB")
    for name, why in (("weights.pt", "holds no plans"), ("text", "is no file of plans")):
        with pytest.raises(ValueError, match=why):
            recompute_activations(Layers(), budget=tmp_path / name)
    with pytest.raises(ValueError, match="an existing file of plans"):
        recompute_activations(Layers(), budget="plan.pt")
    with pytest.raises(FileNotFoundError):
        recompute_activations(Layers(), budget=tmp_path / "plan.pt")
