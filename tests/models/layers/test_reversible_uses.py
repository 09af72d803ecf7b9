"""Reversible modules in unusual places: right gradients, or an error that says why not."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from models.layers import ABN, AdditiveCoupling, InvertibleModuleWrapper, ReversibleSequence
from models.layers.drift import drift
from scripts.bench.measuring import saved_for_backward
from tests.models.layers.test_reversible import (
    IMAGES,
    NORMS,
    Opaque,
    additive,
    affine,
    assert_same,
    assert_same_use,
    branch,
    gradients,
    made,
    step,
    wrapped,
)


@pytest.fixture
def traced_autograd():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch._dynamo.reset()


def assert_compiled_the_same(network: nn.Module, *blocks: nn.Module, steps: int = 1, **options) -> None:
    plain = copy.deepcopy(nn.Sequential(*blocks))
    compiled = torch.compile(network, backend="aot_eager", **options)
    for _ in range(steps):  # gradients and statistics go on
        assert_same(step(compiled, IMAGES), step(plain, IMAGES))


def test_compiled_as_one_graph(traced_autograd):
    blocks = made(additive(), affine(norm=nn.BatchNorm2d))
    assert_compiled_the_same(ReversibleSequence(blocks), *blocks, steps=2, fullgraph=True)


def test_compiled_tied_parameters(traced_autograd):
    """PyTorch traces wrong gradients for an argument that is given twice, so such couplings are no node of a row."""
    first, second = made(additive(), additive())
    second.Fm[1].weight = first.Fm[1].weight
    blocks = [first, second, AdditiveCoupling(first.Fm, first.Fm)]
    assert_compiled_the_same(ReversibleSequence(blocks), *blocks, fullgraph=True)


def test_compiled_wrappers_and_subclasses(traced_autograd):
    blocks = made(
        Scaled(branch()), additive(), affine(norm=nn.BatchNorm2d), additive(norm=nn.BatchNorm2d), Scaled(branch())
    )
    network = nn.Sequential(
        ReversibleSequence(blocks[:2]),
        InvertibleModuleWrapper(blocks[2]),
        InvertibleModuleWrapper(blocks[3], keep_input=True),
        InvertibleModuleWrapper(blocks[4]),
    )
    assert_compiled_the_same(network, *blocks, fullgraph=True)


@pytest.mark.parametrize("keep_input, buffers", [(False, 1), (True, 2)])
def test_compiled_a_wrapper_keeps_its_output_alone(traced_autograd, keep_input, buffers):
    """With its input kept, PyTorch keeps what the branches need: the input and the output of each Tanh."""

    def tanh_branch() -> nn.Module:
        return nn.Sequential(nn.Conv2d(4, 4, 1), nn.Tanh(), nn.Conv2d(4, 4, 1))

    wrapper = InvertibleModuleWrapper(AdditiveCoupling(tanh_branch(), tanh_branch()), keep_input=keep_input)
    x = torch.randn(2, 8, 16, 16, requires_grad=True) * 1
    _, saved = saved_for_backward(lambda: torch.compile(wrapper, backend="aot_eager", fullgraph=True)(x))
    assert sum(tensor.nbytes for tensor in saved if len(tensor) == 2) == buffers * x.nbytes


def test_compiled_with_breaks():
    """PyTorch does not trace gradients in a gradient, unless it is told to."""
    torch._dynamo.reset()
    blocks = made(AdditiveCoupling(branch(), branch(norm=nn.BatchNorm2d)))
    assert_compiled_the_same(ReversibleSequence(blocks), *blocks)
    torch._dynamo.reset()


def test_compiled_branches():
    torch._dynamo.reset()
    blocks = made(AdditiveCoupling(branch(), branch(norm=nn.BatchNorm2d)), additive())
    plain = copy.deepcopy(nn.Sequential(*blocks))
    blocks[0].Fm, blocks[0].Gm = (torch.compile(part, backend="aot_eager") for part in (blocks[0].Fm, blocks[0].Gm))
    assert_same(step(ReversibleSequence(blocks), IMAGES), step(plain, IMAGES))
    torch._dynamo.reset()


class DroppingABN(ABN):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.3, self.training)


class Scaled(AdditiveCoupling):
    """A coupling with more than half-steps."""

    def __init__(self, Fm):
        super().__init__(Fm)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * super().forward(x)

    def inverse(self, y):
        return super().inverse(y / self.scale)


@pytest.mark.parametrize("form", [ReversibleSequence, wrapped])
def test_subclasses_that_override_more(form):
    blocks = made(Scaled(branch()), additive(), Scaled(branch()))
    plain = copy.deepcopy(nn.Sequential(*blocks))
    assert_same(step(form(blocks), IMAGES), step(plain, IMAGES))


def test_compiled_dropout_keeps_its_activations(traced_autograd):
    """Random numbers could not be drawn again inside a graph, so nothing is forgotten there.

    Nor in subclasses, which may draw some. Gradients are compared with finite differences.
    """
    network = ReversibleSequence(made(additive(dropout=0.4), additive(norm=DroppingABN)))
    compiled = torch.compile(network, backend="aot_eager")
    direction, values = torch.randn_like(IMAGES), []
    for size in (0.0, 1e-5, -1e-5):
        torch.manual_seed(0)
        x = (IMAGES + size * direction).requires_grad_()
        values.append(compiled(x).sum())
        if size == 0:
            (gradient,) = torch.autograd.grad(values[0], x)
    torch.testing.assert_close((gradient * direction).sum(), (values[1] - values[2]) / 2e-5, rtol=1e-5, atol=1e-5)


def test_other_parameters_in_the_backward_pass_are_refused():
    network = ReversibleSequence(made(additive()))
    others = {name: nn.Parameter(parameter + 1) for name, parameter in network.named_parameters()}
    y = torch.func.functional_call(network, others, (IMAGES.clone().requires_grad_(),))
    with pytest.raises(RuntimeError, match="is another parameter than in the forward pass"):
        y.sum().backward()


@pytest.mark.parametrize("norm", ["std", "inplace", "checkpoint", "batchnorm"])
def test_modes_and_statistics_that_change_before_the_backward_pass(norm):
    """Evaluate, train on other data, then differentiate the evaluation, as virtual adversarial training does."""
    blocks = made(additive(norm=NORMS[norm]), additive(norm=NORMS[norm]))

    def use(network, x):
        y = network.eval()(x)
        network.train()
        if isinstance(network, ReversibleSequence):  # PyTorch's norms would differentiate with the new statistics
            with torch.no_grad():
                network(IMAGES.sin())
        y.square().sum().backward()
        assert all(module.training for module in network.modules())
        return []

    assert_same_use(use, ReversibleSequence(copy.deepcopy(blocks)), nn.Sequential(*blocks))


def test_buffers_that_the_forward_pass_moves():
    """Spectral norm takes a step of its power iteration in every forward pass: the repetition starts where it did."""
    blocks = made(
        *(AdditiveCoupling(nn.Sequential(spectral_norm(nn.Conv2d(4, 4, 3, padding=1)), nn.Tanh())) for _ in range(3))
    )
    plain = copy.deepcopy(nn.Sequential(*blocks))
    network = ReversibleSequence(blocks)
    for _ in range(2):
        assert_same(step(network, IMAGES), step(plain, IMAGES))


class Rounded(nn.Module):
    def forward(self, x):
        return (10 * x.double().sin()).round().to(x.dtype)


def test_integers_are_restored():
    blocks = [AdditiveCoupling(Rounded()), *made(AdditiveCoupling(nn.Sequential(Float(), *branch())))]
    x = torch.arange(3 * 8 * 20, dtype=torch.int32).reshape(3, 8, 5, 4) % 7
    network, plain = ReversibleSequence(copy.deepcopy(blocks)), nn.Sequential(*blocks)
    for net in (network, plain):
        net(x).square().sum().backward()
    assert_same(gradients(network), gradients(plain))


class Float(nn.Module):
    def forward(self, x):
        return x.double() / 7


class InPlace(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.where = where

    def forward(self, x):
        return x.mul_(2) if self.where == "forward" else 2 * x

    def inverse(self, y):
        return y.mul_(0.5) if self.where == "inverse" else 0.5 * y


@pytest.mark.parametrize("where", ["forward", "inverse"])
def test_functions_that_write_over_their_input_are_named(where):
    network = nn.Sequential(
        *made(InvertibleModuleWrapper(additive()), InvertibleModuleWrapper(InPlace(where)), additive())
    )
    with pytest.raises(ValueError, match="InPlace.* wrote over its input"):
        network(IMAGES.clone().requires_grad_()).sum().backward()


class Failing(nn.Sequential):
    fails = False

    def forward(self, x):
        if self.fails:
            raise KeyError
        return super().forward(x)


def kept_then_wrapped(network, x):
    y = network[0](x * 1)
    (network[1](y) + network[2](y)).square().sum().backward()
    return []


def unused(network, x):
    y = network[0](x * 1)
    network[1](y)
    network[2](y).square().sum().backward()
    return []


def failed_once(network, x):
    y = network[0](x * 1)
    (failing,) = (module for module in network.modules() if isinstance(module, Failing))
    failing.fails = True
    with pytest.raises(KeyError):
        network[1](y)
    failing.fails = False
    network[2](network[1](y)).square().sum().backward()
    return []


def first_in_part(network, x):
    """autograd.grad of the last wrapper frees its graph; the first one's is still there, for two backward passes."""
    y = network[0](x)
    found = torch.autograd.grad(network[1](y).sum(), [*network[1].parameters()])
    y.square().sum().backward(retain_graph=True)
    y.sin().sum().backward()
    return found


@pytest.mark.parametrize("use", [kept_then_wrapped, unused, failed_once, first_in_part])
@pytest.mark.parametrize("kept", [False, True])
def test_an_output_with_several_readers(use, kept):
    blocks = made(additive(), AdditiveCoupling(Failing(*branch()), branch()), additive())
    plain = nn.Sequential(*copy.deepcopy(blocks))
    network = wrapped(blocks)
    network[1].keep_input = kept
    assert_same_use(use, network, plain)


def test_a_kept_block_that_begins_with_a_wrapper():
    blocks = made(additive(), additive(), nn.Conv2d(8, 8, 1), additive())
    plain = nn.Sequential(*copy.deepcopy(blocks))
    inner = nn.Sequential(InvertibleModuleWrapper(blocks[1]), blocks[2])
    network = nn.Sequential(
        InvertibleModuleWrapper(blocks[0]), InvertibleModuleWrapper(inner, keep_input=True), blocks[3]
    )
    assert_same(step(network, IMAGES), step(plain, IMAGES))
    nested = ReversibleSequence(
        [ReversibleSequence(blocks[:1]), nn.Sequential(ReversibleSequence([blocks[1]]), *blocks[2:])]
    )
    nested.zero_grad()
    assert_same(step(nested, IMAGES), step(copy.deepcopy(plain), IMAGES) | {"output": plain(IMAGES).detach()})


@pytest.mark.parametrize(
    "inner",
    [
        lambda: ReversibleSequence([additive(), nn.Conv2d(8, 8, 1)]),
        lambda: InvertibleModuleWrapper(nn.Conv2d(8, 8, 1), keep_input=True),
    ],
)
def test_blocks_without_inverse_inside_others(inner):
    blocks = made(additive(), inner(), additive())
    plain = copy.deepcopy(blocks)
    flat = nn.Sequential(plain[0], *([*plain[1].blocks] if hasattr(plain[1], "blocks") else [plain[1]._fn]), plain[2])
    network = ReversibleSequence(blocks)
    assert not network.invertible and not blocks[1].invertible
    assert_same(step(network, IMAGES), step(flat, IMAGES))


class Hamiltonian(nn.Module):
    """The gradient of a learned energy."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh())

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.energy(x).square().sum(), x, create_graph=True)
        return force


def test_branches_that_differentiate_keep_their_activations_or_are_named():
    blocks = made(AdditiveCoupling(Hamiltonian()), AdditiveCoupling(Hamiltonian()))
    plain = copy.deepcopy(nn.Sequential(*blocks))
    with pytest.raises(RuntimeError, match="asks for gradients in its forward pass.*disable=True"):
        step(ReversibleSequence(blocks), IMAGES)
    assert_same(step(ReversibleSequence(blocks, disable=True), IMAGES), step(plain, IMAGES))


def test_what_a_branch_leaves_behind_cannot_be_differentiated_after_it_ran_again():
    network = ReversibleSequence(made(additive()))
    network.blocks[0].Fm.register_forward_hook(lambda module, args, y: setattr(network, "left", y.square().sum()))
    y = network(IMAGES.clone().requires_grad_())
    y.sum().backward()
    with pytest.raises(RuntimeError, match="left behind was differentiated"):
        network.left.backward()


def test_a_stream_without_gradient_does_not_end_the_chain():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.coupling = additive()

        def forward(self, x, mask):
            return self.coupling(x), mask

        def inverse(self, y, mask):
            return self.coupling.inverse(y), mask

    blocks = made(*(Masked() for _ in range(5)))
    alive: list[weakref.ref] = []
    values = (IMAGES.clone().requires_grad_() * 1, torch.ones(3))
    for block in blocks:
        values = InvertibleModuleWrapper(block)(*values)
        alive.append(weakref.ref(values[0].untyped_storage()))
    assert sum(reference() is not None for reference in alive) == 1
    values[0].sum().backward()


def test_drift_of_opaque_modules_is_measured():
    blocks = [additive(norm=nn.Identity) for _ in range(3)]
    x = IMAGES.float()
    for chain in (blocks, [InvertibleModuleWrapper(b) for b in blocks], [Opaque(b) for b in blocks]):
        assert 0 < drift(ReversibleSequence(chain).reversible_blocks, x) < 1e-5
    assert drift([nn.Conv2d(8, 8, 1)], x) == 0


def test_a_norm_in_two_branches():
    """A norm that is listed in two modules of one step keeps its own buffers."""
    norm = nn.BatchNorm2d(4)
    network = ReversibleSequence(
        made(AdditiveCoupling(nn.Sequential(norm, nn.Conv2d(4, 4, 1)), nn.Sequential(norm, nn.Tanh())))
    )
    buffers = {name: id(values) for name, values in norm.named_buffers()}
    step(network, IMAGES)
    assert {name: id(values) for name, values in norm.named_buffers()} == buffers
    assert norm.num_batches_tracked == 2
