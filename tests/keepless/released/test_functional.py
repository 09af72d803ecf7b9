"""The released package's functions and layers, whose scale is |weight| + eps."""

import importlib
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

import keepless
from keepless import inplace_abn
from keepless.released import stand_in
from keepless.saved import kept_bytes

SHAPE = (4, 3, 5, 6)


def arguments(dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """x, weight (of either sign), bias, running mean and variance."""
    torch.manual_seed(0)
    vectors = torch.tensor([-1.5, 0.5, 1.0]), torch.randn(3), torch.randn(3), torch.rand(3) + 0.5
    x, weight, bias = (each.to(dtype).requires_grad_() for each in (torch.randn(SHAPE), *vectors[:2]))
    return x, weight, bias, *(each.to(dtype) for each in vectors[2:])


def test_only_the_output_and_vectors_are_kept():
    x, *vectors = arguments(torch.float32)
    kept = kept_bytes(nn.Identity(), lambda: inplace_abn(x, *vectors), [x, *vectors])
    assert x.nbytes <= kept <= x.nbytes + 6 * vectors[0].nbytes


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"activation": "relu"}, "relu"),
        ({"momentum": 2.0}, "momentum=2.0: expected 0 to 1"),
        ({"x": torch.zeros(4, 5, 2, 2)}, r"shape \(4, 5, 2, 2\): expected \(N, 3, …\)"),
        ({"x": torch.zeros(1, 3)}, r"shape \(1, 3\): expected several values per channel"),
        ({"training": False, "running_mean": None}, "needs running_mean and running_var"),
    ],
)
def test_wrong_arguments_are_named(changes, message):
    names = ("x", "weight", "bias", "running_mean", "running_var")
    with pytest.raises(ValueError, match=message):
        inplace_abn(**{**dict(zip(names, arguments(torch.float32), strict=True)), **changes})


PROGRAM = """
import torch, warnings
from keepless import stand_in_for_inplace_abn
stand_in_for_inplace_abn(), stand_in_for_inplace_abn()
from inplace_abn import ABN, InPlaceABN, InPlaceABNSync, active_group, set_active_group
from inplace_abn.functions import inplace_abn, inplace_abn_sync
import importlib.util, inplace_abn.group
assert importlib.util.find_spec("inplace_abn.group") and importlib.util.find_spec("inplace_abn")
class Own(ABN):
    def forward(self, x): return super().forward(x) + 1
network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), InPlaceABN(4), Own(4, activation="identity"), InPlaceABNSync(4))
older = {name: tensor for name, tensor in network.state_dict().items() if "num_batches_tracked" not in name}
with warnings.catch_warnings():
    warnings.simplefilter("error")
    network.load_state_dict(older)
network(torch.randn(2, 3, 8, 8)).sum().backward()
saved = network.state_dict()
assert not any("num_batches_tracked" in name for name in saved)  # as the release saves it
network.load_state_dict(saved)
from keepless import from_released
network[1].weight.data.fill_(-1.0)
assert (from_released(network.state_dict())["1.weight"] > 0).all()
assert all(parameter.grad is not None for parameter in network.parameters())
"""


def test_a_program_that_imports_the_released_package_finds_this_one():
    if importlib.util.find_spec("inplace_abn") is not None:
        pytest.skip("the released package is installed: the program finds it")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["InPlaceABN", "InPlaceABNSync"])
def test_a_state_dict_of_the_stand_in_loads_into_this_package(kind, tmp_path):
    network = nn.Sequential(nn.Conv2d(3, 4, 1), getattr(stand_in, kind)(4))
    nn.init.normal_(network[1].weight)
    torch.save(network.state_dict(), tmp_path / "state.pt")
    twin = nn.Sequential(nn.Conv2d(3, 4, 1), getattr(keepless, kind)(4))
    twin.load_state_dict(keepless.from_released(torch.load(tmp_path / "state.pt")))
    x = torch.randn(2, 3, 5, 5)
    for training in (True, False):
        torch.testing.assert_close(twin.train(training)(x), network.train(training)(x))


def test_what_is_there_is_not_replaced_by_the_stand_in(monkeypatch):
    monkeypatch.setitem(sys.modules, "inplace_abn", importlib)
    with pytest.raises(RuntimeError, match="has already been imported: call stand_in_for_inplace_abn.. before"):
        stand_in.stand_in_for_inplace_abn()
    monkeypatch.delitem(sys.modules, "inplace_abn")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(RuntimeError, match="is installed: leave this call out, or pip uninstall inplace-abn"):
        stand_in.stand_in_for_inplace_abn()
