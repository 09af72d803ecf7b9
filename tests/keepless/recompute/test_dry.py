"""Dry steps, of which `keepless.plan` and `keepless.fit` count memory and time: on fake copies, or on real ones."""

from functools import wraps

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize

from keepless import InPlaceABN, fit, plan, recompute_activations
from keepless.conversion.activated import merge
from keepless.recompute.step.dry import rehearsed_step
from keepless.recompute.step.stand_ins import watch_of_example
from keepless.recompute.step.watch import backward_starts
from tests.keepless.recompute.ahead import Layers, plans

X = torch.linspace(-1, 1, 64 * 32).sin().view(64, 32)


class Counts(Layers):
    """It counts its calls, in itself, outside, and in buffers. `reads`: it reads values."""

    outside = 0

    def __init__(self, reads: bool):
        super().__init__(2, Counts.count)
        self.register_buffer("total", torch.zeros(()))
        self.register_buffer("assigned", torch.zeros(()))
        self.register_buffer("grid", torch.ones(32).expand(64, 32))  # nobody can write to it
        if not reads:  # PyTorch copies no real one
            self.register_buffer("sparse", torch.eye(4).to_sparse_csr())
        self.reads = reads

    def count(self, x: Tensor) -> Tensor:
        Counts.outside += 1
        self.total += 1
        self.assigned = self.assigned + 1
        return x * float(x.sum() != 0) if self.reads else x * self.grid


@pytest.mark.parametrize("reads", [False, True])
def test_a_dry_step_runs_on_a_copy_and_what_its_code_does_outside_is_done_once(reads):
    """A real one follows if the fake one has read a value. The random state, gradients and buffers are as before.

    So is the example, whose graph has one backward pass.
    """
    network, x, state, Counts.outside = Counts(reads), X.clone().requires_grad_(), torch.get_rng_state(), 0
    network.layers[0].weight.grad, buffers = torch.ones(32, 32), dict(network.named_buffers())
    squares = x * x
    plan(network, squares)
    assert Counts.outside == 1 + reads and network.calls == network.total == network.assigned == 0
    assert all(buffer is buffers[name] for name, buffer in network.named_buffers())
    squares.sum().backward()
    assert torch.equal(x.grad, 2 * x)
    assert torch.equal(network.layers[0].weight.grad, torch.ones(32, 32)) and network.layers[1].weight.grad is None
    assert torch.equal(state, torch.get_rng_state())


def wrapped(network: nn.Module) -> nn.Module:
    """Its forward pass is decorated as Accelerate does it: the copy's refers to the network itself."""
    forward = network.forward
    network.forward = wraps(forward)(lambda *args: forward(*args).float())
    return network


def locked(network: nn.Module) -> nn.Module:
    network.file = open("/dev/null")
    return network


INSTEAD = r"recompute_activations\(network, budget=…, example=…\) watches a step of the network itself"


@pytest.mark.parametrize("change, reason", [(wrapped, "reads a tensor of the network itself"), (locked, "be copied")])
def test_a_network_that_is_no_copy_of_itself_is_planned_by_a_step_of_its_own(change, reason):
    """Only what runs many steps refuses it."""
    network = change(Layers(4))
    with pytest.raises(RuntimeError, match=f"{reason}.*{INSTEAD}"):
        fit(network, X, "2GiB")
    assert plan(network, X).plain == pytest.approx(plan(Layers(4), X).plain, rel=0.02)
    assert plans(recompute_activations(network, budget=0.9, example=X)) == [1]


def test_a_fake_tensor_that_code_outside_has_kept_says_so_once_it_is_read():
    kept: list[Tensor] = []
    plan(Layers(2, lambda network, x: (kept.append(x), x)[1]), X)
    with pytest.raises(RuntimeError, match="aten.mul.Tensor reads a fake tensor, which code outside the network has"):
        kept[0] * 2


def test_a_dry_step_does_not_communicate(one_process):
    """Others may make none now, and would wait."""

    def summed(network: Layers, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        parts = [torch.empty_like(x)]
        dist.all_gather(parts, total)
        dist.broadcast(total, 0), dist.barrier()
        calls.append(is_fake(x))
        return x + parts[0]

    calls: list[bool] = []
    for network in (Layers(4, summed), DistributedDataParallel(Layers(4, summed))):
        plan(nn.Sequential(network, nn.ReLU()), X)
    assert calls == [True, True]


def test_the_backward_pass_starts_from_losses_and_not_from_what_they_are_computed_from():
    x = torch.randn(4, 3, requires_grad=True)
    logits, features = x.exp(), x * 2
    loss, penalty = logits.mean() + 1, (x * 3).sum()
    assert backward_starts([loss, logits]) == [loss]
    starts = backward_starts([logits, loss, features, penalty])
    assert [id(start) for start in starts] == [id(loss), id(features), id(penalty)]


def test_norms_that_to_inplace_merged_with_an_activation_are_counted_as_they_run():
    with torch.device("meta"):
        x, convolution = torch.randn(2, 3, 8, 8), nn.Conv2d(3, 3, 3)
        separate = nn.Sequential(convolution, InPlaceABN(3), convolution)
        merged = nn.Sequential(convolution, InPlaceABN(3), nn.ReLU(inplace=True), convolution)
    merge(merged[1], merged[2])
    steps = [rehearsed_step(network, (x,), {}) for network in (separate, merged)]
    assert steps[0].memories == steps[1].memories


@pytest.mark.parametrize("run", [rehearsed_step, watch_of_example])
def test_a_dry_step_leaves_cached_weights_as_they_are(run):
    """PyTorch finds them by ids of modules and tensors."""
    x, layer, normed = torch.randn(3, 4), nn.Linear(4, 4), parametrizations.weight_norm(nn.Linear(4, 4))
    with parametrize.cached():
        run(normed, (x,), {})
        weight = normed.weight
        run(normed, (x,), {})
        assert normed.weight is weight
    weight.sum().backward()
    assert normed.parametrizations.weight.original0.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x)
        run(layer, (x,), {})
        after = layer(x)
    assert before.grad_fn.next_functions[0] == after.grad_fn.next_functions[0]  # the cast of the bias
    assert torch.is_autocast_cache_enabled()
