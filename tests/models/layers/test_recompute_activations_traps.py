"""Ways in which recomputation could go wrong, found by trying: each is like the plain network, or an error as there."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.utils.checkpoint import checkpoint

from models.layers import CheckpointedABN, recompute_activations
from models.layers.recording import Recording


def both(plain: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A network in float64, plain and prepared."""
    plain = plain.double()
    return plain, recompute_activations(copy.deepcopy(plain))


def images() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(2, 3, 4, 4, dtype=torch.float64)


def same(plain: list[Tensor], prepared: list[Tensor]) -> None:
    for expected, found in zip(plain, prepared, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize("after", [nn.ELU(inplace=True), nn.LeakyReLU(0.1)], ids=str)
@pytest.mark.parametrize("activation", ["tanh", "elu", "identity"])
def test_what_a_checkpointed_layer_computes_again_is_not_overwritten(activation, after, retained):
    """Its own gradient reads it too."""
    gradients = []
    for network in both(
        nn.Sequential(nn.Conv2d(3, 4, 1), CheckpointedABN(4, activation=activation), after, nn.Conv2d(4, 4, 1))
    ):
        loss = network(images()).square().mean()
        if retained:
            torch.autograd.grad(loss, [network[3].weight], retain_graph=True)
        gradients.append(list(torch.autograd.grad(loss, list(network.parameters()))))
    same(*gradients)


class NormInBothModes(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 1), norm, nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = F.silu(self.norm.eval()(x)) + F.silu(x + self.norm.running_mean.view(1, -1, 1, 1))
        self.norm.train()(3 * x)  # moves the running statistics, without a new version
        return self.last(y)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)], ids=str)
def test_running_statistics_may_move_before_the_backward_pass(norm):
    gradients = []
    for network in both(NormInBothModes(norm)):
        loss = network(images()).square().mean()
        with torch.no_grad():
            network(2 * images())
        gradients.append(list(torch.autograd.grad(loss, [network.first.weight, network.last.weight])))
    same(*gradients)


class WritesOverWhatItSaved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return x.mul_(0).add_(dy)


def test_a_backward_function_that_writes_over_a_saved_tensor_is_found_out():
    w = torch.randn(4, 3, requires_grad=True)
    with Recording():
        y = F.silu(w * 1)
        first = y.sin()  # reads y last in the backward pass
        output = WritesOverWhatItSaved.apply(y) * 2 + first
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


class AddsAnotherDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.first(x))
        y += self.norm(x)  # bfloat16 += float32
        return self.last(y)


def test_a_sum_in_place_keeps_its_dtype():
    plain = AddsAnotherDtype()
    gradients = []
    x = torch.randn(3, 4)
    for network in (plain, recompute_activations(copy.deepcopy(plain))):
        with torch.autocast("cpu", torch.bfloat16):
            loss = network(x).square().sum()
        gradients.append(list(torch.autograd.grad(loss, list(network.parameters()))))
    for expected, found in zip(*gradients, strict=True):
        assert torch.equal(found, expected)


def test_lists_may_change_after_a_call():
    gradients = []
    for record in (False, True):
        w, sizes = images().requires_grad_(), [1, 1]
        with Recording(checkpointed_only=not record):
            y = F.pad(F.silu(w), sizes).sin()
        sizes[:] = [0, 2]
        gradients.append(list(torch.autograd.grad(y.square().sum(), w)))
    same(*gradients)


class Watched(nn.Module):
    """Marks a detached copy, and looks at a value that is then overwritten."""

    def __init__(self, overwrites: bool):
        super().__init__()
        self.overwrites = overwrites
        self.first, self.norm, self.last = nn.Conv2d(3, 4, 1), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.silu(self.norm(self.first(x)))
        self.mean = y.abs().mean().item()
        if self.overwrites:
            y *= 0.5
        output = self.last(y)
        self.map = y.detach().requires_grad_()
        return output


@pytest.mark.parametrize("overwrites", [False, True])
def test_what_nobody_differentiates_is_no_reason_for_an_error(overwrites):
    gradients = [
        list(torch.autograd.grad(network(images()).square().sum(), list(network.parameters())))
        for network in both(Watched(overwrites))
    ]
    same(*gradients)


@pytest.mark.parametrize("stem", [nn.Conv2d(3, 4, 3), CheckpointedABN(3)], ids=["convolution", "CheckpointedABN"])
def test_a_checkpoint_may_repeat_the_forward_pass_in_another_thread(stem):
    """As it does on CUDA. Numbers of nodes begin anew in each thread."""
    gradients = []
    stem = stem.double()
    for network in both(nn.Sequential(nn.Linear(4, 4), nn.SiLU(), nn.Linear(4, 2))):
        rows = stem(torch.randn(2, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
        loss = checkpoint(network, rows.flatten(2).unflatten(2, (-1, 4)), use_reentrant=False).square().sum()
        failed: list[BaseException] = []

        def backward(loss: Tensor = loss, failed: list = failed) -> None:
            try:
                loss.backward()
            except BaseException as error:
                failed.append(error)

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        assert failed == []
        gradients.append([parameter.grad for parameter in network.parameters()])
    same(*gradients)


class Graph(nn.Module):
    adjacency: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(torch.vmap(lambda row: row.mul(2).add_(1).sin())(self.adjacency @ self.layer(x))))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr", "to_dense"])
def test_sparse_and_batched_tensors_are_left_alone(layout):
    x = torch.randn(4, 3, dtype=torch.float64)
    gradients = []
    for network in both(Graph()):
        network.adjacency = getattr(torch.eye(4, dtype=torch.float64), layout)()
        gradients.append(list(torch.autograd.grad(network(x).sum(), list(network.parameters()))))
    same(*gradients)


def test_inference_tensors_are_left_alone():
    with torch.inference_mode():
        part = torch.ones(2, 3, 4, 4, dtype=torch.float64)
    w = images().requires_grad_()
    with Recording():
        loss = torch.cat([F.silu(w), part], 1).sum()
    loss.backward()
    assert w.grad is not None


def test_inside_of_torch_func_it_does_nothing():
    network = recompute_activations(nn.Sequential(nn.Linear(3, 3), nn.ReLU()))
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    found = grad(lambda p: functional_call(network, p, (torch.ones(1, 3),)).sum())(weights)
    assert found.keys() == weights.keys()


def test_any_bounds_of_hardtanh():
    network = recompute_activations(nn.Sequential(nn.Linear(2, 2), nn.Hardtanh(0.0, float("inf")), nn.Linear(2, 2)))
    network(torch.ones(1, 2)).sum().backward()


def test_a_part_of_a_concatenation_may_be_overwritten_under_other_hooks():
    w = images().requires_grad_()
    with Recording():
        a, b = w * 1, w * 2
        y = torch.cat([a, b], 1).sin()
        with torch.autograd.graph.save_on_cpu():
            a.relu_()
    expected = w.detach().cos() + 2 * (2 * w.detach()).cos()
    same([expected], list(torch.autograd.grad(y.sum(), w)))


def test_an_output_that_is_not_given_is_not_written_over():
    """`F.normalize` calls itself with out=None; Swin V2's attention normalises queries and keys."""

    class CosineAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.linear(x).reshape(2, 5, 3, 8).permute(2, 0, 1, 3)
            return (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)) @ v

    plain, prepared = both(CosineAttention())
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    gradients = [torch.autograd.grad(network(x).square().sum(), network.parameters()) for network in (plain, prepared)]
    same(*map(list, gradients))
