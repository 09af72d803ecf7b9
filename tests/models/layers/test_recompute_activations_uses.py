"""Whole networks that compute activations again: bytes, gradients, and whatever else surrounds a forward pass."""

import copy
import gc
import pickle
import threading
from collections import Counter

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from models.layers import InPlaceABN, recompute_activations
from models.layers.saved import current_hooks
from scripts.bench.measuring import kept_bytes
from tests.ranks import Ranks

# Kept bytes relative to the plain network, in training.
SHARES = {
    "resnet50": 0.60,
    "densenet121": 0.25,
    "mobilenet_v2": 0.37,
    "efficientnet_b0": 0.34,
    "regnet_y_400mf": 0.52,
    "shufflenet_v2_x1_0": 0.50,
    "googlenet": 0.47,
    "mobilenet_v3_large": 0.48,
    "lraspp_mobilenet_v3_large": 0.48,
    "swin_t": 0.73,
}


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"init_weights": False, "aux_logits": False} if name == "googlenet" else {}
    module = torchvision.models.segmentation if name.startswith(("lraspp", "deeplab")) else torchvision.models
    options = {"weights_backbone": None} if module is torchvision.models.segmentation else options
    return getattr(module, name)(weights=None, **options).double()


def loss_of(network: nn.Module, images: Tensor) -> Tensor:
    torch.manual_seed(1)  # for dropout
    output = network(images)
    output = output["out"] if isinstance(output, dict) else output
    return output.square().mean() + output.mean()


def gradients(network: nn.Module, images: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(network, images), [p for p in network.parameters() if p.requires_grad]))


def assert_same(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-12) -> None:
    largest = max(gradient.abs().max().item() for gradient in expected)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * max(1.0, largest))


@pytest.mark.parametrize("name", SHARES)
def test_networks_of_torchvision_keep_a_share_of_their_bytes(name):
    plain, images = build(name), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    prepared = recompute_activations(copy.deepcopy(plain))
    kept = [kept_bytes(network, lambda n=network: loss_of(n, images), [images]) for network in (prepared, plain)]
    assert round(kept[0] / kept[1], 2) <= SHARES[name]
    for training in (True, False):
        assert_same(gradients(prepared.train(training), images), gradients(plain.train(training), images))
    for ours, theirs in zip(prepared.buffers(), plain.buffers(), strict=True):
        assert torch.equal(ours, theirs)


class Block(nn.Module):
    def __init__(self, channels: int = 4):
        super().__init__()
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.GroupNorm(2, channels)
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, padding=1), nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(F.relu(self.norm1(x)))
        y = F.silu(self.norm2(y))
        return x + self.conv2(y * y.mean((2, 3), keepdim=True).sigmoid())


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Conv2d(4, 2, 1)).double()


IMAGES = torch.linspace(-1, 1, 2 * 3 * 10 * 10, dtype=torch.float64).sin().view(2, 3, 10, 10)


@pytest.fixture
def networks() -> tuple[nn.Module, nn.Module]:
    """The same network, prepared and plain."""
    return recompute_activations(small()), small()


class Operators(TorchDispatchMode):
    """Context that counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("retain", [False, True])
def test_each_value_is_computed_once_per_backward_pass(networks, retain):
    loss = loss_of(networks[0], IMAGES)
    for _ in range(1 + retain):
        with Operators() as operators:
            loss.backward(retain_graph=retain)
        assert operators.calls["native_batch_norm"] == 2
        assert operators.calls["silu"] == 2 and operators.calls["native_group_norm"] == 2


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.ReLU6(True), nn.LeakyReLU(0.1), nn.Hardtanh(-1, 1)], ids=str)
def test_an_activation_overwrites_what_only_it_reads(activation):
    """Its gradient follows from its result, so that nobody else reads the normalised values."""
    network = recompute_activations(nn.Sequential(nn.BatchNorm2d(3), activation, nn.Conv2d(3, 3, 1)))
    loss = loss_of(network, torch.randn(2, 3, 4, 4, requires_grad=True))
    name = "leaky_relu" if isinstance(activation, nn.LeakyReLU) else "hardtanh"
    with Operators() as operators:
        loss.backward()
    assert operators.calls["native_batch_norm"] == operators.calls[name + "_"] == 1
    assert operators.calls[name] == operators.calls["clone"] == operators.calls["copy_"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_transposed_inputs_of_matrix_products_are_not_copied_for_the_backward_pass(dtype):
    """`nn.MultiheadAttention` with batch_first transposes normalised values; its projection copies them."""
    torch.manual_seed(0)
    plain = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True, norm_first=True).to(dtype)
    prepared = recompute_activations(copy.deepcopy(plain))
    x = torch.randn(2, 10, 16, dtype=dtype, requires_grad=True)
    kept = [kept_bytes(network, lambda n=network: n(x).sum(), [x]) for network in (plain, prepared)]
    assert kept[0] - kept[1] == 2 * x.nbytes  # both normalised values, the first in its transposed copy
    for ours, theirs in zip(gradients(prepared, x), gradients(plain, x), strict=True):
        assert torch.equal(ours, theirs)


def test_a_graph_can_be_used_twice_and_in_parts(networks):
    prepared, plain = networks
    loss, parameters = loss_of(prepared, IMAGES), list(prepared.parameters())
    expected = gradients(plain, IMAGES)
    assert_same(list(torch.autograd.grad(loss, parameters[-2:], retain_graph=True)), expected[-2:])
    assert_same(list(torch.autograd.grad(loss, parameters, retain_graph=True)), expected)
    assert_same(list(torch.autograd.grad(loss, parameters[:3], retain_graph=True)), expected[:3])
    assert_same(list(torch.autograd.grad(loss, parameters)), expected)


def test_two_forward_passes_before_a_backward_pass_and_a_module_used_twice(networks):
    results = []
    for network in networks:
        twice = network[3](network[1](network[1](network[0](IMAGES)))).mean()
        loss = loss_of(network, IMAGES) + loss_of(network, 2 * IMAGES) + twice
        results.append(list(torch.autograd.grad(loss, network.parameters())))
    assert_same(*results)


def test_a_graph_freed_in_part_still_gives_the_other_part():
    """Two heads on one body: the first backward pass frees the body's nodes, and the second one needs only a head."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.first, self.second = Block(), nn.Conv2d(4, 1, 1), nn.Conv2d(4, 1, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = F.silu(self.body(x))
            return self.first(x), self.second(x)

    results = []
    for prepare in (recompute_activations, lambda network: network):
        torch.manual_seed(0)
        network = prepare(Heads().double())
        first, second = network(IMAGES[:, :1].expand(-1, 4, -1, -1))
        first.sum().backward()
        results.append(list(torch.autograd.grad(second.square().sum(), network.second.parameters())))
    assert_same(*results)


def test_second_derivatives(networks):
    for network in networks:
        network[1].norm1.eval(), network[2].norm1.eval()
    results = []
    for network in networks:
        x = IMAGES.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(network, x), x, create_graph=True)
        results.append([gradient, *torch.autograd.grad(gradient.square().sum(), x)])
    assert_same(results[0], results[1])


def backward(network: nn.Module, loss: Tensor) -> list[Tensor]:
    """Gradients; a reentrant checkpoint gives them only to `backward`."""
    network.zero_grad()
    loss.backward()
    return [parameter.grad for parameter in network.parameters()]


def test_the_parts_of_a_concatenation_that_is_written_over_are_not_kept():
    """As in DeepLabV3's head, whose first in-place norm takes the concatenated branches."""

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.branches = nn.ModuleList(nn.Conv2d(3, 8, 1) for _ in range(2))
            self.norm = InPlaceABN(16)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(torch.cat([branch(x) for branch in self.branches], dim=1)).sum()

    plain = Head().double()
    prepared = recompute_activations(copy.deepcopy(plain))
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64)
    kept = [kept_bytes(network, lambda n=network: n(x), [x]) for network in (plain, prepared)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_outside_save_their_bytes(networks, use_reentrant):
    results, kept = [], []
    for network in networks:

        def loss(n=network) -> Tensor:
            x = IMAGES.clone().requires_grad_()
            return checkpoint(n, x, use_reentrant=use_reentrant).square().mean()

        results.append(backward(network, loss()))
        kept.append(kept_bytes(network, loss, []))
    assert_same(*results)
    assert kept[0] == kept[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_inside(networks, use_reentrant):
    class Inside(nn.Module):
        def __init__(self, network):
            super().__init__()
            self.network = network

        def forward(self, x):
            x = F.silu(self.network[0](x))
            return self.network[3](checkpoint(self.network[1:3], x, use_reentrant=use_reentrant).relu())

    prepared, plain = recompute_activations(Inside(networks[1])), Inside(small())
    assert_same(backward(prepared, loss_of(prepared, IMAGES)), backward(plain, loss_of(plain, IMAGES)))


def test_hooks_around_it_get_what_is_kept_once(networks):
    packed, unpacked = [], []

    def pack(tensor: Tensor) -> tuple[object, Tensor]:
        packed.append(tensor)
        return object(), tensor

    def unpack(pair: tuple[object, Tensor]) -> Tensor:
        unpacked.append(pair[0])
        return pair[1]

    prepared, plain = networks
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = gradients(prepared, IMAGES)
    assert len(unpacked) == len(set(unpacked)) <= len(packed)
    assert_same(found, gradients(plain, IMAGES))
    with torch.autograd.graph.save_on_cpu():
        assert_same(gradients(prepared, IMAGES), gradients(plain, IMAGES))


def test_no_gradients_no_cost(networks):
    prepared, plain = networks
    for mode in (torch.no_grad, torch.inference_mode):
        outputs, calls = [], []
        for network in (prepared, plain):
            with mode(), Operators() as operators:
                outputs.append(network(IMAGES))
            calls.append(operators.calls)
        assert torch.equal(*outputs) and calls[0] == calls[1]


def test_a_failing_forward_pass_closes_the_recording(networks):
    with pytest.raises(RuntimeError):
        networks[0](torch.zeros(1, 5, 3, 3, dtype=torch.float64))
    assert current_hooks() is None
    assert_same(gradients(networks[0], IMAGES), gradients(networks[1], IMAGES))


def test_memory_is_back_after_every_step(networks):
    """Without waiting for the garbage collector."""
    prepared = networks[0]

    def living() -> int:
        return sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())

    gradients(prepared, IMAGES)
    gc.collect()
    gc.disable()
    try:
        before = living()
        for _ in range(100):
            prepared(IMAGES)  # and never a backward pass
            gradients(prepared, IMAGES)
        assert living() == before
    finally:
        gc.enable()


def test_threads(networks):
    """As in nn.DataParallel."""
    prepared, plain = networks
    prepared.eval(), plain.eval()
    expected = gradients(plain, IMAGES)
    found: list[list[Tensor]] = []
    threads = [threading.Thread(target=lambda: found.append(gradients(prepared, IMAGES))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for ours in found:
        assert_same(ours, expected)


def test_copies_and_pickles(networks):
    for other in (copy.deepcopy(networks[0]), pickle.loads(pickle.dumps(networks[0]))):
        assert kept_bytes(other, lambda o=other: loss_of(o, IMAGES), [IMAGES]) < kept_bytes(
            networks[1], lambda: loss_of(networks[1], IMAGES), [IMAGES]
        )
        assert_same(gradients(other, IMAGES), gradients(networks[1], IMAGES))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    """The casts that it makes are computed again as well."""
    prepared, plain = recompute_activations(small().float()), small().float()
    images = IMAGES.float()
    results, kept = [], []
    for network in (prepared, plain):

        def run(n=network) -> Tensor:
            with torch.autocast("cpu", dtype):
                return loss_of(n, images).float()

        results.append(list(torch.autograd.grad(run(), network.parameters())))
        kept.append(kept_bytes(network, run, [images]))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)
    assert kept[0] < 0.7 * kept[1]


def test_compiled_it_does_nothing(networks):
    prepared, plain = networks
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    with pytest.warns(UserWarning, match="does nothing inside torch.compile") as warned:
        found = [gradients(compiled, IMAGES) for _ in range(2)]
    assert len(warned) == 1
    assert_same(found[1], gradients(plain, IMAGES))


def _data_parallel(rank: int, wrapper: str) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of a prepared and of a plain network, each wrapped, of a rank's own images."""
    results = []
    for prepare in (recompute_activations, lambda network: network):
        network = prepare(small())
        images = IMAGES * (rank + 1)
        if wrapper == "ddp":
            wrapped: nn.Module = DistributedDataParallel(network)
            loss_of(wrapped, images).backward()
            results.append([parameter.grad for parameter in network.parameters()])
        else:
            for block in network:
                fully_shard(block, reshard_after_forward=True)
            fully_shard(network)
            loss_of(network, images).backward()
            results.append([parameter.grad.full_tensor() for parameter in network.parameters()])
    return results[0], results[1]


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    ranks = Ranks(2, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.stop()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_data_parallel(two_ranks, wrapper):
    """FSDP has freed a norm's parameters when the layer after it asks for the norm's output."""
    for found, expected in two_ranks.run(_data_parallel, wrapper):
        assert_same(found, expected)


class Synchronised(nn.BatchNorm2d):
    """What `nn.SyncBatchNorm` calls, which itself refuses CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        group = dist.group.WORLD
        return SyncBatchNorm.apply(
            x, self.weight, self.bias, self.running_mean, self.running_var, self.eps, 0.1, group, dist.get_world_size()
        )


def _synchronised(rank: int) -> list[tuple[list[Tensor], list[Tensor], list[int]]]:
    """Gradients and kept bytes of prepared and plain networks with synchronised norms, then with frozen biases."""
    library = torch.library.Library("aten", "IMPL")  # CPUs lack these kernels
    dims = [0, 2, 3]

    def elemt(x, weight, bias, mean, invstd, eps):
        shape = (1, -1, 1, 1)
        return (x - mean.view(shape)) * (invstd * weight).view(shape) + bias.view(shape)

    def reduce(dy, x, mean, invstd, weight, *wanted):
        x_mu = x - mean.view(1, -1, 1, 1)
        sums = dy.sum(dims), (dy * x_mu).sum(dims)
        return *sums, sums[1] * invstd, sums[0]

    def backward_elemt(dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
        total, shape = count.sum(), (1, -1, 1, 1)
        slope = (sum_dy_xmu / total * invstd**2).view(shape)
        return (dy - (sum_dy / total).view(shape) - (x - mean.view(shape)) * slope) * (invstd * weight).view(shape)

    def gather(x, means, invstds, running_mean, running_var, momentum, eps, counts):
        weights = (counts / counts.sum()).view(-1, 1)
        mean = (means * weights).sum(0)
        var = ((invstds**-2 - eps + means**2) * weights).sum(0) - mean**2
        return mean, torch.rsqrt(var + eps)

    kernels = {
        "batch_norm_stats": lambda x, eps: (x.mean(dims), torch.rsqrt(x.var(dims, unbiased=False) + eps)),
        "batch_norm_gather_stats_with_counts": gather,
        "batch_norm_elemt": elemt,
        "batch_norm_backward_reduce": reduce,
        "batch_norm_backward_elemt": backward_elemt,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
    answers = []
    for frozen in (False, True):
        results, kept = [], []
        for prepare in (recompute_activations, lambda network: network):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Conv2d(3, 4, 3), Synchronised(4), nn.ReLU(), nn.Conv2d(4, 2, 1)).double()
            network[1].bias.requires_grad_(not frozen)
            network = prepare(network)
            results.append(gradients(network, IMAGES * (rank + 1)))
            kept.append(kept_bytes(network, lambda n=network: loss_of(n, IMAGES), [IMAGES]))
        answers.append((results[0], results[1], kept))
    return answers


def test_synchronised_norms(two_ranks):
    """A frozen bias is not in the node, so what follows from it is kept."""
    for answers in two_ranks.run(_synchronised):
        assert isinstance(answers, list), answers
        for found, expected, _ in answers:
            assert_same(found, expected, 1e-10)
        (_, _, trained), (_, _, frozen) = answers
        assert trained[0] < 0.7 * trained[1] and frozen[0] == frozen[1]
