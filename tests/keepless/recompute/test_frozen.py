"""Frozen layers keep signs or shapes instead of values, with gradients equal to the bit."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations, report
from keepless.saved import kept_bytes

C = 4  # channels


def chain(norm: bool, inplace: bool = False, slope: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(6):
        activation = nn.LeakyReLU(slope, inplace) if slope else nn.ReLU(inplace)
        convolution = nn.ConvTranspose2d if number == 2 else nn.Conv2d
        layers += [convolution(C, C, 3, padding=1), *([nn.BatchNorm2d(C)] if norm else []), activation]
    return nn.Sequential(*layers)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("hooks", [nullcontext, save_on_cpu])
@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("norm, inplace", [(False, False), (False, True), (True, False), (True, True)])
def test_frozen_layers_keep_one_bit_per_value(norm, inplace, slope, hooks, layout):
    """A convolution's gradient of its input needs none of its values; ReLU needs signs. The first layer learns.

    Checkpoints and second derivatives, which a gradient penalty needs, repeat what was saved.
    """
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, C, 1), chain(norm, inplace, slope).eval().requires_grad_(False)).to(
        memory_format=layout
    )
    prepared = recompute_activations(copy.deepcopy(plain))
    x = torch.randn(2, 3, 15, 15).contiguous(memory_format=layout)

    def loss_of(network: nn.Module) -> Tensor:
        return network(x).sum()

    results = []
    for network in (prepared, plain):
        with hooks():
            loss = loss_of(network)
        trained, y = list(network[0].parameters()), x.clone().requires_grad_()
        first = torch.autograd.grad(loss, trained)
        again = torch.autograd.grad(checkpoint(network, y, use_reentrant=False).square().sum(), [y, *trained])
        (penalised,) = torch.autograd.grad(network(y).square().sum(), y, create_graph=True)
        results.append([*first, *again, *torch.autograd.grad(penalised.square().sum(), [y, trained[0]])])
    assert all(map(torch.equal, *results))
    values = 2 * C * 15 * 15
    kept = [kept_bytes(n, lambda n=n: loss_of(n), [x]) for n in (prepared, plain)]
    statistics = 6 * 2 * C * 4 if norm else 0  # running statistics
    theirs = 6 + 6 * norm + (6 if slope and not inplace else 1)  # inputs of layers; inputs of activations, or a result
    assert kept == [6 * values // 8 + statistics, theirs * values * 4 + statistics]
    assert report(prepared).bytes == 6 * values // 8 + x.nbytes


@pytest.mark.parametrize("activations", [[nn.ReLU()], [nn.LeakyReLU()], [nn.ReLU(), nn.LeakyReLU()]], ids=str)
def test_the_gradient_where_a_value_is_not_a_number(activations):
    """ReLU passes it on, LeakyReLU scales it. Signs tell one of them, so a value that both read is kept."""
    plain = nn.Sequential(nn.Conv2d(3, C, 1), *activations, nn.Conv2d(C, C, 1).requires_grad_(False))
    prepared, x = recompute_activations(copy.deepcopy(plain)), torch.randn(2, 3, 8, 8)
    x[0, :, 0, 0] = torch.nan
    found = [torch.autograd.grad(network(x).sum(), network[0].bias)[0] for network in (prepared, plain)]
    assert found[0].isfinite().all() and torch.equal(*found)
