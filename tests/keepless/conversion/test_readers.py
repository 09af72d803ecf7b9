"""What the trace finds: counts of known networks, and never another function, whatever the program does."""

import copy
import pickle

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

from keepless import ABN, InPlaceABN, InPlaceABNSync
from keepless.conversion.convert import to_inplace, to_standard
from tests.bodies import trained
from tests.cuda import FSDP2_ON_CPUS
from tests.keepless.conversion.test_convert import C, Network, act, assert_same_function, bn, converted, half, state_of


@pytest.mark.parametrize(
    "name, counts",
    [("resnet50", (33, 20)), ("mobilenet_v2", (7, 45)), pytest.param("densenet121", (120, 1), marks=pytest.mark.slow)],
)
def test_how_many_norms_of_known_networks_are_replaced(name, counts):
    with torch.device("meta"):
        network = torchvision.models.get_model(name, weights=None)
    _, report = converted(to_inplace, network, relu_slope=0.01)
    assert (len(report.replaced), len(report.kept)) == counts, report


@pytest.mark.slow
def test_networks_of_timm():
    timm = pytest.importorskip("timm")
    counts = {"cspdarknet53": (67, 0), "regnetx_002": (27, 17), "resnet26": (17, 12), "tf_efficientnet_lite0": (40, 9)}
    for name, expected in counts.items():
        network = trained(timm.create_model(name)).double()
        for parent in list(network.modules()):
            for place, child in parent.named_children():
                if type(child) in (nn.ReLU, nn.ReLU6):
                    parent.add_module(place, nn.LeakyReLU(0.01, inplace=True))
        reference = copy.deepcopy(network)
        _, report = converted(to_inplace, network)
        assert (len(report.replaced), len(report.kept)) == expected
        assert_same_function(network, reference, torch.randn(2, 3, 48, 48, dtype=torch.float64))


def test_single_layers_and_layers_in_several_places():
    layer = trained(ABN(C, activation="tanh"))
    inplace, report = converted(to_inplace, layer)
    assert type(inplace) is InPlaceABN and inplace.weight is layer.weight and not inplace.training
    assert report.replaced == {"": "ABN(tanh) -> InPlaceABN(tanh)"} and "(the module itself)" in str(report)
    assert type(to_standard(inplace)) is ABN
    network = to_inplace(nn.ModuleList([layer, nn.Conv2d(C, C, 1), layer]))
    assert type(network[0]) is InPlaceABN and network[0] is network[2]
    with pytest.raises(ValueError, match=r"relu_slope=0: expected a slope above 0"):
        to_inplace(layer, relu_slope=0)


class LeakyBottleneck(Bottleneck):
    """A bottleneck with a leaky ReLU after its first two norms, and its ReLU after the sum."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.leaky_relu(self.bn1(self.conv1(x)), 0.01)
        y = F.leaky_relu(self.bn2(self.conv2(y)), 0.01)
        return F.relu(self.bn3(self.conv3(y)) + x)


def small_bottleneck() -> tuple[nn.Module, nn.Module, Tensor]:
    """A converted block with one ReLU module for all, and the block with a leaky one."""
    torch.manual_seed(0)
    block = trained(Bottleneck(4 * C, C)).double()
    reference = copy.deepcopy(block)
    reference.__class__ = LeakyBottleneck
    state = state_of(block)
    _, report = converted(to_inplace, block, relu_slope=0.01)
    assert list(report.replaced) == ["bn1", "bn2"] and state_of(block) == state
    return block, reference, torch.randn(2, 4 * C, 4, 4, dtype=torch.float64)


CHANGES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda network: pickle.loads(pickle.dumps(network)),
    "compile": lambda network: torch.compile(network, backend="eager", fullgraph=True),
    "DataParallel": lambda network: to_inplace(nn.DataParallel(network)),
    "to_standard": to_standard,
    "and back": lambda network: converted(to_inplace, to_standard(network), relu_slope=0.01)[0],
    "sync": InPlaceABNSync.convert,
}


@pytest.mark.table
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
        for parameter, expected in zip(network.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, rtol=1e-8, atol=1e-8)
    finally:
        dist.destroy_process_group()


def test_a_network_that_cannot_be_traced_is_converted_in_its_sequentials():
    parts = bn(), act(), nn.Conv2d(C, C, 1), bn()
    network = Network(lambda b, y: half(y), norm=nn.Sequential(*parts))
    trained(network)
    reference = copy.deepcopy(network)
    _, report = converted(to_inplace, network)
    assert list(report.replaced) == ["norm.0"] and "cannot be traced (Trace" in report.kept["norm.3"]
    assert_same_function(network, reference, torch.randn(2, C, 3, 3, dtype=torch.float64))


def test_a_sequential_with_another_forward_pass_is_left_alone():
    """Here it would have been converted alone, as the network around it cannot be traced."""
    block = nn.Sequential(bn(), act())
    block.forward = lambda x: block[1](2 * block[0](x))
    _, report = converted(to_inplace, Network(lambda b, y: half(y), block=block))
    assert not report.replaced and "block.0" in report.kept


def test_the_trace_changes_nothing():
    def after(block: nn.Module, y: Tensor) -> Tensor:
        block.seen.append(y)
        block.last_seen = y
        block.calls += 1
        torch.rand(1)
        return block.train().act(y)

    network = Network(after)
    network.seen = []
    network.register_buffer("calls", torch.zeros(()))
    network.eval()
    random = torch.get_rng_state()
    _, report = converted(to_inplace, network)
    assert list(report.replaced) == ["norm"] and not network.training and not network.norm.training
    assert network.seen == [] and not hasattr(network, "last_seen") and network.calls == 0
    assert torch.equal(torch.get_rng_state(), random)


def test_a_path_that_was_not_traced_raises():
    """So does PyTorch's reentrant checkpoint, which would lose the gradient without an error."""
    ways = {"activation": lambda b, y: b.act(y) * 2, "none": lambda b, y: y * 2, "sum": lambda b, y: b.act(y + 1)}
    ways |= {"convolution": lambda b, y: b.last(y), "other": lambda b, y: b.tanh(y), "attribute": lambda b, y: y.sum()}
    network = Network(lambda b, y: ways[b.way](b, y), tanh=nn.Sequential(bn(), nn.Tanh())[1])
    network.way = "activation"
    _, report = converted(to_inplace, network)
    assert list(report.replaced) == ["norm"]
    for network.way in ways:
        if network.way != "activation":
            with pytest.raises((RuntimeError, TypeError, AttributeError), match="did not go|Activated"):
                network(torch.randn(2, C, 3, 3))

    network = Network(lambda b, y: b.act(y))
    converted(to_inplace, network)
    x = torch.randn(2, C, 3, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        network.act(checkpoint(network.norm, x, use_reentrant=True))
    assert network.act(checkpoint(network.norm, x, use_reentrant=False)).requires_grad


def test_an_activation_that_another_norm_includes_is_refused_on_a_path_that_was_not_traced():
    """Defect: its result was that of the first norm's activation."""
    network = Network(lambda b, y: b.tanh(y) if b.is_short else b.tanh(b.second(b.conv(b.act(y)))), second=bn())
    network.is_short = False
    _, report = converted(to_inplace, network)
    assert list(report.replaced) == ["norm", "second"]
    network.is_short = True
    with pytest.raises(RuntimeError, match="did not go where it went in the trace"):
        network(torch.randn(2, C, 3, 3))


# Random programs: each step is (instruction, index of an earlier value); the last value is the output.
STEPS = {
    "norm": lambda net, x, y: net.norms[len(net.called) % 3](x),
    "first norm": lambda net, x, y: net.norms[0](x),
    "act": lambda net, x, y: net.act(x),
    "act in place": lambda net, x, y: net.act_in_place(x),
    "tanh": lambda net, x, y: net.tanh(x),
    "conv": lambda net, x, y: net.conv(x),
    "add": lambda net, x, y: x + y,
    "add in place": lambda net, x, y: x.__iadd__(y),
    "pass on": lambda net, x, y: net.pass_on(x),
    "function": lambda net, x, y: F.leaky_relu(x, 0.3),
    "dropout": lambda net, x, y: F.dropout(x, 0.0, net.training),
}


class Program(nn.Module):
    def __init__(self, steps: list[tuple[str, int, int]]):
        super().__init__()
        self.steps = steps
        self.norms = nn.ModuleList([bn(), bn(), ABN(C, activation="identity")])
        self.act, self.act_in_place, self.tanh = act(), nn.LeakyReLU(0.2, inplace=True), nn.Tanh()
        self.conv, self.pass_on = nn.Conv2d(C, C, 1), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        values, self.called = [x * 1], []
        for name, first, second in self.steps:
            self.called += [name] if name == "norm" else []
            values.append(
                STEPS[name](self, values[-1 - first % min(len(values), 3)], values[-1 - second % len(values)])
            )
        return self.conv(values[-1])


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.sampled_from([0, 0, 0, 1, 2]), st.integers(0, 5)), max_size=9)
)
def test_any_program(steps):
    """A program that trains before the conversion trains after it, with the same gradients."""
    torch.manual_seed(0)
    network = trained(Program([("norm", 0, 0), *steps])).double()
    reference, state = copy.deepcopy(network), state_of(network)
    x = torch.randn(2, C, 3, 3, dtype=torch.float64)
    _, report = converted(to_inplace, network)
    assert state_of(network) == state and len(report.replaced) + len(report.kept) == 3

    def step(network: nn.Module) -> list[Tensor | None]:
        z = network(x)
        return [z, *torch.autograd.grad(z.square().sum(), list(network.parameters()), allow_unused=True)]

    with torch.no_grad():
        torch.testing.assert_close(network.eval()(x), reference.eval()(x), rtol=1e-9, atol=1e-9)
    try:
        expected = step(reference.train())
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
        assume(False)
    torch.testing.assert_close(step(network.train()), expected, rtol=1e-6, atol=1e-6)
