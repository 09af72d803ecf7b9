"""Bytes of tensors in a backward pass, judged by PyTorch's profiler of the same step without the context."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from keepless.made_tensors import MadeTensors
from keepless.recompute.step.costs import peak_bytes
from keepless.saved import saved_for_backward

Kept = list[Tensor]


def head(h: Tensor) -> Tensor:
    """Saves little, and gives `h` a gradient of its size."""
    return F.conv2d(h, torch.ones(1, 16, 1, 1)).square().mean()


def residual(h: Tensor, _: Kept) -> Tensor:
    for _ in range(3):
        h = h + F.conv2d(h, torch.ones(16, 16, 1, 1))
    return head(h)


def held_by_a_hook(h: Tensor, kept: Kept) -> Tensor:
    product = h * 3.0
    product.register_hook(kept.append)
    return head(product) + head(h) + head(h * 2.0)


def held_at_the_sum(h: Tensor, kept: Kept) -> Tensor:
    branch = h.view_as(h)
    branch.register_hook(kept.append)
    return head(h) + head(h) + head(branch)


class _Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return gradient + torch.ones_like(gradient)  # of Python: always a new tensor


NETWORKS = {
    # As in a pyramid of convolutions: gradients meet at its input.
    "branches": lambda h, _: torch.stack([head(h) for _ in range(5)]).sum(),
    # Gradients are views, whose bases hold their memory.
    "tied": lambda h, _: sum(F.linear(torch.ones(4, 512), h.view(1024, 512)).square().mean() for _ in range(3)),
    "residual": residual,
    "product": lambda h, _: head(h * h),  # one node gives both gradients
    "expanded": lambda h, _: h.sum() + head(h) + h.sum(),  # a gradient that cannot be written to
    "aliased": lambda h, _: head((h + 1.0) + h) + head(h),  # the sum gives one gradient to both
    "held by a hook": held_by_a_hook,
    "held at the sum": held_at_the_sum,
    "function of Python": lambda h, _: head(_Adds.apply(h)) + head(_Adds.apply(h)),
}


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_gradients_that_meet_take_the_memory_that_they_take_without_the_context(network):
    x, kept = torch.randn(8, 16, 64, 64, requires_grad=True), Kept()

    def step() -> None:
        network(x * 2.0, kept).backward()
        x.grad = None
        kept.clear()

    step()
    with MadeTensors() as counted:
        step()
    assert counted.bytes == 0
    assert counted.peak == pytest.approx(peak_bytes(step, "cpu"), abs=200)  # scalars


def test_saved_tensors_are_freed_with_their_graph():
    """Here they are outputs, which their operations save."""
    result, saved = saved_for_backward(lambda: torch.ones(2, requires_grad=True).exp().sigmoid())
    kept = weakref.WeakSet(saved)
    assert len(kept) == 2
    del result, saved
    gc.collect()
    assert not kept
