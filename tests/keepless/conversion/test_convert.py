"""Conversions: equal outputs and gradients, the same Parameters, every reason for not replacing a layer."""

import copy
import logging
import pickle
import re
from functools import partial
from itertools import cycle

import pytest
import torch
import torch.distributed as dist
import torchvision
from torch import fx, nn
from torch.ao.quantization import fuse_modules
from torch.fx.experimental.optimization import fuse
from torch.nn.utils import parametrizations

from keepless import ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync
from keepless.conversion.convert import ConversionReport, to_inplace, to_standard
from tests.bodies import small_resnet, small_resnext, small_segmentation, small_wider_a2, trained

C = 4


NETWORKS = [
    partial(small_resnext, classes=5),
    partial(small_resnet, classes=5),
    partial(small_wider_a2, dropout=(0.0,) * 6),
    small_segmentation,
]
NORMS = {
    "std": ABN,
    "std-elu": partial(ABN, activation="elu", activation_param=1.0),
    "std-scale-fixed": partial(ABN, learn_scale=False),
    "inplace-1": partial(InPlaceABN, variant="I", gamma_floor=1e-3),
    "inplace-2": InPlaceABN,
    "inplace-sync": InPlaceABNSync,
    "checkpoint": CheckpointedABN,
    "checkpoint-x-hat": partial(CheckpointedABN, store="x_hat", activation="tanh"),
}


def converted(convert, network: nn.Module, **options) -> tuple[nn.Module, ConversionReport]:
    reports = []
    network = convert(network, report=reports.append, **options)
    (report,) = reports
    return network, report


def state_of(network: nn.Module) -> tuple[dict[str, int], list]:
    """Return all that a conversion must preserve: {name: the tensor's id}, and the order of names in the state dict."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: id(tensor) for name, tensor in tensors.items()}, list(network.state_dict())


def assert_left(network: nn.Module, reason: str, name: str | None = None, **options) -> None:
    """Nothing is replaced, and the layer `name`, by default the only one that could be, is left for this reason."""
    modules, state = list(network.modules()), state_of(network)
    result, report = converted(to_inplace, network, **options)
    assert result is network and list(network.modules()) == modules and state_of(network) == state
    if name is None:
        (name,) = report.kept
    assert not report.replaced and re.search(reason, report.kept[name]), report
    assert type(network.get_submodule(name)).__name__ in report.kept[name]


def gradients(network: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output of a training step, and the gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    torch.manual_seed(0)  # for dropout
    z = network(x * 1)
    dz = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(0))
    return [z, *torch.autograd.grad(z, [x, *network.parameters()], dz)]


@pytest.mark.parametrize("norm, build", list(zip([norm for norm in NORMS if "inplace" not in norm], cycle(NETWORKS))))
def test_networks_of_ours_keep_their_outputs_and_gradients(norm, build):
    torch.manual_seed(0)
    network = trained(build(NORMS[norm]))
    layers = [name for name, module in network.named_modules() if isinstance(module, ABN)]
    x = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    before = network(x)
    reference, state = copy.deepcopy(network), state_of(network)

    result, report = converted(to_inplace, network)
    assert result is network and state_of(network) == state and not report.kept
    for name in layers:
        layer, original = network.get_submodule(name), reference.get_submodule(name)
        assert type(layer) is InPlaceABN and name in report.replaced and not layer.training
        assert layer.extra_repr().startswith(original.extra_repr().split(", variant")[0].split(", store")[0])
    torch.testing.assert_close(network(x), before, rtol=0, atol=1e-12)
    assert_same_training(network, reference, x)


def assert_same_training(network: nn.Module, reference: nn.Module, x: torch.Tensor) -> None:
    theirs, ours = gradients(reference.train(), x), gradients(network.train(), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(list(network.buffers()), list(reference.buffers()))


@pytest.mark.parametrize("norm, build", list(zip(NORMS, cycle(NETWORKS))))
def test_to_standard_leaves_pytorchs_modules_only(norm, build):
    """Outputs in evaluation are equal to the bit in float64. The Parameters stay: `bn.weight` becomes `bn.0.weight`."""
    torch.manual_seed(0)
    network = trained(build(NORMS[norm]))
    reference, (state, _) = copy.deepcopy(network), state_of(network)
    x = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    with torch.no_grad():
        before = network(x)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, ABN)}
    result, report = converted(to_standard, network)
    assert result is network and not report.kept and list(report.replaced) == list(layers)
    assert not [module for module in network.modules() if type(module).__module__.startswith("keepless")]
    kind = "SyncBatchNorm" if norm == "inplace-sync" else "BatchNorm2d"
    assert {type(module).__name__ for module in network.modules() if "BatchNorm" in type(module).__name__} == {kind}
    renamed = {}
    for name, identity in state.items():
        layer, _, tensor = name.rpartition(".")
        with_activation = layer in layers and layers[layer].activation != "identity"
        renamed[f"{layer}.0.{tensor}" if with_activation else name] = identity
    assert state_of(network)[0] == renamed
    with torch.no_grad():
        assert torch.equal(network(x), before)
    assert_same_training(network, reference, x)


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_what_to_inplace_made_of_pytorchs_modules_becomes_them_again(dims):
    """Every name, activation and parameter comes back; its pickle names nothing of ours."""
    make = nn.Linear if dims == 0 else partial((nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1], kernel_size=1)
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    acts = [nn.LeakyReLU(0.2, inplace=True), nn.ELU(0.7, inplace=True), nn.Sigmoid(), nn.Tanh(), nn.Identity()]
    network = nn.Sequential(*(nn.Sequential(make(C, C), norm(C, eps=1e-3), act) for act in acts), make(C, C))
    trained(network)
    reference, state, x = copy.deepcopy(network), state_of(network), torch.randn(5, C, *(3,) * dims).double()
    network, report = converted(to_standard, to_inplace(network, example=x))
    assert len(report.replaced) == 5 and report.replaced["0.1"].endswith(f"-> {norm.__name__} + LeakyReLU")
    assert str(network) == str(reference) and state_of(network) == state
    assert b"keepless" not in pickle.dumps(network)
    assert torch.equal(network(x), reference(x))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_pytorchs_functions_for_its_own_norms_work_on_the_standard_network():
    """docs/keepless.md says what they do to ours. Synchronised layers become ordinary ones where asked."""
    layers = nn.Conv2d(3, C, 3), InPlaceABNSync(C), nn.Conv2d(C, C, 1), ABN(C, sync=True), nn.SyncBatchNorm(C)
    network = trained(nn.Sequential(*layers))
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    before = network(x)
    nn.SyncBatchNorm.convert_sync_batchnorm(network)
    assert [type(layer) for layer in network[1:4:2]] == [InPlaceABNSync, ABN]
    with pytest.raises(fx.proxy.TraceError):
        fuse(network)
    with pytest.raises((AssertionError, NotImplementedError), match="InPlaceABNSync"):
        fuse_modules(network, ["0", "1"])
    synchronised, parameters = copy.deepcopy(network[4:]), [*network.parameters()]
    network, report = converted(partial(to_standard, sync=False), network)
    assert report.replaced["4"] == "SyncBatchNorm -> BatchNorm2d" and [*network.parameters()] == parameters
    assert report.replaced["1"] == "InPlaceABNSync(leaky_relu) -> BatchNorm2d + LeakyReLU"
    for run in (torch.jit.script(network), fuse(network), fuse_modules(network, [["0", "1.0"], ["2", "3.0"]])):
        torch.testing.assert_close(run(x), before)
    alone, _ = converted(partial(to_standard, sync=False), ABN(C, sync=True))
    assert type(alone) is ABN and not alone.sync
    alone, report = converted(partial(to_standard, sync=False), synchronised)
    assert type(alone[0]) is nn.SyncBatchNorm and "number of dimensions" in report.kept["4"]


def test_what_only_ours_computes_stays_ours():
    """Fused layers stay, and layers whose number of dimensions is unknown."""
    fused = InPlaceABN(C, backend="compiled")
    for layers in (
        [nn.Conv2d(C, C, 1), fused],
        [nn.Conv2d(C, C, 1), nn.Conv1d(C, C, 1), InPlaceABN(C)],
        [nn.Conv2d(C, C, 1), nn.Flatten(), nn.Linear(C, C), ABN(C)],
        [nn.Flatten(), CheckpointedABN(C)],
    ):
        network, report = converted(to_standard, nn.Sequential(*layers))
        assert type(network[-1]) is ABN and network[-1].backend == layers[-1].backend and not report.kept
    one, identity = InPlaceABN(C), nn.Identity()
    network, _ = converted(to_standard, nn.Sequential(nn.Conv2d(C, C, 1), one, identity, one, identity))
    assert network[1] is network[3] and [type(module) for module in network[1]] == [nn.BatchNorm2d, nn.LeakyReLU]
    assert network[2] is network[4] is identity


def test_layers_that_need_no_conversion_are_left_as_they_are():
    layers = [InPlaceABN(C, overwrite_input=True, variant="I"), InPlaceABNSync(C)]
    network, report = converted(to_inplace, nn.Sequential(*layers))
    assert list(network) == layers and not report.replaced and not report.kept
    layers = [ABN(C), nn.BatchNorm2d(C), nn.LeakyReLU()]
    network, report = converted(to_standard, nn.Sequential(*layers, InPlaceABN(C, overwrite_input=True)))
    assert list(network)[:3] == layers and type(network[3]) is ABN
    assert list(report.replaced) == ["3"] and not report.kept


def changed(module: nn.Module, **attributes: object) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def with_hidden_statistics(norm: nn.BatchNorm2d) -> nn.BatchNorm2d:
    for name, buffer in norm.named_buffers():
        norm.register_buffer(name, buffer, persistent=False)
    return norm


BATCH_NORMS = {
    "1d": (partial(nn.BatchNorm1d, C), nn.Conv1d, 1),
    "2d": (partial(nn.BatchNorm2d, C), nn.Conv2d, 2),
    "3d": (partial(nn.BatchNorm3d, C), nn.Conv3d, 3),
    "sync": (partial(nn.SyncBatchNorm, C), nn.Conv2d, 2),
    "not affine": (partial(nn.BatchNorm2d, C, affine=False), nn.Conv2d, 2),
    "without shift": (lambda: changed(nn.BatchNorm2d(C), bias=None), nn.Conv2d, 2),
    "untracked since": (lambda: changed(nn.BatchNorm2d(C), track_running_stats=False), nn.Conv2d, 2),
    "buffers outside the state dict": (lambda: with_hidden_statistics(nn.BatchNorm2d(C)), nn.Conv2d, 2),
    "batch statistics always": (partial(nn.BatchNorm2d, C, track_running_stats=False), nn.Conv2d, 2),
    "averages": (partial(nn.BatchNorm2d, C, momentum=None, eps=0.1), nn.Conv2d, 2),
}


@pytest.mark.parametrize("kind", BATCH_NORMS)
def test_every_kind_of_pytorchs_norms(kind):
    torch.manual_seed(0)
    build, conv, dims = BATCH_NORMS[kind]
    network = trained(nn.Sequential(conv(3, C, 3), build(), nn.LeakyReLU(0.2), conv(C, 2, 1))).train()
    reference, state = copy.deepcopy(network), state_of(network)
    x = torch.randn(3, 3, *(7,) * dims, dtype=torch.float64)
    result, report = converted(to_inplace, network, example=x)
    assert result is network and state_of(network) == state
    assert list(report.replaced) == ["1"] and not report.kept
    layer = network[1]
    assert type(layer) is InPlaceABN and layer.sync == (kind == "sync")
    assert (layer.activation, layer.activation_param) == ("leaky_relu", 0.2)
    assert (layer.eps, layer.momentum) == (reference[1].eps, reference[1].momentum)

    for step in range(2):
        torch.testing.assert_close(gradients(network, x + step), gradients(reference, x + step), rtol=0, atol=1e-9)
    torch.testing.assert_close(network.eval()(x), reference.eval()(x), rtol=0, atol=1e-12)


def test_the_process_group_goes_along():
    group = dist.ProcessGroup(0, 1)  # nothing is exchanged here
    network = nn.Sequential(nn.SyncBatchNorm(C, process_group=group), act())
    layer = to_inplace(network, example=torch.randn(2, C, 3, 3))[0]
    assert layer.sync and layer.group is group
    assert to_standard(network)[0].process_group is group


def bn() -> nn.BatchNorm2d:
    return nn.BatchNorm2d(C)


def act() -> nn.LeakyReLU:
    return nn.LeakyReLU(0.1)


def test_a_layer_in_several_places_stays_one_module():
    one = ABN(C)
    network = to_inplace(nn.ModuleList([one, nn.Conv2d(C, C, 1), one]))
    assert isinstance(network[0], InPlaceABN) and network[0] is network[2] and network[0].weight is one.weight


def test_relu_becomes_leaky_only_when_asked():
    def build():
        return nn.Sequential(nn.BatchNorm2d(C), nn.ReLU(inplace=True), ABN(C, activation="relu"))

    x = torch.randn(2, C, 3, 3)
    network, report = converted(to_inplace, build(), example=x)
    assert not report.replaced and all("relu_slope=0.01" in why for why in report.kept.values())
    network, report = converted(to_inplace, build(), relu_slope=0.02, example=x)
    assert not report.kept
    for layer in (network[0], network[2]):
        assert (type(layer), layer.activation, layer.activation_param) == (InPlaceABN, "leaky_relu", 0.02)
    with pytest.raises(ValueError, match=r"relu_slope=0: expected a slope above 0"):
        to_inplace(build(), relu_slope=0)


def test_norms_of_pytorch_need_an_example():
    network = nn.Sequential(ABN(C), *(bn() for _ in range(5)), act())
    modules = list(network.modules())
    with pytest.raises(ValueError, match=r"normalisations \(1, 2, 3, 4 and 1 more\): give to_inplace an example="):
        to_inplace(network)
    assert list(network.modules()) == modules
    with pytest.raises(ValueError, match=r"\(the module itself\): give"):
        to_inplace(bn())


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: None)
    return module


def with_own_forward(module: nn.Module) -> nn.Module:
    return changed(module, forward=lambda x: x)


def subclassed(module: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(module, dim=None)


KEPT = {
    "slope of zero": (lambda: nn.Sequential(bn(), nn.LeakyReLU(0.0)), "expected a slope above 0"),
    "negative alpha": (lambda: nn.Sequential(bn(), nn.ELU(-1.0)), "expected a number above 0"),
    "half precision": (lambda: nn.Sequential(bn(), act()).bfloat16(), r"torch.bfloat16: .*\.float\(\)"),
    "subclass": (lambda: nn.Sequential(subclassed(bn()), act()), "subclass, whose forward pass"),
    "subclass of ours": (lambda: nn.Sequential(subclassed(ABN(C)), act()), "subclass, whose forward pass"),
    "hooks of ours": (lambda: nn.Sequential(with_hook(ABN(C)), act()), "it has hooks"),
    "own forward": (lambda: nn.Sequential(with_own_forward(bn()), act()), "it has hooks"),
    "own buffer": (lambda: nn.Sequential(changed(bn(), mask=nn.Buffer(torch.ones(C))), act()), "buffers or modules of"),
}


@pytest.mark.parametrize("case", KEPT)
def test_layers_that_are_left_for_what_they_are(case):
    build, reason = KEPT[case]
    network = build()
    assert_left(network, reason, example=torch.randn(2, C, 3, 3).to(next(network.parameters())))


def test_to_standard_reports_what_it_leaves():
    layers = with_hook(InPlaceABN(C)), subclassed(InPlaceABN(C)), CheckpointedABN(C)
    network, report = converted(to_standard, nn.Sequential(*layers))
    assert type(network[2]) is ABN and list(report.replaced) == ["2"]
    assert "hooks" in report.kept["0"] and "subclass" in report.kept["1"]


def test_single_layers_are_returned():
    layer = trained(ABN(C, activation="tanh"))
    inplace, report = converted(to_inplace, layer)
    assert type(inplace) is InPlaceABN and inplace.weight is layer.weight and not inplace.training
    assert report.replaced == {"": "ABN(tanh) -> InPlaceABN(tanh)"} and "(the module itself)" in str(report)
    assert type(to_standard(inplace)) is ABN


def test_the_report_of_a_torchvision_network(caplog):
    with torch.device("meta"):
        network, x = torchvision.models.mobilenet_v2(), torch.empty(2, 3, 32, 32)
    _, report = converted(to_inplace, copy.deepcopy(network), example=x)
    text = str(report)
    assert "replaced: 7\n  7 x BatchNorm2d -> InPlaceABN(identity)\n      features.1.conv.2, " in text
    assert "not replaced: 45" in text and "and 6 more" in text

    with caplog.at_level(logging.INFO):
        to_inplace(network, example=x)
        to_inplace(nn.Sequential(bn(), act()), example=torch.randn(2, C, 3, 3))
    warning, information = caplog.records
    assert warning.levelno == logging.WARNING and "not replaced: 45" in warning.getMessage()
    assert information.levelno == logging.INFO and "BatchNorm2d + LeakyReLU" in information.getMessage()
