"""State dicts of the released package, whose layers have the same names and another scale."""

import copy
import linecache
import warnings

import pytest
import torch
from torch import Tensor, nn

from keepless import ABN, CheckpointedABN, InPlaceABN, from_released
from keepless.conversion.convert import to_inplace
from tests.runs import without_counts


def network(cls=InPlaceABN, **options) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Conv2d(c, 4, 1), cls(4, **options)) for c in (3, 4)))


def released() -> dict[str, Tensor]:
    """The state dict of a network of the released package."""
    state = without_counts(network().state_dict())
    return {name: torch.empty_like(tensor).uniform_(-1, 1) for name, tensor in state.items()}


def load(module: nn.Module, state: dict[str, Tensor], **options) -> list[str]:
    """The warnings of a load, which point at its line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.load_state_dict(state, **options)
    assert all("load_state_dict(" in linecache.getline(warning.filename, warning.lineno) for warning in caught)
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("cls", [ABN, CheckpointedABN, InPlaceABN])
def test_released_scales_become_ours(cls, tmp_path):
    state = released()
    before = {name: tensor.clone() for name, tensor in state.items()}
    converted, module = from_released(state, eps=0.25), network(cls)
    torch.save(converted, tmp_path / "file.pt")  # which marks it too
    assert load(module, torch.load(tmp_path / "file.pt")) == load(module, converted) == []
    assert list(converted) == list(state)
    for name, tensor in state.items():
        assert torch.equal(tensor, before[name])  # the argument is unchanged
        is_scale = name in ("0.1.weight", "1.1.weight")
        assert torch.equal(converted[name], tensor.abs() + 0.25 if is_scale else tensor)
        assert torch.equal(module.state_dict()[name], converted[name])
    assert torch.equal(from_released(state)["0.1.weight"], state["0.1.weight"].abs() + 1e-5)
    twice = from_released(converted, eps=0.25)
    assert all(torch.equal(twice[name], converted[name]) for name in state)


@pytest.mark.parametrize("cls", [ABN, CheckpointedABN, InPlaceABN])
@pytest.mark.parametrize("strict", [True, False])
def test_loading_a_released_state_dict_warns_once_per_load(cls, strict):
    module, state = network(cls), released()
    for _ in range(2):
        (line,) = load(module, state, strict=strict)
        assert "0.1" in line and "from_released(state_dict, eps=1e-5)" in line and "|weight| + eps" in line
    assert torch.equal(module[0][1].weight, state["0.1.weight"])
    assert module[0][1].num_batches_tracked == 0


def test_norms_of_other_kinds_keep_their_weights():
    """A norm with a count is not of the release; layers without a scale stay without one."""
    module = nn.ModuleDict({"bn": nn.BatchNorm2d(4), "fixed": ABN(4, learn_scale=False), "ln": nn.LayerNorm(4)})
    module.load_state_dict({name: tensor - 3 for name, tensor in module.state_dict().items()})
    state = {name: tensor for name, tensor in module.state_dict().items() if name != "fixed.num_batches_tracked"}
    state["my_running_mean"] = state["my_weight"] = torch.full((4,), -1.0)
    converted = from_released(state)
    assert converted.keys() == state.keys() and all(converted[name] is tensor for name, tensor in state.items())


def test_prefixes_and_parts_are_found():
    parallel, state = nn.ModuleDict({"module": network()}), released()
    prefixed = {f"module.{name}": tensor for name, tensor in state.items()}
    (line,) = load(parallel, prefixed)
    assert "module.0.1" in line
    assert load(parallel, from_released(prefixed)) == []
    second = {name: tensor for name, tensor in state.items() if name.startswith("1.")}
    (line,) = load(network(), second, strict=False)
    assert "1.1" in line and "0.1" not in line
    single = {name[4:]: tensor for name, tensor in second.items() if name.startswith("1.1.")}
    (line,) = load(InPlaceABN(4), single)
    assert "(the module itself)" in line and load(InPlaceABN(4), from_released(single)) == []


def test_state_dicts_of_standard_norms_and_layers_without_statistics_or_scale_do_not_warn():
    standard = network(nn.BatchNorm2d)
    assert load(network(), standard.state_dict()) == []
    assert load(network(), dict(standard.state_dict())) == []  # without metadata
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.LeakyReLU())
        converted = to_inplace(plain)
        twin = copy.deepcopy(converted)
    assert load(twin, converted.state_dict(), assign=True) == []
    for options in ({"track_running_stats": False}, {"learn_scale": False}, {"affine": False}):
        assert load(network(**options), without_counts(network(**options).state_dict())) == []
    parameters = {name: parameter.detach() for name, parameter in network().named_parameters()}
    assert load(network(), parameters, strict=False) == load(network(), {}, strict=False) == []
