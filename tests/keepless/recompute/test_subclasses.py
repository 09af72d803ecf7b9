"""Subclasses of tensors that carry metadata are followed by their values."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import recompute_activations
from keepless.inputs import tensors_in
from keepless.saved import kept_bytes


class WithMeta(Tensor):
    """Like MONAI's MetaTensor, results of functions carry the metadata of the first argument that has any."""

    meta: dict

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.meta = next((one.meta for one in tensors_in(args) if hasattr(one, "meta")), {})
        return result


class Doubling(WithMeta):
    """Computes something else than the function that is called."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        return result * 2 if function in (F.silu, F.gelu) else result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3)
        self.last = nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.silu(self.norm(self.first(x)))
        x += 1
        y = F.gelu(self.second(x), approximate="tanh").clone()
        return self.last(torch.cat([y.relu_(), y.sigmoid()], 1))


def images(kind: type[Tensor]) -> Tensor:
    values = torch.linspace(-1, 1, 2 * 3 * 12 * 12, dtype=torch.float64).sin().view(2, 3, 12, 12)
    result = values.as_subclass(kind)
    if kind is not Tensor:
        result.meta = {"spacing": 2}
    return result


@pytest.fixture
def network() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


@pytest.mark.filterwarnings("ignore:no plan keeps")
@pytest.mark.parametrize("budget", [None, 1.0, "1KiB"])
@pytest.mark.parametrize("kind", [WithMeta, Doubling])
def test_gradients_are_those_of_the_plain_network_and_types_stay(kind, budget, network):
    expected = torch.autograd.grad(network(images(kind)).square().mean(), [*network.parameters()])
    prepared = recompute_activations(copy.deepcopy(network), budget=budget)
    if budget is None:
        plain, other = images(Tensor), images(kind)
        kept = [kept_bytes(prepared, lambda x=x: prepared(x), [x]) for x in (plain, other)]
        assert kind is Doubling or kept[0] == kept[1]
    for _ in range(4):
        output = prepared(images(kind))
        assert type(output) is kind and output.meta == {"spacing": 2}
        found = torch.autograd.grad(output.square().mean(), [*prepared.parameters()])
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
