"""Blocks that people train, written by hand: what they keep, in values, and gradients equal to the bit."""

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from keepless import InPlaceABN, recompute_activations
from keepless.saved import kept_bytes, saved_for_backward

C, TOKENS = 4, (2, 16, 8)  # channels; (N, sequence, values)
VOLUMES = (2, C, 4, 4, 4)
PIXELS = 2 * C * 4**3


def nn_unet(affine: bool = True) -> nn.Module:
    return nn.Sequential(nn.InstanceNorm3d(C, affine=affine), nn.LeakyReLU(0.01, inplace=True))


class Monai(nn.Sequential):
    """Norm, dropout, activation: the default of MONAI's UNet."""

    def __init__(self) -> None:
        super().__init__(nn.InstanceNorm3d(C), nn.Dropout3d(0.2), nn.PReLU())


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn_unet(), nn.InstanceNorm3d(C)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(x)
        z += y
        return F.leaky_relu(z, 0.01, inplace=True)


class Rotary(nn.Module):
    """Turns pairs of values by an angle that grows along the sequence, after an RMS norm written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, TOKENS[2]))
        self.register_buffer("frequencies", 10 ** -torch.linspace(0, 1, TOKENS[2] // 2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6))
        with torch.no_grad():
            angles = torch.outer(torch.arange(TOKENS[1]), self.frequencies).repeat(1, 2)
        first, second = y.chunk(2, -1)
        return y * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, values = x.chunk(2, -1)
        return torch.cat([F.silu(gate) * values, values], -1)


ROWS = nn.Sequential(nn_unet(), nn.Flatten(3), nn.Unflatten(3, (4, -1)))  # views of what the norm and ReLU wrote
# {name: (block, shape of its input, values that prepared and plain blocks keep between two layers with weights)}
BLOCKS = {
    "nnU-Net": (nn_unet(), VOLUMES, PIXELS, 2 * PIXELS),
    "nnU-Net without affine": (nn_unet(False), VOLUMES, PIXELS, 2 * PIXELS),
    "nnU-Net as rows": (ROWS, VOLUMES, PIXELS, 2 * PIXELS),
    "MONAI": (Monai(), VOLUMES, PIXELS, 3 * PIXELS),
    "residual": (Residual(), VOLUMES, PIXELS, 3 * PIXELS),
    "rotary embeddings": (Rotary(), TOKENS, 512, 1056),
    "SwiGLU": (SwiGLU(), TOKENS, 256, 256 + 128 + 256),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    block, shape, ours, theirs = BLOCKS[name]
    torch.manual_seed(0)
    pointwise = (lambda: nn.Linear(shape[-1], shape[-1])) if shape == TOKENS else (lambda: nn.Conv3d(C, C, 1))
    plain = nn.Sequential(pointwise(), block, pointwise())
    prepared = recompute_activations(copy.deepcopy(plain))
    x = torch.randn(shape)

    def loss_of(network: nn.Module) -> Tensor:
        torch.manual_seed(1)
        return network(x).square().sum()

    kept, results = [], []
    for network in (prepared, plain):
        loss, saved = saved_for_backward(lambda n=network: loss_of(n), [*network.parameters(), x])
        sizes = [tensor.untyped_storage().nbytes() // 4 for tensor in saved]
        kept.append(sum(size for size in sizes if size > 16) - loss.new_empty(shape).numel())  # without the output
        results.append([loss, *torch.autograd.grad(loss_of(network), list(network.parameters()))])
    assert all(map(torch.equal, *results))
    assert kept == [ours, theirs]


def chain(norm: bool, inplace: bool = False, slope: float = 0.0) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(6):
        activation = nn.LeakyReLU(slope, inplace) if slope else nn.ReLU(inplace)
        layers += [nn.Conv2d(C, C, 3, padding=1), *([nn.BatchNorm2d(C)] if norm else []), activation]
    return nn.Sequential(*layers)


def held_bytes(run: Callable[[], object]) -> int:
    """Bytes of the memory that a function makes and that is held while its result is."""

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and function is not torch.ops.aten.detach.default:
                    storage = tensor.untyped_storage()
                    made.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
            return result

    made: dict[int, tuple[StorageWeakRef, int]] = {}
    with Made():
        result = run()
    total = sum(size for storage, size in made.values() if not storage.expired())
    del result
    return total


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("hooks", [nullcontext, save_on_cpu])
@pytest.mark.parametrize("slope", [0.0, 0.1])
@pytest.mark.parametrize("norm, inplace", [(False, False), (False, True), (True, False), (True, True)])
def test_frozen_layers_keep_one_bit_per_value(norm, inplace, slope, hooks, layout):
    """A convolution's gradient of its input needs none of its values; ReLU needs signs. The first layer learns."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, C, 1), chain(norm, inplace, slope).eval().requires_grad_(False)).to(
        memory_format=layout
    )
    prepared = recompute_activations(copy.deepcopy(plain))
    x = torch.randn(2, 3, 15, 15).contiguous(memory_format=layout)

    def loss_of(network: nn.Module) -> Tensor:
        return network(x).sum()

    results = []
    for network in (prepared, plain):
        with hooks():
            loss = loss_of(network)
        results.append(torch.autograd.grad(loss, list(network[0].parameters())))
    assert all(map(torch.equal, *results))
    values = 2 * C * 15 * 15
    kept = [kept_bytes(n, lambda n=n: loss_of(n), [x]) for n in (prepared, plain)]
    statistics = 6 * 2 * C * 4 if norm else 0  # running statistics
    theirs = 6 + 6 * norm + (6 if slope and not inplace else 1)  # inputs of layers; inputs of activations, or a result
    assert kept == [6 * values // 8 + statistics, theirs * values * 4 + statistics]
    assert held_bytes(lambda: loss_of(prepared)) - kept[0] < 500  # the loss and biases


@pytest.mark.parametrize("inplace", [False, True])
def test_frozen_layers_under_a_checkpoint_and_in_second_derivatives(inplace):
    """A gradient penalty needs second derivatives. Both repeat what was saved."""
    frozen = nn.Sequential(*chain(True, inplace), nn.ConvTranspose2d(C, C, 2, 2)).eval().requires_grad_(False)
    plain = nn.Sequential(nn.Conv2d(3, C, 1), frozen, nn.ReLU(inplace), nn.Conv2d(C, 2, 1)).double()
    results = []
    for network in (recompute_activations(copy.deepcopy(plain)), plain):
        x = torch.linspace(-2, 2, 2 * 3 * 64, dtype=torch.float64).view(2, 3, 8, 8).requires_grad_()
        trained = [x, *(parameter for parameter in network.parameters() if parameter.requires_grad)]
        loss = checkpoint(network, x, use_reentrant=False).square().sum()
        first = torch.autograd.grad(loss, trained)
        (gradient,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        results.append([*first, *torch.autograd.grad(gradient.square().sum(), trained[:-1])])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("activations", [[nn.ReLU()], [nn.LeakyReLU()], [nn.ReLU(), nn.LeakyReLU()]], ids=str)
def test_signs_are_kept_only_where_nobody_reads_values(activations):
    """A trained layer, a hook or a sum of results reads values; ReLU passes gradients of NaN, LeakyReLU scales them."""
    activation = nn.Sequential(*activations)
    layers = (nn.Conv2d(3, C, 1), activation, nn.Conv2d(C, C, 1), activation, nn.Flatten(), nn.Softmax(1))
    plain = nn.Sequential(*layers)
    plain[2].weight.requires_grad_(False)
    prepared = recompute_activations(copy.deepcopy(plain))
    x = torch.randn(2, 3, 8, 8)
    x[0, :, 0, 0] = torch.nan
    for other in (
        lambda network: network(x).sum(),
        lambda network: network[3](network[2](network[0](x))).square().sum(),
    ):
        results = []
        for network in (prepared, plain):
            trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
            results.append(torch.autograd.grad(other(network), trained))
        for ours, theirs in zip(*results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_nothing_computed_stays_after_a_part_of_the_graph_was_differentiated():
    """Silu, which reads the norm's output as well, is not reached."""
    network = nn.Sequential(nn.Conv2d(3, C, 1), nn.BatchNorm2d(C), nn.SiLU(), nn.Conv2d(C, C, 1))
    loss = recompute_activations(network)(torch.randn(2, 3, 8, 8)).sum()

    def differentiate() -> None:
        torch.autograd.grad(loss, [network[3].weight], retain_graph=True)

    assert held_bytes(differentiate) == 0
    assert all(gradient is not None for gradient in torch.autograd.grad(loss, list(network.parameters())))


class Joins(nn.Module):
    """Joins the results a and b of two layers, as `join` says; in place functions write over them afterwards."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], written_over: int):
        super().__init__()
        self.first, self.join, self.written_over = (
            nn.ModuleList(nn.Conv2d(3, C, 1) for _ in range(2)),
            join,
            written_over,
        )
        self.last = nn.ModuleList(nn.Conv2d(C, C, 1) for _ in range(2))
        self.head = nn.LazyConv2d(2, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        parts = [layer(x) for layer in self.first]
        joined = self.head(self.join(*parts))
        return [
            joined,
            *(
                layer(F.relu(part, inplace=True))
                for layer, part in zip(self.last, parts[: self.written_over], strict=False)
            ),
        ]


def convolved_under_autocast(a: Tensor, b: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.conv2d(torch.cat([a, b], 1), torch.ones(1, 2 * C, 1, 1, requires_grad=True)).float()


VALUES = 2 * C * 8 * 8  # of a part
NORM = InPlaceABN(2 * C)  # keeps its output and three vectors
JOINS = {  # what plain and prepared networks keep, in values, if no part is written over
    "mean of a concatenation": (lambda a, b: torch.cat([a, b], 1).mean((2, 3), keepdim=True), 2 * 2 * C, 2 * 2 * C),
    "slice of a concatenation": (lambda a, b: (torch.cat([a, b], 1) * 2)[:, C // 2 : -C // 2] * 2, VALUES, VALUES),
    "mean of a stack": (lambda a, b: torch.stack([a, b]).mean(0), VALUES, VALUES),
    "concatenation under autocast": (convolved_under_autocast, VALUES + C + 2 * 64, VALUES + C + 2 * 64),
    "in-place norm of a concatenation": (  # as in DeepLabV3's head
        lambda a, b: NORM(torch.cat([a, b], 1)),
        2 * VALUES + 3 * 2 * C,
        2 * VALUES + 3 * 2 * C,
    ),
    "upsampled": (lambda a, b: F.interpolate(a, scale_factor=2.0), 4 * VALUES, VALUES),
    "slice of an upsampled one": (
        lambda a, b: F.interpolate(a, scale_factor=2.0)[..., :4, :4] * 1,
        VALUES // 4,
        VALUES // 4,
    ),
}


@pytest.mark.parametrize("written_over", [0, 1, 2])
@pytest.mark.parametrize("name", JOINS)
def test_nothing_is_kept_for_something_smaller(name, written_over):
    """A concatenation's parts may be kept instead of it, but not instead of its mean; overwritten, they are copied."""
    join, theirs, ours = JOINS[name]
    x = torch.randn(2, 3, 8, 8)
    plain = Joins(join, written_over)
    plain(x)
    prepared = recompute_activations(copy.deepcopy(plain))
    kept, results = [], []
    for network in (prepared, plain):
        kept.append(kept_bytes(network, lambda n=network: n(x), [x]) // 4)
        loss = torch.stack([output.square().sum() for output in network(x)]).sum()
        results.append(torch.autograd.grad(loss, list(network.parameters()), allow_unused=True))
    assert kept[0] <= kept[1] == theirs + written_over * VALUES
    assert kept[0] == ours if not written_over else kept[0] <= ours + written_over * VALUES
    assert all(a is b or torch.equal(a, b) for a, b in zip(*results, strict=True))


POOLS = {
    "max": (lambda x: F.max_pool2d(x, 2), 2),
    "adaptive max": (lambda x: F.adaptive_max_pool2d(x, 4), 2),
    "average": (lambda x: F.avg_pool2d(x, 2), 0),
    "adaptive average": (lambda x: F.adaptive_avg_pool2d(x, 4), 0),
    "max in volumes": (lambda x: F.max_pool3d(x, (1, 2, 2)), 2),
    "average in volumes": (lambda x: F.avg_pool3d(x, (1, 2, 2)), 0),
}


@pytest.mark.parametrize("name", POOLS)
def test_a_pooling_keeps_of_its_input_only_the_shape_and_narrow_indices(name):
    """So that ReLU before it keeps one bit per value. A gradient penalty needs second derivatives."""
    pool, indices = POOLS[name]
    plain = nn.Sequential(nn.Conv2d(3, C, 1), nn.ReLU(), Pooled(pool), nn.Conv2d(C, 2, 1)).double()
    x = torch.linspace(-2, 2, 2 * 3 * 64, dtype=torch.float64).view(2, 3, 8, 8).requires_grad_()
    prepared, results = recompute_activations(copy.deepcopy(plain)), []
    for network in (plain, prepared, prepared):  # recorded, and by a script
        (gradient,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        results.append(torch.autograd.grad(gradient.square().sum(), [*network.parameters()][:-1]))
        kept = kept_bytes(network, lambda: network(x), [x])  # noqa: B023
    assert all(map(torch.equal, results[0], results[1])) and all(map(torch.equal, results[0], results[2]))
    values, pooled = 2 * C * 64, 2 * C * 16
    assert kept == values // 8 + pooled * (8 + indices)


class Pooled(nn.Module):
    def __init__(self, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        return self.pool(x)
