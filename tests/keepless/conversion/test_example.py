"""Conversions by an example: never another function, the network untouched, a reason for every norm that is left."""

import copy
import operator
import pickle
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from torchvision.models.resnet import Bottleneck

from keepless import ABN, CheckpointedABN, InPlaceABN, InPlaceABNSync
from keepless.conversion.activated import MergedActivation
from keepless.conversion.convert import to_inplace, to_standard
from tests.bodies import kept_maps
from tests.cuda import FSDP2_ON_CPUS
from tests.keepless.conversion.test_convert import (
    act,
    assert_left,
    bn,
    converted,
    gradients,
    state_of,
    trained,
    with_hook,
)

C = 4


def eagerly(network: nn.Module) -> nn.Module:
    """The network, with layers that need no compiler, which takes longer than these tests."""
    for module in network.modules():
        if isinstance(module, ABN):
            module.backend = "eager"
    return network


class LeakyBottleneck(Bottleneck):
    """A bottleneck with a leaky ReLU after its first two norms, and its ReLU after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.bn1(self.conv1(x)), 0.01)
        y = F.leaky_relu(self.bn2(self.conv2(y)), 0.01)
        return F.relu(self.bn3(self.conv3(y)) + x)


def assert_same_function(network: nn.Module, reference: nn.Module, x: Tensor) -> None:
    eagerly(network)
    with torch.no_grad():
        z, expected = network.eval()(x), reference.eval()(x)
    torch.testing.assert_close(z, expected, rtol=1e-12, atol=1e-12)
    theirs, ours = gradients(reference.train(), x), gradients(network.train(), x)
    for gradient, expected in zip(ours, theirs, strict=True):
        atol = 1e-9 * max(1.0, expected.abs().max().item())
        torch.testing.assert_close(gradient, expected, rtol=0, atol=atol)


NETWORKS = {**vars(torchvision.models), **vars(torchvision.models.segmentation)}
# Norms replaced and left, and why.
COUNTS = {
    "resnet18": (9, {"overwritten by add_ in BasicBlock": 8, "save no memory": 3}),
    "resnet50": (33, {"overwritten by add_ in Bottleneck": 16, "save no memory": 4}),
    "mobilenet_v2": (7, {"followed by ReLU6": 35, "save no memory": 10}),
    "densenet121": (120, {"the function relu in DenseNet follows": 1}),
    "deeplabv3_resnet50": (40, {"overwritten by add_ in Bottleneck": 16, "save no memory": 4}),
    "googlenet": (0, {"recompute_activations": 59}),
    "efficientnet_b0": (7, {"followed by SiLU": 33, "overwritten by add_ in MBConv": 9}),
    "shufflenet_v2_x0_5": (56, {}),
}


@pytest.mark.parametrize(
    "name", [name if number % 2 else pytest.param(name, marks=pytest.mark.slow) for number, name in enumerate(COUNTS)]
)
def test_how_many_norms_of_torchvision_networks_are_replaced(name):
    options = {"deeplabv3_resnet50": {"weights_backbone": None}, "googlenet": {"init_weights": False}}
    with torch.device("meta"):
        network = NETWORKS[name](weights=None, **options.get(name, {}))
    norms = {name for name, module in network.named_modules() if isinstance(module, nn.BatchNorm2d)}
    _, report = converted(to_inplace, network, relu_slope=0.01, example=torch.empty(2, 3, 64, 64, device="meta"))
    replaced, kept = COUNTS[name]
    assert len(report.replaced) == replaced and {*report.replaced, *report.kept} == norms
    for reason, count in kept.items():
        assert sum(reason in why for why in report.kept.values()) == count, report
    assert sum(kept.values()) == len(report.kept)


class Network(nn.Module):
    """Modules, and a function of them as the forward pass."""

    def __init__(self, compute: Callable[[nn.Module, Tensor], Any], **modules: nn.Module):
        super().__init__()
        self.compute = compute
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: Tensor) -> Any:
        return self.compute(self, x)


class Block(Network):
    """Convolution and norm, then what a case says."""

    def __init__(self, after: Callable[[nn.Module, Tensor], Any], **modules: nn.Module):
        own = dict(
            conv=nn.Conv2d(C, C, 1), norm=bn(), last=nn.Conv2d(C, C, 1), act=act(), relu=nn.ReLU(), tanh=nn.Tanh()
        )
        super().__init__(lambda b, x: b.last(after(b, b.norm(b.conv(x)))), **own | modules)


def overwriting(block: nn.Module, y: Tensor) -> Tensor:
    z = block.act(y)
    z += 1
    return z


class BatchNormAct(nn.BatchNorm2d):
    """Calls norm, dropout and activation like timm's `BatchNormAct2d`."""

    def __init__(self, act: nn.Module, drop: nn.Module | None = None):
        super().__init__(C)
        self.drop, self.act = drop or nn.Identity(), act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class Lookalike(BatchNormAct):
    pass


BatchNormAct.__module__, BatchNormAct.__qualname__ = "timm.layers.norm_act", "BatchNormAct2d"


def passed_on(block: nn.Module, y: Tensor) -> Tensor:
    return y


NOTHING_LAST = dict(last=nn.Identity())
LEAKY_IN_PLACE = partial(nn.LeakyReLU, 0.2, inplace=True)
# What follows the norm, why it is left, and other modules of the block.
LEFT = {
    "no call": (lambda b, y: y + 1, "was not called on the ex", dict(other=bn())),
    "summed first": (lambda b, y: b.act(y) + y, "several readers: LeakyReLU, add in Block"),
    "sum in place": (lambda b, y: b.act(y.add_(1)), "overwritten by add_ in Block"),
    "through a view": (lambda b, y: b.act(y.flatten(1).add_(1).view_as(y)), "overwritten by add_ in Block"),
    "result overwritten": (overwriting, "overwritten by add_ in Block"),
    "dropout in place": (lambda b, y: b.drop(b.act(y)), "overwritten by Dropout", dict(drop=nn.Dropout(inplace=True))),
    "a function": (lambda b, y: F.relu(y), "function relu in Block follows.* recompute_activations"),
    "relu6": (lambda b, y: b.relu(y), "followed by ReLU6, which an in", dict(relu=nn.ReLU6(inplace=True))),
    "relu": (lambda b, y: b.relu(y), "a ReLU cannot be inverted; relu_slope=0.01"),
    "called twice": (lambda b, y: b.norm(b.act(y)).tanh(), "only some of its calls; .* LeakyReLU, tanh in B"),
    "followed by two kinds": (lambda b, y: b.tanh(b.norm(b.act(y))), "activations follow its calls: LeakyReLU, Tanh"),
    "dropout when training": (lambda b, y: b.act(F.dropout(y, 0.5, b.training)), "LeakyReLU, dropout in Block"),
    "returned": (passed_on, "the network returns its output", NOTHING_LAST),
    "returned beside": (lambda b, y: {"z": b.act(y), "y": [y]}, "LeakyReLU, the caller of the network", NOTHING_LAST),
    "only summed": (lambda b, y: y + 1, "save no memory: its output goes to add in Block"),
    "hooks": (lambda b, y: b.act(y), "it has hooks", dict(norm=with_hook(bn()))),
    "hooks of the activation": (lambda b, y: b.act(y), "LeakyReLU that follows has hooks", dict(act=with_hook(act()))),
    "overwritten output of ours": (lambda b, y: y.add_(1), "overwritten by add_ in Block", dict(norm=ABN(C))),
    "like timm's": (passed_on, "it is a subclass", dict(norm=Lookalike(act()))),
    "timm's with relu": (passed_on, "a ReLU cannot be inverted", dict(norm=BatchNormAct(nn.ReLU()))),
    "timm's with silu": (passed_on, "it includes SiLU", dict(norm=BatchNormAct(nn.SiLU()))),
    "timm's with dropout": (passed_on, "it is a subclass", dict(norm=BatchNormAct(act(), nn.Dropout(0.0)))),
    "hooks of timm's activation": (passed_on, "has hooks", dict(norm=BatchNormAct(with_hook(act())))),
    "ours, then in place": (
        lambda b, y: b.act(y),
        "followed by LeakyReLU, .* overw",
        dict(norm=ABN(C), act=LEAKY_IN_PLACE()),
    ),
}


@pytest.mark.parametrize("case", LEFT)
def test_every_reason_for_leaving_a_norm(case):
    after, reason, *more = LEFT[case]
    network = Block(after, **copy.deepcopy(dict(*more)))
    assert_left(network, reason, "other" if case == "no call" else "norm", example=torch.randn(2, C, 3, 3))


ACTIVATIONS = [nn.LeakyReLU(0.2), LEAKY_IN_PLACE(), nn.ELU(0.7), nn.Sigmoid(), nn.Tanh()]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_activations_keep_their_function(activation):
    """The activation also acts elsewhere, and the norm is called twice."""

    def after(block: nn.Module, y: Tensor) -> Tensor:
        y = block.pass_on(y)
        assert y.shape[1] == C and y.dim() == 4 and not y.is_cuda
        return block.act(block.act(block.norm(block.act(y))) + 1)

    torch.manual_seed(0)
    network = trained(Block(after, act=copy.deepcopy(activation), pass_on=nn.Identity())).double()
    x = torch.randn(2, C, 5, 5, dtype=torch.float64)
    reference, state = copy.deepcopy(network), state_of(network)
    _, report = converted(to_inplace, network, example=(x,))
    assert list(report.replaced) == ["norm"] and not report.kept and state_of(network) == state
    assert type(network.norm) is InPlaceABN and isinstance(network.act, MergedActivation)
    assert_same_function(network, reference, x)


def test_a_norm_without_activation_is_replaced_where_that_saves_memory():
    """A convolution keeps the norm's output anyway, a sum does not."""
    x = torch.randn(2, C, 8, 8)
    for after, saved in ((lambda b, y: y, 1), (lambda b, y: b.silu(y), 1), (lambda b, y: y + 1, 0)):
        network = Block(after, silu=nn.SiLU())
        before, forced = len(kept_maps(network, x)), copy.deepcopy(network)
        _, report = converted(to_inplace, network, example=x)
        assert bool(report.replaced) == bool(saved)
        forced.norm = InPlaceABN(C, activation="identity")
        assert before - len(kept_maps(eagerly(forced), x)) == saved


class Careless(nn.Module):
    """A network whose forward pass changes much of itself."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(C, C, 1), bn(), act()
        self.dropout = nn.Dropout(0.5).eval()
        self.calls, self.seen = 0, []
        self.register_buffer("mean", torch.zeros(C))
        self.alias = nn.Module()
        self.alias.register_buffer("mean", self.mean)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x.shape)
        self.mean += x.mean((0, 2, 3))
        self.extra = nn.Linear(random.randint(1, 5), 2)
        x.mul_(2)
        self.train()
        return self.dropout(self.act(self.norm(self.conv(x))))


def test_the_passes_leave_everything_as_it_was():
    network = Careless()
    fired = []
    network.conv.register_forward_hook(lambda *args: fired.append(1))
    network.norm.eval()
    hooks = {module: dict(module._forward_hooks) for module in network.modules()}
    modes = {name: module.training for name, module in network.named_modules()}
    tensors = network.state_dict(keep_vars=True)
    values = {name: (tensor, tensor.clone(), tensor._version) for name, tensor in tensors.items()}
    x = torch.randn(2, C, 3, 3)
    example, states = x.clone(), (torch.get_rng_state(), random.getstate())
    _, report = converted(to_inplace, network, example=example)
    assert list(report.replaced) == ["norm"] and len(fired) == 2
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert torch.equal(example, x)
    for name, now in network.state_dict(keep_vars=True).items():
        tensor, value, version = values.pop(name)
        assert now is tensor and torch.equal(now, value) and now._version == version
    assert not values
    assert network.mean is network.alias.mean
    assert (network.calls, network.seen, hasattr(network, "extra")) == (0, [], False)
    assert {name: network.get_submodule(name).training for name in modes} == modes
    for module in network.modules():
        assert module is network.norm or dict(module._forward_hooks) == hooks.get(module, {})
        assert not module._forward_pre_hooks and not module._forward_hooks_always_called
    assert not network.norm.training


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_a_failing_pass_leaves_everything_too_and_says_why():
    network = Careless()
    network.last = nn.Linear(3, 3)
    network.forward = lambda x: network.last(Careless.forward(network, x))
    modules, state = list(network.modules()), {name: value.clone() for name, value in network.state_dict().items()}
    message = r"raises RuntimeError in training mode on an example of shape \(2, 4, 5, 5\): "
    with pytest.raises(ValueError, match=message) as e:
        to_inplace(network, example=torch.randn(2, C, 5, 5))
    assert isinstance(e.value.__cause__, RuntimeError) and str(e.value.__cause__) in str(e.value)
    assert list(network.modules()) == modules and network.calls == 0 and not network.norm._forward_hooks
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    x = torch.randn(1, C, 1, 1)
    for other, example, message in (
        (network, x, r"\(1, 4, 1, 1\): Expected more than 1 value per channel"),
        (network, [x], "example is a list: expected a tensor, or a tuple"),
        (nn.Sequential(nn.LazyConv2d(C, 1), bn()), x, "run the network once first"),
        (nn.Sequential(torch.jit.script(bn())), x, "0 is scripted"),
    ):
        with pytest.raises(ValueError, match=message):
            to_inplace(other, example=example)


WAYS = {  # what follows the first norm
    "activation": lambda n, x, y: n.act(y) * 2,
    "none": lambda n, x, y: y * 2,
    "sum": lambda n, x, y: n.act(operator.iadd(y, x)),
    "other activation": lambda n, x, y: n.tanh(y),
    "not converted": lambda n, x, y: n.act(n.other(x)) + n.act(y) + n.act(x),
}


def branches(network: nn.Module, x: Tensor) -> Tensor:
    x = network.tanh(network.third(x))
    return WAYS[network.way](network, x, network.norm(x))


def test_another_way_than_on_the_example_is_right_or_raises():
    torch.manual_seed(0)
    network = Network(branches, norm=bn(), other=bn(), third=bn(), act=act(), tanh=nn.Tanh())
    network.way = "activation"
    trained(network).double()
    x = torch.randn(2, C, 3, 3, dtype=torch.float64)
    reference = copy.deepcopy(network)
    _, report = converted(to_inplace, network, example=x)
    assert list(report.replaced) == ["norm", "third"]
    assert report.kept == {"other": "BatchNorm2d: it was not called on the example"}
    eagerly(network)
    for way in ("activation", "not converted"):
        network.way = reference.way = way
        torch.testing.assert_close(network(x), reference(x), rtol=1e-12, atol=1e-12)
    errors = {"none": "did not go.* __mul__", "sum": "did not go.* to code", "other activation": "did not go.* to Tanh"}
    for network.way, message in errors.items():
        with pytest.raises(RuntimeError, match=message):
            network(x)


def test_the_output_handed_over_raises_wherever_else_it_goes():
    network = to_inplace(Block(lambda b, y: b.act(y)), example=torch.randn(2, C, 3, 3))
    y = eagerly(network).norm(torch.randn(2, C, 3, 3))
    assert y.shape == (2, C, 3, 3) and y.dtype == torch.float32
    uses = [lambda: y + 1, lambda: 1 + y, lambda: y == 0, lambda: y[:, :2], lambda: y.mean(), lambda: list(y)]
    uses += [lambda: torch.cat([y.tensor, y]), lambda: nn.Conv2d(C, C, 1)(y), lambda: y.tensor.add_(y)]
    for use in uses:
        with pytest.raises((RuntimeError, AttributeError), match="convert the network with an example"):
            use()


def small_bottleneck() -> tuple[nn.Module, nn.Module, Tensor]:
    """A converted block with one ReLU module for all, and the block with a leaky one."""
    torch.manual_seed(0)
    block = trained(Bottleneck(4 * C, C)).double()
    reference = copy.deepcopy(block)
    reference.__class__ = LeakyBottleneck
    x = torch.randn(2, 4 * C, 4, 4, dtype=torch.float64)
    network, report = converted(to_inplace, block, relu_slope=0.01, example=x)
    assert list(report.replaced) == ["bn1", "bn2"]
    return eagerly(network), reference, x


CHANGES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "compile": lambda network: torch.compile(network, backend="eager", fullgraph=True),
    "DataParallel": nn.DataParallel,
    "to_standard": to_standard,
    "and back": lambda network: CHANGES["again"](to_standard(network)),
    "sync": InPlaceABNSync.convert,
    "again": lambda network: to_inplace(network, relu_slope=0.01, example=torch.randn(2, 4 * C, 4, 4).double()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_shared_relu_stays_right(change):
    network, reference, x = small_bottleneck()
    assert_same_function(CHANGES[change](network), reference, x)


@FSDP2_ON_CPUS
def test_norms_that_fsdp2_shards_by_themselves():
    network, reference, x = small_bottleneck()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (*(norm for norm in network.modules() if isinstance(norm, (ABN, nn.BatchNorm2d))), network):
            fully_shard(module, mesh=mesh)
        network(x).square().sum().backward()
        reference(x).square().sum().backward()
        for ours, theirs in zip(network.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-8, atol=1e-8)
    finally:
        dist.destroy_process_group()


def test_checkpointing_between_norm_and_activation():
    """PyTorch's reentrant checkpoint would lose the gradient without an error."""

    class Net(nn.Sequential):
        reentrant = False

        def forward(self, x: Tensor) -> Tensor:
            return self[2](checkpoint(lambda x: self[1](self[0](x)), x, use_reentrant=self.reentrant))

    network = Net(nn.Conv2d(C, C, 1), bn(), act()).double()
    x = torch.randn(2, C, 3, 3, dtype=torch.float64, requires_grad=True)
    reference = copy.deepcopy(network)
    _, report = converted(to_inplace, network, example=x)
    assert list(report.replaced) == ["1"]
    assert_same_function(network, reference, x)
    network.reentrant = True
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        network(x)


def test_layers_of_ours_are_replaced_with_an_example_too():
    network = nn.ModuleList([ABN(C), CheckpointedABN(C, activation="tanh"), ABN(C, activation="relu")])
    network.forward = lambda x: network[0](network[1](x))
    _, report = converted(to_inplace, network, example=torch.randn(2, C, 3, 3))
    assert list(report.replaced) == ["0", "1"] and "cannot be inverted" in report.kept["2"]


@pytest.mark.parametrize("activation", [*ACTIVATIONS, nn.Identity()], ids=repr)
def test_a_batch_norm_with_an_activation_of_its_own(activation):
    torch.manual_seed(0)
    network = trained(Block(passed_on, norm=BatchNormAct(copy.deepcopy(activation)))).double()
    reference, state = copy.deepcopy(network), state_of(network)
    x = torch.randn(2, C, 4, 4, dtype=torch.float64)
    _, report = converted(to_inplace, network, example=x)
    assert list(report.replaced) == ["norm"] and not report.kept and state_of(network) == state
    assert type(network.norm) is InPlaceABN and not network.norm._forward_hooks
    assert report.replaced["norm"].startswith(f"BatchNormAct + {type(activation).__name__} -> InPlaceABN(")
    assert_same_function(network, reference, x)


@pytest.mark.slow
def test_networks_of_timm():
    timm = pytest.importorskip("timm")
    replaced_and_kept = {"cspdarknet53": (67, 0), "regnetx_002": (27, 17), "resnet26": (17, 12), "tresnet_m": (36, 24)}
    for name, counts in replaced_and_kept.items():
        torch.manual_seed(0)
        network = trained(timm.create_model(name)).double()
        x = torch.randn(2, 3, 48, 48, dtype=torch.float64)
        reference = copy.deepcopy(network)
        _, report = converted(to_inplace, network, relu_slope=0.01, example=x)
        assert (len(report.replaced), len(report.kept)) == counts
        if name == "cspdarknet53":  # has leaky ReLUs only
            assert_same_function(network, reference, x)


# Random programs: each step is (instruction, index of an earlier value); the last value is the output.
STEPS = {
    "norm": lambda net, x, y: net.norms[len(net.called) % 3](x),
    "first norm": lambda net, x, y: net.norms[0](x),
    "act": lambda net, x, y: net.act(x),
    "act in place": lambda net, x, y: net.act_in_place(x),
    "tanh": lambda net, x, y: net.tanh(x),
    "conv": lambda net, x, y: net.conv(x),
    "add": lambda net, x, y: x + y,
    "add in place": lambda net, x, y: x.add_(y),
    "view": lambda net, x, y: x.view_as(x),
    "function": lambda net, x, y: F.leaky_relu(x, 0.3),
    "dropout": lambda net, x, y: F.dropout(x, 0.0, net.training),
}


class Program(nn.Module):
    def __init__(self, steps: list[tuple[str, int, int]]):
        super().__init__()
        self.steps = steps
        self.norms = nn.ModuleList([bn(), bn(), ABN(C, activation="identity")])
        self.act, self.act_in_place, self.tanh = act(), nn.LeakyReLU(0.2, inplace=True), nn.Tanh()
        self.conv = nn.Conv2d(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        values, self.called = [x * 1], []
        for name, one, other in self.steps:
            self.called += [name] if name == "norm" else []
            values.append(STEPS[name](self, values[-1 - one % min(len(values), 3)], values[-1 - other % len(values)]))
        return self.conv(values[-1])


@settings(max_examples=60)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 5)), max_size=9)
)
def test_any_program(steps):
    """A program that trains before the conversion trains after it, with the same gradients."""
    torch.manual_seed(0)
    network = trained(Program([("norm", 0, 0), *steps])).double()
    reference, state = copy.deepcopy(network), state_of(network)
    x = torch.randn(2, C, 3, 3, dtype=torch.float64)
    _, report = converted(to_inplace, network, example=x)
    assert state_of(network) == state and len(report.replaced) + len(report.kept) == 3

    def step(network: nn.Module) -> list[Tensor | None]:
        z = network(x)
        return [z, *torch.autograd.grad(z.square().sum(), list(network.parameters()), allow_unused=True)]

    with torch.no_grad():
        torch.testing.assert_close(eagerly(network).eval()(x), reference.eval()(x), rtol=1e-9, atol=1e-9)
    try:
        expected = step(reference.train())
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        assume(False)
    torch.testing.assert_close(step(network.train()), expected, rtol=1e-6, atol=1e-6)
