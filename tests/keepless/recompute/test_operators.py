"""PyTorch's operators with the samples of its own tests."""

from collections import Counter
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from keepless import recompute_activations
from tests.keepless.recompute.agreement import Setup, agree, agrees, keep_by_chance, note_followed, run

STEPS, SAMPLES = 12, 5
DTYPES = torch.float32, torch.float64, torch.complex64  # the first that an operator has


class Operator(nn.Module):
    """Its arguments are computed; what it makes is saved."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, args: Any, kwargs: Any) -> dict[int, Tensor]:
        args, kwargs = tree_map(lambda one: one * 1 if getattr(one, "requires_grad", False) else one, (args, kwargs))
        found = [one for one in tree_leaves(self.function(*args, **kwargs)) if isinstance(one, Tensor)]
        return dict(enumerate((one * 1.5).sin() if one.requires_grad else one for one in found))


class AsItIs(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def is_other_under_a_mode(plain: Operator, samples: list[Any]) -> bool:
    """Whether PyTorch itself gives other bits under a dispatch mode, as a watched step has: masked.prod's gradient."""
    try:
        for sample in samples:
            expected = run(plain, on(sample))
            with AsItIs():
                agrees(expected, run(plain, on(sample)))
    except AssertionError:
        return True
    return False


def on(sample: Any) -> Setup:
    def setup(network: nn.Module) -> tuple[tuple[Any, ...], list[Tensor]]:
        given = tree_map(
            lambda one: one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, Tensor) else one,
            ((sample.input, *sample.args), sample.kwargs),
        )
        return given, [one for one in tree_leaves(given) if getattr(one, "requires_grad", False)]

    return setup


@pytest.mark.slow("hundreds of operators")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("budget", [None, 0.5, "by chance"])
@pytest.mark.parametrize("variant", ["op", "method_variant", "inplace_variant"])
def test_operators_whose_samples_change_are_like_the_plain_ones(variant, budget, monkeypatch):
    """Functions, methods and in-place methods: the first step's sample comes three times, then others at random."""
    pytest.importorskip("expecttest", reason="PyTorch's tests need it")
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)  # other tests set them
    from torch.testing._internal.common_methods_invocations import op_db

    followed, steps, differ = note_followed(monkeypatch), Counter(), []
    for operator in op_db:
        function, draws = getattr(operator, variant), Random(operator.full_name)
        dtype = next((one for one in DTYPES if one in operator.dtypes), None)
        if function is None or dtype is None or not operator.supports_autograd:
            continue
        keep_by_chance(monkeypatch, draws, *[()] * (budget != "by chance"))
        torch.manual_seed(0)
        samples = list(operator.sample_inputs("cpu", dtype, requires_grad=True))
        samples = draws.sample(samples, min(SAMPLES, len(samples)))
        plain, ours = Operator(function), recompute_activations(Operator(function), budget=budget and 0.5)
        try:
            for sample in [*samples[:1] * 3, *draws.choices(samples, k=STEPS - 3)]:
                steps[agree(plain, ours, on(sample))] += 1
        except AssertionError as error:
            if budget is None or not is_other_under_a_mode(plain, samples):
                differ.append(f"{operator.full_name}: {error}")
    print(variant, budget, steps, Counter(followed), differ)
    assert not differ and steps[True] > 5 * steps[False]
