"""Networks of many kinds are like the plain ones to the bit, in the bytes that are planned, and nothing is said."""

import copy
import random
from itertools import product

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models import resnet

from keepless import ABN, InPlaceABN, plan, recompute_activations
from keepless.norms.bn_act import norm_and_activation
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.step.dry import counted_step, rehearsed_step
from keepless.recompute.step.search import Choice
from keepless.recompute.step.simulation import Simulation, plain_peak
from keepless.recompute.step.step import Kind
from tests.keepless.recompute.ahead import peak_of, step
from tests.keepless.recompute.networks import COUNTED, IMAGES, OURS, residuals


def layers_of_ours() -> list:
    cases = []
    for (name, (cls, options)), training, backend in product(OURS.items(), (True, False), ("eager", "compiled")):
        make = lambda c=cls, t=training, b=backend, o=options: residuals(c, 2, backend=b, **o).train(t)  # noqa: E731
        is_known = cls is not ABN and backend == "eager"  # others take more bytes than are known
        marks = [pytest.mark.slow] if backend == "compiled" else []
        cases.append(pytest.param(make, IMAGES, is_known, marks=marks, id=f"{name} {training} {backend}"))
    return cases


@pytest.mark.table
@pytest.mark.parametrize(
    ("make", "shape", "is_known"),
    [*(pytest.param(*row, True, id=name) for name, row in COUNTED.items()), *layers_of_ours()],
)
def test_any_plan_is_exact_and_takes_the_bytes_that_are_simulated(make, shape, is_known):
    """If nothing is computed again, the peak is the plain one. Running statistics move once.

    Of values that may be computed again, the first plan keeps none, others keep 40 %.
    """
    torch.manual_seed(0)
    network = make()
    x = torch.randn(shape).to(next(network.parameters()).dtype)
    step(network, x)
    counted = counted_step(network, (x,), {})
    if is_known:
        measured = peak_bytes(lambda: step(network, x), "cpu")
        assert plain_peak(counted) == pytest.approx(measured, abs=256)
        assert plain_peak(rehearsed_step(network, (x,), {})) == pytest.approx(measured, abs=256)
    for seed, part in enumerate((0.0, 0.4, 0.4, 0.4)):
        draws = random.Random(seed)
        kept = [
            value.kind == Kind.KEPT or (value.kind == Kind.FREE and draws.random() < part) for value in counted.values
        ]
        plan, reference = Choice(0, 0.0, tuple(kept)).plan(counted), copy.deepcopy(network)
        assert all(map(torch.equal, step(network, x, plan), step(reference, x)))
        if is_known:
            measured = peak_bytes(lambda: step(network, x, plan), "cpu")  # noqa: B023
            assert Simulation(counted).run(kept).peak == pytest.approx(measured, rel=0.03)


def test_layers_that_overwrite_their_input_are_not_repeated():
    for overwrites in (True, False):
        network = residuals(InPlaceABN, 1, overwrite_input=overwrites)
        counted = counted_step(network, (torch.randn(1, 3, 32, 32),), {})
        assert (norm_and_activation in [function for function, *_ in counted.calls]) is not overwrites


WITHIN = COUNTED | {
    "residual blocks": (lambda: nn.Sequential(*(resnet.BasicBlock(4, 4) for _ in range(3))), (2, 4, 32, 32)),
    # A matrix exponential's memory depends on values.
    "orthogonal": (
        lambda: nn.Sequential(*(parametrizations.orthogonal(nn.Linear(96, 96)) for _ in range(3))),
        (64, 96),
    ),
    "I": (lambda: residuals(InPlaceABN, 6, variant="I"), IMAGES),
    "II": (lambda: residuals(InPlaceABN, 6, variant="II"), IMAGES),
}
SHARES = [("mixed", 0.9), ("mixed", None), ("chain", 0.9), ("chain", None), ("copies", 0.5)]
SHARES += [("over views, then a layer", 0.7), ("orthogonal", 1.01), ("I", 0.5), ("II", 0.5), ("residual blocks", 0.8)]


@pytest.mark.table
@pytest.mark.parametrize("name, share", SHARES)
def test_steps_are_within_their_budget_from_the_first_on_and_silent(name, share):
    """A share of None is a budget near the least, which varies with measured times. The first step is recorded."""
    make, shape = WITHIN[name]
    torch.manual_seed(0)
    plain, x = make(), torch.randn(shape)
    warm, within = copy.deepcopy(plain), copy.deepcopy(plain)
    step(warm, x)
    peak = peak_bytes(lambda: step(warm, x), "cpu")
    if share is None:
        planned = plan(plain, x, budgets=(1.0,))
        budget = planned.least + (planned.plain - planned.least) // 5
    else:
        budget = int(share * peak)
    recompute_activations(within, budget=budget)
    peaks = [peak_of(within, x) for _ in range(4)]
    assert max(peaks) <= 1.03 * budget and max(peaks[1:]) <= peaks[0]
