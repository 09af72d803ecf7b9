"""Reversible modules compute the same gradients as stored activations, in float64, and keep only their last output.

Arguments have MemCNN's names. Each test of a defect of MemCNN says which.
"""

import copy
import gc
from functools import partial
from itertools import product
from random import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from keepless import (
    ABN,
    AdditiveCoupling,
    AffineAdapterNaive,
    AffineAdapterSigmoid,
    AffineCoupling,
    CheckpointedABN,
    InPlaceABN,
    InvertibleModuleWrapper,
    ReversibleSequence,
    is_invertible_module,
    recompute_activations,
)
from keepless.reversible import checks
from keepless.saved import kept_bytes, saved_for_backward

NORMS = {
    "std": ABN,
    "inplace": InPlaceABN,
    "inplace_1": partial(InPlaceABN, variant="I"),
    "checkpoint": CheckpointedABN,
    "batchnorm": nn.BatchNorm2d,
    "cumulative": partial(nn.BatchNorm2d, momentum=None),
    "none": nn.Identity,
}


def branch(channels=4, norm=InPlaceABN, out=None, dropout=0.0) -> nn.Sequential:
    conv = nn.Conv2d(channels, out or channels, 3, padding=1)
    layers = [norm(channels), conv, *([nn.Dropout(dropout)] if dropout else []), nn.Tanh()]
    return recompute_activations(nn.Sequential(*layers))


def additive(norm=InPlaceABN, dropout=0.0) -> AdditiveCoupling:
    return AdditiveCoupling(Fm=branch(norm=norm, dropout=dropout), Gm=branch(norm=norm, dropout=dropout))


def affine(norm=InPlaceABN, dropout=0.0) -> AffineCoupling:
    return AffineCoupling(branch(norm=norm, dropout=dropout), adapter=AffineAdapterNaive)


class Opaque(nn.Sequential):
    """A user's own invertible module: a coupling that is not known to be one."""

    def inverse(self, y):
        return self[0].inverse(y)


class Scaled(AdditiveCoupling):
    """A coupling with more than half-steps."""

    def __init__(self, Fm):
        super().__init__(Fm)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.scale * super().forward(x)

    def inverse(self, y):
        return super().inverse(y / self.scale)


COUPLINGS = {"additive": additive, "affine": affine, "scaled": lambda **options: Scaled(branch(**options))}
COUPLINGS["sigmoid"] = lambda **options: AffineCoupling(branch(out=8, **options), adapter=AffineAdapterSigmoid)


def wrapped(blocks, **options) -> nn.Sequential:
    return nn.Sequential(*(InvertibleModuleWrapper(fn=block, num_bwd_passes=2, **options) for block in blocks))


FORMS = {
    "sequence": ReversibleSequence,
    "wrappers": wrapped,
    "opaque": lambda blocks: wrapped(map(Opaque, blocks)),
    "opaque sequence": lambda blocks: ReversibleSequence([*map(Opaque, blocks[:2]), *blocks[2:]]),
    "kept inputs": lambda blocks: wrapped(blocks, keep_input=True),
}


def step(network, x, seed=0) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    y = network(x.clone())
    (y.square().sum() / 2 + y.sin().sum()).backward()
    tensors = {"output": y.detach(), "input": x.grad}
    return tensors | gradients(network) | {f"buffer {i}": b.clone() for i, b in enumerate(network.buffers())}


def gradients(network) -> dict[str, torch.Tensor]:
    """Gradients by number: the forms nest their modules differently, but in the same order."""
    return {f"parameter {i}": p.grad for i, p in enumerate(network.parameters()) if p.grad is not None}


def assert_same(tensors, expected, tolerance=1e-9):
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        scale = tensor.abs().max().clamp(min=1e-6).item() if tensor.is_floating_point() else 1
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=tolerance * scale, msg=f"{name}: {{}}".format)


def assert_same_use(use, *networks):
    """All networks give the same tensors, which `use` may return for a network and images, and the same gradients."""
    results = []
    for network in networks:
        x = IMAGES.clone().requires_grad_()
        values = {f"value {i}": value for i, value in enumerate(use(network, x) or [])}
        results.append(values | gradients(network) | ({} if x.grad is None else {"input": x.grad}))
    for tensors in results[:-1]:
        assert_same(tensors, results[-1])


def in_float64(*blocks: nn.Module) -> list[nn.Module]:
    return [block.double() for block in blocks]


def twins(form, make, count=3, **options):
    torch.manual_seed(0)
    blocks = in_float64(*(make(**options) for _ in range(count)))
    return FORMS[form](copy.deepcopy(blocks)), nn.Sequential(*blocks)


IMAGES = torch.randn(3, 8, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.table
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coupling", COUPLINGS)
def test_gradients_and_statistics_equal_stored_activations(coupling, form):
    """Defects: running statistics that move three times a step; parameters of stored activations."""
    norms = NORMS if coupling == "additive" else ("inplace", "batchnorm")
    blocks = in_float64(*(COUPLINGS[coupling](norm=NORMS[norm]) for norm in norms))
    network, expected = FORMS[form](copy.deepcopy(blocks)), nn.Sequential(*blocks)
    assert_same(step(network, IMAGES), step(expected, IMAGES))
    assert_same(step(network.eval(), IMAGES), step(expected.eval(), IMAGES))


@pytest.mark.parametrize("form", ["sequence", "wrappers", "kept inputs"])
@pytest.mark.parametrize("coupling", ["additive", "affine", "sigmoid"])
def test_dropout_drops_the_same_again(coupling, form):
    """Defect: dropout inside F or G gives wrong gradients."""
    network, expected = twins(form, COUPLINGS[coupling], dropout=0.4)
    assert_same(step(network, IMAGES), step(expected, IMAGES))
    after = torch.rand(1)
    torch.manual_seed(0)
    with torch.no_grad():
        expected(IMAGES)
    assert torch.equal(after, torch.rand(1))  # the backward pass leaves the random numbers alone
    if form == "wrappers":
        with pytest.raises(RuntimeError, match="computed other values"):
            step(wrapped([wrapper._fn for wrapper in network], preserve_rng_state=False), IMAGES)


def conv(branch: nn.Module) -> nn.Conv2d:
    return getattr(branch, "f", branch)[1]


def tied(network):
    conv(network[2].Fm).weight = conv(network[0].Fm).weight


def frozen(network):
    network[1].requires_grad_(False)


def frozen_norms(network):
    for norm in filter(lambda module: isinstance(module, ABN), network.modules()):
        norm.eval().requires_grad_(False)


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
    network = nn.Sequential(*in_float64(coupling(), coupling(), coupling()))
    change(network)
    twin = copy.deepcopy(network)
    if change is foreign:  # a deep copy would use the first network's weight
        foreign(twin)
    assert_same(step(ReversibleSequence(twin), IMAGES), step(network, IMAGES))


def twice(network, x):
    y = network(x)
    y.sum().backward(retain_graph=True)
    y.square().sum().backward(retain_graph=True)
    return torch.autograd.grad(y.sin().sum(), [x, *network.parameters()])


def in_part(network, x):
    """Gradients of some parameters, from half of the output: some steps never restore their activations."""
    wanted = [p for i, p in enumerate(network.parameters()) if i % 5 == 1]
    gradients = torch.autograd.grad(network(x.detach())[:, :4].square().sum(), wanted, allow_unused=True)
    return [torch.zeros(1) if gradient is None else gradient for gradient in gradients]


def twice_in_turn(network, x):
    (gradient,) = torch.autograd.grad(network(x).square().sum(), x, create_graph=True)
    gradient.square().sum().backward()


@pytest.mark.table
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coupling", [additive, affine])
@pytest.mark.parametrize("use", [twice, in_part, twice_in_turn])
def test_other_ways_to_differentiate(use, coupling, form):
    assert_same_use(use, *twins(form, coupling, norm=nn.BatchNorm2d))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_inside_checkpointing(form, reentrant):
    network, expected = twins(form, additive, norm=ABN)
    outside = nn.Sequential(network)
    outside.forward = lambda x: checkpoint(network, x, use_reentrant=reentrant)
    assert_same(step(outside, IMAGES), step(expected, IMAGES))


def test_checkpointing_and_reversible_modules_inside_branches():
    class Checkpointed(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    inner = [[AdditiveCoupling(branch(2)), AffineCoupling(branch(2), adapter=AffineAdapterNaive)] for _ in range(2)]
    blocks = in_float64(*(AdditiveCoupling(Checkpointed(*branch()), ReversibleSequence(parts)) for parts in inner))
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
        tensors = step(network, IMAGES)
    assert_same(tensors, step(expected, IMAGES))
    assert [tensor.shape for tensor in packed].count(IMAGES.shape) == 3  # ours; y for its square and sine


def test_an_input_that_someone_holds_stays():
    """Defects: a skip connection's freed input crashes the process; an input that another operation saved raises."""
    blocks, expected = twins("wrappers", additive, norm=ABN)

    def use(network, x):
        outputs = [x.sin()]
        for block in network:
            outputs.append(block(outputs[-1]))
        loss = sum((h.exp() * (i + 1)).sum() for i, h in enumerate(outputs)) + (outputs[0] * outputs[-1]).sum()
        values = [h.detach().clone() for h in outputs]
        loss.backward()
        assert all(torch.equal(h, value) for h, value in zip(outputs, values, strict=True))
        return values

    assert_same_use(use, blocks, expected)


def change(parameter):
    return lambda network, y: getattr(conv(network.blocks[0].Fm), parameter).mul_(2)


def differentiate(network, y):
    with torch.enable_grad():
        y.sum().backward()


@pytest.mark.parametrize(
    "form, change, message",
    [
        ("sequence", lambda network, y: y.mul_(2), "modified by an inplace operation"),
        ("wrappers", lambda network, y: y.mul_(2), "modified by an inplace operation"),
        ("sequence", change("weight"), "modified by an inplace operation"),
        # Autograd keeps no bias, so plain networks may change it; here the branch would compute something else.
        ("sequence", change("bias"), "Conv2d.bias .* was modified by an inplace operation"),
        ("sequence", differentiate, "second time"),
        ("wrappers", differentiate, "second time"),
        ("opaque", differentiate, "second time"),
    ],
)
def test_what_the_backward_pass_needs_is_gone(form, change, message):
    network, _ = twins(form, additive)
    y = network(IMAGES.clone().requires_grad_())
    with torch.no_grad():
        change(network, y)
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


@pytest.mark.parametrize("form", FORMS)
def test_without_gradients_nothing_is_freed(form):
    """Defect: inputs are freed under no_grad too."""
    (network, expected), x = twins(form, additive), IMAGES.clone()
    for context, training in product((torch.no_grad, torch.inference_mode), (False, True)):
        with context():
            outputs, wanted = (module.train(training)(x) for module in (network, expected))
            torch.testing.assert_close(outputs, wanted, rtol=0, atol=1e-12)
        assert torch.equal(x, IMAGES)


@pytest.mark.table
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("coupling", [additive, affine])
@pytest.mark.filterwarnings("ignore:InvertibleModuleWrapper got a torch.bfloat16 input")
def test_autocast_keeps_dtypes(coupling, form):
    """Streams of either dtype; gradients as stored. A sequence of couplings converts its stream to float32."""
    reversible, expected = (network.float() for network in twins(form, coupling, norm=ABN))
    for dtype in (torch.float32, torch.bfloat16)[: 1 if form == "opaque sequence" else 2]:
        results = []
        for network in (reversible, expected):
            x = IMAGES.to(dtype).requires_grad_()
            converts = form == "sequence" and network is expected
            with torch.autocast("cpu", torch.bfloat16):
                y = network((x * 1).float() if converts else x * 1)
            y.float().square().sum().backward()
            results.append({"y": y.detach(), "x": x.grad} | gradients(network))
            network.zero_grad()
        assert [t.dtype for t in results[0].values()] == [t.dtype for t in results[1].values()]
        assert torch.equal(results[0]["y"], results[1]["y"])
        assert_same(*results, tolerance=0.1 if dtype == torch.bfloat16 else 0.03)


def test_a_sequence_computes_in_float32_under_autocast_however_it_runs():
    """A convolution is before or inside it. It runs without gradients, with stored activations, and compiled too."""
    blocks = [AdditiveCoupling(branch(norm=ABN)) for _ in range(2)]
    convolution, x = nn.Conv2d(8, 8, 1), IMAGES.float()
    network = nn.Sequential(convolution, ReversibleSequence(blocks))
    with torch.autocast("cpu", torch.bfloat16):
        stem = convolution(x)
        assert stem.dtype == torch.bfloat16
        expected = nn.Sequential(*blocks)(stem.float())
        stored, within = ReversibleSequence(blocks, disable=True), ReversibleSequence([convolution, *blocks])
        with torch.no_grad():
            outputs = [network(x)]
        outputs += [network(x), stored(stem), within(x)]
        with pytest.warns(UserWarning, match="inside torch.compile"):
            outputs.append(torch.compile(network, backend="eager")(x))
        with pytest.warns(UserWarning, match="got a torch.bfloat16 input under autocast.*give the first one x.float()"):
            wrapped(blocks)(stem)
    assert expected.dtype == torch.float32
    for y in outputs:
        torch.testing.assert_close(y, expected, rtol=0, atol=0)


def test_hooks_fire():
    """Forward hooks fire again in the backward pass; backward hooks and hooks of parameters once, with the gradient."""
    sequence, expected = twins("sequence", additive)
    for network in (sequence.blocks, expected):
        network.calls, network.forward_calls = [], []
        layer = network[1].Fm[1]
        layer.register_full_backward_hook(lambda m, i, o, n=network: n.calls.append(o[0].clone()))
        layer.weight.register_hook(lambda g, n=network: n.calls.append(g.clone()) or 2 * g)
        layer.weight.register_post_accumulate_grad_hook(lambda p, n=network: n.calls.append(p.grad.clone()))
        network[0].register_forward_hook(lambda m, x, y, n=network: n.forward_calls.append(y))
        network[2].register_full_backward_hook(lambda m, i, o, n=network: n.calls.append(o[0].clone()))
    assert_same(step(sequence, IMAGES), step(expected, IMAGES))
    assert len(sequence.blocks.calls) == len(expected.calls) == 4 and sequence.blocks.forward_calls
    assert_same(dict(enumerate(sequence.blocks.calls)), dict(enumerate(expected.calls)))


@pytest.mark.parametrize(
    "make, depth",
    [(additive, 20), (partial(additive, norm=ABN), 20), (partial(additive, norm=nn.BatchNorm2d), 20), (affine, 20)]
    + [(partial(additive, norm=nn.Identity), 100)],
)
def test_saved_bytes_do_not_depend_on_the_depth(make, depth):
    x = torch.randn(2, 8, 16, 16, requires_grad=True)
    for network in (ReversibleSequence([make() for _ in range(blocks)]) for blocks in (1, depth)):
        assert kept_bytes(network, partial(network, x), ()) == x.nbytes


def test_what_a_row_of_wrappers_drops_again_is_not_counted():
    result, kept = saved_for_backward(lambda: twins("wrappers", additive, count=6)[0](IMAGES * 1))
    assert [tensor.nbytes for tensor in kept] == [result.nbytes]


@pytest.mark.parametrize("form", ["sequence", "wrappers"])
def test_only_the_last_output_lives_until_the_backward_pass(form):
    """Counts live storages: a wrapper that follows another one frees its input."""
    network, _ = twins(form, partial(additive, norm=nn.BatchNorm2d), count=6)
    alive: list[StorageWeakRef] = []
    for module in network.modules():
        module.register_forward_hook(lambda m, args, y: alive.append(StorageWeakRef(y.untyped_storage())))
    x = IMAGES.clone().requires_grad_()
    y = network(x * 1)
    gc.disable()
    try:
        last = StorageWeakRef(y.untyped_storage())
        assert {reference for reference in alive if not reference.expired()} == {last}
        loss = y.sum()
        del y
        assert not last.expired()  # kept
        loss.backward()
        del loss
        assert all(reference.expired() for reference in alive)  # without waiting for the garbage collector
    finally:
        gc.enable()


def test_branches_run_once_more_in_the_backward_pass():
    """4N operations for couplings, 5N for modules that must be inverted first (RevNet, section 3.2)."""
    blocks = in_float64(*(additive(norm=nn.BatchNorm2d) for _ in range(4)))
    nested = ReversibleSequence([ReversibleSequence([InvertibleModuleWrapper(b) for b in blocks[:2]]), *blocks[2:]])
    flops = []
    for network in (nn.Sequential(*blocks), ReversibleSequence(blocks), nested, wrapped(map(Opaque, blocks))):
        with FlopCounterMode(display=False) as counter:
            network(IMAGES.clone().requires_grad_()).sum().backward()
        flops.append(counter.get_total_flops())
    assert [count / flops[0] for count in flops[1:]] == pytest.approx([4 / 3, 4 / 3, 5 / 3])


@pytest.mark.parametrize(
    "split_dim, shape", [(1, (4, 6)), (-1, (4, 6)), (1, (2, 4, 3, 3, 3)), (3, (2, 3, 4, 6)), (-2, (2, 3, 4, 5))]
)
@pytest.mark.parametrize("keep_input", [False, True])
def test_any_dimension_but_the_batch(split_dim, shape, keep_input):
    blocks = in_float64(*(AdditiveCoupling(nn.PReLU(init=random()), split_dim=split_dim) for _ in range(3)))
    for block in blocks:  # a missing Gm is a copy of Fm
        assert block.Fm.weight == block.Gm.weight and block.Fm.weight is not block.Gm.weight
    x = torch.randn(shape, dtype=torch.float64)
    expected = step(nn.Sequential(*copy.deepcopy(blocks)), x)
    assert_same(step(wrapped(copy.deepcopy(blocks), keep_input=keep_input), x), expected)
    assert_same(step(ReversibleSequence(blocks), x), expected)


class Rotation(nn.Module):
    """Two tensors to two tensors, with a learned angle."""

    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, a, b, sign=1):
        c, s = self.angle.cos(), sign * self.angle.sin()
        return c * a - s * b, s * a + c * b

    def inverse(self, a, b):
        return Rotation.forward(self, a, b, sign=-1)


@pytest.mark.parametrize("options", [{}, {"keep_input": True}, {"disable": True}])
def test_several_inputs_and_outputs(options):
    def use(network, x):
        values = (x * 1, x.sin())
        for module in network:
            values = module(*values)
        (values[0].square() * values[1]).sum().backward()

    rotations = [Rotation() for _ in range(3)]
    assert_same_use(use, wrapped(copy.deepcopy(rotations), **options), nn.Sequential(*rotations))


@pytest.mark.parametrize("keep_input_inverse", [False, True])
@pytest.mark.parametrize("make", [additive, affine, lambda: Opaque(additive()), lambda: Opaque(affine())])
def test_the_inverse_is_differentiated_without_its_input(make, keep_input_inverse):
    (module,) = in_float64(make())
    wrapper = InvertibleModuleWrapper(copy.deepcopy(module), keep_input_inverse=keep_input_inverse)

    assert_same_use(lambda network, y: network.inverse(y * 1).square().sum().backward(), wrapper, module)


class Times(nn.Module):
    """A number times a tensor, which the quotient restores only up to rounding."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return self.factor * x

    def inverse(self, y):
        return y / self.factor


def test_integers_are_restored_exactly():
    numbers, times = torch.arange(1000), Times()
    InvertibleModuleWrapper(times)(numbers.clone()).sum().backward()
    assert (times.inverse(times(numbers)) < numbers).any() and times.factor.grad == numbers.sum()


class Wide(nn.Module):
    forward = staticmethod(lambda x: torch.cat([x, x], dim=1))


class Listed(nn.Module):
    forward = staticmethod(lambda x: [x])


@pytest.mark.parametrize(
    "make, shape, message",
    [
        (lambda: AdditiveCoupling(nn.Identity()), (2, 3), r"shape \(2, 3\): dimension 1 has the odd size 3"),
        (lambda: AdditiveCoupling(nn.Identity(), split_dim=0), (2, 2), "split_dim=0: expected a dimension.*batch"),
        (lambda: AdditiveCoupling(Wide()), (2, 4), r"Wide returned the shape \(2, 4\).*other half's.*\(2, 2\)"),
        (lambda: AdditiveCoupling(Listed()), (2, 4), "Listed returned a list: a coupling needs"),
        (lambda: AffineCoupling(nn.Identity()), (2, 4), r"Tensor from a branch.*\(scale, shift\).*AffineAdapterNaive"),
        (lambda: AffineCoupling(nn.Identity(), None, AffineAdapterSigmoid), (2, 2), "1 channels from Identity"),
        (lambda: AdditiveCoupling(AffineAdapterNaive(nn.Identity())), (2, 2), "got a tuple from a branch"),
        (lambda: AdditiveCoupling(nn.ReLU(inplace=True)), (2, 2), "ReLU wrote over its input.*not inplace"),
        (lambda: InvertibleModuleWrapper(nn.Identity()), (2, 2), "Identity has no method inverse.*keep_input=True"),
        (lambda: InvertibleModuleWrapper(nn.Sequential(), num_bwd_passes=0), (2, 8), "num_bwd_passes=0: expected"),
        (lambda: partial(InvertibleModuleWrapper(additive()), 3), (), "got or returned a int: expected tensors"),
        (lambda: lambda x: InvertibleModuleWrapper(additive())(), (), "got or returned nothing"),
        (lambda: ReversibleSequence([nn.Identity()]).inverse, (1,), "Identity of a ReversibleSequence has no inverse"),
    ],
)
def test_mistakes_are_named(make, shape, message):
    """Defect: an affine coupling without an adapter silently splits the batch."""
    with pytest.raises(ValueError, match=message):
        make()(torch.ones(shape))


class Moody(nn.Module):
    """Saves other tensors, or more, or fewer, when it runs again."""

    def __init__(self, saved):
        super().__init__()
        self.saved = iter(saved)

    def forward(self, x):
        weights = torch.ones(1, dtype=x.dtype, requires_grad=True)
        return x + sum((weights.expand(size) * weights.expand(size)).sum() for size in next(self.saved))


@pytest.mark.parametrize(
    "saved, message", [([[2], [3]], "at first"), ([[2], [2, 2]], "more tensors"), ([[2, 2], [2]], "fewer tensors")]
)
def test_a_branch_that_saves_something_else_is_named(saved, message):
    checks._enabled.set(False)  # the fixture resets it
    coupling = InvertibleModuleWrapper(AdditiveCoupling(Moody(saved), nn.Identity()))
    with pytest.raises(RuntimeError, match=f"something else when.*{message}"):
        coupling(IMAGES.clone().requires_grad_()).sum().backward()


def test_trying_whether_a_module_is_invertible_changes_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "manual_seed_all", lambda seed: pytest.fail("it would seed devices later"))

    class Wrong(Rotation):
        inverse = Rotation.forward

    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.rand_like(x)

        def inverse(self, y):
            return y - torch.rand_like(y)

    class OneWay(nn.Module):
        """Its inverse undoes it, but it does not undo its inverse of numbers below 1."""

        def forward(self, x):
            return x.exp()

        def inverse(self, y):
            return y.clamp_min(1).log()

    module, dropping = additive(norm=nn.BatchNorm2d), additive(dropout=0.5)
    before, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    assert is_invertible_module(module_in=module, test_input_shape=(2, 8, 4, 4), atol=1e-5, random_seed=7)
    assert not is_invertible_module(dropping, (2, 8, 4, 4))  # its inverse draws in another order
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert is_invertible_module(Rotation(), ((2, 3), (2, 3)), torch.float64)
    assert is_invertible_module(Noisy(), (2, 3))  # both draw the same numbers
    assert not is_invertible_module(Wrong(), ((2, 3), (2, 3)), torch.float64)
    assert not is_invertible_module(nn.Identity(), (2, 3)) and not is_invertible_module(OneWay(), (2, 3))
    assert not is_invertible_module("not a module", (2, 3))
