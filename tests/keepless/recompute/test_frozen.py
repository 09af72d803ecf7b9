"""Frozen layers keep signs or shapes instead of values, with gradients equal to the bit."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations, report
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import kept_bytes
from tests.keepless.recompute.ahead import assert_like, pair

C = 4  # channels


def chain(norm: bool, inplace: bool = False, slope: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(6):
        activation = nn.LeakyReLU(slope, inplace) if slope else nn.ReLU(inplace)
        convolution = nn.ConvTranspose2d if number == 2 else nn.Conv2d
        layers += [convolution(C, C, 3, padding=1), *([nn.BatchNorm2d(C)] if norm else []), activation]
    return nn.Sequential(*layers)


@pytest.mark.table
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("hooks", [nullcontext, save_on_cpu])
@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("norm, inplace", [(False, False), (False, True), (True, False), (True, True)])
def test_frozen_layers_keep_one_bit_per_value(norm, inplace, slope, hooks, layout):
    """A convolution's gradient of its input needs none of its values; ReLU needs signs. The first layer learns.

    Checkpoints and second derivatives, which a gradient penalty needs, repeat what was saved.
    """
    torch.manual_seed(0)
    frozen = chain(norm, inplace, slope).eval().requires_grad_(False)
    plain, prepared = pair(nn.Sequential(nn.Conv2d(3, C, 1), frozen).to(memory_format=layout))
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
    # Inputs of layers; inputs of activations, or a result.
    plain_values = 6 + 6 * norm + (6 if slope and not inplace else 1)
    assert kept == [6 * values // 8 + statistics, plain_values * values * 4 + statistics]
    assert report(prepared).bytes == 6 * values // 8 + x.nbytes


@pytest.mark.parametrize("activations", [[nn.ReLU()], [nn.LeakyReLU()], [nn.ReLU(), nn.LeakyReLU()]], ids=str)
def test_the_gradient_where_a_value_is_not_a_number(activations):
    """ReLU passes it on, LeakyReLU scales it. Signs tell one of them, so a value that both read is kept."""
    plain, prepared = pair(nn.Sequential(nn.Conv2d(3, C, 1), *activations, nn.Conv2d(C, C, 1).requires_grad_(False)))
    x = torch.randn(2, 3, 8, 8)
    x[0, :, 0, 0] = torch.nan
    bias_gradients = [torch.autograd.grad(network(x).sum(), network[0].bias)[0] for network in (prepared, plain)]
    assert bias_gradients[0].isfinite().all() and torch.equal(*bias_gradients)


def tuned(frozen: int, trained: int) -> nn.Sequential:
    """Frozen layers before trained ones."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.SiLU()) for _ in range(frozen + trained)]
    return nn.Sequential(nn.Sequential(*layers[:frozen]).requires_grad_(False), *layers[frozen:])


def test_results_of_frozen_layers_are_freed_in_the_first_step_too():
    """Before the first trained layer, nothing but the program holds them."""
    network, x = tuned(20, 6), torch.randn(512, 64)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    plain = peak_bytes(lambda: network(x).square().mean().backward(), "cpu")
    recompute_activations(network, budget=plain // 2, example=x)
    for _ in range(3):
        assert peak_bytes(lambda: network(x).square().mean().backward(), "cpu") <= plain // 2


class Adapted(nn.Module):
    """A frozen layer and a small trained one side by side, as in LoRA. The first ones have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.main = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)).requires_grad_(False)
        self.down, self.up = (nn.ModuleList(nn.Linear(*sizes) for _ in range(4)) for sizes in ((64, 2), (2, 64)))
        self.changes, self.mask = None, nn.Parameter(torch.ones(256, 64))

    def forward(self, x: Tensor) -> Tensor:
        x = x.sigmoid()
        mask = torch.ones_like(self.mask)
        for main, down, up in zip(self.main, self.down, self.up, strict=True):
            y = main(x)
            if self.changes is not None and not y.requires_grad:
                self.changes(y)
                self.changes(mask)
            x = F.gelu(y + up(down(x))) * mask
        return x


def _through_an_array(y: Tensor) -> None:
    y.numpy()[::2] = 0


def _through_dlpack(y: Tensor) -> None:
    torch.from_dlpack(y)[::2] = 0


@pytest.mark.table
@pytest.mark.filterwarnings("ignore:no plan keeps|the first steps")
@pytest.mark.parametrize("late", [0, 3])
@pytest.mark.parametrize(
    "changes", [lambda y: y.data.mul_(2), lambda y: y.mul_(2), _through_an_array, _through_dlpack], ids=range(4)
)
def test_the_program_may_write_over_what_a_frozen_layer_has_made(changes, late):
    """A plan may recompute it, but not from memory that has changed."""
    (plain, within), x = pair(Adapted(), budget=0.3), torch.randn(256, 64)
    assert_like(plain, within, *[x] * late)
    plain.changes = within.changes = changes
    assert_like(plain, within, x, x)
