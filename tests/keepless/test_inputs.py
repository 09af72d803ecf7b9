"""What is no module is refused with its type and the fix."""

import pytest
import torch
from torch import nn

import keepless
from keepless import AdditiveCoupling, InPlaceABNSync, InvertibleModuleWrapper, create_coupling

RECEIVERS = [keepless.recompute_activations, keepless.undo, keepless.report, keepless.to_inplace, keepless.to_standard]
RECEIVERS += [InPlaceABNSync.convert, InvertibleModuleWrapper, AdditiveCoupling]
RECEIVERS += [lambda value: keepless.renew_statistics(value, [])]
RECEIVERS += [lambda value: AdditiveCoupling(nn.ReLU(), value)]


@pytest.mark.parametrize("receiver", RECEIVERS)
def test_only_modules_are_taken(receiver):
    with pytest.raises(ValueError, match=r"got the class ReLU: expected an object, ReLU\(…\)"):
        receiver(nn.ReLU)
    for value, name in ((torch.relu, "builtin_function_or_method"), ([nn.ReLU()], "list")):
        with pytest.raises(ValueError, match=f"got a {name}: expected an nn.Module"):
            receiver(value)


class LightningModule(nn.Module):
    """Stands for Lightning's class, whose `training_step` calls other modules."""

    def forward(self, *args):
        return super().forward(*args)


def test_modules_that_are_never_called_name_those_to_give():
    lightning = LightningModule()
    lightning.net, lightning.heads = nn.Sequential(nn.ReLU()), nn.ModuleList([nn.ReLU(), nn.ReLU(), nn.ReLU()])
    for network, parts in (
        (lightning, ", or the parts network.net, network.heads.0, network.heads.1, …"),
        (nn.ModuleDict({"a": nn.ReLU()}), ", or the parts network.a"),
        (nn.ModuleList(), ""),
    ):
        with pytest.raises(ValueError, match=f"never called: give it the module that calls this one{parts}$"):
            keepless.recompute_activations(network)
    assert keepless.recompute_activations(lightning.net)(torch.ones(1)) == 1


def test_couplings_by_name():
    branch, adapter = nn.Linear(2, 2), keepless.AffineAdapterNaive
    assert type(create_coupling(branch, split_dim=-1)) is AdditiveCoupling
    affine = create_coupling(branch, coupling="affine", adapter=adapter)
    assert type(affine) is keepless.AffineCoupling and type(affine.Gm) is adapter
    for wrong in ({"coupling": "glow"}, {"adapter": adapter}):
        with pytest.raises(ValueError, match="expected 'additive', or 'affine'"):
            create_coupling(branch, **wrong)
    for kind, adapters in ((AdditiveCoupling, ()), (keepless.AffineCoupling, (None,))):  # MemCNN's implementation_fwd
        with pytest.raises(TypeError):
            kind(branch, branch, *adapters, -1)
