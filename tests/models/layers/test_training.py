"""The layers in real training code: whole networks, recomputation, copies, compilation, shortcuts."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from models.blocks import IdentityResidualBlock
from models.bodies import resnext101, wider_resnet38_a2
from models.heads import DeepLabV3
from models.layers import ABN, CheckpointedABN, InPlaceABN, recompute_activations
from models.layers.backends.compiled import compiler_available
from models.segmentation import SegmentationNetwork
from scripts.bench.measuring import saved_for_backward

STRATEGIES = {
    "std": ABN,
    "checkpoint": partial(CheckpointedABN, store="x"),
    "checkpoint_xhat": partial(CheckpointedABN, store="x_hat"),
    "inplace_1": partial(InPlaceABN, variant="I"),
    "inplace": InPlaceABN,
}
SAVING = [name for name in STRATEGIES if name != "std"]
CHECKPOINTED = ["checkpoint", "checkpoint_xhat"]


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def segmentation_network(norm_act) -> nn.Module:
    torch.manual_seed(0)
    body = resnext101(
        norm_act, output_stride=8, structure=(1, 2, 1, 1), groups=2, base_channels=(8, 8, 16), stem_channels=8
    )
    network = SegmentationNetwork(body, DeepLabV3(body.out_channels, 8, (2, 4), norm_act=norm_act), 3).double()
    return recompute_activations(network, checkpointed_only=True)


def wide_body(norm_act) -> nn.Module:
    torch.manual_seed(0)
    channels = [(8, 8), (8, 8), (8, 8), (8, 16), (8, 8, 16), (8, 8, 16)]
    body = wider_resnet38_a2(norm_act, output_stride=8, structure=(1,) * 6, channels=channels, stem_channels=8).double()
    return recompute_activations(body, checkpointed_only=True)


NETWORKS = {"resnext and head": segmentation_network, "wide resnet": wide_body}
SHARE_KEPT = {"resnext and head": 0.62, "wide resnet": 0.78}  # max-pooling and dropout keep their own values


def gradients(network: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)  # for dropout
    return torch.autograd.grad(network(inputs).square().mean(), list(network.parameters()))


def assert_close(ours, theirs, atol=1e-10):
    for result, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("strategy", SAVING)
def test_whole_networks_have_the_gradients_and_statistics_of_standard(name, strategy):
    standard, network = NETWORKS[name](ABN), NETWORKS[name](STRATEGIES[strategy])
    expected = gradients(standard, images())
    assert_close(gradients(network, images()), expected, atol=1e-10 * max(g.abs().max().item() for g in expected))
    assert network.state_dict().keys() == standard.state_dict().keys()
    for key, value in standard.state_dict().items():
        torch.testing.assert_close(network.state_dict()[key], value, rtol=1e-10, atol=1e-10)


def activation_bytes(network: nn.Module, inputs: torch.Tensor) -> int:
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    _, saved = saved_for_backward(lambda: network(inputs))
    return sum(t.untyped_storage().nbytes() for t in saved if t.untyped_storage()._cdata not in parameters)


@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks_keep_about_half_and_every_saving_strategy_the_same(name):
    kept = {strategy: activation_bytes(NETWORKS[name](norm), images(64)) for strategy, norm in STRATEGIES.items()}
    saving = [kept[strategy] for strategy in SAVING]
    assert max(saving) < SHARE_KEPT[name] * kept["std"]
    assert max(saving) - min(saving) < 0.02 * kept["std"]  # statistics: (b) keeps means and x_hat does not


@pytest.mark.parametrize("strategy", CHECKPOINTED)
@pytest.mark.parametrize("kind", ["block", "projection", "two readers", "stacked"])
def test_nothing_keeps_the_output_of_a_checkpointed_layer(strategy, kind):
    norm = STRATEGIES[strategy]

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = norm(4), norm(4)
            self.conv, self.other = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            self.z = self.first(x)
            if kind == "stacked":
                self.z2 = self.second(self.z)
                return self.conv(self.z2)
            z = self.conv(self.z)
            return z + self.other(self.z) if kind == "projection" else z * self.z.sum() if kind == "two readers" else z

    network = recompute_activations(Network(), checkpointed_only=True)
    _, saved = saved_for_backward(lambda: network(torch.randn(2, 4, 8, 8) * 1))
    kept = {tensor.untyped_storage()._cdata for tensor in saved}
    assert network.z.untyped_storage()._cdata not in kept
    assert kind != "stacked" or network.z2.untyped_storage()._cdata not in kept


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_an_output_changed_in_place_is_never_recomputed_wrongly(strategy):
    """Dropout, activations and sums often write over a norm's output."""

    class Network(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.conv = norm(4, activation="identity"), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            return self.conv(self.norm(x).mul_(2))

    torch.manual_seed(0)
    network = recompute_activations(Network(STRATEGIES[strategy]).double(), checkpointed_only=True)
    torch.manual_seed(0)
    standard = Network(ABN).double()
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    assert_close(gradients(network, x), gradients(standard, x))


@pytest.mark.parametrize("strategy", ["inplace", "inplace_1"])
def test_writing_over_what_an_in_place_layer_keeps_raises(strategy):
    z = STRATEGIES[strategy](4)(torch.randn(2, 4, 8, 8) * 1)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_writing_over_what_the_network_keeps_raises_while_recomputing_too(strategy):
    """Autograd does not check versions under saved-tensor hooks, so our hooks do."""

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.conv = STRATEGIES[strategy](4), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            y = self.conv(self.norm(x))
            squared = y.square()  # keeps y
            y.mul_(2)
            return squared

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recompute_activations(Network(), checkpointed_only=True)(torch.randn(2, 4, 8, 8)).sum().backward()


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_recomputation_leaves_other_hooks_working(strategy):
    network, plain = segmentation_network(STRATEGIES[strategy]), segmentation_network(ABN)
    with torch.autograd.graph.save_on_cpu():
        ours = gradients(network, images())
    expected = gradients(plain, images())
    assert_close(ours, expected, atol=1e-10 * max(g.abs().max().item() for g in expected))


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_what_is_kept_is_asked_for_once(strategy):
    """Hooks around a prepared network, e.g. from torch.utils.checkpoint, may refuse to unpack twice."""
    network = recompute_activations(blocks(STRATEGIES[strategy]), checkpointed_only=True)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    unpacked = []

    def unpack(packed):
        unpacked.append(packed[0])
        return packed[1]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (object(), tensor), unpack):
        expected = gradients(network, x)
    assert len(unpacked) == len(set(unpacked))
    loss = checkpoint(network, x, use_reentrant=False).square().mean()
    assert_close(torch.autograd.grad(loss, list(network.parameters())), expected)


@pytest.mark.parametrize("strategy", CHECKPOINTED)
@pytest.mark.parametrize("how", ["no_grad", "detach"])
def test_an_output_changed_behind_autograd_s_back_is_kept_as_it_is(strategy, how):
    class Network(nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.norm, self.conv = norm(4), nn.Conv2d(4, 4, 3)

        def forward(self, x):
            z = self.norm(x)
            if how == "detach":
                z.detach().clamp_(max=0.5)
            else:
                with torch.no_grad():
                    z.mul_(2)
            return self.conv(z)

    torch.manual_seed(0)
    network = recompute_activations(Network(STRATEGIES[strategy]).double(), checkpointed_only=True)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    output = network(x)
    z = F.leaky_relu(F.batch_norm(x, None, None, training=True), 0.01)
    z = z.clamp(max=0.5) if how == "detach" else 2 * z
    dz = torch.randn_like(output)
    (ours,) = torch.autograd.grad(output, network.conv.weight, dz)
    torch.testing.assert_close(ours, torch.nn.grad.conv2d_weight(z, ours.shape, dz), rtol=0, atol=1e-10)


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_a_network_without_a_backward_pass_is_freed(strategy):
    """An operation that keeps its own output must not keep itself alive."""
    network = recompute_activations(
        nn.Sequential(STRATEGIES[strategy](4), nn.Conv2d(4, 4, 3), nn.Sigmoid(), nn.ReLU()), checkpointed_only=True
    )
    output = network(torch.randn(2, 4, 8, 8))
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_a_failing_forward_pass_closes_the_recomputation(strategy):
    network = segmentation_network(STRATEGIES[strategy])
    with pytest.raises(ValueError):
        network.body(torch.randn(1, 3, 1, 1, dtype=torch.float64))
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_graph_can_be_used_twice_and_in_parts(strategy):
    network = segmentation_network(STRATEGIES[strategy])
    loss = network(images()).square().mean()
    parameters = list(network.parameters())
    first = torch.autograd.grad(loss, parameters, retain_graph=True)
    last = torch.autograd.grad(loss, parameters[-1], retain_graph=True)  # runs no norm's backward
    assert_close([*torch.autograd.grad(loss, parameters), *last], [*first, first[-1]], atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_torch_checkpoint_around_a_block(strategy, use_reentrant):
    """The recomputed forward pass has the same gradients and does not count its minibatch again."""
    block = nn.Sequential(STRATEGIES[strategy](4), nn.Conv2d(4, 4, 3), STRATEGIES[strategy](4)).double()
    plain = copy.deepcopy(block)
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().mean(), [x, *plain.parameters()])
    checkpoint(block, x, use_reentrant=use_reentrant).square().mean().backward()
    assert_close([x.grad, *(p.grad for p in block.parameters())], expected)
    for ours, theirs in zip(block.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_frozen_statistics_inside_training(strategy):
    """Fine-tuning with BN in eval mode: as few bytes as in training, exact gradients, nothing updated."""
    network, standard = segmentation_network(STRATEGIES[strategy]), segmentation_network(ABN)
    trained = activation_bytes(network, images())
    gradients(standard, images())  # updates its statistics as often
    for net in (network, standard):
        for layer in net.modules():
            if isinstance(layer, ABN):
                layer.eval()
    before = copy.deepcopy(network.state_dict())
    assert activation_bytes(network, images()) <= trained
    expected = gradients(standard, images())
    assert_close(gradients(network, images()), expected, atol=1e-10 * max(g.abs().max().item() for g in expected))
    assert all(torch.equal(value, before[key]) for key, value in network.state_dict().items())


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_copies_averages_and_state_dicts(strategy):
    network = segmentation_network(STRATEGIES[strategy])
    gradients(network, images())
    twin, average = copy.deepcopy(network), AveragedModel(network, use_buffers=True)
    average.update_parameters(network)
    fresh = segmentation_network(STRATEGIES[strategy])
    fresh.load_state_dict(network.state_dict())
    expected = gradients(network, images())
    for other in (twin, average, fresh):
        assert_close(gradients(other, images()), expected, atol=0)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_evaluation_equals_standard_and_training_goes_on_after_it(strategy, mode):
    network, standard = segmentation_network(STRATEGIES[strategy]), segmentation_network(ABN)
    with mode():
        torch.testing.assert_close(network.eval()(images()), standard.eval()(images()), rtol=0, atol=1e-10)
    expected = gradients(standard.train(), images())
    assert_close(
        gradients(network.train(), images()), expected, atol=1e-10 * max(g.abs().max().item() for g in expected)
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_gradients(strategy):
    network = segmentation_network(STRATEGIES[strategy])
    first, second = images(), images() + 1
    expected = [a + b for a, b in zip(gradients(network, first), gradients(network, second), strict=True)]
    for part in (first, second):
        torch.manual_seed(1)
        network(part).square().mean().backward()
    assert_close([p.grad for p in network.parameters()], expected)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_shortcuts_before_and_after(strategy):
    """x and z are read again after the layer, and the preceding relu kept x."""
    layer = STRATEGIES[strategy](4).double()
    x = torch.randn(2, 4, 5, 5, dtype=torch.float64, requires_grad=True)

    def with_shortcuts(bn_act):
        rectified = F.relu(x)
        z = bn_act(rectified)
        return z * rectified + z.square() + bn_act(z) + rectified

    def reference(value):
        return F.leaky_relu(F.batch_norm(value, None, None, layer.weight, layer.bias, training=True), 0.01)

    sources = [x, layer.weight, layer.bias]
    ours, theirs = with_shortcuts(layer), with_shortcuts(reference)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
    dz = torch.randn_like(ours)
    assert_close(torch.autograd.grad(ours, sources, dz), torch.autograd.grad(theirs, sources, dz))


def blocks(norm_act) -> nn.Module:
    torch.manual_seed(0)
    first = IdentityResidualBlock(4, (8, 8, 16), norm_act=norm_act, groups=2)
    return nn.Sequential(first, IdentityResidualBlock(16, (8, 16), norm_act=norm_act), norm_act(16)).double()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_compiles_to_one_graph_that_keeps_no_more(strategy):
    """Saved tensors cross the graph's boundary, where they are counted."""
    torch._dynamo.reset()
    network = recompute_activations(blocks(STRATEGIES[strategy]), checkpointed_only=True)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(2, 4, 32, 32, dtype=torch.float64)
    assert_close(gradients(compiled, x), gradients(network, x))
    if strategy not in CHECKPOINTED:
        assert activation_bytes(compiled, x) <= activation_bytes(network, x)


@pytest.mark.parametrize("strategy", ["std", "inplace"])
def test_inductor_keeps_no_more_activations(strategy):
    """It may also keep copies of convolution weights in another layout, which are far smaller here."""
    if not compiler_available("cpu"):
        pytest.skip("needs a C++ compiler")
    torch._dynamo.reset()
    network = blocks(STRATEGIES[strategy]).float()
    x = torch.randn(2, 4, 32, 32)

    def kept(forward) -> int:
        _, saved = saved_for_backward(lambda: forward(x))
        sizes = [tensor.untyped_storage().nbytes() for tensor in saved]
        return sum(size for size in sizes if size >= x.nbytes)

    assert 0 < kept(torch.compile(network, fullgraph=True)) <= kept(network)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_half_the_bytes_again(strategy, dtype):
    network = recompute_activations(blocks(STRATEGIES[strategy]).float(), checkpointed_only=True)
    x = torch.randn(2, 4, 64, 64)
    full = activation_bytes(network, x)
    with torch.autocast("cpu", dtype):
        x = x.to(dtype)  # as from a convolution
        assert activation_bytes(network, x) < 0.51 * full
        network(x).float().square().mean().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in network.parameters())


def test_cumulative_statistics_on_the_meta_device():
    """momentum=None averages all minibatches, also on the meta device, where a memory planner traces it."""
    layer = InPlaceABN(4, momentum=None).to("meta")
    assert layer(torch.empty(2, 4, 8, 8, device="meta")).shape == (2, 4, 8, 8)
