"""Reversible modules in unusual places: right gradients, or an error that says why not."""

import copy

import pytest
import torch
from torch import nn

from keepless import AdditiveCoupling, InvertibleModuleWrapper, ReversibleSequence, recompute_activations
from tests.keepless.reversible import test_modules as reversible
from tests.keepless.reversible.test_modules import (
    IMAGES,
    additive,
    assert_same,
    assert_same_use,
    branch,
    in_float64,
    step,
)


@pytest.mark.parametrize("form", ["sequence", pytest.param("opaque", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:recompute_activations does nothing inside torch.compile")
def test_compiled_as_one_graph_with_a_warning_that_the_compiler_decides(form):
    torch._dynamo.reset()  # other tests may have reached its limit of compilations
    network, plain = reversible.twins(form, lambda: AdditiveCoupling(branch(), branch(norm=nn.BatchNorm2d)))
    with pytest.warns(UserWarning, match="inside torch.compile, .* compile their branches"):
        assert_same(step(torch.compile(network, backend="eager", fullgraph=True), IMAGES), step(plain, IMAGES))


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:recompute_activations does nothing inside torch.compile")
def test_compiled_branches(backend):
    torch.compiler.reset()  # modules share a limit of 8 compilations, which earlier tests may have reached
    blocks = in_float64(AdditiveCoupling(branch(), branch(norm=nn.BatchNorm2d)), additive())
    plain = copy.deepcopy(nn.Sequential(*blocks))
    blocks[0].Fm = torch.compile(blocks[0].Fm, backend=backend)
    assert_same(step(ReversibleSequence(blocks), IMAGES), step(plain, IMAGES))


@pytest.mark.parametrize("tokens", [3, 4])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "expanded"])
def test_branches_whose_saved_tensors_depend_on_strides(tokens, layout):
    """Halves of tokens are views with gaps, for which `F.linear` saves others; of the same shapes if there are four."""
    blocks = in_float64(*(AdditiveCoupling(nn.Linear(4, 4), nn.Linear(4, 4), split_dim=2) for _ in range(2)))
    x = torch.randn(2, tokens, 8, dtype=torch.float64)
    x = {"transposed": x.transpose(0, 1), "expanded": x[:1].expand(2, -1, -1)}.get(layout, x)

    def use(network, _):
        leaf = x.detach().requires_grad_()
        network(leaf).sin().sum().backward()
        return [leaf.grad]

    assert_same_use(use, ReversibleSequence(copy.deepcopy(blocks)), nn.Sequential(*blocks))


@pytest.mark.parametrize("kind", [nn.Parameter, torch.clone])
def test_other_tensors_in_place_of_parameters_are_refused(kind):
    """MAML trains so: the tensors need not be parameters."""
    network = ReversibleSequence(in_float64(additive()))
    doubled = {name: kind(parameter.detach() * 2) for name, parameter in network.named_parameters()}
    y = torch.func.functional_call(network, doubled, (IMAGES.clone().requires_grad_(),))
    with pytest.raises(RuntimeError, match="is not the same tensor as in the forward pass"):
        y.sum().backward()


class WithBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return (x * self.scale).sin()


def test_buffers_that_change_before_the_backward_pass_are_refused():
    """PyTorch refuses those that an operation saved; here any of them changes what is restored."""
    for change, message in (
        (lambda part: part.scale.mul_(3), "WithBuffer.scale of shape .* was modified by an inplace operation"),
        (lambda part: setattr(part, "scale", torch.zeros(())), "WithBuffer.scale .* is not the same tensor"),
    ):
        scaled = WithBuffer()
        y = ReversibleSequence(in_float64(AdditiveCoupling(scaled)))(IMAGES.clone().requires_grad_())
        change(scaled)
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()


@pytest.mark.parametrize("norm", ["std", "inplace", "checkpoint", "batchnorm"])
def test_modes_and_statistics_that_change_before_the_backward_pass(norm):
    """Evaluate, train on other data, then differentiate the evaluation, as virtual adversarial training does."""
    blocks = in_float64(additive(norm=reversible.NORMS[norm]), additive(norm=reversible.NORMS[norm]))

    def use(network, x):
        y = network.eval()(x)
        network.train()
        if isinstance(network, ReversibleSequence):  # PyTorch's norms would differentiate with the new statistics
            with torch.no_grad():
                network(IMAGES.sin())
        y.square().sum().backward()
        assert all(module.training for module in network.modules())

    assert_same_use(use, ReversibleSequence(copy.deepcopy(blocks)), nn.Sequential(*blocks))


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
    network = nn.Sequential(*reversible.wrapped(in_float64(additive(), InPlace(where))), *in_float64(additive()))
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


def unused(network, x):
    y = network[0](x * 1)
    network[1](y)
    network[2](y).square().sum().backward()


def failed_once(network, x):
    y = network[0](x * 1)
    (failing,) = (module for module in network.modules() if isinstance(module, Failing))
    failing.fails = True
    with pytest.raises(KeyError):
        network[1](y)
    failing.fails = False
    network[2](network[1](y)).square().sum().backward()


def failed_after_another(network, x):
    y = network[0](x * 1)
    z = network[2](y)
    (failing,) = (module for module in network.modules() if isinstance(module, Failing))
    failing.fails = True
    with pytest.raises(KeyError):
        network[1](y)
    z.square().sum().backward()


def first_in_part(network, x):
    """autograd.grad of the last wrapper frees its graph; the first one's is still there, for two backward passes."""
    y = network[0](x)
    gradients = torch.autograd.grad(network[1](y).sum(), [*network[1].parameters()])
    y.square().sum().backward(retain_graph=True)
    y.sin().sum().backward()
    return gradients


@pytest.mark.parametrize("use", [kept_then_wrapped, unused, failed_once, failed_after_another, first_in_part])
@pytest.mark.parametrize("kept", [False, True])
def test_an_output_with_several_readers(use, kept):
    blocks = in_float64(additive(), AdditiveCoupling(Failing(*branch()), branch()), additive())
    plain = nn.Sequential(*copy.deepcopy(blocks))
    network = reversible.wrapped(blocks)
    network[1].keep_input = kept
    assert_same_use(use, network, plain)


def test_a_kept_block_that_begins_with_a_wrapper():
    blocks = in_float64(additive(), additive(), nn.Conv2d(8, 8, 1), additive())
    plain = nn.Sequential(*copy.deepcopy(blocks))
    inner = nn.Sequential(InvertibleModuleWrapper(blocks[1]), blocks[2])
    network = nn.Sequential(*reversible.wrapped(blocks[:1]), InvertibleModuleWrapper(inner, keep_input=True), blocks[3])
    parts = [ReversibleSequence(blocks[:1]), nn.Sequential(ReversibleSequence([blocks[1]]), *blocks[2:])]
    for outside in (network, ReversibleSequence(parts)):
        outside.zero_grad(), plain.zero_grad()
        assert_same(step(outside, IMAGES), step(plain, IMAGES))


def test_blocks_without_inverse_inside_others():
    flat = in_float64(additive(), additive(), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1), additive())
    plain = copy.deepcopy(nn.Sequential(*flat))
    inner = ReversibleSequence(flat[1:3]), InvertibleModuleWrapper(flat[3], keep_input=True)
    network = ReversibleSequence([flat[0], *inner, flat[4]])
    assert not any(module.invertible for module in (network, *inner))
    assert_same(step(network, IMAGES), step(plain, IMAGES))


class Hamiltonian(nn.Sequential):
    """The gradient of a learned energy."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (force,) = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return force


def test_branches_that_differentiate_keep_their_activations_or_are_named():
    energies = [(nn.Conv2d(4, 4, 3, padding=1), nn.Tanh()) for _ in range(2)]
    blocks = in_float64(*(AdditiveCoupling(Hamiltonian(*energy)) for energy in energies))
    plain = copy.deepcopy(nn.Sequential(*blocks))
    with pytest.raises(RuntimeError, match="computes gradients in its forward pass.*disable=True"):
        step(ReversibleSequence(blocks), IMAGES)
    assert_same(step(ReversibleSequence(blocks, disable=True), IMAGES), step(plain, IMAGES))


def test_what_a_branch_leaves_behind_cannot_be_differentiated_after_it_ran_again():
    """Its graph ends at the branch, so gradients of what comes before would be missing."""
    network = ReversibleSequence(in_float64(additive()))
    network.blocks[0].Fm.register_forward_hook(lambda module, args, y: setattr(network, "left", y.square().sum()))
    network(IMAGES.clone().requires_grad_()).sum().backward()
    with pytest.raises(RuntimeError, match="stored elsewhere was differentiated"):
        network.left.backward()


def test_casts_that_a_step_does_not_cache_are_not_cached_when_it_is_repeated():
    """Defect: inside an autocast that caches, repetitions had the weights of the step before."""
    blocks = [AdditiveCoupling(nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1))]

    def use(network, x):
        with torch.autocast("cpu", torch.bfloat16):
            for _ in range(2):
                network.zero_grad()
                with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                    y = network(x.float())
                y.square().sum().backward()
                for parameter in network.parameters():
                    parameter.data.mul_(-2)
        return [y.detach()]

    assert_same_use(use, ReversibleSequence(copy.deepcopy(blocks)), nn.Sequential(*blocks))


def test_a_norm_in_two_branches():
    """A norm that is listed in two modules of one step keeps its own buffers."""
    norm = nn.BatchNorm2d(4)
    branches = nn.Sequential(norm, nn.Conv2d(4, 4, 1)), nn.Sequential(norm, nn.Tanh())
    network = ReversibleSequence(in_float64(AdditiveCoupling(*branches)))
    buffers = {name: id(values) for name, values in norm.named_buffers()}
    step(network, IMAGES)
    assert {name: id(values) for name, values in norm.named_buffers()} == buffers
    assert norm.num_batches_tracked == 2


@pytest.mark.table
@pytest.mark.filterwarnings("ignore::keepless.KeeplessWarning")  # nothing of a reversible block fits into 1 KiB
@pytest.mark.parametrize("first, budget", [(nn.GroupNorm(2, 4), None), (nn.GroupNorm(2, 4), "1KiB"), (nn.Tanh(), None)])
def test_prepared_branches_keep_the_same_when_they_run_again(first, budget):
    """Group norm copies the half of a tensor. The result of tanh is kept, not the half, although nobody else does."""
    torch.manual_seed(0)
    branches = [nn.Sequential(first, nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)) for _ in range(4)]
    blocks = ReversibleSequence([AdditiveCoupling(*branches[:2]), AdditiveCoupling(*branches[2:])])
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), blocks, nn.Conv2d(8, 2, 1)).double()
    prepared, images = recompute_activations(copy.deepcopy(plain), budget=budget), torch.randn(2, 3, 8, 8).double()
    expected = torch.autograd.grad(plain(images).square().mean(), [*plain.parameters()])
    for _ in range(3):
        gradients = torch.autograd.grad(prepared(images).square().mean(), [*prepared.parameters()])
        torch.testing.assert_close(gradients, expected, rtol=1e-12, atol=1e-12)
