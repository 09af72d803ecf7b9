"""A script keeps, and computes again, exactly what the recorded pass does from which it was learned."""

import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet

from keepless import recompute_activations
from keepless.recompute.costs import peak_bytes
from keepless.recompute.input_forms import InputForm


class Residual(nn.Sequential):
    """Blocks whose activations are read by two layers each."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 3), *(resnet.BasicBlock(16, 16) for _ in range(2)), nn.Conv2d(16, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Checkpointed(nn.Sequential):
    """A network with a checkpointed block. The checkpoint saves its input outside of calls that a script can see."""

    def __init__(self) -> None:
        super().__init__(*(nn.Sequential(nn.Conv2d(n, 4, 3), nn.BatchNorm2d(4), nn.ReLU()) for n in (3, 4, 4)))

    def forward(self, x: Tensor) -> Tensor:
        return self[2](checkpoint(self[1], self[0](x), use_reentrant=False)).square().mean()


def a_step(network: nn.Module, x: Tensor) -> None:
    network.zero_grad(set_to_none=False)
    network(x).backward()


@pytest.mark.filterwarnings("ignore:the network runs a part of its forward pass")
@pytest.mark.parametrize("make, budget", [(Residual, None), (Residual, 4_000_000), (Checkpointed, None)])
def test_a_step_by_a_script_has_the_peak_of_a_recorded_one(make, budget, monkeypatch):
    network, x = recompute_activations(make(), budget=budget), torch.randn(2, 3, 64, 64)
    step = partial(a_step, network, x)
    with monkeypatch.context() as patched:
        patched.setattr(InputForm, "learn", lambda form, script: None)  # so the next pass is recorded, too
        for _ in range(3):
            step()
        recorded = peak_bytes(step, "cpu")
    step()  # learns the script
    assert peak_bytes(step, "cpu") <= recorded


class Auxiliary(nn.Module):
    """Another layer reads the activation in some steps. Without it, only signs of the activation are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.is_on = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), False

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        return y.mean() + (self.second(y).square().sum() if self.is_on else 0.0)


def test_a_new_reader_of_an_activation_gets_its_values_where_the_script_has_kept_signs():
    plain = Auxiliary()
    prepared, x = recompute_activations(copy.deepcopy(plain)), torch.randn(2, 3, 5, 5)
    for is_on in (False, False, True):
        plain.is_on = prepared.is_on = is_on
        prepared.zero_grad()
        prepared(x).backward()
    plain(x).backward()
    for found, expected in zip(prepared.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)


class Tuned(nn.Module):
    """A network whose layers need gradients from some step on: only the arguments of calls change."""

    def __init__(self) -> None:
        super().__init__()
        layers = ((nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.SiLU()) for _ in range(3))
        self.first, self.last = nn.Sequential(*(one for layer in layers for one in layer)), nn.Conv2d(4, 1, 1)
        self.is_tuned = True
        for parameter in self.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.is_tuned):
            y = self.first(x)
        return self.last(y).mean()


def test_a_pass_is_recorded_at_once_if_gradients_are_enabled_where_they_were_not():
    network, x = recompute_activations(Tuned()), torch.randn(2, 4, 32, 32)
    network.is_tuned = False
    for _ in range(3):
        a_step(network, x)
    network.is_tuned = True
    by_script = peak_bytes(lambda: a_step(network, x), "cpu")
    assert by_script <= peak_bytes(lambda: a_step(recompute_activations(network), x), "cpu")


OUTPUTS = [(nn.ReLU(), None), (nn.ReLU(True), None), (nn.LeakyReLU(0.1), 1.0), (nn.LeakyReLU(0.1), "1GiB")]


@pytest.mark.parametrize("activation, budget", OUTPUTS, ids=str)
def test_an_output_may_be_overwritten_where_the_activation_is_computed_again(activation, budget):
    """And in every step that fits as it is. The product's gradients are the same, if the plain network raises no error.

    The plain network with ReLU does, because ReLU saves its result; with a smaller budget LeakyReLU's would be kept.
    """
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), activation)
    prepared, x = recompute_activations(copy.deepcopy(plain), budget=budget), torch.randn(2, 3, 9, 9)
    for _ in range(3):  # recorded, and twice by the script
        prepared.zero_grad()
        prepared(x).mul_(2).square().mean().backward()
    (plain(x) * 2).square().mean().backward()
    for found, expected in zip(prepared.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, expected.grad, rtol=0, atol=0)
