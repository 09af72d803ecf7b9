"""Functions that are computed again, one by one: equal to the bit, and from little."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import InPlaceABN, recompute_activations, upsampled_cross_entropy
from keepless.saved import saved_for_backward
from tests.keepless.recompute.agreement import (
    Setup,
    agree,
    by_backward,
    in_parts,
    keep_by_chance,
    note_followed,
    on,
    second_derivatives,
)
from tests.keepless.recompute.ahead import After
from tests.keepless.recompute.programs import Cube

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
    "max-pooling": lambda y: F.max_pool2d(y.relu(), 3, 1, 1),
    "upsampling": lambda y: F.interpolate(y.relu(), scale_factor=2.0, mode="bilinear")[..., ::2, ::2],
    "concatenation": lambda y: torch.cat([y.relu(), y.sigmoid()], 1)[:, 2:6],
    "stack": lambda y: torch.stack([y.relu(), y - 1.0], 1)[:, 1],
    "quotient": lambda y: y / (1 + y.abs()),
    "elu_": lambda y: F.elu_(y, 0.5),
    "prelu": lambda y: F.prelu(y, torch.full((4,), 0.3, dtype=torch.float64)),
    **{name: partial(getattr(F, name), p=0.3) for name in ("dropout2d", "feature_alpha_dropout")},
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
KEEPS_MORE = {"leaky_relu beside": [392]}
KEEPS_MORE |= {name: [98] for name in ACTIVATIONS if "max-pooling" in name} | {"where": [49, 49], "masked": [49]}


def block(norm: str, activation: str, frozen: tuple[str, ...] = (), training: bool = True) -> nn.Sequential:
    """A norm and an activation between two convolutions."""
    torch.manual_seed(1)
    middle = After(NORMS[norm](4), ACTIVATIONS[activation])
    network = nn.Sequential(nn.Conv2d(3, 4, 3), middle, nn.Conv2d(4, 4, 3)).double().train(training)
    for name, parameter in middle.layer.named_parameters():
        nn.init.normal_(parameter).requires_grad_(name not in frozen)
    for buffer in filter(torch.is_floating_point, middle.layer.buffers()):
        nn.init.uniform_(buffer, 0.5, 1.5)
    return network


IMAGES = torch.randn(2, 3, 9, 9, dtype=torch.float64)


def like_plain(plain: nn.Module, setup: Setup, budgets: tuple, *uses) -> None:
    """A prepared network takes the same three steps as a plain one, within each budget."""
    for budget in budgets:
        baseline, ours = copy.deepcopy(plain), recompute_activations(copy.deepcopy(plain), budget=budget)
        for use in uses or [by_backward] * 3:
            assert agree(baseline, ours, setup, use) or uses  # second derivatives may raise


@pytest.fixture
def followed(monkeypatch) -> list[bool]:
    """See `note_followed`. Plans keep a random part of what they could recompute."""
    keep_by_chance(monkeypatch, Random(0))
    return note_followed(monkeypatch)


@pytest.mark.table
@pytest.mark.parametrize("norm", NORMS)
def test_norms_with_frozen_parameters_and_statistics(norm, followed):
    frozen = [(), ("weight",), ("bias",), ("weight", "bias")]
    for number, (names, training) in enumerate(product(frozen, [True, False])):
        activation = ["relu_", "silu"][(number + number // 2) % 2]  # each with each of the two others
        like_plain(block(norm, activation, names, training), on(IMAGES, False), (None, "1KiB"))
    assert all(followed)


def values_kept(network: nn.Module, x: Tensor) -> list[int]:
    """The numbers of values of the tensors that a graph keeps besides parameters and the input; not of statistics."""
    _, saved = saved_for_backward(lambda: network(x))
    unsaved = {tensor.untyped_storage()._cdata for tensor in [x, *network.parameters(), *network.buffers()]}
    sizes = [kept.untyped_storage().nbytes() // 8 for kept in saved if kept.untyped_storage()._cdata not in unsaved]
    return sorted(size for size in sizes if size > 8)


@pytest.mark.slow
def test_the_images_and_the_input_of_the_norm_are_kept_and_nothing_else(followed):
    """Whatever the norm and the activation, but for masks, indices and what no recipe is known for."""
    for norm, activation in [*product(NORMS, ["relu_"]), *product(["batch"], ACTIVATIONS)]:
        print(norm, activation)
        plain = block(norm, activation)
        kept = values_kept(recompute_activations(copy.deepcopy(plain)), IMAGES.clone())
        assert kept == [*KEEPS_MORE.get(activation, []), 392]
        like_plain(plain, on(IMAGES, False), (None, "1KiB"))
    assert all(followed)


def _chain(length: int, step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        for _ in range(length):
            x = step(x)
        return x

    return function


def _part_changed_under_other_hooks(x: Tensor) -> Tensor:
    a, b = x * 1, x * 2
    y = torch.cat([a, b], 1).sin()
    with torch.autograd.graph.save_on_cpu():
        a.relu_()
    return y


def _relu_over_a_view(y: Tensor) -> Tensor:
    z = F.relu(y.flatten(1))  # when computed again, it may not be written over y
    return z.sin().view_as(y) * y.cos()


def _relus_over_results_that_are_views(x: Tensor) -> Tensor:
    y = F.silu(x)
    views = [torch.einsum("abcd->badc", y).transpose(0, 1), torch.einsum("abcd->abcd", y), F.pixel_shuffle(y, 1)]
    return torch.stack([F.relu(view).sin() for view in (*views, F.pixel_unshuffle(y, 1))]).sum(0) * y.cos()


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
    z = (y * 2).sin()
    z.marked = y.detach().requires_grad_()
    return z


def _change_part(y: Tensor) -> Tensor:
    part = y[:, :2]
    part.relu_()
    return part.sin().sum() + y.cos().sum()


def _copy_before_a_write(x: Tensor) -> Tensor:
    """The product saves both. A copy of an earlier version is none that the product has made."""
    y = _opaque(x, 1)
    copied = y.clone()
    with torch.no_grad():
        y.mul_(2)
    return y * copied


def _laid_out_otherwise(x: Tensor) -> Tensor:
    """A norm saves a contiguous copy of a tensor that is laid out otherwise, which its recipe and others read."""
    y = _opaque(x, 1).contiguous(memory_format=torch.channels_last)
    weight = torch.ones(4, 1, 1, 1, dtype=y.dtype, requires_grad=True)
    return F.silu(F.instance_norm(y)) * F.conv2d(y, weight, groups=4)


def _upsampled(x: Tensor) -> Tensor:
    y = x.sin()
    return F.interpolate(y, scale_factor=2.0).sin().sum() + F.interpolate(y, scale_factor=3.0).sin().sum()


def _change_option(x: Tensor) -> Tensor:
    """An option that is a tensor changes after the call."""
    alpha = torch.tensor(0.1)
    y = F.celu(F.elu(x * 1, alpha), alpha=alpha).sin()
    alpha *= 0.5
    return y


def _signs_in_inference_mode(x: Tensor) -> Tensor:
    y = F.avg_pool2d(_opaque(x, 1).relu(), 2)  # does not keep the ReLU's result
    with torch.inference_mode():
        y.mean()
    return y


def _copy_in_inference_mode(x: Tensor) -> Tensor:
    a, b = _opaque(x, 1), _opaque(x, 2)
    joined = torch.cat([a, b], 1)
    with torch.inference_mode():
        a.zero_()
    return joined.sin()


def _read_memory_of_others(x: Tensor, join: Callable[[Tensor, Tensor], Tensor], is_storage: bool = False) -> Tensor:
    """It is filled again before the backward pass, without a new version. Autograd does not keep it."""
    y = torch.full(x.shape, 0.5, dtype=x.dtype)
    array = None if is_storage else y.numpy()  # what becomes an array is read by no recipe
    result = join(F.silu(x), y if is_storage else torch.from_numpy(array)).sin()
    y.untyped_storage().fill_(63) if is_storage else array.fill(5.0)
    return result


def _joined_with_part(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x, y[:, :1].expand(-1, 2, -1, -1), y.cos()], 1)


def _in_bfloat16(x: Tensor) -> Tensor:
    """A convolution saves bfloat16, so that its parts in float32 are not kept instead."""
    with torch.autocast("cpu", torch.bfloat16):
        parts = torch.cat([_opaque(x.float(), 1), _opaque(x.float(), 2)], 1)
        return F.conv2d(parts, torch.ones(1, 8, 1, 1, requires_grad=True)).double()


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64, requires_grad=True)


def _layer(x: Tensor) -> Tensor:
    return F.linear(x, _ones(6, 6))


def _divided(x: Tensor) -> Tensor:
    """The largest values are divided by their sum, which is computed again from these values, as Mixtral does."""
    chosen, _ = x.sigmoid().topk(3, -1)
    chosen /= chosen.sum(-1, keepdim=True).sin().cos()
    return x.sin() * chosen.repeat(1, 1, 1, 2)


_opaque = torch.cumsum  # has no rule, and saves nothing
IN_PLACE_NORM = InPlaceABN(8).double()  # keeps its output
POOLS = [partial(pool, kernel_size=2) for pool in (F.max_pool2d, F.avg_pool2d)]
POOLS += [partial(pool, output_size=3) for pool in (F.adaptive_max_pool2d, F.adaptive_avg_pool2d)]
POOLS += [partial(pool, kernel_size=(1, 2, 2)) for pool in (F.max_pool3d, F.avg_pool3d)]
# Functions of x, and how many tensors each keeps besides its input, and besides sign masks.
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    # As in MobileNetV3.
    "overwritten twice": (lambda x: F.dropout(F.hardswish(_layer(x), True), 0.2, True, True).sin(), 3),
    # A linear layer without bias returns a view: biases of positions in Swin V2.
    "relus over views": (lambda x: F.relu(_layer(F.relu(F.linear(x, _ones(6, 6), _ones(6)), True)), True).sin(), 4),
    "divided by a sum of its values": (_divided, 7),
    "saved outside of calls": (lambda x: Cube.apply(_layer(x)) + Cube.apply(_layer(x).relu().transpose(2, 3)), 4),
    "complex numbers": (lambda x: torch.fft.ifft((1 + 2j) * torch.fft.fft(x.sin()).conj().sin()).abs().sin(), 3),
    "long chain": (_chain(1200, F.silu), 92),  # longer than Python's limit of recursion
    # On CPUs RMSNorm saves its normalised input, too, and follows as many recipes as a chain may have.
    "norms after chains": (lambda x: sum(F.rms_norm(_chain(n, F.silu)(x), (6,)).sin() for n in (10, 11, 12)), 3),
    "complex view": (lambda x: torch.view_as_complex(F.silu(x).view(2, 4, 6, 3, 2)).square(), 1),
    "conjugate": (lambda x: (torch.complex(x, x) * torch.complex(x, -x)).conj() * torch.complex(x, x), 4),
    "part changed under other hooks": (_part_changed_under_other_hooks, 0),
    "permuted slice": (lambda x: F.silu(x).permute(0, 2, 3, 1)[:, 1:, :2].sin(), 0),
    "copied windows": (lambda x: torch.roll(F.silu(x), 1, 2).transpose(1, 3).reshape(2, 6, -1).sin(), 0),
    "chunks": (lambda x: torch.cat(F.gelu(x).chunk(2, 1)[::-1], 1).sin(), 0),
    "expanded": (lambda x: F.silu(x[:, :1]).expand(2, 5, 6, 6).sin(), 0),
    "padded": (lambda x: F.pad(F.silu(x), (1, 1)).sin(), 0),
    "joined with memory of others": (partial(_read_memory_of_others, join=_joined_with_part), 2),
    "joined with memory of a storage": (partial(_read_memory_of_others, join=_joined_with_part, is_storage=True), 2),
    "a number of others added": (partial(_read_memory_of_others, join=lambda x, y: F.silu(x + y[:1, :1, :1, :1])), 1),
    "an option that changes": (_change_option, 2),
    "an option that the function which is called again does not have": (lambda x: F.elu_(x * 1, 0.5, 2.0).sin(), 1),
    "upsampled": (_upsampled, 1),
    "a copy before a write": (_copy_before_a_write, 2),
    "a copy that is laid out otherwise": (_laid_out_otherwise, 2),
    "nothing pooled": (lambda x: sum(pool(_opaque(x[:0], 1).relu()).sin() for pool in (POOLS[0], POOLS[2])), 0),
    "cast": (lambda x: F.silu(x).to(torch.float32).sin().double(), 0),
    "view changed": (lambda x: _change_part(F.silu(x)), 1),
    "relu over a parameter's view": (lambda x: F.relu(x.reshape(2, -1)).sin() + F.relu(x.flatten(1)).cos(), 0),
    "relu over a view": (lambda x: _relu_over_a_view(F.silu(x)), 2),
    "relu over results that are views": (_relus_over_results_that_are_views, 2),
    "einsum of a list": (_change_a_factor, 2),
    "loss by tiles": (lambda x: upsampled_cross_entropy(F.silu(x), torch.ones(2, 12, 12, dtype=torch.uint8)), 1),
    "looks and marks": (_look_and_mark, 0),
    "looks, overwrites and marks": (partial(_look_and_mark, overwrites=True), 0),
    # `F.normalize` calls itself with out=None: nothing is written over.
    "normalised": (lambda x: x.sin() * F.normalize(x, dim=1), 3),
    "signs packed in inference mode": (_signs_in_inference_mode, 0),
    "part of a concatenation changed in inference mode": (_copy_in_inference_mode, 2),
    # Nothing is kept for something smaller: parts of a concatenation, instead of its mean.
    "mean of a concatenation": (lambda x: torch.cat([_opaque(x, 1), _opaque(x, 2)], 1).mean((2, 3), True).sin(), 1),
    "slice of a concatenation": (lambda x: ((torch.cat([_opaque(x, 1), _opaque(x, 2)], 1) * 2)[:, 2:-2] * 2).sin(), 1),
    "parts by name": (lambda x: torch.stack(dim=1, tensors=[F.silu(x), torch.cat(tensors=(x, x))[:2]]).sin(), 0),
    "concatenation under autocast": (_in_bfloat16, 1),
    "in-place norm of a concatenation": (lambda x: IN_PLACE_NORM(torch.cat([_opaque(x, 1), _opaque(x, 2)], 1)), 1),
    "slice of an upsampled one": (lambda x: (F.interpolate(_opaque(x, 1), scale_factor=2.0)[..., :3, :3] * 1).sin(), 1),
    # Of a pooling's input only the shape is kept, and so of the ReLU before it one bit per value; and narrow indices.
    "pooled": (lambda x: torch.stack([pool(_opaque(x, 1).relu()) for pool in POOLS]).sum(0), 3),
}
WITHOUT_ADVICE = ["view changed", "looks, overwrites and marks"]


@pytest.mark.table
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, followed):
    function, kept = FUNCTIONS[name]
    plain, x = After(nn.Identity(), lambda x: function(x * 1.0)), torch.randn(2, 4, 6, 6, dtype=torch.float64)
    like_plain(plain, on(x), (None,))
    assert followed == [True] or name in WITHOUT_ADVICE  # the third pass is recorded anew
    assert len(values_kept(recompute_activations(copy.deepcopy(plain)), x.clone().requires_grad_())) == kept
    if name != "long chain":
        like_plain(plain, on(x), (None,), *[in_parts, second_derivatives] * 2)
    like_plain(plain, on(x), ("1KiB",))


class _Overwriting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        ctx.saved_tensors[0].zero_()
        return gradient


def _overwrites_in_the_backward_pass(x: Tensor) -> Tensor:
    y = x.relu()
    product = y @ torch.ones(4, 4, requires_grad=True)  # its backward runs after the other's
    return _Overwriting.apply(y) + product


def test_what_a_backward_function_overwrites_is_refused_to_the_next():
    """PyTorch raises this error, too. Without it, the matrix would silently get a gradient of zero."""
    network = recompute_activations(After(nn.BatchNorm1d(4), _overwrites_in_the_backward_pass))
    loss = network(torch.randn(3, 4)).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
