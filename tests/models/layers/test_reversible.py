"""Reversible modules compute the same gradients as stored activations, in float64, and keep only their last output.

Each test of a defect of MemCNN says which.
"""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from models.layers import (
    ABN,
    AdditiveCoupling,
    AffineAdapterNaive,
    AffineAdapterSigmoid,
    AffineCoupling,
    CheckpointedABN,
    InPlaceABN,
    InvertibleModuleWrapper,
    ReversibleSequence,
    recompute_activations,
)
from scripts.bench.measuring import saved_for_backward
from tests.ranks import Ranks

NORMS = {
    "std": ABN,
    "inplace": InPlaceABN,
    "inplace_1": partial(InPlaceABN, variant="I"),
    "checkpoint": CheckpointedABN,
    "batchnorm": nn.BatchNorm2d,
    "none": nn.Identity,
}


def branch(channels=4, norm=InPlaceABN, out=None, dropout=0.0) -> nn.Sequential:
    conv = nn.Conv2d(channels, out or channels, 3, padding=1)
    layers = [norm(channels), conv, *([nn.Dropout(dropout)] if dropout else []), nn.Tanh()]
    return recompute_activations(nn.Sequential(*layers))


def additive(norm=InPlaceABN, dropout=0.0) -> AdditiveCoupling:
    return AdditiveCoupling(branch(norm=norm, dropout=dropout), branch(norm=norm, dropout=dropout))


def affine(norm=InPlaceABN, dropout=0.0) -> AffineCoupling:
    return AffineCoupling(branch(norm=norm, dropout=dropout), adapter=AffineAdapterNaive)


def sigmoid(norm=InPlaceABN, dropout=0.0) -> AffineCoupling:
    return AffineCoupling(branch(norm=norm, out=8, dropout=dropout), adapter=AffineAdapterSigmoid)


class Opaque(nn.Module):
    """A user's own invertible module: a coupling that is not known to be one."""

    def __init__(self, coupling: nn.Module):
        super().__init__()
        self.hidden = coupling

    def forward(self, x):
        return self.hidden(x)

    def inverse(self, y):
        return self.hidden.inverse(y)


COUPLINGS = {"additive": additive, "affine": affine, "sigmoid": sigmoid}


def wrapped(blocks, **options) -> nn.Sequential:
    return nn.Sequential(*(InvertibleModuleWrapper(block, **options) for block in blocks))


FORMS = {
    "sequence": ReversibleSequence,
    "wrappers": wrapped,
    "opaque": lambda blocks: wrapped(map(Opaque, blocks)),
    "opaque sequence": lambda blocks: ReversibleSequence([*map(Opaque, blocks[:2]), *blocks[2:]]),
    "kept inputs": lambda blocks: wrapped(blocks, keep_input=True),
}


def step(network, x, seed=0) -> dict[str, torch.Tensor]:
    """Output, gradients and buffers after a step."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = network(x.clone())
    (y.square().sum() / 2 + y.sin().sum()).backward()
    found = {"output": y.detach(), "input": x.grad}
    # The forms nest their modules differently, but in the same order.
    found |= {f"parameter {i}": p.grad for i, p in enumerate(network.parameters()) if p.grad is not None}
    return found | {f"buffer {i}": b.clone() for i, b in enumerate(network.buffers())}


def assert_same(found, expected, tolerance=1e-9):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.abs().max().clamp(min=1e-6).item() if tensor.is_floating_point() else 1
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=tolerance * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def twins(form, make, count=3, **options):
    """The same network with and without its activations."""
    torch.manual_seed(0)
    blocks = [make(**options).double() for _ in range(count)]
    return FORMS[form](copy.deepcopy(blocks)), nn.Sequential(*blocks)


IMAGES = torch.randn(3, 8, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_gradients_and_statistics_are_those_of_stored_activations(coupling, norm, form):
    """Defects: running statistics that move three times a step; parameters of stored activations."""
    found, expected = twins(form, COUPLINGS[coupling], norm=NORMS[norm])
    assert_same(step(found, IMAGES), step(expected, IMAGES))
    assert_same(step(found.eval(), IMAGES), step(expected.eval(), IMAGES))


@pytest.mark.parametrize("form", ["sequence", "wrappers", "kept inputs"])
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_dropout_drops_the_same_again(coupling, form):
    """Defect: dropout inside F or G gives wrong gradients."""
    found, expected = twins(form, COUPLINGS[coupling], dropout=0.4)
    assert_same(step(found, IMAGES), step(expected, IMAGES))
    after = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        expected(IMAGES)
    assert torch.equal(after, torch.rand(1))  # the backward pass leaves the random numbers alone


def test_without_preserved_random_numbers_dropout_is_wrong():
    torch.manual_seed(0)
    blocks = [additive(dropout=0.4).double() for _ in range(2)]
    found = step(wrapped(copy.deepcopy(blocks), preserve_rng_state=False), IMAGES)
    expected = step(nn.Sequential(*blocks), IMAGES)
    assert not torch.allclose(found["input"], expected["input"])


def conv(branch: nn.Module) -> nn.Conv2d:
    return getattr(branch, "f", branch)[1]


def tied(network):
    conv(network[2].Fm).weight = conv(network[0].Fm).weight


def frozen(network):
    for parameter in network[1].parameters():
        parameter.requires_grad_(False)


def frozen_norms(network):
    for module in network.modules():
        if isinstance(module, ABN):
            module.eval().requires_grad_(False)


def unused(network):
    """Defect: parameters that are not used raise."""
    network[1].Gm.spare = nn.Parameter(torch.ones(3, dtype=torch.float64))
    conv(network[1].Gm).forward = lambda x: x.sin()


def foreign(network):
    """F uses a parameter that is not its own."""
    weight = conv(network[0].Fm).weight
    conv(network[2].Gm).forward = lambda x: F.conv2d(x, weight, padding=1)


@pytest.mark.parametrize("change", [tied, frozen, frozen_norms, unused, foreign])
@pytest.mark.parametrize("coupling", [additive, affine])
def test_tied_frozen_unused_and_foreign_parameters(coupling, change):
    torch.manual_seed(0)
    network = nn.Sequential(*(coupling().double() for _ in range(3)))
    change(network)
    twin = copy.deepcopy(network)
    if change is foreign:  # a deep copy would use the first network's weight
        foreign(twin)
    assert_same(step(ReversibleSequence(twin), IMAGES), step(network, IMAGES))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coupling", [additive, affine])
def test_two_backward_passes(coupling, form):
    found, expected = twins(form, coupling, norm=nn.BatchNorm2d)
    losses = []
    for network in (found, expected):
        x = IMAGES.clone().requires_grad_()
        y = network(x)
        y.sum().backward(retain_graph=True)
        y.square().sum().backward(retain_graph=True)
        gradients = torch.autograd.grad(y.sin().sum(), [x, *network.parameters()])
        losses.append(dict(enumerate([x.grad, *gradients, *(p.grad for p in network.parameters())])))
    assert_same(*losses)


@pytest.mark.parametrize("form", ["sequence", "wrappers", "opaque"])
def test_a_second_backward_pass_of_a_freed_graph_is_refused(form):
    network, _ = twins(form, additive)
    y = network(IMAGES)
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coupling", [additive, affine])
def test_gradients_of_a_part(coupling, form):
    """autograd.grad for some parameters, from half of the output: some steps are never asked for their activations."""
    found, expected = twins(form, coupling)
    results = []
    for network in (found, expected):
        y = network(IMAGES.clone())
        wanted = [p for i, p in enumerate(network.parameters()) if i % 5 == 1]
        loss = y[:, :4].square().sum()
        results.append(dict(enumerate(torch.autograd.grad(loss, wanted, allow_unused=True))))
        results[-1] = {key: torch.zeros(1) if grad is None else grad for key, grad in results[-1].items()}
    assert_same(*results)


def test_second_derivatives():
    found, expected = twins("sequence", affine, norm=nn.BatchNorm2d)
    results = []
    for network in (found, expected):
        x = IMAGES.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        results.append({"input": x.grad} | {f"{i}": p.grad for i, p in enumerate(network.parameters())})
    assert_same(*results)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_inside_checkpointing(form, reentrant):
    found, expected = twins(form, additive, norm=ABN)
    outside = nn.Sequential(nn.Identity())
    outside.forward = lambda x: checkpoint(found, x, use_reentrant=reentrant)
    outside.inner = found
    assert_same(step(outside, IMAGES), step(expected, IMAGES))


def test_checkpointing_and_reversible_modules_inside_branches():
    torch.manual_seed(0)

    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    inner = lambda: ReversibleSequence([AdditiveCoupling(branch(2)), affine_of(2)])  # noqa: E731
    affine_of = lambda channels: AffineCoupling(branch(channels), adapter=AffineAdapterNaive)  # noqa: E731
    blocks = [AdditiveCoupling(Checkpointed(*branch()), inner()).double() for _ in range(2)]
    plain = copy.deepcopy(blocks)
    for block in plain:
        block.Gm.disable = True
        block.Fm.__class__ = nn.Sequential
    assert_same(step(ReversibleSequence(blocks), IMAGES), step(nn.Sequential(*plain), IMAGES))


def test_outer_hooks_hold_what_is_kept():
    network, expected = twins("sequence", additive)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda number: packed[number].clone()):
        found = step(network, IMAGES)
    assert_same(found, step(expected, IMAGES))
    assert [tensor.shape for tensor in packed].count(IMAGES.shape) == 3  # ours; y for its square and sine


def test_an_input_that_someone_holds_stays():
    """Defects: a skip connection's freed input crashes the process; an input that another operation saved raises."""
    found, expected = twins("wrappers", additive, norm=ABN)
    results = []
    for network in (found, expected):
        x = IMAGES.clone().requires_grad_()
        held = [x.sin()]
        for block in network:
            held.append(block(held[-1]))
        loss = sum((h.exp() * (i + 1)).sum() for i, h in enumerate(held)) + (held[0] * held[-1]).sum()
        values = [h.detach().clone() for h in held]
        loss.backward()
        assert all(torch.equal(h, value) for h, value in zip(held, values, strict=True))
        results.append({"x": x.grad} | {f"{i}": p.grad for i, p in enumerate(network.parameters())})
    assert_same(*results)


@pytest.mark.parametrize("form", ["sequence", "wrappers"])
def test_an_output_changed_in_place_is_refused(form):
    network, _ = twins(form, additive)
    y = network(IMAGES.clone())
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_weight_changed_before_the_backward_pass_is_refused():
    network, _ = twins("sequence", additive)
    y = network(IMAGES.clone().requires_grad_())
    with torch.no_grad():
        network.blocks[1].Fm[1].weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_without_gradients_nothing_is_freed(form):
    """Defect: inputs are freed under no_grad too."""
    network, expected = twins(form, additive)
    x = IMAGES.clone()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            torch.testing.assert_close(network.eval()(x), expected.eval()(x), rtol=0, atol=1e-12)
            torch.testing.assert_close(network.train()(x), expected.train()(x), rtol=0, atol=1e-12)
        assert torch.equal(x, IMAGES)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coupling", [additive, affine])
def test_autocast_keeps_dtypes(coupling, form):
    """Defect: with bfloat16 autocast on a CPU outputs are float32. Streams of either dtype; gradients as stored."""
    found, expected = (network.float() for network in twins(form, coupling, norm=ABN))
    for dtype in (torch.float32, torch.bfloat16):
        results = []
        for network in (found, expected):
            x = IMAGES.to(dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16):
                y = network(x * 1)
            y.float().square().sum().backward()
            results.append(
                {"y": y.detach(), "x": x.grad} | {f"{i}": p.grad for i, p in enumerate(network.parameters())}
            )
            network.zero_grad()
        assert [t.dtype for t in results[0].values()] == [t.dtype for t in results[1].values()]
        assert torch.equal(results[0]["y"], results[1]["y"])
        assert_same(*results, tolerance=0.1 if dtype == torch.bfloat16 else 0.03)


def test_hooks_fire():
    """Forward hooks fire again in the backward pass; backward hooks and hooks of parameters once, with the gradient."""
    found, expected = twins("sequence", additive)
    for network in (found.blocks, expected):
        network.calls = []
        conv = network[1].Fm[1]
        conv.register_full_backward_hook(lambda m, i, o, n=network: n.calls.append(o[0].clone()))
        conv.weight.register_hook(lambda g, n=network: n.calls.append(g.clone()) or 2 * g)
        conv.weight.register_post_accumulate_grad_hook(lambda p, n=network: n.calls.append(p.grad.clone()))
    assert_same(step(found, IMAGES), step(expected, IMAGES))
    assert len(found.blocks.calls) == len(expected.calls) == 3
    assert_same(dict(enumerate(found.blocks.calls)), dict(enumerate(expected.calls)))


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("norm", [nn.BatchNorm2d, ABN, InPlaceABN, CheckpointedABN])
def test_running_statistics_move_once_per_step(norm, momentum):
    network, _ = twins("sequence", additive, norm=partial(norm, momentum=momentum))
    for count in (1, 2, 3):
        step(network, IMAGES + count)
        counts = [m.num_batches_tracked.item() for m in network.modules() if hasattr(m, "num_batches_tracked")]
        assert counts == [count] * 6


def keep(make, depth) -> int:
    network = ReversibleSequence([make() for _ in range(depth)])
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    _, saved = saved_for_backward(lambda: network(x))
    parameters = {p.untyped_storage()._cdata for p in network.parameters()}
    return sum(t.untyped_storage().nbytes() for t in saved if t.untyped_storage()._cdata not in parameters)


@pytest.mark.parametrize(
    "make", [additive, partial(additive, norm=ABN), partial(additive, norm=nn.BatchNorm2d), affine]
)
def test_saved_bytes_do_not_depend_on_the_depth(make):
    output = 2 * 8 * 16 * 16 * 4
    assert [keep(make, depth) for depth in (1, 20, 200, 600)] == [output] * 4


@pytest.mark.parametrize("form", ["sequence", "wrappers"])
def test_only_the_last_output_lives_until_the_backward_pass(form):
    """Counts live storages: a wrapper that follows another one frees its input."""
    network, _ = twins(form, partial(additive, norm=nn.BatchNorm2d), count=6)
    alive: list[weakref.ref] = []
    for module in network.modules():
        module.register_forward_hook(lambda m, args, y: alive.append(weakref.ref(y.untyped_storage())))
    x = IMAGES.clone().requires_grad_()
    y = network(x * 1)
    gc.disable()
    try:
        last = y.untyped_storage()
        assert {reference() for reference in alive} - {None} == {last}
        loss = y.sum()
        del y, last
        assert any(reference() is not None for reference in alive)  # kept
        loss.backward()
        del loss
        assert all(reference() is None for reference in alive)  # without waiting for the garbage collector
    finally:
        gc.enable()


def test_branches_run_once_more_in_the_backward_pass():
    """4N operations for couplings, 5N for modules that must be inverted first (RevNet, section 3.2)."""
    flops = {}
    for form in ("sequence", "opaque"):
        found, expected = twins(form, additive, norm=nn.BatchNorm2d)
        for name, network in ((form, found), ("stored", expected)):
            x = IMAGES.clone().requires_grad_()
            with FlopCounterMode(display=False) as counter:
                network(x).sum().backward()
            flops[name] = counter.get_total_flops()
    assert flops["sequence"] / flops["stored"] == pytest.approx(4 / 3)
    assert flops["opaque"] / flops["stored"] == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    "split_dim, shape", [(1, (4, 6)), (-1, (4, 6)), (1, (2, 4, 3, 3, 3)), (3, (2, 3, 4, 6)), (-2, (2, 3, 4, 5))]
)
@pytest.mark.parametrize("keep_input", [False, True])
def test_any_dimension_but_the_batch(split_dim, shape, keep_input):
    torch.manual_seed(0)

    class Sine(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn((), dtype=torch.float64))

        def forward(self, x):
            return (x * self.weight).sin()

    blocks = [AdditiveCoupling(Sine(), split_dim=split_dim) for _ in range(3)]
    x = torch.randn(shape, dtype=torch.float64)
    found = step(wrapped(copy.deepcopy(blocks), keep_input=keep_input), x)
    assert_same(found, step(nn.Sequential(*blocks), x))
    assert_same(
        step(ReversibleSequence(copy.deepcopy(blocks)), x), step(nn.Sequential(*copy.deepcopy(blocks)), x) | found
    )


def test_a_missing_gm_is_a_copy():
    coupling = AdditiveCoupling(branch())
    assert coupling.Gm is not coupling.Fm
    pairs = zip(coupling.Fm.parameters(), coupling.Gm.parameters(), strict=True)
    assert all(torch.equal(f, g) and f is not g for f, g in pairs)


class Rotation(nn.Module):
    """Two tensors to two tensors, with a learned angle."""

    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, a, b):
        c, s = self.angle.cos(), self.angle.sin()
        return c * a - s * b, s * a + c * b

    def inverse(self, a, b):
        c, s = self.angle.cos(), self.angle.sin()
        return c * a + s * b, c * b - s * a


@pytest.mark.parametrize("options", [{}, {"keep_input": True}, {"disable": True}])
def test_several_inputs_and_outputs(options):
    results = []
    for wrap in (lambda module: module, lambda module: InvertibleModuleWrapper(module, **options)):
        modules = [wrap(Rotation()) for _ in range(3)]
        a, b = IMAGES.clone().requires_grad_(), IMAGES.sin().requires_grad_()
        values = (a * 1, b * 1)
        for module in modules:
            values = module(*values)
        (values[0].square() * values[1]).sum().backward()
        results.append(dict(enumerate([a.grad, b.grad, *(p.grad for m in modules for p in m.parameters())])))
    assert_same(*results)


@pytest.mark.parametrize("keep_input_inverse", [False, True])
@pytest.mark.parametrize("make", [additive, affine, lambda: Opaque(additive()), lambda: Opaque(affine())])
def test_the_inverse_is_differentiated_without_its_input(make, keep_input_inverse):
    torch.manual_seed(0)
    module = make().double()
    wrapper = InvertibleModuleWrapper(copy.deepcopy(module), keep_input_inverse=keep_input_inverse)
    results = []
    for inverse, network in ((wrapper.inverse, wrapper), (module.inverse, module)):
        y = IMAGES.clone().requires_grad_()
        inverse(y * 1).square().sum().backward()
        results.append({"y": y.grad} | {f"{i}": p.grad for i, p in enumerate(network.parameters())})
    assert_same(*results)


class Wide(nn.Module):
    def forward(self, x):
        return torch.cat([x, x], dim=1)


@pytest.mark.parametrize(
    "run, message",
    [
        (lambda: AdditiveCoupling(nn.Identity())(torch.ones(2, 3)), r"shape \(2, 3\): dimension 1 has the odd size 3"),
        (
            lambda: AdditiveCoupling(nn.Identity(), split_dim=0)(torch.ones(2, 2)),
            "split_dim=0: expected a dimension.*batch",
        ),
        (lambda: AdditiveCoupling(nn.Identity(), split_dim=-2)(torch.ones(2, 2)), "split_dim=-2: expected a dimension"),
        (lambda: AdditiveCoupling(nn.Identity(), split_dim=4)(torch.ones(2, 2)), "split_dim=4: expected a dimension"),
        (
            lambda: AdditiveCoupling(Wide())(torch.ones(2, 4)),
            r"Wide returned the shape \(2, 4\).*other half's.*\(2, 2\)",
        ),
        (
            lambda: AffineCoupling(nn.Identity())(torch.ones(2, 4)),
            r"Tensor from a branch.*\(scale, shift\).*AffineAdapterNaive",
        ),
        (
            lambda: AffineCoupling(nn.Identity(), adapter=AffineAdapterSigmoid)(torch.ones(2, 2)),
            "1 channels from Identity",
        ),
        (lambda: AdditiveCoupling(AffineAdapterNaive(nn.Identity()))(torch.ones(2, 2)), "got a tuple from a branch"),
        (lambda: AdditiveCoupling(nn.ReLU(inplace=True))(torch.ones(2, 2)), "ReLU wrote over its input.*not inplace"),
        (lambda: InvertibleModuleWrapper(nn.Identity()), "Identity has no method inverse.*keep_input=True"),
        (lambda: InvertibleModuleWrapper(additive(), num_bwd_passes=0), "num_bwd_passes=0: expected at least 1"),
        (
            lambda: ReversibleSequence([nn.Identity()]).inverse(torch.ones(1)),
            "Identity of a ReversibleSequence has no inverse",
        ),
    ],
)
def test_mistakes_are_named(run, message):
    """Defect: an affine coupling without an adapter silently splits the batch."""
    with pytest.raises(ValueError, match=message):
        run()


class Moody(nn.Module):
    """Saves other tensors, or more, or fewer, when it runs again."""

    def __init__(self, saved):
        super().__init__()
        self.saved = iter(saved)

    def forward(self, x):
        weights = torch.ones(1, dtype=x.dtype, requires_grad=True)
        y = x
        for size in next(self.saved):
            y = y + (weights.expand(size) * weights.expand(size)).sum()
        return y


@pytest.mark.parametrize(
    "saved, message", [([[2], [3]], "at first"), ([[2], [2, 2]], "more tensors"), ([[2, 2], [2]], "fewer tensors")]
)
def test_a_branch_that_computes_something_else_is_named(saved, message):
    coupling = InvertibleModuleWrapper(AdditiveCoupling(Moody(saved), nn.Identity()))
    with pytest.raises(RuntimeError, match=f"something else when.*{message}"):
        coupling(IMAGES.clone().requires_grad_()).sum().backward()


def test_memcnn_s_example_runs():
    import models.layers as memcnn

    class ExampleOperation(nn.Module):
        def __init__(self, channels):
            super().__init__()
            conv = nn.Conv2d(in_channels=channels, out_channels=channels, kernel_size=(3, 3), padding=1)
            self.seq = nn.Sequential(conv, nn.BatchNorm2d(num_features=channels), nn.ReLU(inplace=True))

        def forward(self, x):
            return self.seq(x)

    x = torch.rand(2, 10, 8, 8)
    module = memcnn.AdditiveCoupling(Fm=ExampleOperation(channels=10 // 2), Gm=ExampleOperation(channels=10 // 2))
    module.eval()
    assert memcnn.is_invertible_module(module, test_input_shape=x.shape)
    wrapper = memcnn.InvertibleModuleWrapper(fn=module, keep_input=True, keep_input_inverse=True)
    wrapper.eval()
    assert memcnn.is_invertible_module(wrapper, test_input_shape=x.shape)
    y = wrapper.forward(x)
    assert torch.allclose(x, wrapper.inverse(y), atol=1e-06)


def test_trying_whether_a_module_is_invertible_changes_nothing():
    from models.layers import is_invertible_module

    class Wrong(Rotation):
        def inverse(self, a, b):
            return self.forward(a, b)

    module, dropping = additive(norm=nn.BatchNorm2d), additive(dropout=0.5)
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert is_invertible_module(module, (2, 8, 4, 4), atol=1e-5)
    assert not is_invertible_module(dropping, (2, 8, 4, 4))  # its inverse draws in another order
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert is_invertible_module(Rotation(), ((2, 3), (2, 3)), torch.float64)
    assert not is_invertible_module(Wrong(), ((2, 3), (2, 3)), torch.float64)
    assert not is_invertible_module(nn.Identity(), (2, 3))
    assert not is_invertible_module("not a module", (2, 3))


def whole_and_share(rank: int) -> list:
    """Gradients and statistics of two ranks with synchronised norms, each with its share of the minibatch."""
    network, _ = twins("sequence", partial(additive, norm=partial(InPlaceABN, sync=True)))
    parallel = DistributedDataParallel(network)
    parallel(IMAGES.repeat(2, 1, 1, 1)[2 * rank : 2 * rank + 2 + 2 * rank]).square().sum().backward()
    return [t.detach().numpy() for t in (*(p.grad for p in network.parameters()), *network.buffers())]


def test_two_processes_with_synchronised_norms_are_one(tmp_path):
    ranks = Ranks(2, tmp_path)
    try:
        results = ranks.run(whole_and_share)
    finally:
        ranks.stop()
    network, _ = twins("sequence", additive)
    (network(IMAGES.repeat(2, 1, 1, 1)).square().sum() / 2).backward()
    expected = dict(enumerate([*(p.grad for p in network.parameters()), *network.buffers()]))
    for result in results:
        assert_same(dict(enumerate(map(torch.from_numpy, result))), expected, 1e-10)


@pytest.fixture
def traced_autograd():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
@pytest.mark.parametrize("make", [additive, affine])
def test_compiled_as_one_graph(make, norm, traced_autograd):
    """Gradients as stored, statistics move once, and the graph keeps no more than its output."""
    found, expected = twins("sequence", partial(make, norm=norm), count=2)
    compiled = torch.compile(found, fullgraph=True, backend="aot_eager")
    assert_same(step(compiled, IMAGES), step(expected, IMAGES))
    assert_same(step(compiled, IMAGES), step(expected, IMAGES))  # gradients and statistics go on


@pytest.mark.parametrize("norm", [InPlaceABN, nn.BatchNorm2d])
@pytest.mark.parametrize("traced", [False, True])
def test_compiled_in_parts(norm, traced):
    """F and G compiled alone; and the whole with breaks, because PyTorch does not trace gradients in a gradient."""
    torch._dynamo.reset()
    found, expected = twins("sequence", partial(additive, norm=norm), count=2)
    if traced:
        network = torch.compile(found, backend="aot_eager")
    else:
        network = found
        for block in found.blocks:
            block.Fm, block.Gm = (torch.compile(part, backend="aot_eager") for part in (block.Fm, block.Gm))
    assert_same(step(network, IMAGES), step(expected, IMAGES))
    torch._dynamo.reset()


def test_compiled_dropout_keeps_its_activations(traced_autograd):
    """Random numbers could not be drawn again inside a graph, so nothing is forgotten there."""
    found, _ = twins("sequence", partial(additive, dropout=0.4), count=2)
    compiled = torch.compile(found, backend="aot_eager")
    x = IMAGES.clone().requires_grad_()
    torch.manual_seed(0)
    y = compiled(x)
    direction = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    values = []
    for sign in (1, -1):
        torch.manual_seed(0)
        values.append(compiled((x + sign * 1e-5 * direction).detach().requires_grad_()).sum().detach())
    torch.testing.assert_close((gradient * direction).sum(), (values[0] - values[1]) / 2e-5, rtol=1e-5, atol=1e-5)
