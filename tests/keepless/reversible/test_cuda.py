"""Reversible modules on a CUDA device; what can be told without one is tested with stubs."""

import pytest
import torch
from torch import nn

from keepless import AdditiveCoupling
from keepless.reversible import checks, replay, state
from keepless.reversible.replay import Section
from keepless.torch_internals import FakeTensorMode
from tests.cuda import NEEDS_CUDA
from tests.keepless.reversible.test_modules import IMAGES, additive, step, twins


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_dropout_and_autocast(device, precision):
    """The repetition draws the same mask from the device's generator, in the same precision."""
    networks, results = twins("sequence", additive, dropout=0.5), []
    for network in networks:
        with torch.autocast(device, precision, enabled=precision is not None):
            results.append(step(network.float().to(device), IMAGES.float().to(device)))
    found, expected = results
    for name, wanted in expected.items():
        error = (found[name].double() - wanted.double()).norm()
        assert error <= (1e-4 if precision is None else 0.1) * wanted.double().norm(), name


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
        Section([AdditiveCoupling(nn.Dropout(0.5))], [x])
    Section([AdditiveCoupling(nn.Dropout(0.0))], [x])
    Section([AdditiveCoupling(nn.Dropout(0.5)).eval()], [x])
