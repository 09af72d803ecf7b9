"""What is computed again on a CUDA device: seen on fake tensors, which need none; and on a device, if there is one."""

import copy
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from keepless import recompute_activations
from keepless.norms.backends.eager import EagerBackend
from keepless.recompute.held import signs, values
from keepless.recompute.held.signs import positive
from keepless.recompute.held.values import Again, Recipe, Value
from keepless.recompute.step.costs import peak_bytes
from keepless.recompute.table import rules
from keepless.recompute.table.rules import NotRepeated, dropout_scale
from keepless.saved import Kept
from tests.cuda import NEEDS_CUDA
from tests.keepless.recompute.agreement import agree, on, under
from tests.keepless.recompute.ahead import pair, peak_of
from tests.keepless.recompute.networks import blocks
from tests.keepless.recompute.test_uses import Operators


def operators_again(dtype: torch.dtype) -> set[str]:
    """The operators that compute a batch norm and its activation again, on a fake CUDA device."""
    with FakeTensorMode(), torch.device("cuda"):
        first, last = nn.Conv2d(3, 8, 3, dtype=dtype), nn.Conv2d(8, 4, 1, dtype=dtype)
        network = nn.Sequential(first, nn.BatchNorm2d(8, dtype=dtype), nn.SiLU(), last)
        output = recompute_activations(network)(torch.empty(4, 3, 16, 16, dtype=dtype))
        with Operators() as operators:
            again = output.grad_fn._saved_input  # of the last convolution
        assert again.shape == (4, 8, 14, 14) and again.is_cuda and again.dtype == dtype
    return set(operators.calls)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_computed_again_on_fake_tensors_launches_nothing(dtype):
    assert operators_again(dtype).isdisjoint({"batch_norm_elemt", "native_batch_norm", "cudnn_batch_norm"})


@pytest.mark.parametrize("dtype, name", [(torch.float32, "cudnn_batch_norm"), (torch.bfloat16, "empty_like")])
def test_under_deterministic_algorithms_cudnn_computes_its_norm_again(dtype, name, deterministic):
    assert name in operators_again(dtype)


def test_moments_of_fake_tensors_launch_nothing():
    with FakeTensorMode(), torch.device("cuda"), Operators() as operators:
        mean, var = EagerBackend().moments(torch.empty(4, 8, 3, dtype=torch.bfloat16))
    assert mean.dtype == var.dtype == torch.float32 and mean.shape == var.shape == (8,) and mean.is_cuda
    assert "batch_norm_update_stats" not in operators.calls


class Stream:
    """Stands in for a stream: notes for which others it waits."""

    device = None

    def __init__(self, name: str, log: list[str]):
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def present(monkeypatch) -> list[Stream]:
    """Its item is the current stream of every device."""
    streams: list[Stream] = []
    for module in (torch.cuda, values, signs):
        monkeypatch.setattr(module, "current_stream", lambda _: streams[0])
    monkeypatch.setattr(Tensor, "record_stream", lambda _, stream: stream.log.append(f"{stream.name} records"))
    return streams


def test_a_reader_on_another_stream_waits_and_records(present, monkeypatch):
    """A value is computed on its first consumer's stream, from what the forward pass has kept on another."""
    log: list[str] = []
    forward, first, second = (Stream(name, log) for name in ("forward", "first", "second"))
    present.append(forward)
    monkeypatch.setattr(values, "backward_number", lambda: -2)
    monkeypatch.setattr(values, "at_end_of_backward", lambda call: None)
    with FakeTensorMode(), torch.device("cuda"):
        kept = Value(Kept(torch.empty(4), None))
        value = Value(Recipe(Again(torch.exp, [kept]), torch.empty(4)))
        for _ in range(4):
            value.count_consumer(1)
        for present[0] in (first, first, second):
            value.get()
    assert log == ["first waits for forward", "first records", "second waits for first", "second records"]


def test_signs_are_packed_after_the_stream_that_made_the_values_and_read_after_the_one_that_packed(present):
    """A value that a later call packs may come from another stream, and be read on a third."""
    log: list[str] = []
    maker, packs, reads = (Stream(name, log) for name in ("made", "packs", "reads"))
    present.append(packs)
    with FakeTensorMode(), torch.device("cuda"):
        value = Value(Kept(torch.empty(4), None))
        value.consumer_count = value.sign_consumer_count = 1
        value.positive, value.stream = positive, maker
        value.settle(None, at_end=True)
        present[0] = reads
        value.get()
    assert log == ["packs waits for made", "packs records", "reads waits for packs", "reads records"]


class TwoStreams(nn.Module):
    """The second half runs on a side stream, and reads what the first half has made."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation
        self.first, self.second = nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3)
        self.third, self.norm = nn.Conv2d(64, 64, 1), nn.BatchNorm2d(64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        present, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(present)
        with torch.cuda.stream(side):
            y.record_stream(side)
            z = self.second(y)
        x = self.third(y)
        present.wait_stream(side)
        z.record_stream(present)
        return z.mean((2, 3)) + x.mean((2, 3))


def cuda_gradients(network: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(network(x).float().square().mean(), list(network.parameters())))


@pytest.mark.parametrize("budget", [None, "1KiB"])
@pytest.mark.parametrize("activation", [pytest.param(module, marks=NEEDS_CUDA) for module in (nn.SiLU(), nn.ReLU())])
def test_gradients_on_two_streams_are_those_of_the_plain_network(activation, budget, deterministic):
    torch.manual_seed(0)
    plain, prepared = pair(TwoStreams(activation).cuda(), budget=budget)
    x = torch.randn(16, 3, 128, 128, device="cuda")
    expected = cuda_gradients(plain, x)
    for _ in range(10):
        for gradient, reference in zip(cuda_gradients(prepared, x), expected, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("around", ["nothing", "autocast", "save_on_cpu", "frozen"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_gradients_are_equal_to_the_bit(device, around, deterministic):
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.LeakyReLU(0.1), nn.Dropout(0.3), nn.Conv2d(32, 32, 3)]
    plain = nn.Sequential(*layers, nn.BatchNorm2d(32), nn.SiLU(), nn.Conv2d(32, 4, 1)).to(device)
    plain[4].requires_grad_(around != "frozen")
    contexts = {
        "autocast": partial(torch.autocast, device, torch.bfloat16),
        "save_on_cpu": partial(torch.autograd.graph.save_on_cpu, pin_memory=device == "cuda"),
    }
    images, context = torch.randn(4, 3, 24, 24, device=device), contexts.get(around, nullcontext)
    assert agree(*pair(plain), on(images, False), wraps=partial(under, context))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def test_the_scale_of_dropout_is_the_kernel_s_own(device):
    """Kernels divide by 1 - p rounded to float32, or not; measuring draws no numbers from the program's generator."""
    device = torch.device(device, 0 if device == "cuda" else None)
    before = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    scales = {p: dropout_scale(device, False, p) for p in (percent / 100 for percent in range(1, 100))}
    after = torch.cuda.get_rng_state() if device.type == "cuda" else torch.get_rng_state()
    assert torch.equal(before, after)
    x = torch.randn(2**12, device=device)
    for p, scale in scales.items():
        result, mask = torch.native_dropout(x, p, True)
        assert torch.equal(x * mask * scale, result), p


def test_a_mask_is_not_used_where_its_scale_cannot_be_measured(monkeypatch):
    with pytest.raises(NotRepeated):
        dropout_scale(torch.device("cpu"), False, 1.0)
    monkeypatch.setattr(rules, "is_capturing", lambda: True)
    with pytest.raises(NotRepeated):
        dropout_scale(torch.device("cuda", 0), False, 0.123)


NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
SECOND = pytest.param("cuda:1", marks=[*NEEDS_CUDA, NEEDS_TWO])


def train(network: nn.Module, x: Tensor) -> None:
    network(x).square().mean().backward()


@pytest.mark.parametrize("with_example", [False, True])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA), SECOND])
def test_every_step_is_within_the_budget_and_exact(device, with_example):
    """The workspace of convolutions on a device is not planned, so a step may take 5 % more there."""
    torch.manual_seed(0)
    plain = blocks(6, nn.BatchNorm2d(32), nn.SiLU(), width=32, last=(nn.AdaptiveAvgPool2d(1),)).to(device)
    x, within = torch.randn(32, 3, 32, 32, device=device), copy.deepcopy(plain)
    train(plain, x)
    budget = int(0.5 * peak_bytes(lambda: train(plain, x), device))
    recompute_activations(within, budget=budget, example=x if with_example else None)
    for _ in range(4):
        assert peak_of(within, x) <= 1.05 * budget
    for network in (plain, within):
        network.zero_grad()
        train(network, x)
    for parameter, reference in zip(within.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("budget", [None, 0.7])
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
def test_a_captured_graph_replays_a_recomputed_step_with_new_masks(device, budget):
    def replayed(network: nn.Module) -> list[Tensor]:
        """Gradients of two replays, after five steps in which plans are made."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(5):
                network.zero_grad()
                train(network, x)
        torch.cuda.current_stream().wait_stream(side)
        network.zero_grad()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            train(network, x)
        torch.cuda.manual_seed(5)
        gradients = []
        for _ in range(2):
            graph.replay()
            gradients.append(torch.cat([p.grad.flatten().clone() for p in network.parameters()]))
        return gradients

    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(256)) for _ in range(6)]
    plain, x = nn.Sequential(*layers).to(device), torch.randn(512, 256, device=device)
    expected = replayed(copy.deepcopy(plain))
    results = replayed(recompute_activations(plain, budget=budget))
    assert not torch.equal(*expected) and all(map(torch.equal, results, expected))
