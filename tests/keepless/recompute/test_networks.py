"""Networks of many kinds are like the plain ones to the bit, with a budget and without, and nothing is said."""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations
from keepless.recompute.following import Following
from tests.keepless.recompute.ahead import planned_sizes, step
from tests.keepless.recompute.test_programs import Cube


class Network(nn.Module):
    """Linear layers before and behind something that networks do."""

    def __init__(self, between: "Callable[[Network, Tensor], Tensor] | None" = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
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


def checkpointed(network: Network, x: Tensor) -> Tensor:
    return checkpoint(lambda x: F.silu(network.second(x)), x, use_reentrant=False)


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


class Frozen(Network):
    """Freezes its first layer, like detectors."""

    def forward(self, x):
        torch.set_grad_enabled(False)
        x = F.gelu(self.first(x))
        torch.set_grad_enabled(True)
        return self.second(F.gelu(self.second(x)))


class Dictionary(Network):
    def forward(self, x):
        return {"out": super().forward(x), "ids": x.argmax(-1)}


class InsideAutocast(Network):
    """Turns autocast on in its own forward pass, as published models do."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def reparametrised(norm) -> nn.Module:
    network = Network()
    norm(network.first)
    return network


class Transposed(nn.Module):
    """Multiplies transposed inputs, as vision transformers do: pixels are rows, but lie in memory as columns.

    PyTorch multiplies them in another way where weights need no gradient.
    """

    def __init__(self, multiply: Callable[[nn.Linear, Tensor], Tensor], frozen: bool) -> None:
        super().__init__()
        self.layers, self.multiply = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), multiply
        self.layers[1:].requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(self.multiply(layer, x.transpose(1, 2))).transpose(1, 2).contiguous()
        return x


def weighted(layer: nn.Linear, x: Tensor) -> Tensor:
    return x @ layer.weight


class Conjugates(nn.Module):
    """A product saves a conjugate, which is a view that cannot be made again."""

    def __init__(self):
        super().__init__()
        self.matrix, self.vector = (nn.Parameter(torch.randn(*shape, 8, dtype=torch.cfloat)) for shape in ((8,), ()))

    def forward(self, x):
        return ((x.cfloat() @ self.matrix).conj() * self.vector).abs()


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(0.1))


X, ROWS = (40, 4, 8), (2, 8, 64)
NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
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
    "calls that return their argument": (partial(Network, returned), X),
    "frozen first layers": (Frozen, X),
    "a dictionary": (Dictionary, X),
    "autocast inside": (InsideAutocast, X),
    "spectral norm": (partial(reparametrised, parametrizations.spectral_norm), X),
    "weight norm": (partial(reparametrised, parametrizations.weight_norm), X),
    "batch norm": (normed, X),
    "transformer": (partial(nn.TransformerEncoderLayer, 8, 2, 16, batch_first=True), X),
    "conjugates": (Conjugates, X),
    "transposed inputs of layers": (partial(Transposed, nn.Linear.__call__, False), ROWS),
    "transposed inputs of frozen layers": (partial(Transposed, nn.Linear.__call__, True), ROWS),
    "transposed inputs of products": (partial(Transposed, weighted, False), ROWS),
    "transposed inputs of frozen products": (partial(Transposed, weighted, True), ROWS),
    "vmap inside": (partial(Network, batched), X),
    "vmap inside that overwrites": (partial(Network, partial(batched, overwrites=True)), X),
}
# No budget can plan these, which is said.
UNPLANNED = {"a checkpointed part", "vmap inside", "vmap inside that overwrites"}
# Each of their steps is recorded.
WITHOUT_SCRIPTS = {"conjugates", "calls that return their argument", "vmap inside", "vmap inside that overwrites"}


@pytest.mark.parametrize("budget", [None, "1KiB"])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_are_like_the_plain_ones_to_the_bit(name, budget, monkeypatch):
    """Each has one plan, and follows its script from the second step on."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    plain, x = make(), torch.randn(shape)
    within, followed = recompute_activations(copy.deepcopy(plain), budget=budget), []
    conclude = Following.has_followed.fget
    monkeypatch.setattr(Following, "has_followed", property(lambda one: followed.append(conclude(one)) or followed[-1]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "no plan keeps|this step is within")  # the budget
        if name in UNPLANNED:
            warnings.filterwarnings("ignore", "the network runs a part of its forward pass")
        for seed in range(4):
            assert all(map(torch.equal, step(within, x, seed=seed), step(plain, x, seed=seed)))
    assert (followed == [True] * 3) is (name not in WITHOUT_SCRIPTS)
    if budget is not None:
        (size,) = planned_sizes(within)
        assert not size.strays and size.rehearsals == 1 and len(size.plans) == 1
