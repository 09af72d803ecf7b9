"""Custom operators that declare to write over nothing are repeated as one call, with equal gradients."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from keepless import recompute_activations
from keepless.recompute.costs import peak_bytes
from keepless.recompute.functions import TABLE, learn, row_of
from keepless.recompute.rehearsal import counted_step
from keepless.recompute.search import Choice
from keepless.recompute.simulation import plain_peak, simulate
from keepless.recompute.step import Flag, Kind
from tests.keepless.recompute.ahead import step


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


class Operators(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.ops.keepless_tests.noisy_square(layer(x))
        return x.square().mean()


def test_an_operator_is_repeated_with_its_random_numbers_and_what_it_saves():
    torch.manual_seed(0)
    network, x = Operators(), torch.randn(800, 64)
    expected = step(copy.deepcopy(network), x)
    step(network, x)
    traced = counted_step(network, (x,), {})
    of_operator = [value.call >= 0 and "noisy" in str(traced.calls[value.call][0]) for value in traced.values]
    kept = [not operator for operator in of_operator]
    peak = simulate(traced, kept).peak
    plan = Choice(peak, 0.0, tuple(kept)).plan(traced)
    assert sum(flag & Flag.AGAIN != 0 for flag in plan.flags) == 8 and plan.calls == traced.calls
    assert all(map(torch.equal, step(network, x, plan), expected))
    measured = peak_bytes(lambda: step(network, x, plan), "cpu")
    assert measured == pytest.approx(peak, rel=0.02) and peak < 0.8 * plain_peak(traced)


def test_only_operators_that_write_over_nothing_have_a_rule():
    """PyTorch's own operators have none either, because its functions have rules."""
    mine = torch.ops.keepless_tests
    others = {mine.counted, torch.ops.aten.dropout, torch.ops.profiler._record_function_enter_new}
    for operator in (mine.noisy_square, mine.noisy_square.default, *others):
        learn(operator)
    for operator in (mine.noisy_square, mine.noisy_square.default):
        assert TABLE[operator].is_slow and TABLE[operator].inside and TABLE[operator].draws
    assert not others & TABLE.keys()


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
    network = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    network[1].forward = convert
    recompute_activations(network, budget=1.0)
    for _ in range(4):
        network(torch.randn(16, 64)).square().mean().backward()
    assert from_outside == 4 * [False]


class Functions(nn.Module):
    """Functions of PyTorch that no row of the table names, as in the norm of ConvNeXt V2."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = torch.lerp(x.sin(), x, 0.5)
            x = torch.addcmul(layer.bias, layer.bias, x / torch.linalg.vector_norm(x, dim=0, keepdim=True))
            x = torch.maximum(x, x.flip(1)).index_select(1, torch.arange(64))
        return x.square().mean()


def test_plans_repeat_functions_that_declare_a_new_tensor():
    torch.manual_seed(0)
    network, x = Functions(), torch.randn(800, 64)
    expected = step(copy.deepcopy(network), x)
    values = counted_step(network, (x,), {}).values
    assert [value.bytes for value in values if value.kind == Kind.KEPT and value.bytes >= x.nbytes] == [x.nbytes]
    with pytest.warns(UserWarning, match="no plan keeps this step"):
        assert all(map(torch.equal, step(recompute_activations(network, budget=1000), x), expected))


@pytest.mark.parametrize(
    "function",
    [
        *(Tensor.addcmul_, torch.batch_norm, torch.cumsum, torch.rrelu, Tensor.index_add, torch.alpha_dropout),
        *(Tensor.detach, torch.linalg.svdvals, torch.linalg.matrix_norm),
    ],
)
def test_functions_that_write_or_draw_or_differ_when_they_run_again_are_not_repeated(function):
    assert row_of(function).again is None


class Weighted(nn.Module):
    """Multiplies by the mean of a function of the input."""

    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * self.function(x).sin().exp().mean()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:7] @ x.view(4, 64, 64),
        lambda x: torch.matmul(x[0], x.view(4, 64, 64)),
        lambda x: torch.linalg.matmul(x[:7], x.view(4, 64, 64).mT),
        lambda x: torch.linalg.matmul(x.view(4, 64, 64).mT, x[0]),
        lambda x: torch.linalg.norm(x, 2),
    ],
)
def test_arithmetic_that_depends_on_gradients_is_repeated_as_it_was(function):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), Weighted(function), nn.Tanh()) for _ in range(3)]
    network, x = nn.Sequential(*layers), torch.randn(256, 64)
    expected = step(copy.deepcopy(network), x)
    with pytest.warns(UserWarning, match="no plan keeps this step"):
        assert all(map(torch.equal, step(recompute_activations(network, budget=1000), x), expected))
