"""Small networks of many kinds, each with the shape of an input: what models do, and what has once gone wrong."""

import copy
import itertools
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import ABN, CheckpointedABN, InPlaceABN
from tests.keepless.recompute.ahead import After
from tests.keepless.recompute.test_calls import OWN


class Network(nn.Module):
    """Linear layers before and behind something that networks do."""

    def __init__(self, between: "Callable[[Network, Tensor], Tensor]", width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("scale", torch.ones(width))
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        x = self.second(F.gelu(self.between(self, x)))
        return self.second(F.gelu(x))


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


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Dropping(nn.Module):
    """A block of a transformer that drops weights of attention, results of layers, or both."""

    def __init__(self, weights: float, results: float):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.weights, self.results = weights, results

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.weights).transpose(1, 2).reshape(x.shape)
        return x + F.dropout(self.out(F.gelu(y)), self.results)


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


class Beside(nn.Sequential):
    """Layers whose result is joined with their input."""

    def __init__(self, join: Callable[[Tensor, Tensor], Tensor], *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.join = join

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, super().forward(x))


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
IMAGES = (4, 3, 32, 32)
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
    # Recipes hold the state of the generator, and make all that attention saves inside at once.
    "dropout": (lambda: nn.Sequential(*(Dropping(0.0, 0.1) for _ in range(4))), (8, 64, 32)),
    "dropped attention": (lambda: nn.Sequential(*(Dropping(0.1, 0.1) for _ in range(3))), (8, 64, 32)),
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
