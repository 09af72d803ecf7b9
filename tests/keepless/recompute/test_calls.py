"""Calls are computed again with all that they have saved, equal to the bit; and only calls that may run twice are."""

from collections.abc import Callable
from random import Random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from keepless import recompute_activations, report
from keepless.recompute.table import rules
from keepless.recompute.table.functions import row_of
from keepless.recompute.table.rules import NotRepeated, with_gradient
from tests.keepless.recompute.agreement import keep_by_chance
from tests.keepless.recompute.ahead import After, pair, plan_next_step


@torch.library.custom_op("keepless_tests::noisy_square", mutates_args=())
def noisy_square(x: Tensor) -> Tensor:
    return torch.rand_like(x).addcmul_(x, x)


@torch.library.custom_op("keepless_tests::counted", mutates_args=("calls",))
def counted(x: Tensor, calls: Tensor) -> Tensor:
    calls += 1
    return x * calls


def _save_both(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0], output)
    ctx.shape = inputs[0].shape  # an attribute


noisy_square.register_fake(torch.empty_like)
noisy_square.register_autograd(
    lambda ctx, gradient: gradient.view(ctx.shape) * ctx.saved_tensors[0] * ctx.saved_tensors[1],
    setup_context=_save_both,
)
OWN = torch.ops.keepless_tests


def attention(x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, -x, dropout_p=0.3, is_causal=True)


def by_one_backend(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # which saves other tensors inside than the backend that is chosen without it
        return F.scaled_dot_product_attention(x, x * 2, -x)


class SelfAttention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(0, 1)
        return super().forward(x, x, x, need_weights=self.training)[0]


def masked(x: Tensor) -> Tensor:
    """Two layers share a mask that is made without gradient, and takes a quarter of the scores' bytes."""
    mask = torch.zeros(8, 1, 64, 64, device=x.device).masked_fill(torch.ones_like(x[:, :1]).triu(1).bool(), -1e9)
    for _ in range(2):
        x = ((x * 2) + mask).softmax(-1).exp()
    return x


def without_rows(x: Tensor) -> Tensor:
    """Functions of PyTorch that no row of the table names, as in the norm of ConvNeXt V2."""
    x, bias = torch.lerp(x.sin(), x, 0.5), torch.ones(64, device=x.device)
    x = torch.addcmul(bias, bias, x / torch.linalg.vector_norm(x, dim=0, keepdim=True))
    return torch.maximum(x, x.flip(1)).index_select(1, torch.arange(4, device=x.device))


def weighted(function: Callable[[Tensor], Tensor], height: int = 64) -> Callable[[Tensor], Tensor]:
    """PyTorch multiplies and takes norms in another way where nothing needs a gradient."""
    return lambda x: x * function(x.view(-1, height, 64)).sin().exp().mean()


# Functions of x (8, 4, 64, 64), and the bytes of tensors that are kept, relative to x.
CALLS: dict[str, tuple[Callable[[Tensor], Tensor], list[float]]] = {
    "dropout": (lambda x: F.dropout(x, 0.3), []),
    "dropout in place": (lambda x: F.dropout(x * 1.5, 0.3, inplace=True), [1]),  # its mask
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), []),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.3, training=True), [1, 1]),  # has no rule
    "attention": (attention, []),
    "attention by one backend": (by_one_backend, []),
    "multi-head attention with weights": (SelfAttention(64, 2, batch_first=True), []),
    "multi-head attention": (SelfAttention(64, 2, batch_first=True).eval(), []),
    "transposed": (lambda x: F.dropout(x.transpose(1, 3), 0.3), []),
    "bernoulli": (lambda x: x * torch.bernoulli(x.sigmoid()), []),
    "its own generator": (lambda x: x * torch.bernoulli(x.sigmoid(), generator=torch.Generator(x.device)), [1]),
    "cross entropy": (lambda x: F.cross_entropy(x.flatten(0, 2), torch.arange(64, device=x.device).repeat(32)), []),
    "a custom operator": (lambda x: OWN.noisy_square(OWN.noisy_square.default(x)), []),
    "functions without a row": (without_rows, []),
    "a mask, kept once": (masked, [0.25]),
    # Products copy what they transpose.
    "a folded product": (weighted(lambda x: x[0, :7] @ x), [1]),
    "a folded product by name": (weighted(lambda x: torch.matmul(x[0, 0], x)), [1]),
    "a folded product of a transposed tensor": (weighted(lambda x: torch.linalg.matmul(x[0, :7], x.mT)), []),
    "a folded product with a vector": (weighted(lambda x: torch.linalg.matmul(x.mT, x[0, 0])), []),
    "a layer of transposed inputs": (weighted(lambda x: F.linear(x.mT, x[0, :, :8]), 8), []),
    "a frozen layer of transposed inputs": (weighted(lambda x: F.linear(x.mT, x[0, :, :8].detach()), 8), [1]),
    "a layer whose bias comes first": (
        weighted(lambda x: F.linear(x.mT, bias=x[0, 0, :8].detach(), weight=x[0, :, :8]), 8),
        [],
    ),
    "a folded product by swapped names": (weighted(lambda x: torch.matmul(other=x, input=x[0, :7])), [1]),
    "a product of transposed inputs": (weighted(lambda x: x.mT @ x[0, :, :8], 8), []),
    "a product of transposed inputs and constants": (weighted(lambda x: x.mT @ x[0, :, :8].detach(), 8), [1]),
    "a norm": (weighted(lambda x: torch.linalg.norm(x.flatten(0, 1), 2)), [1.03]),  # singular vectors
}


class Called(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.w, self.function = nn.Parameter(torch.randn(8, 4, 64, 64)), CALLS[name][0]

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.w * x).exp().sum()


@pytest.mark.table
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", CALLS)
def test_calls_are_computed_again_to_the_bit_from_little(name, device, monkeypatch):
    """The forward pass draws as many random numbers as without a plan; draws between the passes change nothing."""
    keep_by_chance(monkeypatch, Random(0), shares=[0.0])
    plain, prepared = pair(Called(name).to(device), budget="1KiB")
    x, results = torch.tensor(1.25, device=device), []
    plan_next_step(prepared, x)
    for network in (plain, prepared):
        torch.manual_seed(1)
        loss = network(x).square().mean()
        before = torch.rand(1, device=device)
        gradients = torch.autograd.grad(loss, list(network.parameters()))
        results.append([loss, before, *gradients, torch.rand(1, device=device)])
    assert all(map(torch.equal, *results))
    if device == "cpu":
        shares = [round(line.bytes / prepared.w.nbytes, 2) for line in report(prepared).lines]
        assert sorted(share for share in shares if share > 0.1) == CALLS[name][1]


def test_operators_get_no_values_but_the_network_s():
    """Kernels such as torchvision's `roi_align` trust their indices, and read outside of their tensors otherwise.

    Nor does a name that begins like a convolution's tell anything.
    """
    from_outside = []

    @torch.library.custom_op("keepless_tests::convert", mutates_args=())
    def convert(x: Tensor) -> Tensor:
        from_outside.append(len(x.unique()) < 2)
        return x * 2

    convert.register_fake(torch.empty_like)
    convert.register_autograd(lambda ctx, gradient: gradient * 2)
    network = nn.Sequential(After(nn.Linear(64, 64), lambda x: convert(x)), nn.Linear(64, 64))
    recompute_activations(network, budget=1.0)
    for _ in range(4):
        network(torch.randn(16, 64)).square().mean().backward()
    assert from_outside == 4 * [False]


@pytest.mark.parametrize(
    "function",
    [
        *(Tensor.addcmul_, torch.batch_norm, torch.cumsum, torch.rrelu, Tensor.index_add, torch.alpha_dropout),
        *(Tensor.detach, torch.linalg.svdvals, torch.linalg.matrix_norm),
        # PyTorch's own operators have no rule, because its functions have rules.
        *(OWN.counted, torch.ops.aten.dropout, torch.ops.profiler._record_function_enter_new),
    ],
)
def test_functions_that_write_or_draw_or_differ_when_they_run_again_are_not_repeated(function):
    assert row_of(function).again is None


def test_a_product_that_runs_with_a_gradient_saves_nothing_to_the_program_s_hooks():
    saved, (x, weight) = [], torch.randn(2, 3, 4, 4).unbind()
    with saved_tensors_hooks(saved.append, lambda _: None):
        with_gradient(1, F.linear, x.transpose(0, 1), weight[0])
    assert not saved


@pytest.mark.parametrize("is_named", [False, True])
def test_calls_that_draw_are_repeated_only_on_aligned_tensors(is_named):
    """CUDA's kernels assign random numbers to others in another order."""
    q = torch.randn(2 * 2 * 8 * 8 + 1)[1:].view(2, 2, 8, 8)
    args, kwargs = ((), {"query": q, "key": q, "value": q}) if is_named else ((q, q, q), {})
    with pytest.raises(NotRepeated, match="its random numbers cannot be drawn again"):
        rules.attention(lambda tensor, may_keep=False: tensor, args, {**kwargs, "dropout_p": 0.3}, q)
