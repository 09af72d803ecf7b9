"""The layers compute what the released package `inplace_abn` computes, once its weights are converted.

`make peer` builds the package and runs the tests marked `peer`. Without it, its results are in released_package.json.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine import assemble
from keepless import InPlaceABN, from_released
from tests.runs import run_config, without_counts

RECORD = Path(__file__).parent / "released_package.json"
CALLS = [(name, training) for name in ("leaky_relu", "elu", "identity") for training in (True, False)]
EPS, SLOPE = 2**-10, 2**-7  # the package rounds such numbers to float32
NAMES = ("z", "dx", "dweight", "dbias", "running_mean", "running_var")


@pytest.fixture(scope="module")
def released():
    return pytest.importorskip("inplace_abn", reason="make peer builds the released package")


def results(function: Callable, activation: str, training: bool) -> dict[str, list[float]]:
    """Return a function's results and gradients in float64, with one negative weight and one that is 0."""
    generator = torch.Generator().manual_seed(0)
    x, dz = torch.randn(2, 4, 3, 3, generator=generator, dtype=torch.float64).unbind()
    x, weight = x.requires_grad_(), torch.tensor([1.5, -0.7, 0.0], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64, requires_grad=True)
    running = torch.tensor([0.2, -0.1, 0.0], dtype=torch.float64), torch.tensor([1.5, 0.5, 1.0], dtype=torch.float64)
    z = function(x * 1, weight, bias, *running, training, 0.1, EPS, activation, 0.25)
    gradients = torch.autograd.grad(z, (x, weight, bias), dz)
    return {name: t.flatten().tolist() for name, t in zip(NAMES, (z, *gradients, *running), strict=True)}


def by_a_layer(x, weight, bias, running_mean, running_var, training, momentum, eps, activation, slope) -> Tensor:
    """The released function's call, by a layer with converted weights. Its weight's gradient at 0 is 1, as released."""
    layer = InPlaceABN(3, eps, momentum, activation=activation, activation_param=slope).double().train(training)
    released = {"weight": weight, "bias": bias, "running_mean": running_mean, "running_var": running_var}
    converted = from_released(released, eps)
    sign = torch.ones_like(weight).copysign(weight.detach())
    converted["weight"] = converted["weight"] + sign * (weight - weight.detach())
    return torch.func.functional_call(layer, converted, (x,))


def assert_close(computed: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert computed.keys() == expected.keys()
    for name, values in expected.items():
        assert computed[name] == pytest.approx(values, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("activation, training", CALLS)
def test_layers_compute_what_the_released_package_has_computed(activation, training):
    expected = json.loads(RECORD.read_text())[f"{activation} {training}"]
    assert_close(results(by_a_layer, activation, training), expected)


@pytest.mark.peer
def test_the_record_is_what_the_released_package_computes(released, tmp_path):
    """To write it again, copy the file that this test leaves."""
    computed = {f"{a} {training}": results(released.functional.inplace_abn, a, training) for a, training in CALLS}
    (tmp_path / RECORD.name).write_text(json.dumps(computed, indent=1) + "\n")
    recorded = json.loads(RECORD.read_text())
    assert computed.keys() == recorded.keys()
    for call, values in recorded.items():
        assert_close(computed[call], values)


@pytest.mark.peer
def test_the_norm_choice_computes_the_same(released):
    """Scales are converted; the gradient of a negative one has the other sign."""
    released_network, ours = (
        assemble.network_of(run_config(f"norm={norm}", f"norm.eps={EPS}", f"norm.activation_param={SLOPE}"), classes=3)
        for norm in ("package", "inplace")
    )
    with torch.no_grad():
        for parameter in released_network.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-1.5, 1.5)
    released_network, ours = released_network.double().train(), ours.double().train()
    ours.load_state_dict(from_released(without_counts(released_network.state_dict()), EPS), strict=False)
    torch.manual_seed(1)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    outputs = released_network(images), ours(images)
    torch.testing.assert_close(*outputs, rtol=1e-7, atol=1e-7)
    for output in outputs:
        output.sin().sum().backward()
    for (name, parameter), expected in zip(ours.named_parameters(), released_network.parameters(), strict=True):
        is_scale = name.endswith("weight") and expected.dim() == 1
        wanted = expected.grad * expected.sign() if is_scale else expected.grad
        torch.testing.assert_close(parameter.grad, wanted, rtol=1e-6, atol=1e-6, msg=name)
    torch.testing.assert_close(released_network.eval()(images), ours.eval()(images), rtol=1e-7, atol=1e-7)
