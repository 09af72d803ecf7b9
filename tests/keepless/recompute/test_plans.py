"""Budgets and plans: what users read about them."""

import math
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from keepless import before_capture, fit, plan, recompute_activations, report
from keepless.recompute.signatures import plans as plans_module
from keepless.recompute.signatures.plans import parsed_budget
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.step.dry import counted_step, rehearsed_step
from keepless.recompute.step.search import frontier
from tests.keepless.recompute.ahead import After, step
from tests.keepless.recompute.networks import Mixed, blocks


@dataclass
class Batch:
    images: Tensor
    classes: int


class Batched(Mixed):
    def forward(self, batch: Batch) -> Batch:
        return Batch(super().forward(batch.images), batch.classes)


def test_a_plan_says_what_budgets_cost():
    costs = plan(Batched(), Batch(torch.randn(4, 3, 16, 16), 5), budgets=(0.9, 0.8, 0.75, "1GiB"))
    assert costs.plain > costs.rows[0].peak >= costs.rows[1].peak >= costs.rows[2].peak >= costs.least
    assert all(row.peak <= row.budget + costs.gradients for row in costs.rows)
    assert costs.rows[0].seconds <= costs.rows[1].seconds <= costs.rows[2].seconds
    assert costs.rows[3].operations == 0 and costs.rows[3].kept > costs.rows[2].kept  # everything fits
    assert str(costs).count("\n") == 5 and "of plain" in str(costs)
    # On fake tensors: the same bytes, but for what operators take while they run.
    with FakeTensorMode():
        fake = plan(Batched(), Batch(torch.empty(4, 3, 16, 16), 5), budgets=(0.9,))
    assert fake.plain == pytest.approx(costs.plain, rel=0.1)


@pytest.mark.filterwarnings("error:no plan keeps")
def test_the_least_of_a_plan_is_a_budget_that_no_warning_follows():
    torch.manual_seed(0)
    network = blocks(6, nn.BatchNorm2d(8), nn.ReLU(), last=(nn.Flatten(0), nn.Softmax(0), nn.Linear(8192, 1)))
    x = torch.randn(4, 3, 16, 16)
    recompute_activations(network, budget=plan(network, x).least)
    for _ in range(4):
        network.zero_grad()
        network(x).backward()


def test_a_plan_of_a_network_that_cannot_take_less_has_one_row():
    costs = plan(nn.Linear(3, 3), torch.randn(2, 3))
    assert [row.peak for row in costs.rows] == [costs.plain]
    assert repr(costs) == str(costs)  # in a notebook


@pytest.mark.filterwarnings("error")
def test_outputs_that_cannot_be_seen_are_said():
    network, x = After(blocks(4), lambda y: SimpleNamespace(logits=y)), torch.randn(2, 3, 8, 8)
    recompute_activations(network, budget=0.5)
    with pytest.warns(UserWarning, match="no plan can be made.* in lists, tuples, dictionaries or dataclasses"):
        for _ in range(2):
            network(x).logits.sum().backward()
    frozen = recompute_activations(blocks(4), budget=0.5).requires_grad_(False)
    frozen(x), frozen(x), network(x)  # it is said once


@pytest.mark.parametrize(
    "module, shape",
    [
        (nn.Conv2d(4, 8, 3, padding=1), (2, 4, 6, 6)),
        (nn.ConvTranspose2d(4, 8, 2, stride=2), (2, 4, 6, 6)),
        (After(nn.Identity(), lambda x: torch.einsum("nij,njk->nik", x, x)), (2, 5, 5)),
        (After(nn.Identity(), lambda x: torch.einsum("...ij,...kj->...ik", [x, x.clone()])), (2, 3, 4, 5)),
        (After(nn.Identity(), lambda x: torch.einsum("ij,jk", x, x)), (5, 5)),
    ],
)
def test_operations_are_those_that_pytorch_counts(module, shape):
    x = torch.randn(shape, requires_grad=True)
    with FlopCounterMode(display=False) as reference:
        module(x)
    assert counted_step(module, (x,), {}).operations == 3 * reference.get_total_flops()  # and two gradients


WRONG = {
    "6": r"budget='6': expected at least 1000 bytes, such as '6GiB' \(KiB, MiB",
    0: "budget=0: expected at least 1000 bytes, such as",
    2: "budget=2: expected at least 1000 bytes, .* or a share of the baseline's peak up to 1.0, such as",
    1.5: "budget=1.5",
    math.inf: "budget=inf",
    True: "budget=True",
    (6,): r"budget=\(6,\)",
    "120%": r"budget='120%': .*, such as 0.3 or '30%'",
}


def test_budgets_may_be_floats_texts_and_numbers_of_numpy():
    numbers = {0.9 * 2**20: 943718, np.int64(4000): 4000, np.float32(0.5): 0.5}
    for budget, expected in {**numbers, "50%": 0.5, "900 KB": 900_000}.items():
        assert repr(parsed_budget(budget)) == repr(expected)


@pytest.mark.filterwarnings("error")
def test_wrong_budgets_name_the_value_and_what_can_be_met():
    network, x = blocks(4), torch.randn(2, 3, 8, 8)
    for wrong, words in WRONG.items():
        with pytest.raises(ValueError, match=words):
            recompute_activations(network, budget=wrong)
    with pytest.raises(TypeError, match="positional argument"):
        recompute_activations(network, "6GiB")
    with pytest.warns(UserWarning, match="plan got a network in eval mode, .*: call network.train.. first"):
        plan(blocks(4).eval(), x)
    with pytest.raises(ValueError, match="without a budget"):
        recompute_activations(network, example=x)
    with pytest.raises(ValueError, match=r"has no tensor: expected one, such as torch.zeros\(2, 3, 8, 8\)"):
        plan(network, (2, 3, 8, 8))
    with pytest.raises(ValueError, match="checkpointed_only=True"):
        recompute_activations(network, budget=0.5, checkpointed_only=True)
    with pytest.raises(ValueError, match="expected one of at least .*, the lowest that a plan keeps"):
        plan(network, x, budgets=["1kB"])
    with pytest.raises(ValueError, match="budget=2.0"):
        plan(network, x, budgets=[2.0])
    with pytest.raises(ValueError, match="budgets=.'1%'.: expected one of"):  # one budget needs no list
        plan(network, x, "1%")
    for run, name in ((plan, "budget"), (fit, "memory")):
        with pytest.raises(ValueError, match=rf"^{name}=tensor.*: expected "):
            run(network, x, x)
    with pytest.raises(ValueError, match="no output of the network needs a gradient"):
        plan(network.requires_grad_(False), x)
    prepared = recompute_activations(network.requires_grad_(), budget="1kB")
    with pytest.warns(
        UserWarning, match="no plan keeps this step within 1.0 KiB: the lowest peak is .*; it is at "
    ) as caught:
        for _ in range(2):
            prepared(x).sum().backward()
    assert caught[0].filename == __file__
    for number in range(6):  # it is said once, also about other passes
        step(prepared.train(number % 3 != 1), x)


@pytest.mark.filterwarnings("error")
def test_a_budget_that_changes_nothing_is_said_after_the_forward_pass(monkeypatch):
    """Also one in bytes, but not if the step is within it."""
    network, x = nn.Sequential(nn.GRU(8, 8)), torch.randn(3, 2, 8)
    monkeypatch.setattr(plans_module, "frontier", lambda *_: pytest.fail("there is nothing to search"))
    for budget in (0.9, "1kB"):
        with pytest.warns(
            UserWarning, match=r"changes nothing, .* kept at gru in 0 \(GRU\): train it without a budget"
        ):
            recompute_activations(network, budget=budget, example=x)(x)
    monkeypatch.undo()
    recompute_activations(network, budget="1GiB", example=x)(x)


@pytest.mark.filterwarnings("ignore:this step is within")
def test_second_derivatives_in_forward_are_said_not_to_be_planned():
    def derived(x: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
        return slope + x

    network = After(nn.Linear(16, 16), derived)
    with pytest.warns(UserWarning, match=r"not planned, .* create_graph=True \(second derivatives\): remove that"):
        recompute_activations(network, budget=0.95, example=(x := torch.randn(64, 16)))(x)


def test_complex_outputs_are_planned():
    costs = plan(After(nn.Linear(64, 64), lambda y: torch.fft.fft(y.sin().sin())), torch.randn(64, 64))
    assert costs.least < costs.plain


def test_a_budget_that_held_outputs_exceed_says_so():
    network, x = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 256)), torch.randn(64, 64)
    least_with_outputs = frontier(rehearsed_step(network, (x,), {}))[-1].peak
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter)  # otherwise their room is free until they come
    with pytest.warns(UserWarning, match="only if the program drops the network's outputs before the backward pass"):
        recompute_activations(network, budget=least_with_outputs - 1024, example=x)(x)


def test_the_lowest_peak_has_outputs_that_a_loss_saves():
    network, x = nn.Sequential(*[nn.Linear(64, 64), nn.SiLU()] * 2, nn.Linear(64, 64)), torch.randn(256, 64)
    least = frontier(rehearsed_step(network, (x,), {}).without_outputs())[-1].peak
    recompute_activations(network, budget=least)

    def dropping() -> None:
        network.zero_grad(set_to_none=False)
        network(x).square().mean().backward()

    for _ in range(3):
        dropping()
    assert peak_bytes(dropping, "cpu") <= least


@pytest.mark.filterwarnings("ignore:no plan keeps")
def test_plans_before_a_capture_keep_masks_as_captured_steps_do(monkeypatch):
    """A CUDA graph's backward pass would draw others. An eager step makes the plan, and the capture follows it."""
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.Dropout(0.5))]
    network, x = nn.Sequential(*layers), torch.randn(512, 64)
    peaks = []
    for context in (nullcontext, before_capture):
        with context():
            costs = plan(network, x)
        peaks.append(costs.least)
    mask = x.numel()
    assert peaks[1] - peaks[0] >= 3 * mask

    prepared = recompute_activations(network, budget=peaks[1])
    with before_capture():
        for _ in range(2):
            prepared(x).sum().backward()
    kept = report(prepared).bytes
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    prepared(x).sum().backward()
    assert report(prepared).bytes == kept
