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
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from keepless import recompute_activations
from keepless.saved import kept_bytes

ERROR = "modified by an inplace operation"
IMAGES = torch.linspace(-3, 3, 2 * 3 * 4 * 4).sin().view(2, 3, 4, 4)


class Joined(nn.Module):
    """Concatenates a value f with another one and writes over f. Returns f, and a function of the result."""

    def __init__(self, write: Callable[[Tensor], object] = id, last: Callable[[Tensor], Tensor] = torch.square):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(8, 2, 1)
        self.write, self.last = write, last

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f = self.first(x)
        y = self.second(torch.cat([f, f * 2], 1))
        self.write(f)
        return f, self.last(y)


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
    # timm's TNT does this.
    "dropout of nothing": lambda f: F.dropout(f, 0.0, inplace=True),
    "dropout in evaluation": lambda f: F.dropout(f, 0.5, False, inplace=True),
}
UNSEEN = {"script": lambda f: script()(f), "thread": in_another_thread, "no functions": without_functions}
# Hooks that pass tensors on, alias them, or copy them, and so keep the right values.
AROUND = {
    "nothing": nullcontext,
    "save_on_cpu": save_on_cpu,
    "same": partial(saved_tensors_hooks, lambda tensor: tensor, lambda tensor: tensor),
    "alias": partial(saved_tensors_hooks, lambda tensor: tensor.data, lambda tensor: tensor),
    "copy": partial(saved_tensors_hooks, lambda tensor: tensor.clone(), lambda tensor: tensor),
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("around", [*AROUND, "checkpoint"])
@pytest.mark.parametrize("write", [*SEEN, *UNSEEN, "by the caller"])
def test_writes_by_operators_are_seen_and_others_refused(write, around):
    """Right is what the network does: a caller's writes are refused."""

    def run(network: nn.Module) -> Tensor:
        if around == "checkpoint":
            f, y = checkpoint(network, IMAGES, use_reentrant=False)
        else:
            with AROUND[around]():
                f, y = network(IMAGES)
        if write == "by the caller":
            f.relu_()
        return y.sum()

    plain = Joined((SEEN | UNSEEN).get(write, id))
    assert_right_or_refused(plain, run, right=write in SEEN or (around == "copy" and write == "by the caller"))


@pytest.mark.parametrize("write", ["unseen", "by the caller"])
def test_a_checkpoint_that_repeats_a_write_is_noticed(write):
    """Its tensors are not the original ones, which nothing holds any more."""

    class Second(Joined):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[1]

    def part(network: nn.Module, x: Tensor) -> Tensor:
        if write == "unseen":
            return network(x)
        f, y = network(x)
        f.relu_()
        return y

    plain = Second(without_functions) if write == "unseen" else Joined()
    recompute = partial(checkpoint, part, use_reentrant=False)
    assert_right_or_refused(plain, lambda network: recompute(network, IMAGES).sum(), right=False)


@pytest.mark.parametrize("around", AROUND)
def test_a_call_that_writes_over_what_it_saves_is_refused(around):
    """PyTorch refuses it as well, but not under hooks."""
    network = recompute_activations(Joined(last=lambda y: y.mul_(y)))
    with pytest.raises(RuntimeError, match=ERROR), AROUND[around]():
        network(IMAGES)[1].sum().backward()


@pytest.mark.parametrize("name", [name for name in SEEN if "dropout" in name])
def test_dropout_in_place_that_drops_nothing_writes_nothing(name):
    """So the result that sigmoid has saved stays valid, and the parts of the concatenation need no copies."""
    plain = Joined(last=lambda y: SEEN[name](z := torch.sigmoid(y)) is None or z)
    assert_right_or_refused(plain, lambda network: network(IMAGES)[1].square().sum(), right=True)
    networks = [recompute_activations(Joined(write)) for write in (SEEN[name], id)]
    assert len({kept_bytes(network, lambda n=network: n(IMAGES)[1], [IMAGES]) for network in networks}) == 1


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)], ids=str)
def test_an_optimiser_may_change_what_the_backward_pass_of_a_plain_norm_does_not_read(norm):
    """Two losses with a step in between do this. The bias is copied, and so is a weight that autograd repeats first."""
    plain = nn.Sequential(nn.Conv2d(3, 4, 1), norm, nn.ReLU(), nn.Conv2d(4, 2, 1))

    def run(network: nn.Module) -> Tensor:
        loss = network(images).square().sum()
        with torch.no_grad():
            network[1].bias.add_(1)
        return loss

    images = IMAGES.repeat(1, 1, 4, 4)
    assert_right_or_refused(plain, run, right=True)
    prepared = recompute_activations(copy.deepcopy(plain))
    kept = [kept_bytes(network, lambda n=network: run(n), [images]) for network in (plain, prepared)]
    if isinstance(norm, nn.BatchNorm2d):  # which keeps its weight
        loss = prepared(images).sum()
        with torch.no_grad():
            prepared[1].weight.add_(1)
        with pytest.raises(RuntimeError, match=ERROR):
            loss.backward()
    assert (
        kept[0] - kept[1] == 2 * 4 * 16 * 16 * 4 - (2 if isinstance(norm, nn.InstanceNorm2d) else 1) * norm.bias.nbytes
    )
