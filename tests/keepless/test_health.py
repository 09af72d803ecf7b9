"""Layer health is exact, names the right layer and does not affect training."""

import math

import pytest
import torch
from torch import Tensor, nn

from keepless import ABN, InPlaceABN, layer_health

BFLOAT16 = torch.autocast("cpu", torch.bfloat16)  # decorates a forward function


def network() -> nn.Sequential:
    torch.manual_seed(0)
    parts = nn.Conv2d(3, 4, 3), InPlaceABN(4), nn.Conv2d(4, 4, 3), nn.Dropout2d(0.5), InPlaceABN(4), nn.Conv2d(4, 2, 1)
    made = nn.Sequential(*parts)
    for layer in (made[1], made[4]):
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    nn.init.normal_(made[1].weight, std=0.01)  # the layer that rounding hurts most
    return made


def images() -> Tensor:
    return torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def independent_error(layer: InPlaceABN, x: Tensor) -> float:
    """The error from the layer's own training output, by the definition of x_hat and the inverse of leaky ReLU."""
    z = layer.train()(x).float()
    y = torch.where(z >= 0, z, z * 100)
    gamma, beta = (vector.view(1, -1, 1, 1) for vector in (layer.weight, layer.bias))
    x = x.double()
    var, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
    return ((y - beta) / gamma - (x - mean) / (var + layer.eps).sqrt()).abs().max().item()


@pytest.mark.parametrize(
    "decorate, least, most", [(lambda net: net, 1e-6, 1e-3), (BFLOAT16, 0.1, 100.0)], ids=["float32", "bfloat16"]
)
def test_the_error_is_measured_on_what_the_layers_return_in_training(decorate, least, most):
    net, seen = network(), {}
    for i in (1, 4):
        net[i].register_forward_pre_hook(lambda layer, args: seen.setdefault(layer, args[0]))
    name, error = layer_health(net, images(), decorate(net))["largest_reconstruction_error"]
    errors = [independent_error(net[i], seen[net[i]]) for i in (1, 4)]
    assert name == "1" and errors[0] > 3 * errors[1] and least < errors[0] < most
    assert error == pytest.approx(errors[0], rel=0.05)


def test_a_scale_that_loses_its_input_is_found_and_named():
    """beta = 1 needs 24 bits; gamma = 1e-6 leaves four of them for x_hat."""
    net = network()
    nn.init.ones_(net[1].weight)
    nn.init.ones_(net[4].bias)
    net[4].gamma_floor = 1e-7
    with torch.no_grad():
        net[4].weight[2] = -1e-6
    health = layer_health(net, images())
    assert health["smallest_gamma"] == ("4", pytest.approx(1e-6))
    name, error = health["largest_reconstruction_error"]
    assert name == "4" and 0.01 < error < 0.2  # half an ulp of 1, or of 1 - 1e-6, over 1e-6


def test_gamma_is_the_scale_in_training():
    """Standard layers have nothing else, so a network of them is not called."""
    net = nn.Sequential(InPlaceABN(2, gamma_floor=0.25), ABN(2), InPlaceABN(2, learn_scale=False))
    with torch.no_grad():
        net[0].weight.copy_(torch.tensor([-1e-9, 3.0]))  # below the floor
        net[1].weight.copy_(torch.tensor([-0.5, 3.0]))
    x = torch.randn(2, 2, 4, 4)
    assert layer_health(net, x)["smallest_gamma"] == ("0", 0.25)
    with torch.no_grad():
        net[1].weight[1] = 0.125  # has no floor
    assert layer_health(net, x)["smallest_gamma"] == ("1", 0.125)
    net[1].forward = None
    assert layer_health(net[1:2], x) == {"smallest_gamma": ("1", 0.125)}
    assert set(layer_health(net[2:], x)) == {"largest_reconstruction_error"}


def test_nan_is_more_extreme_than_any_number():
    net = network()
    with torch.no_grad():
        net[4].weight[0] = math.nan
    for name, value in layer_health(net, images()).values():
        assert name == "4" and math.isnan(value)


def test_nothing_that_a_training_depends_on_changes():
    net = network()
    net(images()).sum().backward()
    net[1].eval()  # unlike the network
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    gradients = [p.grad.clone() for p in net.parameters()]
    modes = [module.training for module in net.modules()]
    random = torch.get_rng_state()
    layer_health(net, images(), BFLOAT16(net))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(torch.equal(p.grad, gradient) for p, gradient in zip(net.parameters(), gradients, strict=True))
    assert [module.training for module in net.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(module._forward_pre_hooks for module in net.modules())
