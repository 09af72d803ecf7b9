"""The layers in real training code: whole networks, recomputation, copies, compilation, shortcuts."""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from models.blocks import IdentityResidualBlock
from models.bodies import resnext101
from models.heads import DeepLabV3
from models.layers import ABN, InPlaceABN, recompute_activations
from models.layers.backends.compiled import compiler_available
from models.segmentation import SegmentationNetwork
from scripts.bench.measuring import kept_bytes, saved_for_backward
from tests.norms import CHECKPOINTED, IN_PLACE, STRATEGIES

SAVING = [name for name in STRATEGIES if name != "std"]


def images(size: int = 32) -> torch.Tensor:
    return torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def segmentation_network(norm_act) -> nn.Module:
    torch.manual_seed(0)
    body = resnext101(
        norm_act, output_stride=8, structure=(1, 2, 1, 1), groups=2, base_channels=(8, 8, 16), stem_channels=8
    )
    network = SegmentationNetwork(body, DeepLabV3(body.out_channels, 8, (2, 4), norm_act=norm_act), 3).double()
    return recompute_activations(network, checkpointed_only=True)


def block(norm_act) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(IdentityResidualBlock(4, (4, 8), norm_act=norm_act), norm_act(8)).double()


def gradients(network: nn.Module, inputs: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)  # for dropout
    return torch.autograd.grad(network(inputs).square().mean(), list(network.parameters()))


def assert_close(ours, theirs, atol=1e-10):
    for result, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(result, expected, rtol=0, atol=atol)


def assert_same_gradients(network: nn.Module, standard: nn.Module) -> None:
    """Up to rounding, relative to the largest."""
    expected = gradients(standard, images())
    largest = max(gradient.abs().max().item() for gradient in expected)
    assert_close(gradients(network, images()), expected, atol=1e-10 * largest)


@pytest.mark.parametrize("strategy", SAVING)
def test_whole_networks_have_the_gradients_and_statistics_of_standard(strategy):
    standard, network = segmentation_network(ABN), segmentation_network(STRATEGIES[strategy])
    assert_same_gradients(network, standard)
    assert list(network.state_dict()) == list(standard.state_dict())
    for ours, theirs in zip(network.state_dict().values(), standard.state_dict().values(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def activation_bytes(network: nn.Module, inputs: torch.Tensor) -> int:
    return kept_bytes(network, lambda: network(inputs), ())


def test_whole_networks_keep_about_half_and_every_saving_strategy_the_same():
    kept = {name: activation_bytes(segmentation_network(norm), images(64)) for name, norm in STRATEGIES.items()}
    saving = [kept[strategy] for strategy in SAVING]
    assert max(saving) < 0.62 * kept["std"]  # max-pooling and dropout keep their own values
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


class NormAndConvolution(nn.Module):
    """What comes between the two, and after them, is given."""

    def __init__(self, norm: nn.Module, between=lambda z: z, after=lambda y: y):
        super().__init__()
        self.norm, self.conv = norm, nn.Conv2d(4, 4, 3)
        self.between, self.after = between, after

    def forward(self, x):
        return self.after(self.conv(self.between(self.norm(x))))


def clamp_detached(z: torch.Tensor) -> torch.Tensor:
    z.detach().clamp_(max=0.5)
    return z


@torch.no_grad()
def double_unseen(z: torch.Tensor) -> torch.Tensor:
    return z.mul_(2)


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_an_output_changed_in_place_is_never_recomputed_wrongly(strategy):
    """Dropout, activations and sums often write over a norm's output."""
    networks = []
    for norm in (ABN, STRATEGIES[strategy]):
        torch.manual_seed(0)
        networks.append(NormAndConvolution(norm(4, activation="identity"), lambda z: z.mul_(2)).double())
    standard, network = networks
    recompute_activations(network, checkpointed_only=True)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    assert_close(gradients(network, x), gradients(standard, x))


@pytest.mark.parametrize("strategy", IN_PLACE)
def test_writing_over_what_an_in_place_layer_keeps_raises(strategy):
    z = STRATEGIES[strategy](4)(torch.randn(2, 4, 8, 8) * 1)
    z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_writing_over_what_the_network_keeps_raises_while_recomputing_too(strategy):
    """Autograd does not check versions under saved-tensor hooks, so our hooks do."""

    def square_and_overwrite(y: torch.Tensor) -> torch.Tensor:
        squared = y.square()  # keeps y
        y.mul_(2)
        return squared

    network = NormAndConvolution(STRATEGIES[strategy](4), after=square_and_overwrite)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        recompute_activations(network, checkpointed_only=True)(torch.randn(2, 4, 8, 8)).sum().backward()


@pytest.mark.parametrize("strategy", CHECKPOINTED)
def test_hooks_around_a_network_are_asked_once_for_what_they_keep(strategy):
    """E.g. those of torch.utils.checkpoint may refuse to unpack twice."""
    network = recompute_activations(block(STRATEGIES[strategy]), checkpointed_only=True)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    expected, unpacked = gradients(block(ABN), x), []

    def unpack(packed):
        unpacked.append(packed[0])
        return packed[1]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (object(), tensor), unpack):
        assert_close(gradients(network, x), expected)
    assert unpacked and len(unpacked) == len(set(unpacked))
    loss = checkpoint(network, x, use_reentrant=False).square().mean()
    assert_close(torch.autograd.grad(loss, list(network.parameters())), expected)


@pytest.mark.parametrize("strategy", CHECKPOINTED)
@pytest.mark.parametrize("change", [clamp_detached, double_unseen])
def test_an_output_changed_behind_autograd_s_back_is_kept_as_it_is(strategy, change):
    network = NormAndConvolution(STRATEGIES[strategy](4), change).double()
    recompute_activations(network, checkpointed_only=True)
    x = torch.randn(2, 4, 8, 8, dtype=torch.float64)
    output = network(x)
    z = change(F.leaky_relu(F.batch_norm(x, None, None, training=True), 0.01))
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
    network = nn.Sequential(STRATEGIES[strategy](4), nn.Conv2d(4, 4, 3), STRATEGIES[strategy](4)).double()
    plain = copy.deepcopy(network)
    x = torch.randn(3, 4, 8, 8, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(plain(x).square().mean(), [x, *plain.parameters()])
    checkpoint(network, x, use_reentrant=use_reentrant).square().mean().backward()
    assert_close([x.grad, *(p.grad for p in network.parameters())], expected)
    for ours, theirs in zip(network.buffers(), plain.buffers(), strict=True):
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
    assert_same_gradients(network, standard)
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
    assert_same_gradients(network.train(), standard.train())


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


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "inplace_1"])  # compiled as variant II
def test_compiles_to_one_graph_that_keeps_no_more(strategy):
    """Saved tensors cross the graph's boundary, where they are counted."""
    torch._dynamo.reset()
    network = recompute_activations(block(STRATEGIES[strategy]), checkpointed_only=True)
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager_decomp_partition")
    x = torch.randn(2, 4, 16, 16, dtype=torch.float64)
    assert_close(gradients(compiled, x), gradients(network, x))
    if strategy not in CHECKPOINTED:
        assert activation_bytes(compiled, x) <= activation_bytes(network, x)


def as_inductor_divides_it(graph: torch.fx.GraphModule, inputs: list) -> Callable:
    """Inductor's graphs of the forward and the backward pass, run by PyTorch's operators: C++ compiles for seconds."""
    from functorch.compile import make_boxed_func  # here, because they take seconds to import
    from torch._inductor.compile_fx import compile_fx

    return compile_fx(graph, inputs, inner_compile=lambda part, inputs, **options: make_boxed_func(part.forward))


@pytest.mark.parametrize("strategy", ["std", "inplace"])
@pytest.mark.parametrize("backend", [as_inductor_divides_it, pytest.param("inductor", marks=pytest.mark.slow)])
def test_inductor_keeps_no_more_activations(strategy, backend):
    """It may also keep copies of convolution weights in another layout, which are far smaller here."""
    if backend == "inductor" and not compiler_available("cpu"):
        pytest.skip("needs a C++ compiler")
    torch._dynamo.reset()
    network = block(STRATEGIES[strategy]).float()
    x = torch.randn(2, 4, 16, 16)

    def kept(forward) -> int:
        _, saved = saved_for_backward(lambda: forward(x))
        sizes = [tensor.untyped_storage().nbytes() for tensor in saved]
        return sum(size for size in sizes if size >= x.nbytes)

    assert 0 < kept(torch.compile(network, fullgraph=True, backend=backend)) <= kept(network)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_half_the_bytes_again(strategy, dtype):
    network = recompute_activations(block(STRATEGIES[strategy]).float(), checkpointed_only=True)
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
