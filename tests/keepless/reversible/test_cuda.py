"""Reversible modules on a CUDA device; what can be told without one is tested with stubs."""

import pytest
import torch
from torch import nn

from keepless import AdditiveCoupling, InPlaceABN, ReversibleSequence
from keepless.reversible import checks, replay, state
from keepless.reversible.replay import Section
from keepless.torch_internals import FakeTensorMode
from tests.cuda import NEEDS_CUDA

ON_CUDA = pytest.param("cuda", marks=NEEDS_CUDA)


def sequence(*extra: nn.Module) -> ReversibleSequence:
    def branch() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), InPlaceABN(4, backend="eager"), *extra)

    torch.manual_seed(0)
    return ReversibleSequence([AdditiveCoupling(branch(), branch()) for _ in range(2)])


def gradients(network, x, precision=None) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype=precision, enabled=precision is not None):
        output = network(x)
    return [output, *torch.autograd.grad(output.float().square().sum(), [x, *network.parameters()])]


@pytest.mark.parametrize("device", [ON_CUDA])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_dropout_and_autocast(device, precision):
    """The repetition draws the same mask from the device's generator, in the same precision."""
    network, x = sequence(nn.Dropout(0.5)).to(device), torch.randn(2, 8, 6, 6, device=device)
    results = []
    for network.disable in (False, True):
        torch.manual_seed(1)
        results.append(gradients(network, x, precision))
    tolerance = 1e-4 if precision is None else 0.1
    for result, wanted in zip(*results, strict=True):
        assert (result - wanted).float().norm() <= tolerance * wanted.float().norm()


@pytest.fixture
def capturing(monkeypatch):
    """A CUDA graph is being captured, so the state of the device's generator cannot be read."""

    def refused(*arguments):
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    for module in (checks, replay, state):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refused)
    monkeypatch.setattr(torch.cuda, "set_rng_state", refused)


def test_dropout_is_refused_while_a_graph_is_captured(capturing):
    with FakeTensorMode():
        x = torch.empty(2, 8, 6, 6, device="cuda")
    with pytest.raises(RuntimeError, match=r"captures a reversible module that contains Dropout\(p=0.5"):
        Section(sequence(nn.Dropout(0.5)).blocks, [x])
    Section(sequence(nn.Dropout(0.0)).blocks, [x])
    Section(sequence(nn.Dropout(0.5)).eval().blocks, [x])
