"""Memory that is modified between the forward and the backward pass: gradients are right, or PyTorch's error is raised.

Also where no call can be seen, and under other saved-tensor hooks, where autograd itself checks nothing.
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from models.layers import recompute_activations

ERROR = "modified by an inplace operation"


class Joined(nn.Module):
    """Concatenates a value f with another one and, where `write` says so, writes over f."""

    def __init__(self, write: Callable[[Tensor], object] = id):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)
        self.write = write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.first(x)
        y = self.last(torch.cat([f, f * 2], 1))
        self.write(f)
        return f, y


def found(network: nn.Module, run: Callable[[nn.Module], Tensor]) -> list[Tensor] | str:
    """The gradients of a loss, or the error's message."""
    try:
        return list(torch.autograd.grad(run(network), list(network.parameters())))
    except RuntimeError as error:
        return str(error)


def assert_right_or_refused(plain: nn.Module, run: Callable[[nn.Module], Tensor], right: bool) -> None:
    """`right`: whether no error is accepted. Gradients are compared to the bit."""
    expected, ours = (found(n, run) for n in (plain, recompute_activations(copy.deepcopy(plain))))
    assert not isinstance(expected, str)
    if right or not isinstance(ours, str):
        assert not isinstance(ours, str), ours
        assert all(map(torch.equal, ours, expected))
    else:
        assert ERROR in ours


IMAGES = torch.linspace(-3, 3, 2 * 3 * 4 * 4).sin().view(2, 3, 4, 4)
SAME = partial(saved_tensors_hooks, lambda tensor: tensor, lambda tensor: tensor)
ALIAS = partial(saved_tensors_hooks, lambda tensor: tensor.data, lambda tensor: tensor)
COPY = partial(saved_tensors_hooks, lambda tensor: tensor.clone(), lambda tensor: tensor)


@pytest.mark.parametrize("hooks", [nullcontext, save_on_cpu, SAME, ALIAS, COPY])
def test_what_the_caller_writes_over_is_refused_under_other_hooks_as_well(hooks):
    """Hooks that make a copy keep the right values."""
    plain = Joined()

    def run(network: nn.Module) -> Tensor:
        with hooks():
            f, y = network(IMAGES)
        f.relu_()
        return y.sum()

    assert_right_or_refused(plain, run, right=hooks is COPY)


@torch.library.custom_op("in_place_abn::halved", mutates_args=["x"])
def halved(x: Tensor) -> None:
    x.mul_(0.5)


def halve(x: Tensor) -> Tensor:
    return x.mul_(0.5)


@cache
def script() -> Callable[[Tensor], Tensor]:
    return torch.jit.script(halve)


def without_functions(x: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        x.relu_()


def in_another_thread(x: Tensor) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(torch.no_grad()(x.relu_)).result()


SEEN = {
    "operator": lambda f: torch.ops.aten.add_.Tensor(f, f),
    "operator's overloads": lambda f: torch.ops.aten.relu_(f),
    "operator by name": lambda f: torch.ops.aten.relu_.default(self=f),
    "custom operator": lambda f: halved(f.detach()),
    "operator with out": lambda f: torch.ops.aten.sin.out(f.detach(), out=f.detach()),
}
UNSEEN = {"script": lambda f: script()(f), "thread": in_another_thread, "no functions": without_functions}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("around", ["nothing", "checkpoint", "save_on_cpu"])
@pytest.mark.parametrize("write", SEEN | UNSEEN)
def test_writes_by_operators_are_seen_and_others_refused(write, around):
    def run(network: nn.Module) -> Tensor:
        if around == "checkpoint":
            return checkpoint(network, IMAGES, use_reentrant=False)[1].square().sum()
        with save_on_cpu() if around == "save_on_cpu" else nullcontext():
            return network(IMAGES)[1].square().sum()

    assert_right_or_refused(Joined((SEEN | UNSEEN)[write]), run, right=write in SEEN)
