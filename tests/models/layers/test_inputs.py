"""What is no module is refused with its type and the fix."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from models import layers
from models.layers import AdditiveCoupling, InPlaceABNSync, InvertibleModuleWrapper, create_coupling

RECEIVERS = [layers.recompute_activations, layers.undo, layers.report, layers.to_inplace, layers.to_standard]
RECEIVERS += [InPlaceABNSync.convert, InvertibleModuleWrapper, AdditiveCoupling]
RECEIVERS += [lambda value: layers.layer_health(value, None), lambda value: layers.renew_statistics(value, [])]
RECEIVERS += [lambda value: AdditiveCoupling(nn.ReLU(), value)]


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_only_modules_are_taken(receiver):
    with pytest.raises(ValueError, match=r"got the class ReLU: expected an object, ReLU\(…\)"):
        receiver(nn.ReLU)
    for value, name in ((torch.relu, "builtin_function_or_method"), ([nn.ReLU()], "list")):
        with pytest.raises(ValueError, match=f"got a {name}: expected an nn.Module"):
            receiver(value)


def test_the_package_under_two_names_is_refused(monkeypatch):
    spec = importlib.util.spec_from_file_location("models.layers.version", Path(layers.__file__).parent / "version.py")
    again = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "keepless", SimpleNamespace())  # somebody else's
    spec.loader.exec_module(again)
    monkeypatch.setitem(sys.modules, "keepless", layers)
    with pytest.raises(ImportError, match="keepless and models.layers are the same package.*import it by one name"):
        spec.loader.exec_module(again)


def test_couplings_by_name():
    branch, adapter = nn.Linear(2, 2), layers.AffineAdapterNaive
    assert type(create_coupling(branch, split_dim=-1)) is AdditiveCoupling
    affine = create_coupling(branch, coupling="affine", adapter=adapter)
    assert type(affine) is layers.AffineCoupling and type(affine.Gm) is adapter
    for wrong in ({"coupling": "glow"}, {"adapter": adapter}):
        with pytest.raises(ValueError, match="expected 'additive', or 'affine'"):
            create_coupling(branch, **wrong)
    for kind, others in ((AdditiveCoupling, ()), (layers.AffineCoupling, (None,))):  # MemCNN's implementation_fwd
        with pytest.raises(TypeError):
            kind(branch, branch, *others, -1)
