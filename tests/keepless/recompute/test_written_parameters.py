"""Parameters that a forward pass writes over after recipes have read them."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.keepless.recompute.agreement import agree, on
from tests.keepless.recompute.ahead import pair


def without_gradients(write: Callable[[Tensor], object]) -> Callable[[Tensor], object]:
    return torch.no_grad()(write)


def steps(optimizer: type[torch.optim.Optimizer], **options: bool) -> Callable[[Tensor], object]:
    def step(weight: Tensor) -> None:
        before, weight.grad = weight.grad, torch.ones_like(weight)
        optimizer([weight], lr=0.1, **options).step()  # type: ignore[call-arg]
        weight.grad = before

    return step


def observed(weight: Tensor) -> Tensor:
    """Writes two of the weights, and leaves their version as it is."""
    on, place, least, most = torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.int32), weight[0], weight[1]
    arguments = (torch.randn(4, 4), on, on, least[:1], most[:1], torch.ones(1), place, 0.5, 0, 255, -1)
    return torch.fused_moving_avg_obs_fake_quant(*arguments)


NUMBERS = torch.tensor([1, 2])
WRITES: dict[str, Callable[[Tensor], object]] = {
    "method": without_gradients(lambda weight: weight.mul_(0.9)),
    "item": without_gradients(lambda weight: weight.__setitem__(0, 0.5)),
    "out": without_gradients(lambda weight: torch.add(input=weight, other=0.1, out=weight)),
    "detached": lambda weight: weight.detach().__idiv__(1.1),
    "by keyword": lambda weight: nn.init.constant_(weight, 0.1),
    "several": without_gradients(lambda weight: torch._foreach_mul_([weight], 0.9)),
    "not the first": lambda weight: F.embedding(NUMBERS, weight, max_norm=0.1),
    "bag": lambda weight: F.embedding_bag(NUMBERS[None], weight, max_norm=0.1),
    "no underscore": without_gradients(observed),
    "optimiser": steps(torch.optim.AdamW, fused=True),
    "data": lambda weight: setattr(weight, "data", weight.data * 0.5),
}


class Twice(nn.Module):
    """Saves only copies of a weight that changes, and in `detached`, a result of a call that the gradient passes by."""

    def __init__(self, write: Callable[[Tensor], object]):
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.randn(16, 16)), write

    def use(self, x: Tensor) -> Tensor:
        self.write(self.weight)
        detached = F.layer_norm(x, (16,), self.weight[0]).detach()
        return F.linear(x, self.weight.clone()) * detached * torch.tanh(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(torch.tanh(self.use(x)))


@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.filterwarnings("ignore:no plan keeps")
@pytest.mark.filterwarnings("ignore:a step with more results for its backward")
def test_a_parameter_may_be_written_over_wherever_pytorch_saves_only_its_copies(name, budget):
    plain, ours = pair(Twice(WRITES[name]), budget=budget)
    for _ in range(3):
        assert agree(plain, ours, on(torch.randn(8, 16)))


class Statistics(nn.Module):
    """Reads a view of running statistics that a batch norm then updates, without a new version."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * (self.norm.running_var.view(1, 1, 8))
        self.norm((5 * x).flatten(0, 1))
        return scaled.sin() * 2


@pytest.mark.parametrize("budget", [None, 0.5])
@pytest.mark.filterwarnings("ignore:no plan keeps")
def test_running_statistics_may_be_read_before_they_are_updated(budget):
    plain, ours = pair(Statistics(), budget=budget)
    for _ in range(3):
        assert agree(plain, ours, on(torch.randn(32, 8, 8)))
