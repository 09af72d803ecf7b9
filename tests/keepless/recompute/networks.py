"""Small networks of many kinds, each with the shape of an input: what models do, and what has once gone wrong."""

import copy
import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torchvision.models import resnet

from keepless import ABN, CheckpointedABN, InPlaceABN
from tests.keepless.recompute.ahead import After
from tests.keepless.recompute.test_calls import OWN
from tests.keepless.recompute.test_programs import Cube


class Network(nn.Module):
    """Linear layers before and behind something that networks do."""

    def __init__(self, between: "Callable[[Network, Tensor], Tensor] | None" = None, width: int = 8) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        x = self.second(F.gelu(x if self.between is None else self.between(self, x)))
        return self.second(F.gelu(x))


def averages(network: Network, x: Tensor) -> Tensor:
    with torch.no_grad():
        network.scale.mul_(0.9).add_(0.1 * x.square().mean((0, 1)).sqrt())
    return x / network.scale


@torch.no_grad()
def angles(network: Network, length: int) -> Tensor:
    return torch.arange(length).float()[:, None] * network.scale


def taught(network: Network, x: Tensor) -> Tensor:
    with torch.inference_mode():
        target = F.gelu(network.second(x)).mean()
    return x * target.clone()


def switched_on(network: Network, x: Tensor) -> Tensor:
    """A gradient that is needed whatever the mode outside."""
    with torch.no_grad(), torch.enable_grad():
        return F.silu(x)


def sparse(network: Network, x: Tensor) -> Tensor:
    rows = x.flatten(0, 1)
    return torch.sparse.mm(torch.eye(len(rows)).to_sparse(), rows).view_as(x)


def routed(network: Network, x: Tensor) -> Tensor:
    """Reads how many rows an expert has."""
    rows = x.flatten(0, 1)
    chosen = (rows.mean(1) > 0).nonzero()[:, 0]
    return rows.index_add(0, chosen, F.gelu(rows[chosen])).view_as(x)


def without_rows(network: Network, x: Tensor) -> Tensor:
    """Each of three experts gets a slice of a projection, the last one no rows."""
    values, _ = network.first(x.flatten(0, 1)).repeat(1, 2).split(8, 1)
    rows = len(values) // 2
    return torch.cat([network.second(part) for part in (values[:rows], values[rows:], values[:0])]).view_as(x)


def checkpointed(network: Network, x: Tensor, use_reentrant: bool = False) -> Tensor:
    return checkpoint(lambda x: F.silu(network.second(x)), x, use_reentrant=use_reentrant)


def batched(network: Network, x: Tensor, overwrites: bool = False) -> Tensor:
    """Each row predicts a kernel for itself."""
    both = torch.cat([x, F.silu(x)], 1)
    kernels = network.second(x.mean(1)).repeat(1, 12).view(-1, 4, 8, 3)
    y = torch.vmap(lambda h, w: F.silu(F.conv1d(F.relu(h * 2)[None], w, padding=1))[0])(both, kernels)
    if overwrites:
        torch.vmap(lambda part: part.mul_(2))(y)
    return y


def returned(network: Network, x: Tensor) -> Tensor:
    """Three equal calls, of which the first two return their argument."""
    with torch.autocast("cpu", torch.bfloat16):
        q, k, v = network.first(x), network.second(x), network.first(x)
    q, k = q * 2.0 + x, k * 2.0 + x
    return x + network.second(F.scaled_dot_product_attention(q.float(), k.float(), v.float()))


def frozen_first(network: Network, x: Tensor) -> Tensor:
    """Detectors freeze their first layers like this."""
    torch.set_grad_enabled(False)
    x = F.gelu(network.first(x))
    torch.set_grad_enabled(True)
    return x


def with_teacher(network: Network, x: Tensor) -> Tensor:
    """Tensors without gradient come and go."""
    with torch.no_grad():
        scale = F.linear(x, network.second.weight.repeat(8, 1)).square().mean()
    return x * scale


def of_parameters(network: Network, x: Tensor) -> Tensor:
    """An activation of a parameter, and products of a list, one of which needs no gradient."""
    gate = network.second.bias
    shift = torch.einsum("ij,jk->ik", [torch.eye(len(gate)), gate[:, None]])
    return F.gelu(x) * F.silu(gate) + F.relu(shift[:, 0])


def over_half(network: Network, x: Tensor) -> Tensor:
    """`silu_` saves a copy of the view that it writes over. It follows from what it views, unless that is kept."""
    return F.silu(network.first(x).repeat(1, 1, 2)[..., len(network.scale) :], inplace=True)


class InsideAutocast(Network):
    """Turns autocast on in its own forward pass, as published models do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def reparametrised(norm) -> nn.Module:
    network = Network()
    norm(network.first)
    return network


class Conjugates(nn.Module):
    """A product saves a conjugate, which is a view that cannot be made again."""

    def __init__(self):
        super().__init__()
        self.matrix, self.vector = (nn.Parameter(torch.randn(*shape, 8, dtype=torch.cfloat)) for shape in ((8,), ()))

    def forward(self, x):
        return ((x.cfloat() @ self.matrix).conj() * self.vector).abs()


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Mixed(nn.Module):
    """Convolutions, norms, activations in place, a concatenation, pooling, dropout, attention and a matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.left = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8), nn.SiLU(inplace=True))
        self.right = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GroupNorm(2, 8), nn.ReLU6(inplace=True), nn.Dropout(0.2))
        self.attention, self.head = Attention(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.max_pool2d(torch.cat([self.left(x), self.right(x)], 1), 2)
        x = F.hardswish(x.flatten(2).transpose(1, 2).contiguous())
        x = self.attention(x)
        x = (x.softmax(-1) @ x.transpose(1, 2)).matmul(x)
        return self.head(x.mean(1))


def blocks(count: int, *layers: nn.Module, width: int = 8, last: tuple[nn.Module, ...] = ()) -> nn.Sequential:
    """Convolutions of one size, each followed by copies of the layers."""
    parts = [[nn.Conv2d(width, width, 3, padding=1), *copy.deepcopy(layers)] for _ in range(count)]
    return nn.Sequential(nn.Conv2d(3, width, 1), *itertools.chain(*parts), *last)


def over_views(*last: nn.Module) -> nn.Module:
    """An activation writes over the result of an instance norm, which is a view."""
    return blocks(3, nn.InstanceNorm2d(8), nn.SiLU(inplace=True), last=last or (nn.AdaptiveAvgPool2d(1),))


def dropping() -> nn.Module:
    """Dropout of tensors that are not contiguous, whose mask needs a tensor of this layout to be drawn again."""
    layers = blocks(4, nn.SiLU(), nn.Dropout(0.2), last=(nn.AdaptiveAvgPool2d(1),))
    return layers.to(memory_format=torch.channels_last)


def last_step(kind: type[nn.LSTM | nn.GRU]) -> nn.Module:
    """A loss of a recurrent network's last output."""
    return After(kind(16, 16, 2, bidirectional=True, dropout=0.2), lambda outputs: outputs[0][-1].square().mean())


class Shared(nn.Module):
    """Three layers read one tensor that is not contiguous, and each saves a copy. On fake tensors it is contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layers = nn.BatchNorm1d(64), nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (layer(h) for layer in self.layers)
        return x + q.sigmoid() * k.tanh() * v


def read_before(y: Tensor) -> Tensor:
    """Its recipes read a sum before it is written over."""
    sums = y.cumsum(1)
    read = (sums * 2).sin()
    sums.add_(1)
    return (read * sums).sin().mean()


def read_again(y: Tensor) -> Tensor:
    """The backward pass adds the gradients of `square` and `sin` first. The gradient of `repeat` comes much later."""
    y = y.exp()
    return y.repeat(1, 4).exp().sum() + (y.square() + y.sin()).sum()


def deep(y: Tensor) -> Tensor:
    """A chain of 250 calls, of which a plan repeats at most 200 in a row."""
    for _ in range(50):
        z = F.silu(F.silu(F.silu(F.silu(y))))
        y = torch.cat([y[:, :8], z[:, 8:]], 1)
    return y.square().mean()


def noisy(y: Tensor) -> Tensor:
    return OWN.noisy_square(y.cumsum(1))  # only the operator is repeated


class Residual(nn.Module):
    def __init__(self, cls: type[ABN], **options):
        super().__init__()
        self.first, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), cls(8, **options)
        self.second, self.out = nn.Conv2d(8, 8, 3, padding=1, bias=False), cls(8, momentum=None, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.second(F.dropout(self.norm(self.first(x)), 0.1)))


def residuals(cls: type[ABN], count: int, **options) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *(Residual(cls, **options) for _ in range(count)))


OURS = {
    "I": (InPlaceABN, {"variant": "I"}),
    "II": (InPlaceABN, {"variant": "II", "learn_scale": False}),
    "x": (CheckpointedABN, {"store": "x"}),
    "x_hat": (CheckpointedABN, {"store": "x_hat", "activation": "relu"}),
    "standard": (ABN, {}),
}
X_HAT = CheckpointedABN(8, store="x_hat")
Row = tuple[Callable[[], nn.Module], tuple[int, ...]]
X, IMAGES = (40, 4, 8), (4, 3, 32, 32)
NETWORKS: dict[str, Row] = {
    "averages of activations": (partial(Network, averages), X),
    "angles of positions": (partial(Network, lambda network, x: x * angles(network, x.size(1)).cos()), X),
    "a teacher": (partial(Network, taught), X),
    "gradients switched on": (partial(Network, switched_on), X),
    "quantised": (partial(Network, lambda network, x: x + (x.round() - x).detach()), X),
    "an own function": (partial(Network, lambda network, x: Cube.apply(x)), X),
    "a sparse matrix": (partial(Network, sparse), X),
    "an expert": (partial(Network, routed), X),
    "an expert without rows": (partial(Network, without_rows), X),
    "a checkpointed part": (partial(Network, checkpointed), X),
    "a part with a reentrant checkpoint": (partial(Network, partial(checkpointed, use_reentrant=True)), X),
    "calls that return their argument": (partial(Network, returned), X),
    "frozen first layers": (partial(Network, frozen_first), X),
    "a dictionary": (lambda: After(Network(), lambda y: {"out": y, "ids": y.argmax(-1)}), X),
    "autocast inside": (InsideAutocast, X),
    "spectral norm": (partial(reparametrised, parametrizations.spectral_norm), X),
    "weight norm": (partial(reparametrised, parametrizations.weight_norm), X),
    "residual blocks": (lambda: nn.Sequential(*(resnet.BasicBlock(4, 4) for _ in range(3))), (2, 4, 32, 32)),
    "batch norm": (lambda: nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(True), nn.Dropout(0.1)), X),
    "transformer": (partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True), X),
    "conjugates": (Conjugates, X),
    "vmap inside": (partial(Network, batched), X),
    "vmap inside that overwrites": (partial(Network, partial(batched, overwrites=True)), X),
}
# Of these it is known what each step takes.
COUNTED: dict[str, Row] = {
    "over views": (over_views, IMAGES),
    "over views, then a layer": (lambda: over_views(nn.Conv2d(8, 8, 1)), IMAGES),
    # While a float64 convolution runs, it needs temporary memory of several times its result.
    "over views in float64": (lambda: over_views().double(), (4, 3, 16, 16)),
    "dropping": (dropping, IMAGES),
    "of parameters": (partial(Network, of_parameters, 32), (64, 4, 32)),
    # The loss of large outputs takes more than the network.
    "loss": (lambda: After(blocks(1, nn.SiLU(), last=(nn.Conv2d(8, 32, 1),)), lambda y: y.square().mean()), IMAGES),
    "mixed": (Mixed, (4, 3, 16, 16)),
    "chain": (lambda: blocks(12, nn.GELU()), IMAGES),
    # The ReLU's result is kept as one bit per value.
    "signs": (lambda: nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), IMAGES),
    # Each layer's output is computed from what the layer keeps, which may have to be computed first.
    "checkpointed": (lambda: blocks(2, CheckpointedABN(8), nn.Conv2d(8, 8, 1), X_HAT), IMAGES),
    "a teacher": (partial(Network, with_teacher, 32), (64, 4, 32)),
    "LSTM": (partial(last_step, nn.LSTM), (12, 16, 16)),  # it makes a few nodes, a GRU several for each step in time
    "GRU": (partial(last_step, nn.GRU), (12, 16, 16)),
    "copies": (lambda: nn.Sequential(*(Shared() for _ in range(4))), (48, 15, 64)),
    "over halves": (partial(Network, over_half, 64), (16, 32, 64)),
    "custom operators": (lambda: nn.Sequential(*(After(nn.Linear(64, 64), noisy) for _ in range(2))), (800, 64)),
    # Statistics of norms are saved without gradient, and take as many bytes as their inputs.
    "statistics": (lambda: nn.Sequential(*[nn.BatchNorm1d(512), nn.SiLU()] * 9), (2, 512)),
    # `torch.cdist` is written in Python, and takes memory while it runs and in its backward pass.
    "distances": (lambda: After(nn.Linear(64, 64), lambda y: torch.cdist(y, y[:64].exp()).mean()), (512, 64)),
    "a copy of what is overwritten": (lambda: After(nn.Linear(64, 64), read_before), (512, 64)),
    "a deep chain": (lambda: After(nn.Linear(16, 16), deep), (128, 16)),
    "sums of gradients that wait for more": (lambda: After(nn.Linear(16, 64), read_again), (256, 16)),
}
