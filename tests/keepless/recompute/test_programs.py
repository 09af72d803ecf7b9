"""Plain and prepared networks either agree, in float64, or both raise; what is kept is counted."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keepless import CheckpointedABN, recompute_activations, upsampled_cross_entropy
from keepless.recompute.compiler import script_of
from keepless.recompute.counting import Counting
from keepless.recompute.following import Following
from keepless.recompute.lesson import Lesson
from keepless.recompute.recipes import ByPlan
from keepless.recompute.recording import Recording
from keepless.recompute.script import Script
from keepless.recompute.step import Flag, Plan
from keepless.saved import saved_for_backward

Gradients = list[Tensor | None]
FLAGS = 0, Flag.KEEP, Flag.AGAIN, Flag.AGAIN, Flag.AGAIN | Flag.MASK, Flag.MASK


def attempt(forward: Callable[[], Tensor], sources: list[Tensor], context) -> tuple[Tensor, Gradients] | Exception:
    """Output and gradients, or the RuntimeError."""
    torch.manual_seed(0)
    try:
        with context:
            output = forward()
        loss = output.abs().square().mean()
        return output.detach().clone(), list(torch.autograd.grad(loss, sources, allow_unused=True))
    except RuntimeError as error:
        return error


def agree(make: Callable[[], tuple[Callable[[], Tensor], list[Tensor]]]) -> bool:
    """Compare runs of a forward pass, each freshly made; whether they agree, rather than all raise.

    It runs as it is, recorded, without a plan that fits, and by plans that keep some results at random. The scripts
    that are learned from these passes are followed.
    """
    plain, other = (run(make, context) for context in (nullcontext(), Recording(ByPlan())))
    others, calls = [other, *learned_and_followed(make, [make])], calls_of(make)
    for seed in range(3):
        draws = Random(seed)
        flags = bytes(draws.choice(FLAGS) for _ in calls)
        flags = flags if seed < 2 else bytes([Flag.AGAIN] * len(flags))
        others += learned_and_followed(make, [make], Plan(calls, flags))
    return all(agrees(plain, recorded) for recorded in others)


Make = Callable[[], tuple[Callable[[], Tensor], list[Tensor]]]


def calls_of(make: Make) -> list[Any]:
    """The calls of a program for which a plan decides, up to its end or an error."""
    torch.manual_seed(1)
    forward, _ = make()
    torch.manual_seed(0)
    counting = Counting([], measures=False)
    with suppress(RuntimeError):
        counting.forward_pass(forward, (), {})
    return counting.calls


class Learning(Recording):
    """Learns a script from the recorded pass."""

    script: Script | None = None

    def __init__(self, plan: Plan | None):
        super().__init__(None if plan is None else ByPlan([plan]))
        self.lesson, self.plan = Lesson(), plan

    def __exit__(self, *error):
        super().__exit__(*error)
        if error[0] is None:
            self.script = script_of(self.lesson, self.known, self.kept, self.plan)


def _policy_of(plan: Plan | None) -> ByPlan | None:
    return None if plan is None else ByPlan([plan])


def learned_and_followed(make: Make, others: Sequence[Make], plan: Plan | None = None) -> list[Any]:
    """Return the results of a recorded pass, and of passes of these programs that start with its script."""
    learning = Learning(plan)
    results = [run(make, learning)]
    if learning.script is None:
        return results
    for other in others:
        policy = partial(_policy_of, plan)
        results.append(run(other, Following(learning.script, [], policy)))
    return results


def run(make: Callable[[], tuple[Callable[[], Tensor], list[Tensor]]], context) -> tuple[Tensor, Gradients] | Exception:
    torch.manual_seed(1)
    return attempt(*make(), context)


def agrees(plain: tuple[Tensor, Gradients] | Exception, recorded: tuple[Tensor, Gradients] | Exception) -> bool:
    if isinstance(plain, Exception) or isinstance(recorded, Exception):
        assert isinstance(recorded, Exception), f"only the plain one raised {plain}"
        assert isinstance(plain, Exception), f"only the recorded one raised {recorded}"
        changed = "modified by an inplace operation"
        assert (changed in str(plain) and changed in str(recorded)) or str(plain) == str(recorded), (plain, recorded)
        return False
    assert torch.equal(plain[0], recorded[0])
    for expected, found in zip(plain[1], recorded[1], strict=True):
        scale = 1.0 if expected is None else max(1.0, expected.abs().max().item())
        error = 1e-12 if plain[0].dtype == torch.float64 else 1e-4
        torch.testing.assert_close(found, expected, rtol=error, atol=error * scale)
    return True


NORMS = {
    "batch": nn.BatchNorm2d,
    "batch without affine": lambda c: nn.BatchNorm2d(c, affine=False),
    "batch without statistics": lambda c: nn.BatchNorm2d(c, track_running_stats=False),
    "group": lambda c: nn.GroupNorm(2, c),
    "instance": lambda c: nn.InstanceNorm2d(c, affine=True),
    "instance with statistics": lambda c: nn.InstanceNorm2d(c, affine=True, track_running_stats=True),
    "layer": lambda c: nn.LayerNorm((c, 7, 7)),
    "rms": lambda c: nn.RMSNorm((c, 7, 7)),
}
ACTIVATIONS = {
    **{name: getattr(F, name) for name in ("relu", "relu6", "leaky_relu", "elu", "silu", "hardsigmoid", "gelu")},
    **{name + "_": partial(getattr(F, name), inplace=True) for name in ("relu", "silu", "hardswish")},
    "relu6_": lambda y: F.relu6(y, True),
    "hardtanh": lambda y: F.hardtanh(y, -0.3, 0.3),
    "hardtanh within integers": lambda y: F.hardtanh(y, -1, 1),
    "hardtanh without a bound": lambda y: F.hardtanh(y, 0.0, float("inf")),
    "leaky_relu_": lambda y: F.leaky_relu(y, 0.1, True),
    "falling leaky_relu": lambda y: F.leaky_relu(y, -0.1),
    "leaky_relu beside": lambda y: F.leaky_relu(y, 0.1) * y.sin(),
    "sigmoid": torch.sigmoid,
    "tanh_": torch.tanh_,
    "square": lambda y: y * y,
    "squeeze and excitation": lambda y: y * y.mean((2, 3), keepdim=True).sigmoid(),
    "sum": lambda y: (y + y.sigmoid()).relu(),
    "dropout": lambda y: F.dropout(y.relu(), 0.3),
    "max-pooling": lambda y: F.max_pool2d(y.relu(), 3, 1, 1),
    "upsampling": lambda y: F.interpolate(y.relu(), scale_factor=2.0, mode="bilinear")[..., ::2, ::2],
    "concatenation": lambda y: torch.cat([y.relu(), y.sigmoid()], 1)[:, 2:6],
    "stack": lambda y: torch.stack([y.relu(), y - 1.0], 1)[:, 1],
    "quotient": lambda y: y / (1 + y.abs()),
    "elu_": lambda y: F.elu_(y, 0.5),
    "prelu": lambda y: F.prelu(y, torch.full((4,), 0.3, dtype=torch.float64)),
    **{name: partial(getattr(F, name), p=0.3) for name in ("dropout2d", "feature_alpha_dropout")},
    "alpha_dropout": lambda y: F.alpha_dropout(y, 0.3, True),
    "dropout3d": lambda y: F.dropout3d(y[None], 0.3)[0],
    "dropout2d_": lambda y: F.dropout2d(y, 0.3, inplace=True),
    "max-pooling of rows": lambda y: F.max_pool1d(y.relu().flatten(1, 2), 3, 1, 1).view_as(y),
    "max-pooling of volumes": lambda y: F.max_pool3d(y.relu(), 3, 1, 1),
    "adaptive max-pooling": lambda y: F.adaptive_max_pool2d(y.relu(), 7),
    "average pooling": lambda y: F.avg_pool2d(y.relu(), 3, 1),
    "adaptive average pooling": lambda y: F.adaptive_avg_pool2d(y.relu(), 5),
    "average pooling of rows": lambda y: F.avg_pool1d(y.flatten(1, 2), 3, 1, 1).view_as(y),
    "powers": lambda y: (y**2 + y.pow(3)).square() * 2**y,
    "star relu": lambda y: 0.9 * F.relu(y) ** 2 + 0.4,
    "gate": lambda y: (1 - y.neg()) * -abs(y),
    "roots": lambda y: (1 + y.square()).sqrt() * (2 + abs(y)).rsqrt(),
    "reciprocal": lambda y: (2 + y.sigmoid()).reciprocal(),
    "logarithm": lambda y: torch.log1p(y.exp()) - torch.erf(y),
    "clamp_": lambda y: y.mul(2).clamp_(-1, 1),
    "clamp by name": lambda y: torch.clamp(y, min=-0.5).clamp(max=1.0),
    "threshold": lambda y: F.threshold(y, 0.1, 0.2, inplace=True),
    "where": lambda y: torch.where(y > 0, y, -y).where(y < 1, 0.5),
    "masked": lambda y: y.masked_fill(y > 0.5, 0.0),
    "RMS norm written out": lambda y: y * torch.rsqrt(y.pow(2).mean(1, keepdim=True) + 1e-6),
    "shuffled pixels": lambda y: F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2),
    "gated by halves": lambda y: F.glu(torch.cat([y, y + 1], 1), 1),
}
# Also their masks and indices (a truth value is an eighth of a number), or the result of a function without a rule.
KEEPS_MORE = dict.fromkeys(["leaky_relu beside", "dropout"], [392])
KEEPS_MORE["alpha_dropout"] = [392, 392]
KEEPS_MORE |= {name: [98] for name in ACTIVATIONS if "max-pooling" in name} | {"where": [49, 49], "masked": [49]}
# They differ in what they save, and in what is needed to compute them again.
CHANGED = ["relu_", "relu6", "leaky_relu", "elu", "silu_", "tanh_", "square", "squeeze and excitation", "dropout"]
CHANGED += ["max-pooling", "upsampling", "concatenation", "stack"]
CHANGES: dict[str, tuple[Callable[[Tensor], object], Callable[[Tensor], object]]] = {
    "norm under no_grad": (lambda y: torch.no_grad()(y.mul_)(2), id),
    "norm detached": (lambda y: y.detach().clamp_(max=0.2), id),
    "activation under no_grad": (id, lambda z: torch.no_grad()(z.mul_)(2)),
    "activation": (id, lambda z: z.mul_(2)),
    "half of the activation": (id, lambda z: z[:, :2].add_(1)),
}


def block(norm, activation, change=None, frozen=(), training=True):
    def make():
        first, norm_layer, last = nn.Conv2d(3, 4, 3), NORMS[norm](4), nn.Conv2d(4, 4, 3)
        network = nn.ModuleList([first, norm_layer, last]).double().train(training)
        for name, parameter in norm_layer.named_parameters():
            nn.init.normal_(parameter).requires_grad_(name not in frozen)
        for buffer in filter(torch.is_floating_point, norm_layer.buffers()):
            nn.init.uniform_(buffer, 0.5, 1.5)
        x = torch.randn(2, 3, 9, 9, dtype=torch.float64)

        def forward() -> Tensor:
            y = norm_layer(first(x))
            change_norm, change_activation = CHANGES.get(change, (id, id))
            change_norm(y)
            z = ACTIVATIONS[activation](y)
            change_activation(z)
            return last(z)

        return forward, [parameter for parameter in network.parameters() if parameter.requires_grad]

    return make


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_in_place_is_never_computed_wrongly(change):
    """Autograd does not see some of the changes. ReLU and tanh keep their results, so PyTorch refuses changes."""
    for activation in CHANGED:
        refused = activation in ("relu_", "tanh_") and "activation" in change
        assert agree(block("batch", activation, change)) is not refused, activation


@pytest.mark.parametrize("norm", NORMS)
def test_norms_with_frozen_parameters_and_statistics(norm):
    frozen = [(), ("weight",), ("bias",), ("weight", "bias")]
    for number, (names, training) in enumerate(product(frozen, [True, False])):
        activation = ["relu_", "silu"][(number + number // 2) % 2]  # each with each of the two others
        assert agree(block(norm, activation, frozen=names, training=training)), (names, training)


def values_kept(forward: Callable[[], Tensor], sources: list[Tensor]) -> list[int]:
    """The numbers of values of the tensors that a recorded graph keeps besides its sources; not of statistics."""

    def recorded() -> Tensor:
        with Recording():
            return forward()

    _, saved = saved_for_backward(recorded)
    others = {tensor.untyped_storage()._cdata for tensor in sources}
    sizes = [kept.untyped_storage().nbytes() // 8 for kept in saved if kept.untyped_storage()._cdata not in others]
    return sorted(size for size in sizes if size > 8)


def test_the_images_and_the_input_of_the_norm_are_kept_and_nothing_else():
    """Whatever the norm and the activation, but for masks, indices and what no recipe is known for."""
    for norm, activation in [*product(NORMS, ["relu_"]), *product(["batch"], ACTIVATIONS)]:
        assert agree(block(norm, activation)), (norm, activation)
        kept = values_kept(*block(norm, activation)())
        assert kept == [*KEEPS_MORE.get(activation, []), 392, 486], (norm, activation)


def test_a_weight_that_changes_before_the_backward_pass_raises():
    network = recompute_activations(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)))
    loss = network(torch.randn(2, 3, 4, 4, requires_grad=True)).sum()
    with torch.no_grad():
        network[0].weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def _lends(x: Tensor) -> Tensor:
    a, b = x + 1, x + 2
    both = torch.cat([a, b], 1)
    y = F.silu(both)
    a.relu_()  # allowed: a concatenation does not keep its parts
    b[:, 0] += 1
    return y * y.sigmoid() + torch.cat([a, b], 1)


def _lends_to_an_alias(x: Tensor) -> Tensor:
    a, b = x + 1, x + 2
    both = torch.cat([a, b], 1)
    a.detach().zero_()
    return both.sin()


def _chain(length: int, step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for _ in range(length):
            x = step(x)
        return x

    return function


def _other_hooks(x: Tensor) -> Tensor:
    y = F.silu(x)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 1, lambda tensor: tensor):
        z = y.sin()
    return z * y


def _part_changed_under_other_hooks(x: Tensor) -> Tensor:
    a, b = x * 1, x * 2
    y = torch.cat([a, b], 1).sin()
    with torch.autograd.graph.save_on_cpu():
        a.relu_()
    return y


def _relu_over_a_view(y: Tensor) -> Tensor:
    z = F.relu(y.flatten(1))  # when computed again, it may not be written over y
    return z.sin().view_as(y) * y.cos()


def _change_a_factor(x: Tensor) -> Tensor:
    a, b = x * 2, torch.ones(6, 6, dtype=x.dtype)
    y = F.gelu(torch.einsum("ncij,jk->ncik", [a, b])).sin()  # a list
    a.mul_(-1)  # without the result of einsum, a would be needed
    return y


def _look_and_mark(x: Tensor, overwrites: bool = False) -> Tensor:
    """Looks at a value that is perhaps overwritten then, and marks a detached copy: no reasons for an error."""
    y = F.silu(x)
    y.abs().mean().item()
    if overwrites:
        y *= 0.5
    z = y.sin()
    z.marked = y.detach().requires_grad_()
    return z


def _change_part(y: Tensor) -> Tensor:
    part = y[:, :2]
    part.relu_()
    return part.sin().sum() + y.cos().sum()


def _upsampled(x: Tensor) -> Tensor:
    y = x.sin()
    return F.interpolate(y, scale_factor=2.0).sin().sum() + F.interpolate(y, scale_factor=3.0).sin().sum()


def _change_list(x: Tensor) -> Tensor:
    sizes = [1, 1]
    y = F.pad(F.silu(x), sizes).sin()
    sizes[:] = [0, 2]
    return y


def _change_option(activation: Callable[..., Tensor], name: str | None = None) -> Callable[[Tensor], Tensor]:
    """An activation with a tensor as an option, given by name or not, which changes after the call."""

    def function(x: Tensor) -> Tensor:
        option, y = torch.tensor(0.1), x * 1
        y = (activation(y, option) if name is None else activation(y, **{name: option})).sin()
        option *= 0.5
        return y

    return function


def _add_another_dtype(x: Tensor) -> Tensor:
    y = F.silu(x.bfloat16())
    y += x.float()  # stays bfloat16
    return y.sin().double()


def _join_an_inference_tensor(x: Tensor) -> Tensor:
    with torch.inference_mode():
        part = torch.ones_like(x)
    return torch.cat([F.silu(x), part], 1).sin()


def _replace_data(x: Tensor) -> Tensor:
    y = F.silu(x)
    y.data = y.data * 2
    return y.sin()


def _graph(layout: str) -> Callable[[Tensor], Tensor]:
    """An adjacency matrix of some layout, then operations on rows that vmap batches."""

    def function(x: Tensor) -> Tensor:
        adjacency = getattr(torch.eye(6, dtype=x.dtype), layout)()
        rows = adjacency @ F.silu(x).reshape(6, -1)
        return F.relu(torch.vmap(lambda row: row.mul(2).add_(1).sin())(rows)).sin()

    return function


# Options of activations that a recipe cannot give again.
OPTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "slope that changes": _change_option(F.leaky_relu),
    "slope by name that changes": _change_option(F.leaky_relu, "negative_slope"),
    "alpha that changes": _change_option(F.elu),
    "alpha by name that changes": _change_option(F.celu, "alpha"),
    # Options that the function which is called again does not have.
    "elu_ with a scale": lambda x: F.elu_(x * 1, 0.5, 2.0).sin(),
}
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "parts of a concatenation": _lends,
    "alias of a part": _lends_to_an_alias,
    "forty products": _chain(40, lambda x: x * x),
    "long chain": _chain(2000, F.silu),
    "complex view": lambda x: torch.view_as_complex(F.silu(x).view(2, 4, 6, 3, 2)).square(),
    "conjugate": lambda x: (torch.complex(x, x) * torch.complex(x, -x)).conj() * torch.complex(x, x),
    "checkpoint inside": lambda x: checkpoint(lambda y: F.silu(y) * y, x, use_reentrant=False).sin(),
    "other hooks inside": _other_hooks,
    "part changed under other hooks": _part_changed_under_other_hooks,
    "permuted slice": lambda x: F.silu(x).permute(0, 2, 3, 1)[:, 1:, :2].sin(),
    "copied windows": lambda x: torch.roll(F.silu(x), 1, 2).transpose(1, 3).reshape(2, 6, -1).sin(),
    "chunks": lambda x: torch.cat(F.gelu(x).chunk(2, 1)[::-1], 1).sin(),
    "expanded": lambda x: F.silu(x[:, :1]).expand(2, 5, 6, 6).sin(),
    "padded": lambda x: F.pad(F.silu(x), (1, 1)).sin(),
    "padded by a list that changes later": _change_list,
    **OPTIONS,
    "upsampled": _upsampled,
    "cast": lambda x: F.silu(x).to(torch.float32).sin().double(),
    "sum in place of two dtypes": _add_another_dtype,
    "view changed": lambda x: _change_part(F.silu(x)),
    "relu over a parameter's view": lambda x: F.relu(x.reshape(2, -1)).sin() + F.relu(x.flatten(1)).cos(),
    "relu over a view": lambda x: _relu_over_a_view(F.silu(x)),
    "einsum of a list": _change_a_factor,
    "loss by tiles": lambda x: upsampled_cross_entropy(F.silu(x), torch.ones(2, 12, 12, dtype=torch.uint8)),
    "looks and marks": _look_and_mark,
    "looks, overwrites and marks": partial(_look_and_mark, overwrites=True),
    # `F.normalize` calls itself with out=None: nothing is written over.
    "normalised": lambda x: x.sin() * F.normalize(x, dim=1),
    "inference tensor": _join_an_inference_tensor,
    "replaced data": _replace_data,
    "sparse": _graph("to_sparse"),
    "sparse CSR": _graph("to_sparse_csr"),
    "batched": _graph("to_dense"),
}
# {function: tensors that it keeps besides its input}; a chain keeps a value of every 13.
TENSORS_KEPT = {
    "replaced data": 1,
    "forty products": 3,
    "long chain": 2000 // 13,
    "complex view": 1,
    "conjugate": 4,
}
TENSORS_KEPT |= {"checkpoint inside": 1, "other hooks inside": 1, "view changed": 1, "relu over a view": 2}
TENSORS_KEPT |= {
    "normalised": 3,
    "upsampled": 1,
    "inference tensor": 1,
    "batched": 3,
    "einsum of a list": 2,
    "loss by tiles": 1,
}
TENSORS_KEPT |= dict.fromkeys(OPTIONS, 1)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    def make():
        w = torch.randn(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
        return (lambda: FUNCTIONS[name](w * 1.0)), [w]

    assert agree(make)
    if not name.startswith("sparse"):  # sparse tensors have no memory that could be counted
        assert len(values_kept(*make())) == TENSORS_KEPT.get(name, 0)


class Cube(torch.autograd.Function):
    """Saves its argument outside of the calls that a recording sees."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        return 3 * x**2 * gradient


UNARY = [F.silu, torch.relu, torch.sin, torch.sigmoid, F.gelu, F.softplus, torch.neg, Tensor.contiguous, torch.exp]
UNARY += [F.relu6, F.leaky_relu, lambda x: 1 / (2 + x.sigmoid()), Cube.apply]
IN_PLACE = [torch.relu_, Tensor.sigmoid_, lambda x: F.silu(x, inplace=True), lambda x: x.mul_(0.5), lambda x: x.add_(1)]
IN_PLACE += [lambda x: F.leaky_relu(x, 0.1, inplace=True), F.elu_, lambda x: x.sub_(0.5), lambda x: x.div_(2)]
BINARY = [torch.mul, torch.add, torch.sub, lambda x, y: torch.cat([x, y], 1)[:, 1:5]]
BINARY += [lambda x, y: x / (1 + y * y), lambda x, y: 1 - x, lambda x, y: torch.stack([x, y], 1)[:, 1]]
VIEWS = [lambda x: x[:, :2], lambda x: x.transpose(2, 3), lambda x: x.detach(), lambda x: x.view(2, 4, 36)]
MOVES = st.tuples(
    st.sampled_from(["unary", "in place", "unseen", "part", "binary", "norm", "transposed"]),
    st.integers(0, 12),
    st.integers(0, 8),
    st.integers(0, 8),
)


def _run(moves, w: Tensor, norms: nn.ModuleList) -> Tensor:
    tensors = [w * 1.0, w + 1.0]
    for kind, number, first, second in moves:
        x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
        change = IN_PLACE[number % len(IN_PLACE)]
        if kind == "unary":
            tensors.append(UNARY[number % len(UNARY)](x))
        elif kind == "in place":
            tensors.append(change(x))
        elif kind == "unseen":
            with torch.no_grad():
                change(VIEWS[second % len(VIEWS)](x))
        elif kind == "part":
            change(VIEWS[second % 2](x))
        elif kind == "binary":
            tensors.append(BINARY[number % len(BINARY)](x, y))
        elif kind == "norm":
            tensors.append(norms[number % len(norms)](x))
        else:
            tensors.append(x.transpose(2, 3).contiguous())
    return torch.stack([tensor.sin() for tensor in tensors]).sum(0)


def program(moves, size: int = 6, frozen: int = 1, dtype: torch.dtype = torch.float64) -> Make:
    """`frozen`: the norm whose parameters are not trained; norms are in evaluation mode if it is 5."""

    def make():
        norms = [nn.BatchNorm2d(4), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.RMSNorm(6)]
        layers = nn.ModuleList(norms).to(dtype).train(frozen != 5)
        layers[frozen % 5].requires_grad_(False)
        w = torch.randn(2, 4, size, 6, dtype=dtype, requires_grad=True)
        return (lambda: _run(moves, w, layers)), [w, *(p for p in layers.parameters() if p.requires_grad)]

    return make


@pytest.mark.parametrize("examples", [120, pytest.param(1500, marks=pytest.mark.slow)])
def test_random_graphs(examples):
    @settings(max_examples=examples)
    @given(st.lists(MOVES, min_size=2, max_size=12))
    def check(moves):
        agree(program(moves))

    check()


CHANGING = st.sampled_from(["move", "less", "more", "size", "frozen", "training", "dtype"])


def changed(moves: list[Any], how: str, place: int, move: Any) -> Make:
    """A program that differs from another one in one place."""
    place %= len(moves)
    before, after = moves[:place], moves[place + 1 :]
    if how == "move":
        return program([*before, move, *after])
    if how == "less":
        return program([*before, *after])
    if how == "more":
        return program([*before, move, *moves[place:]])
    if how == "size":
        return program(moves, size=7)
    return program(moves, dtype=torch.float32) if how == "dtype" else program(moves, frozen=3 if how == "frozen" else 5)


@pytest.mark.parametrize("examples", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_a_script_never_runs_where_the_program_differs(examples):
    """A branch flips, a size changes, or a layer is frozen: passes that start with another program's script agree."""

    @settings(max_examples=examples)
    @given(st.lists(MOVES, min_size=3, max_size=12), CHANGING, st.integers(0, 11), MOVES, st.integers(0, 2**30))
    def check(moves, how, place, move, seed):
        make, other = program(moves), changed(moves, how, place, move)
        draws, calls = Random(seed), calls_of(make)
        flags = bytes(draws.choice(FLAGS) for _ in calls)
        plain, other_plain = run(make, nullcontext()), run(other, nullcontext())
        for plan in (None, Plan(calls, flags), Plan(calls, bytes([Flag.AGAIN] * len(flags)))):
            first, *passes = learned_and_followed(make, [other, make], plan)
            agrees(plain, first)
            for expected, found in zip((other_plain, plain), passes, strict=False):
                agrees(expected, found)

    check()


class Read(torch.autograd.Function):
    """Sums z, and lists it as it was and as the backward pass sees it."""

    @staticmethod
    def forward(context, z, seen):
        context.save_for_backward(z)
        context.seen = seen
        seen.append((z.clone(), z.stride()))
        return z.sum()

    @staticmethod
    def backward(context, gradient):
        (z,) = context.saved_tensors
        context.seen.append((z, z.stride()))
        return gradient.expand_as(z), None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_computed_again_is_equal_to_the_bit_and_laid_out_alike(dtype):
    """With channels_last, other kernels would round otherwise."""
    for activation in ("relu_", "silu", "sum", "max-pooling", "concatenation", "hardtanh", "tanh_"):
        norm, seen = nn.BatchNorm2d(8) if activation != "tanh_" else CheckpointedABN(8), []
        nn.init.normal_(norm.weight)
        x = torch.randn(2, 8, 7, 7, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
        with Recording():
            loss = Read.apply(ACTIVATIONS[activation](norm(x)), seen)
        loss.backward()
        (expected, stride), (found, found_stride) = seen
        assert torch.equal(found, expected) and found_stride == stride, activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_of_transposed_and_sliced_values_are_equal_to_the_bit(dtype):
    """PyTorch's kernel for such layouts rounds after each step."""
    for values in (
        torch.randn(2, 7, 8).transpose(1, 2),
        torch.randn(9, 16).t()[::2].t(),
        torch.randn(2, 9, 5, 5)[:, 1:],
    ):
        norm, seen = nn.BatchNorm1d(8) if values.dim() < 4 else nn.BatchNorm2d(8), []
        for parameter in norm.parameters():
            nn.init.normal_(parameter)
        with Recording():
            loss = Read.apply(norm(values.to(dtype).requires_grad_()), seen)
        loss.backward()
        (expected, stride), (found, found_stride) = seen
        assert torch.equal(found, expected) and found_stride == stride, values.shape


def test_a_copied_argument_may_be_overwritten():
    """`silu_` saves a copy of its argument, so PyTorch allows it."""
    moves = [("in place", 2, 0, 0), ("transposed", 0, 0, 0), ("unseen", 0, 0, 0)]
    assert agree(program(moves))
    plain = run(program(moves), nullcontext())
    for found in learned_and_followed(program(moves[:2]), [program(moves)]):
        assert not isinstance(found, Exception)
    assert agrees(plain, found)
