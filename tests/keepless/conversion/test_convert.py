"""Conversions: equal outputs and gradients, the same Parameters, a reason for every norm that is left."""

import copy
import operator
import pickle
import re
from collections.abc import Callable
from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.optimization import fuse
from torch.nn.utils import parametrizations

from keepless import ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync
from keepless.conversion.convert import ConversionReport, to_inplace, to_standard
from models.segmentation import Outputs
from tests.bodies import small_resnet, small_resnext, small_segmentation, small_wider_a2, trained

C = 4
NETWORKS = [partial(small_resnext, classes=5), partial(small_resnet, classes=5)]
NETWORKS += [partial(small_wider_a2, dropout=(0.0,) * 6), small_segmentation]
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


def bn() -> nn.BatchNorm2d:
    return nn.BatchNorm2d(C)


def act() -> nn.LeakyReLU:
    return nn.LeakyReLU(0.1)


def converted(convert, network: nn.Module, **options) -> tuple[nn.Module, ConversionReport]:
    reports = []
    network = convert(network, report=reports.append, **options)
    for module in network.modules():
        if isinstance(module, InPlaceABN) and module.backend == "auto":
            module.backend = "eager"  # a compiler takes longer than these tests
    (report,) = reports
    return network, report


def state_of(network: nn.Module) -> tuple[dict[str, int], list]:
    """All that a conversion must preserve: {name: the tensor's id}, and the order of names in the state dict."""
    tensors = {**dict(network.named_parameters()), **dict(network.named_buffers())}
    return {name: id(tensor) for name, tensor in tensors.items()}, list(network.state_dict())


def gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    """Output of a training step, and the gradients of the input and all parameters."""
    x = x.clone().requires_grad_()
    torch.manual_seed(0)  # for dropout
    z = network(x * 1)
    z = z.main.logits if isinstance(z, Outputs) else z
    dz = torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(0))
    return [z, *torch.autograd.grad(z, [x, *network.parameters()], dz)]


def assert_same_function(network: nn.Module, reference: nn.Module, x: Tensor) -> None:
    """In both modes: outputs, gradients and statistics, in float64."""
    with torch.no_grad():
        torch.testing.assert_close(network.eval()(x), reference.eval()(x), rtol=0, atol=1e-12)
    actual, expected = gradients(network.train(), x), gradients(reference.train(), x)
    torch.testing.assert_close(actual, expected, rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(list(network.buffers()), list(reference.buffers()))


@pytest.mark.table
@pytest.mark.parametrize("norm, build", list(zip(NORMS, cycle(NETWORKS))))
def test_networks_of_ours_keep_their_outputs_and_gradients(norm, build):
    """`to_standard` leaves PyTorch's modules only; the Parameters stay, and `bn.weight` becomes `bn.0.weight`."""
    torch.manual_seed(0)
    network = trained(build(NORMS[norm]))
    x = torch.randn(2, 3, 33, 33, dtype=torch.float64)
    reference, state = copy.deepcopy(network), state_of(network)
    layers = {name: module for name, module in reference.named_modules() if isinstance(module, ABN)}
    result, report = converted(to_inplace, network)
    assert result is network and state_of(network) == state and not report.kept
    assert bool(report.replaced) == ("inplace" not in norm)
    assert {type(network.get_submodule(name)) for name in layers} <= {InPlaceABN, InPlaceABNSync}
    assert_same_function(network, reference, x)

    _, report = converted(to_standard, network)
    assert not report.kept and list(report.replaced) == list(layers)
    assert not [module for module in network.modules() if type(module).__module__.startswith("keepless")]
    kind = "SyncBatchNorm" if norm == "inplace-sync" else "BatchNorm2d"
    assert {type(module).__name__ for module in network.modules() if "BatchNorm" in type(module).__name__} == {kind}
    renamed = {}
    for name, identity in state[0].items():
        layer, _, tensor = name.rpartition(".")
        with_activation = layer in layers and layers[layer].activation != "identity"
        renamed[f"{layer}.0.{tensor}" if with_activation else name] = identity
    assert state_of(network)[0] == renamed
    assert_same_function(network, reference, x)


@pytest.mark.parametrize("dims", [0, 1, 2, 3])
def test_what_to_inplace_made_of_pytorchs_modules_becomes_them_again(dims):
    """Every name, activation and parameter comes back; its pickle names nothing of ours."""
    make = nn.Linear if dims == 0 else partial((nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1], kernel_size=1)
    norm = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[dims]
    acts = [nn.LeakyReLU(0.2, inplace=True), nn.ELU(0.7, inplace=True), nn.Sigmoid(), nn.Tanh()]
    network = nn.Sequential(*(nn.Sequential(make(C, C), norm(C, eps=1e-3), act) for act in acts), make(C, C))
    trained(network)
    reference, state, x = copy.deepcopy(network), state_of(network), torch.randn(5, C, *(3,) * dims).double()
    inplace, report = converted(to_inplace, network)
    assert len(report.replaced) == 4 and state_of(inplace) == state
    assert_same_function(inplace, copy.deepcopy(reference), x)
    network, report = converted(to_standard, inplace)
    assert len(report.replaced) == 4 and report.replaced["0.1"].endswith(f"-> {norm.__name__}")
    assert str(network) == str(reference) and state_of(network) == state
    assert b"keepless" not in pickle.dumps(network)


def test_synchronised_layers_become_ordinary_ones_where_asked():
    """docs/layers.md says what PyTorch's functions do to ours."""
    layers = nn.Conv2d(3, C, 3), InPlaceABNSync(C), nn.Conv2d(C, C, 1), ABN(C, sync=True), nn.SyncBatchNorm(C)
    network = trained(nn.Sequential(*layers))
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    before = network(x)
    nn.SyncBatchNorm.convert_sync_batchnorm(network)
    assert [type(layer) for layer in network[1:4:2]] == [InPlaceABNSync, ABN]
    with pytest.raises(fx.proxy.TraceError):
        fuse(network)
    parameters = [*network.parameters()]
    network, report = converted(partial(to_standard, sync=False), network)
    assert report.replaced["4"] == "SyncBatchNorm -> BatchNorm2d" and [*network.parameters()] == parameters
    assert report.replaced["1"] == "InPlaceABNSync(leaky_relu) -> BatchNorm2d + LeakyReLU"
    torch.testing.assert_close(fuse(network)(x), before)
    alone, report = converted(partial(to_standard, sync=False), nn.Sequential(ABN(C, sync=True), nn.SyncBatchNorm(C)))
    assert type(alone[0]) is ABN and not alone[0].sync
    assert type(alone[1]) is nn.SyncBatchNorm and "number of dimensions" in report.kept["1"]


def test_what_only_ours_computes_stays_ours():
    """Fused layers stay, customised ones, and layers whose number of dimensions is unknown."""
    for layers in (
        [nn.Conv2d(C, C, 1), InPlaceABN(C, backend="compiled")],
        [nn.Conv2d(C, C, 1), nn.Conv1d(C, C, 1), InPlaceABN(C)],
        [nn.Conv2d(C, C, 1), nn.Flatten(), nn.Linear(C, C), ABN(C)],
        [nn.Flatten(), CheckpointedABN(C)],
    ):
        network, report = converted(to_standard, nn.Sequential(*layers))
        assert type(network[-1]) is ABN and network[-1].backend == layers[-1].backend and not report.kept
    _, report = converted(to_standard, nn.Sequential(with_hook(InPlaceABN(C)), subclassed(InPlaceABN(C))))
    assert "hooks" in report.kept["0"] and "subclass" in report.kept["1"]
    norm, identity = InPlaceABN(C), nn.Identity()
    network, _ = converted(to_standard, nn.Sequential(nn.Conv2d(C, C, 1), norm, identity, norm, identity))
    assert network[1] is network[3] and [type(module) for module in network[1]] == [nn.BatchNorm2d, nn.LeakyReLU]


def with_hook(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda module, args, output: None)
    return module


def subclassed(module: nn.Module) -> nn.Module:
    return parametrizations.weight_norm(module, dim=None)


def changed(module: nn.Module, **attributes: object) -> nn.Module:
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def unsaved(norm: nn.Module) -> nn.Module:
    for name, buffer in dict(norm.named_buffers()).items():
        norm.register_buffer(name, buffer, persistent=False)
    return norm


GROUP = dist.ProcessGroup(0, 1)  # nothing is exchanged here
BATCH_NORMS = {
    "sync": partial(nn.SyncBatchNorm, C, process_group=GROUP),
    "not affine": partial(nn.BatchNorm2d, C, affine=False),
    "without shift": lambda: changed(nn.BatchNorm2d(C), bias=None),
    "untracked since": lambda: changed(nn.BatchNorm2d(C), track_running_stats=False),
    "batch statistics always": partial(nn.BatchNorm2d, C, track_running_stats=False),
    "statistics not saved": lambda: unsaved(nn.BatchNorm2d(C)),
    "averages": partial(nn.BatchNorm2d, C, momentum=None, eps=0.1),
}


@pytest.mark.parametrize("kind", BATCH_NORMS)
def test_every_kind_of_pytorchs_norms(kind):
    network = trained(nn.Sequential(nn.Conv2d(3, C, 3), BATCH_NORMS[kind](), nn.LeakyReLU(0.2), nn.Conv2d(C, 2, 1)))
    reference, state = nn.Sequential(*network), state_of(network)
    network, report = converted(to_inplace, network.train())
    assert state_of(network) == state and list(report.replaced) == ["1"] and not report.kept
    layer = network[1]
    assert (layer.activation, layer.activation_param, layer.training) == ("leaky_relu", 0.2, True)
    assert (layer.eps, layer.momentum) == (reference[1].eps, reference[1].momentum)
    if kind == "sync":
        assert layer.sync and layer.group is GROUP
        assert to_standard(network, report=lambda _: None)[1].process_group is GROUP
    else:
        reference[2] = nn.LeakyReLU(0.2)
        assert_same_function(network, copy.deepcopy(reference), torch.randn(3, 3, 7, 7, dtype=torch.float64))


class Network(nn.Module):
    """Modules, and a function of them as the forward pass: convolution and norm, then what a case says."""

    def __init__(self, after: Callable[[nn.Module, Tensor], Any], **modules: nn.Module):
        super().__init__()
        self.after = after
        parts = dict(conv=nn.Conv2d(C, C, 1), norm=bn(), last=nn.Conv2d(C, C, 1), act=act(), tanh=nn.Tanh())
        for name, module in (parts | modules).items():
            self.add_module(name, module)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        return self.last(self.after(self, self.norm(self.conv(x if mask is None else x * mask))))


class BatchNormAct(nn.BatchNorm2d):
    """Calls norm, dropout and activation like timm's `BatchNormAct2d`."""

    def __init__(self, act: nn.Module, drop: nn.Module | None = None):
        super().__init__(C)
        self.drop, self.act = drop or nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


BatchNormAct.__module__, BatchNormAct.__qualname__ = "timm.layers.norm_act", "BatchNormAct2d"


def passed_on(block: nn.Module, y: Tensor) -> Tensor:
    return y


def activated(block: nn.Module, y: Tensor) -> Tensor:
    return block.act(y)


def half(y: Tensor) -> Tensor:
    if y.sum() > 0:  # cannot be traced
        return y
    return y / 2


# What follows the norm, why it is left, and other modules of the network.
LEFT = {
    "slope of zero": (activated, "expected a slope above 0", dict(act=nn.LeakyReLU(0.0))),
    "negative alpha": (activated, "expected a number above 0", dict(act=nn.ELU(-1.0))),
    "half precision": (activated, r"use \.float\(\) and autocast", dict(norm=bn().bfloat16())),
    "subclass": (activated, "subclass, whose forward pass", dict(norm=subclassed(bn()))),
    "subclass of ours": (activated, "subclass, whose forward pass", dict(norm=subclassed(ABN(C)))),
    "hooks": (activated, "it has hooks", dict(norm=with_hook(bn()))),
    "own forward": (activated, "it has hooks", dict(norm=changed(bn(), forward=torch.relu))),
    "own buffer": (activated, "buffers or modules of", dict(norm=changed(bn(), mask=nn.Buffer(torch.ones(C))))),
    "hooks of the activation": (activated, "goes to LeakyReLU", dict(act=with_hook(act()))),
    "relu": (activated, "a ReLU cannot be inverted; relu_slope=0.01", dict(act=nn.ReLU(inplace=True))),
    "relu of ours": (passed_on, "a ReLU cannot be inverted", dict(norm=ABN(C, activation="relu"))),
    "relu6": (activated, "goes to ReLU6: expected", dict(act=nn.ReLU6())),
    "a function": (lambda b, y: F.leaky_relu(y), "goes to leaky_relu: expected"),
    "several readers": (lambda b, y: b.act(y) + y, "goes to LeakyReLU, add"),
    "only summed": (lambda b, y: y + 1, "goes to add"),
    "sum in place": (lambda b, y: b.act(y.add_(1)), "goes to add_"),
    "result overwritten": (lambda b, y: operator.iadd(b.act(y), 1), "iadd overwrites the output"),
    "identity overwritten": (
        lambda b, y: operator.iadd(b.pass_on(b.act(y)), 1),
        "iadd overwrites the output",
        dict(pass_on=nn.Identity()),
    ),
    "dropout in place": (lambda b, y: b.tanh(b.act(y)), "Dropout overwrites", dict(tanh=nn.Dropout(inplace=True))),
    "conv and sum in place": (lambda b, y: operator.iadd(y, b.last(y)), "iadd overwrites the output"),
    "called twice": (lambda b, y: b.norm(b.act(y)).tanh(), "goes to tanh"),
    "two kinds": (lambda b, y: b.tanh(b.norm(b.act(y))), "followed by LeakyReLU, Tanh"),
    "dropout when training": (lambda b, y: b.act(F.dropout(y) if b.training else y), "goes to dropout"),
    "ours, then in place": (activated, "LeakyReLU overwrites", dict(norm=ABN(C), act=nn.LeakyReLU(inplace=True))),
    "not traced": (lambda b, y: b.act(half(y)), "no traced code calls it; .* cannot be traced .TraceError: symboli"),
    "timm's with relu": (passed_on, "a ReLU cannot be inverted", dict(norm=BatchNormAct(nn.ReLU()))),
    "timm's with silu": (passed_on, "it includes SiLU", dict(norm=BatchNormAct(nn.SiLU()))),
    "timm's with dropout": (passed_on, "it is a subclass", dict(norm=BatchNormAct(act(), nn.Dropout(0.0)))),
    "hooks of timm's activation": (passed_on, "or which has hooks", dict(norm=BatchNormAct(with_hook(act())))),
}


@pytest.mark.parametrize("case", LEFT)
def test_every_reason_for_leaving_a_norm(case):
    after, reason, *extras = LEFT[case]
    network = Network(after, **copy.deepcopy(dict(*extras)))
    modules, state = list(network.modules()), state_of(network)
    _, report = converted(to_inplace, network)
    assert list(network.modules()) == modules and state_of(network) == state and not report.replaced
    assert re.search(reason, report.kept["norm"]) and type(network.norm).__name__ in report.kept["norm"]
