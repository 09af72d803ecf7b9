"""A branch that computes something else when it runs again is named, instead of giving a wrong gradient; precision."""

import pytest
import torch
from torch import Tensor, nn

from keepless import AdditiveCoupling, InvertibleModuleWrapper, ReversibleSequence
from keepless.reversible import checks, replay
from keepless.torch_internals import FakeTensorMode
from tests.cuda import NEEDS_CUDA
from tests.keepless.reversible.test_modules import IMAGES, additive, step, twins


class Changing(nn.Module):
    """A branch that multiplies with something that is not the same each time."""

    def __init__(self, kind: str):
        super().__init__()
        self.layer, self.kind, self.calls = nn.Conv2d(2, 2, 1), kind, [0]
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        factors = {
            "calls": lambda: self.calls[0],  # a number would be restored
            "generator": lambda: torch.rand(x.shape, generator=self.generator),
            "nothing": lambda: torch.rand(x.shape),  # PyTorch's own random numbers are restored
        }
        return self.layer(x) * factors[self.kind]()


@pytest.mark.parametrize("keep_input", [False, True])
@pytest.mark.parametrize("kind", ["calls", "generator", "nothing"])
def test_a_branch_that_computes_something_else_is_named(kind, keep_input):
    branch = Changing(kind)
    module = branch if keep_input else AdditiveCoupling(branch, branch)
    wrapper = InvertibleModuleWrapper(module, keep_input=keep_input)
    loss = wrapper(torch.randn(2, 2 if keep_input else 4, 6, 6)).square().sum()
    if kind == "nothing":
        loss.backward()
    else:
        with pytest.raises(RuntimeError, match="Changing computed other values"):
            loss.backward()


def sequence(couplings: int) -> nn.Module:
    torch.manual_seed(0)
    branches = [nn.Sequential(nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)) for _ in range(couplings)]
    return ReversibleSequence([AdditiveCoupling(branch) for branch in branches])


def test_checking_changes_no_bit_and_needs_little_memory():
    """The checksum copies at most 2^20 values of an output at a time."""
    x, gradients = torch.randn(2, 8, 8, 8), []
    for checked in (True, False):
        checks._enabled.set(checked)  # the fixture resets it
        network = sequence(3)
        gradients.append(torch.autograd.grad(network(x).square().sum(), list(network.parameters())))
    assert all(map(torch.equal, *gradients))
    large = torch.ones(3, 2**10, 2**11).transpose(1, 2)
    assert [part.numel() for part in checks._parts(large)] == [2**20] * 6
    assert checks._checksum(large)[1] == large.numel() ** 0.5


@pytest.mark.slow
def test_pure_bfloat16_adds_up_rounding():
    """The bounds in docs/memory.md on the distance to the gradient with stored activations, relative to its norm."""
    checks._enabled.set(False)  # they might find it
    x = torch.randn(2, 8, 8, 8, generator=torch.Generator().manual_seed(100))

    def gradient(dtype: torch.dtype, stream: torch.dtype, autocast: bool, stored: bool) -> Tensor:
        network = sequence(50).to(dtype)
        network.disable = stored
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = network(x.to(stream)).float().square().mean()
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(network.parameters()))]).double()

    deviations = []
    wide, low = torch.float32, torch.bfloat16
    for options in ((wide, wide, False), (low, low, False), (wide, wide, True), (wide, low, True)):
        stored, reversed_ = (gradient(*options, stored) for stored in (True, False))
        deviations.append(((reversed_ - stored).norm() / stored.norm()).item())
    assert deviations[0] < 2e-6 and 0.05 < deviations[1] < 0.2 and max(deviations[2:]) < 0.04, deviations


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_dropout_and_autocast(device, precision):
    """The repetition draws the same mask from the device's generator, in the same precision."""
    networks, results = twins("sequence", additive, dropout=0.5), []
    for network in networks:
        with torch.autocast(device, precision, enabled=precision is not None):
            results.append(step(network.float().to(device), IMAGES.float().to(device)))
    tensors, expected = results
    for name, wanted in expected.items():
        error = (tensors[name].double() - wanted.double()).norm()
        assert error <= (1e-4 if precision is None else 0.1) * wanted.double().norm(), name


@pytest.fixture
def capturing(monkeypatch):
    """A CUDA graph is being captured, so the state of the device's generator cannot be read."""

    def refused(*arguments):
        raise RuntimeError("Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture")

    for module in (checks, replay):
        monkeypatch.setattr(module, "is_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", refused)
    monkeypatch.setattr(torch.cuda, "set_rng_state", refused)


def test_dropout_is_refused_while_a_graph_is_captured(capturing):
    with FakeTensorMode():
        x = torch.empty(2, 8, 6, 6, device="cuda")
    with pytest.raises(RuntimeError, match=r"captures a reversible module that contains Dropout\(p=0.5"):
        replay.Section([AdditiveCoupling(nn.Dropout(0.5))], [x])
    replay.Section([AdditiveCoupling(nn.Dropout(0.0))], [x])
    replay.Section([AdditiveCoupling(nn.Dropout(0.5)).eval()], [x])
