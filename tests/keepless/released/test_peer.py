"""The released package `inplace_abn` and what stands in for it compute the same.

`make peer` builds the package and runs the tests marked `peer`. Without it, its results are in released_package.json.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from engine import assemble
from keepless import from_released, inplace_abn, inplace_abn_sync, layer_health
from keepless.released import stand_in
from tests.bodies import trained
from tests.runs import run_config, without_counts

RECORD = Path(__file__).parent / "released_package.json"
CALLS = [(name, training) for name in ("leaky_relu", "elu", "identity") for training in (True, False)]
WORLD_SIZE = 2
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


def assert_close(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-9), name


@pytest.mark.parametrize("activation, training", CALLS)
def test_functions_compute_what_the_released_package_has_computed(activation, training):
    """A weight of 0 has a gradient too, which lets it grow."""
    assert_close(results(inplace_abn, activation, training), json.loads(RECORD.read_text())[f"{activation} {training}"])


@pytest.mark.peer
def test_the_record_is_what_the_released_package_computes(released, tmp_path):
    """To write it again, copy the file that this test leaves."""
    found = {f"{a} {training}": results(released.functional.inplace_abn, a, training) for a, training in CALLS}
    (tmp_path / RECORD.name).write_text(json.dumps(found, indent=1) + "\n")
    recorded = json.loads(RECORD.read_text())
    assert found.keys() == recorded.keys()
    for call, values in recorded.items():
        assert_close(found[call], values)


def step(layer: nn.Module, x: Tensor) -> list[Tensor]:
    """Output and gradients of two training passes, statistics, and the output of an evaluation."""
    layer.train()
    values: list[Tensor] = []
    for part in (x.clone().requires_grad_(), (x + 1).requires_grad_()):
        z = layer(part * 1)
        values += [z.detach(), *torch.autograd.grad(z.sin().sum(), [part, *layer.parameters()])]
    layer.eval()
    return [*values, *layer.buffers(), layer(x * 1).detach()]


@pytest.mark.peer
@pytest.mark.parametrize("name", ["ABN", "InPlaceABN"])
@pytest.mark.parametrize(
    "options", [{}, {"momentum": None, "eps": 2**-20}, {"affine": False}, {"track_running_stats": False}]
)
def test_layers_compute_the_same_with_the_same_state_dict(released, name, options):
    options = {"eps": EPS, "activation": "elu", "activation_param": 0.75} | options
    theirs, ours = (getattr(package, name)(3, **options).double() for package in (released, stand_in))
    for parameter in theirs.parameters():
        nn.init.uniform_(parameter, -1, 1)
    ours.load_state_dict(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, 6, dtype=torch.float64)
    for found, expected in zip(step(ours, x), step(theirs, x), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-8)


def assert_same_networks(theirs: nn.Module, ours: nn.Module) -> None:
    """Scales are converted; the gradient of a negative one has the other sign."""
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(-1.5, 1.5)
    theirs, ours = theirs.double().train(), ours.double().train()
    ours.load_state_dict(from_released(without_counts(theirs.state_dict()), EPS), strict=False)
    torch.manual_seed(1)
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    outputs = theirs(images), ours(images)
    torch.testing.assert_close(*outputs, rtol=1e-7, atol=1e-7)
    for output in outputs:
        output.sin().sum().backward()
    for (name, found), expected in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        is_scale = name.endswith("weight") and expected.dim() == 1
        wanted = expected.grad * expected.sign() if is_scale else expected.grad
        torch.testing.assert_close(found.grad, wanted, rtol=1e-6, atol=1e-6, msg=name)
    torch.testing.assert_close(theirs.eval()(images), ours.eval()(images), rtol=1e-7, atol=1e-7)


@pytest.mark.peer
def test_the_norm_choice_computes_the_same(released):
    package, ours = (
        assemble.network_of(run_config(f"norm={norm}", f"norm.eps={EPS}", f"norm.activation_param={SLOPE}"), classes=3)
        for norm in ("package", "inplace")
    )
    assert_same_networks(package, ours)


def whole_minibatch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, dz = torch.randn(2, 6, 3, 4, 5, generator=generator, dtype=torch.float64).unbind()
    return x, dz


def _synchronised(rank: int, function: str) -> list[Tensor]:
    """z, dx, dweight and dbias of a rank's third or two thirds of the minibatch, then statistics."""
    x, dz = (each[:2] if rank == 0 else each[2:] for each in whole_minibatch())
    x, weight, bias, mean, var = x.requires_grad_(), *vectors()
    if function == "inplace_abn_sync":
        z = inplace_abn_sync(x, weight, bias, mean, var, group=dist.group.WORLD)
    else:
        layer = stand_in.InPlaceABNSync(3).double()
        layer.weight, layer.bias, layer.running_mean, layer.running_var = weight, bias, mean, var
        network = nn.Sequential(layer)
        stand_in.set_active_group(network, stand_in.active_group(True))
        z = network(x)
        alone = stand_in.active_group(rank == 1)  # a group of one process, which has no statistics to share
        if rank == 1:
            stand_in.set_active_group(network, alone)
            torch.testing.assert_close(network(x), inplace_abn(x, weight, bias, None, None))
    return [z.detach(), *torch.autograd.grad(z, (x, weight, bias), dz), mean, var]


def vectors() -> list[Tensor]:
    weight, bias = (nn.Parameter(torch.tensor(v, dtype=torch.float64)) for v in ([1.5, -0.5, 1.0], [0.1, 0.2, 0.3]))
    return [weight, bias, torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)]


def test_the_synchronised_function_computes_what_one_process_does(ranks):
    """Ranks have minibatches of different sizes. Gradients of vectors are each rank's share, as in the package."""
    x, dz = whole_minibatch()
    x, weight, bias, mean, var = x.requires_grad_(), *vectors()
    z = inplace_abn(x, weight, bias, mean, var)
    expected = [z.detach(), *torch.autograd.grad(z, (x, weight, bias), dz), mean, var]
    first, second = ranks.run(_synchronised, "inplace_abn_sync")
    joined = [torch.cat(pair) for pair in zip(first[:2], second[:2], strict=True)]
    joined += [a + b for a, b in zip(first[2:4], second[2:4], strict=True)]
    for found, wanted in zip([*joined, *first[4:]], expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    assert all(map(torch.equal, first[4:], second[4:]))


def test_groups_of_the_stand_in(ranks):
    for answer in ranks.run(_synchronised, "InPlaceABNSync"):
        assert isinstance(answer, list), answer


class Doubled(stand_in.ABN):
    """A subclass of somebody's program."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def test_a_subclass_overrides_the_stand_in():
    torch.manual_seed(0)
    network = trained(nn.Sequential(nn.Conv2d(3, 4, 1), Doubled(4), stand_in.InPlaceABN(4)))
    x = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    y = network[:2](x)
    torch.testing.assert_close(y, 2 * stand_in.ABN.forward(network[1], network[0](x)))
    assert all(isinstance(layer, stand_in.ABN) for layer in (network[1], network[2], stand_in.InPlaceABNSync(4)))
    with torch.no_grad():
        network[2].weight[1] = -1e-7
    assert layer_health(network, x)["smallest_gamma"] == ("2", pytest.approx(1e-7 + network[2].eps))
    copied = copy.deepcopy(network)
    copied.load_state_dict(network.state_dict())
    assert torch.equal(copied(x), network(x))
