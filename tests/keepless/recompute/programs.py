"""Random programs: they draw, overwrite, raise, run regions under other modes, and change from step to step."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from keepless import CheckpointedABN
from keepless.inputs import tensors_in
from tests.keepless.recompute.agreement import AROUND, Setup


class Cube(torch.autograd.Function):
    """Saves its argument outside of the calls that a recording sees, and expects to read it as it was."""

    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        context.seen = x.clone(), x.stride()
        return x**3

    @staticmethod
    def backward(context, gradient):
        (x,) = context.saved_tensors
        assert torch.equal(x, context.seen[0]) and x.stride() == context.seen[1], x.shape
        return 3 * x**2 * gradient


class WithMeta(Tensor):
    """Like MONAI's MetaTensor, results of functions carry the metadata of the first argument that has any."""

    meta: dict

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(result, cls):
            result.meta = next((tensor.meta for tensor in tensors_in(args) if hasattr(tensor, "meta")), {"spacing": 2})
        return result


class Doubling(WithMeta):
    """Computes something else than the function that is called."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        result = super().__torch_function__(function, types, args, kwargs)
        return result * 2 if function in (F.silu, F.gelu) else result


def _cast_once(x: Tensor) -> Tensor:
    """Two equal calls, one of which returns its argument."""
    with torch.autocast("cpu", torch.bfloat16):
        y = x @ x.transpose(2, 3)
    return (x * 2.0).float() + y.float()


def _routed(x: Tensor) -> Tensor:
    """Reads how many rows an expert has. Another one has no rows."""
    rows = x.flatten(0, 2)
    chosen = (rows.mean(1) > 0).nonzero()[:, 0]
    return torch.cat([rows.index_add(0, chosen, F.gelu(rows[chosen])), rows[:0].sin()]).view_as(x)


def _sparse(x: Tensor) -> Tensor:
    rows = x.float().flatten(0, 2)
    return torch.sparse.mm(torch.eye(len(rows)).to_sparse(), rows).view_as(x).to(x.dtype)


def _attended(x: Tensor) -> Tensor:
    """Attention between rows. Its result is permuted."""
    q, k, v = (x.transpose(1, 2) * factor for factor in (1, 2, -1))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


UNARY = [F.silu, torch.relu, torch.sin, torch.sigmoid, F.gelu, F.softplus, torch.neg, Tensor.contiguous, torch.exp]
UNARY += [F.relu6, F.leaky_relu, lambda x: 1 / (2 + x.sigmoid()), Cube.apply, partial(F.dropout, p=0.3)]
UNARY += [lambda x: x.softmax(1), lambda x: x @ x.transpose(2, 3), lambda x: x.transpose(2, 3)]
UNARY += [lambda x: x[:, :, 1:].sum(2, keepdim=True).expand_as(x), lambda x: x + (x.round() - x).detach()]
UNARY += [lambda x: F.max_pool2d(x.relu(), 3, 1, 1), lambda x: x.double().to(x.dtype), lambda x: x.to(torch.bfloat16)]
UNARY += [lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3), _cast_once, _routed, _sparse]
UNARY += [lambda x: (torch.complex(x.float(), x.float()).conj() * (1 + 2j) * x).abs()]
# Kernels round otherwise if a tensor is laid out otherwise.
UNARY += [lambda x: x.contiguous(memory_format=torch.channels_last), F.instance_norm, _attended]
NORMALISED = partial(F.batch_norm, running_mean=None, running_var=None, training=True)
UNARY += [NORMALISED, lambda x: NORMALISED(x.transpose(1, 3)).transpose(1, 3)]
UNARY += [lambda x: F.instance_norm(x.transpose(1, 2)).transpose(1, 2)]
IN_PLACE = [torch.relu_, Tensor.sigmoid_, lambda x: x.div_(2), lambda x: x.mul_(0.5), lambda x: x.add_(1)]
IN_PLACE += [lambda x: F.leaky_relu(x, 0.1, inplace=True), F.elu_, lambda x: x.sub_(0.5)]
IN_PLACE += [lambda x: F.silu(x, inplace=True)]
BINARY = [torch.mul, torch.add, torch.sub, lambda x, y: torch.cat([x, y], 1)[:, 1:5]]
BINARY += [lambda x, y: x / (1 + y * y), lambda x, y: 1 - x, lambda x, y: torch.stack([x, y], 1)[:, 1]]
VIEWS = [lambda x: x[:, :2], lambda x: x.transpose(2, 3), lambda x: x.detach(), lambda x: x.view(2, 4, 36)]


def _resampled(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.interpolate(x, scale_factor=2.0, **options)[..., ::2, ::2]


def _attending(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, y, x, **options)


def _over(x: Tensor, write: Callable[[Tensor], Tensor]) -> Tensor:
    return write(x * 2)


def _rolled(x: Tensor, y: Tensor) -> Tensor:
    """The program changes its list after the call."""
    shifts = [2, 1]
    result = torch.roll(x, shifts, [2, 3])
    shifts[:] = [1, 1]
    return result


def _transposed(x: Tensor, y: Tensor, rows: int = 4, needs: bool = True) -> Tensor:
    """The layer saves a copy of a number of rows."""
    weight = y[0, 0] if needs else y[0, 0].detach()
    return torch.cat([F.linear(x[:, :rows].transpose(0, 1), weight).transpose(0, 1), x[:, rows:]], 1)


# Calls of a function on two tensors, which differ in arguments, aliases, dtypes, None, lists or keyword arguments.
Call = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: list[Call] = [lambda x, y: x * y, lambda x, y: x * x, lambda x, y: x * x.detach(), lambda x, y: x * x[:]]
OVERWRITTEN: list[Call] = [lambda x, y: _over(x, lambda z: z.add_(y)), lambda x, y: _over(x, lambda z: z.add_(z))]
OVERWRITTEN += [lambda x, y: _over(x, lambda z: z.add_(2)), lambda x, y: _over(x, lambda z: z + y)]
OVERWRITTEN += [lambda x, y: _over(x.to(torch.bfloat16), lambda z: z.add_(y)).to(x.dtype)]  # stays bfloat16
JOINED: list[Call] = [lambda x, y: torch.cat([x, y])[:2], lambda x, y: torch.cat([x, x])[:2]]
JOINED += [lambda x, y: torch.cat([y, x, y], 0)[1:3], lambda x, y: torch.cat(tensors=(x,))]
ROLLED: list[Call] = [_rolled, lambda x, y: torch.roll(x, (1,), (2,)), lambda x, y: torch.roll(x, shifts=[1], dims=[3])]
NORMED: list[Call] = [lambda x, y: F.layer_norm(x, (6,)), lambda x, y: F.layer_norm(x, [6], y[0, 0, 0])]
NORMED += [lambda x, y: F.layer_norm(x, (6,), None, y[0, 0, 0]), lambda x, y: F.layer_norm(x, (6,), eps=0.1)]
CAST: list[Call] = [lambda x, y: (x.double() * 1.5).sin().to(x.dtype)]
CAST += [lambda x, y: (x.to(torch.bfloat16) * 1.5).sin().to(dtype=x.dtype)]
STATISTICS = {"running_mean": torch.zeros(4), "running_var": torch.ones(4)}
LEARNED: list[Call] = [lambda x, y: F.batch_norm(x, **STATISTICS, weight=y[0, :, 0, 0])]
LEARNED += [lambda x, y: F.batch_norm(x, **STATISTICS, training=True, momentum=0.0), lambda x, y: NORMALISED(x)]
ATTENDING: list[Call] = [_attending, lambda x, y: _attending(x, x), partial(_attending, is_causal=True)]
ATTENDING += [partial(_attending, attn_mask=torch.ones(6, 6).tril().bool()), partial(_attending, scale=0.5)]
TRANSPOSED: list[Call] = [_transposed, partial(_transposed, rows=3), partial(_transposed, needs=False)]
CALLS: dict[str, list[Call]] = {
    **{"product": PRODUCTS, "overwritten": OVERWRITTEN, "list of tensors": JOINED, "list of numbers": ROLLED},
    **{"None": NORMED, "dtype": CAST, "statistics": LEARNED, "attention": ATTENDING, "layout": TRANSPOSED},
    "option": [_resampled, partial(_resampled, mode="bilinear")],
}


@torch.library.custom_op("keepless_tests::halved", mutates_args=["x"])
def halved(x: Tensor) -> None:
    x.mul_(0.5)


def halve(x: Tensor) -> Tensor:
    return x.mul_(0.5)


@cache
def script() -> Callable[[Tensor], Tensor]:
    return torch.jit.script(halve)


def _without_functions(x: Tensor) -> None:
    with torch._C.DisableTorchFunction():
        x.relu_()


def _in_a_thread(x: Tensor) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(torch.no_grad()(x.relu_)).result()


BY_OPERATORS = [lambda x: torch.ops.aten.add_.Tensor(x, x), lambda x: torch.ops.aten.relu_(x)]
BY_OPERATORS += [lambda x: torch.ops.aten.relu_.default(self=x), lambda x: halved(x.detach())]
BY_OPERATORS += [lambda x: torch.ops.aten.sin.out(x.detach(), out=x.detach())]
BY_OPERATORS += [lambda x: F.dropout(x, 0.0, inplace=True), lambda x: F.dropout(x, 0.5, False, inplace=True)]  # nothing
UNSEEN = [lambda x: script()(x), _without_functions, _in_a_thread]
Moves = list[tuple[str, Any, int, int]]  # a kind, a choice of this kind, and the numbers of two tensors


def _apart(around: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> Callable:
    """A region that makes one tensor of another."""

    def region(moves: Moves, tensors: list[Tensor], x: Tensor, layers: nn.ModuleList) -> None:
        def inside(x: Tensor) -> Tensor:
            new_tensors = [x * 1.0]
            _run(moves, new_tensors, layers)
            return new_tensors[-1]

        tensors.append(around(inside, x))

    return region


def _under(context: Callable[[], AbstractContextManager]) -> Callable:
    def region(moves: Moves, tensors: list[Tensor], x: Tensor, layers: nn.ModuleList) -> None:
        with context():
            _run(moves, tensors, layers)

    return region


REGIONS: dict[str, Callable] = {
    "no_grad": _under(torch.no_grad),
    "enable_grad": _under(torch.enable_grad),
    "autocast": _under(partial(torch.autocast, "cpu", torch.bfloat16)),
    "no autocast": _under(partial(torch.autocast, "cpu", enabled=False)),
    "copying hooks": _under(AROUND[-1]),
    "inference": _apart(lambda inside, x: torch.inference_mode()(inside)(x).clone()),
    "checkpoint": _apart(partial(checkpoint, use_reentrant=False)),
    "reentrant": _apart(partial(checkpoint, use_reentrant=True)),
    "vmap": _apart(lambda inside, x: torch.vmap(lambda y: inside(y[None])[0], randomness="different")(x)),
}


class OfFunctions(TorchFunctionMode):
    """Computes something else than the functions that are called."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return result * 2 if function in (F.silu, torch.sin, F.layer_norm, Tensor.exp) else result


class OfOperators(TorchDispatchMode):
    names: tuple[str, ...] = ("silu", "gelu", "relu", "leaky_relu", "native_batch_norm", "add", "cat")

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        is_changed = function.overloadpacket.__name__ in self.names and isinstance(result, Tensor)
        return result.bfloat16().to(result.dtype) if is_changed and result.is_floating_point() else result


class OfOthers(OfOperators):
    """Another mode at the same depth."""

    names = ("sigmoid", "mul", "native_group_norm", "sin")


MODES: dict[str, Callable[[], AbstractContextManager]] = {
    **{"of functions": OfFunctions, "of operators": OfOperators, "of others": OfOthers},
    **{"counting": partial(FlopCounterMode, display=False), "device": partial(torch.device, "cpu")},
    "without hooks": partial(disable_saved_tensors_hooks, "of the program"),
}


def _given_data(x: Tensor) -> None:
    x.data = x.data * 1.5


# Writes that change no version
DATA = [lambda x: x.data.round_(), lambda x: x.data.mul_(0.5), lambda x: x.view(-1).data.add_(0.1), _given_data]
DATA += [lambda x: x.data.zero_(), lambda x: x[:, 1:].data.neg_()]
# Tensors from elsewhere, which take each other's places: trained, made in the pass, and not.
ADDENDS = [lambda net: net.small, lambda net: net.table, lambda net: net.table * net.small, lambda net: net.large]
ADDENDS += [lambda net: (net.small * 2).detach(), lambda net: (net.small > 0).to(net.small.dtype)]
ADDENDS += [lambda net: net.large.detach()]
FUNCTIONS_OF_MOVES: dict[str, list[Callable]] = {
    **{"unary": UNARY, "binary": BINARY, "transposed": [lambda x: x.transpose(2, 3).contiguous()]},
    **{"in place": IN_PLACE, "part": IN_PLACE, "no_grad": IN_PLACE, "operator": BY_OPERATORS, "unseen": UNSEEN},
    "squared": [lambda x: x.mul_(x)],
}
LAYERS = 9
CHOICES: dict[str, Sequence[Any]] = {
    **{kind: range(len(functions)) for kind, functions in FUNCTIONS_OF_MOVES.items()},
    **{"region": [*REGIONS], "layer": range(LAYERS), "given": [0], "raises": [RuntimeError, KeyboardInterrupt]},
    **{"mode": [*MODES], "data": range(len(DATA)), "addend": range(len(ADDENDS)), "dropout": range(4)},
    "call": [(name, number) for name, calls in CALLS.items() for number in range(len(calls))],
}
CALM = [*["unary"] * 4, "binary", "binary", *["call"] * 3, "transposed", "region", *["layer"] * 3]
WRITING = [*CALM, "in place", "in place", "part", "no_grad", "operator"]
DEPENDING = [*CALM, *["mode"] * 2, *["data"] * 3, *["addend"] * 2, *["dropout"] * 2]
HIDING = ["unseen", "given"]  # the caller writes over a given tensor


def drawn(draws: Random, least: int, most: int, sets: Sequence[list[str]] = (CALM, WRITING, WRITING + HIDING)) -> Moves:
    kinds = draws.choices(draws.choice(sets), k=draws.randint(least, most))
    return [(kind, draws.choice(CHOICES[kind]), draws.randrange(9), draws.randrange(9)) for kind in kinds]


def hides(moves: Moves) -> bool:
    return any(kind in HIDING for kind, *_ in moves)


DROPOUTS = [(0.0, True), (0.3, False), (0.3, True), (0.6, True)]


def _run(moves: Moves, tensors: list[Tensor], layers: nn.ModuleList) -> None:
    """Make further tensors, or change some. A region is around the moves behind it."""
    for place, (kind, choice, first, second) in enumerate(moves):
        x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
        if kind in ("region", "mode"):
            end, region = place + 2 + second % 4, REGIONS[choice] if kind == "region" else _under(MODES[choice])
            region(moves[place + 1 : end], tensors, x, layers)
            return _run(moves[end:], tensors, layers)
        if kind == "data":
            DATA[choice](tensors[first % len(tensors)])
        elif kind == "dropout":
            tensors.append(F.silu(F.dropout(x, *DROPOUTS[choice])))
        elif kind == "addend":
            tensors.append(F.gelu(x + ADDENDS[choice](layers)))
        elif kind == "layer":
            layer = layers[choice]
            is_trained = any(parameter.requires_grad for parameter in layer.parameters())
            # Of a frozen norm's input in eval mode only the shape is kept, so it may be overwritten, unlike PyTorch's.
            tensors.append(layer.train(layers.training and (second % 3 > 0 or not is_trained))(x))
        elif kind == "raises":
            raise choice("of the program")
        elif kind == "call":
            name, number = choice
            tensors.append(CALLS[name][number](x, y))
        elif kind in FUNCTIONS_OF_MOVES:
            function = FUNCTIONS_OF_MOVES[kind][choice]
            if kind in ("unary", "transposed", "in place"):
                tensors.append(function(x))
            elif kind == "binary":
                tensors.append(function(x, y))
            else:
                with torch.no_grad() if kind == "no_grad" else nullcontext():
                    views = {"part": VIEWS[:2], "no_grad": VIEWS}.get(kind, [lambda x: x])
                    function(views[second % len(views)](x))


class Program(nn.Module):
    """Runs moves, and returns what a loss of two parts needs, and tensors to write over."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(6, 6), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.RMSNorm(6)]
        layers += [CheckpointedABN(4, activation="elu"), parametrizations.weight_norm(nn.Linear(6, 6))]
        layers += [parametrizations.spectral_norm(nn.Linear(6, 6))]
        transformer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True)
        self.layers = nn.ModuleList([*layers, nn.Sequential(nn.Flatten(0, 1), transformer, nn.Unflatten(0, (-1, 4)))])
        self.head = nn.Parameter(torch.ones(6))
        self.layers.small, self.layers.large = nn.Parameter(torch.ones(6)), nn.Parameter(torch.rand(4, 1, 6))
        self.layers.register_buffer("table", torch.rand(6))

    def forward(self, w: Tensor, moves: Moves, autocast: bool) -> dict[str, Any]:
        tensors = [w * 1.0, w + 1.0]
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            _run(moves, tensors, self.layers)
        # Every other tensor is not saved here, so the program may write over it.
        y = torch.stack([tensor if place % 2 else tensor.sin() for place, tensor in enumerate(tensors)]).sum(0)
        writable = [tensors[first % len(tensors)] for kind, _, first, _ in moves if kind == "given"]
        return {"out": y, "second": F.silu(y) * self.head, "ids": y.argmax(-1), "given": writable}


def program(
    moves: Moves,
    size: int = 6,
    frozen: int = 1,
    training: bool = True,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
    kind: type[Tensor] = Tensor,
) -> Setup:
    """A step of a `Program`. `frozen`: the layer whose parameters are not trained."""

    def setup(network: nn.Module) -> tuple[tuple[Any, ...], list[Tensor]]:
        network.to(dtype).train(training).requires_grad_(True)
        network.layers[frozen].requires_grad_(False)
        w = torch.randn(2, 4, size, 6, dtype=dtype, requires_grad=True)
        argument = w if kind is Tensor else w.as_subclass(kind)
        sources = [w, network.head, *(one for one in network.layers.parameters() if one.requires_grad)]
        return (argument, moves, autocast), sources

    return setup


OPTIONS: list[dict[str, Any]] = [{"size": 7}, {"size": 0}, {"frozen": 4}, {"training": False, "frozen": 0}]
OPTIONS += [{"dtype": torch.float64}, {"autocast": True}, {"kind": WithMeta}, {"kind": Doubling}]


def changed(moves: Moves, draws: Random) -> tuple[Moves, dict[str, Any]]:
    """The moves and options of a program that differs from another one in one place."""
    hows = ["move", "arguments", "arguments", "call", "call", "less", "more", "raises", "options", "options"]
    how, place = draws.choice(hows), draws.randrange(len(moves) + 1)
    if how == "options":
        return moves, draws.choice(OPTIONS)
    if how == "call":
        place = draws.choice([n for n, (kind, *_) in enumerate(moves) if kind == "call"] or [place])
    new = [] if how == "less" else drawn(draws, 1, 1, [["raises"] if how == "raises" else WRITING + HIDING])
    if how in ("arguments", "call") and place < len(moves):
        kind, choice, *numbers = moves[place]
        if how == "arguments":
            numbers = [draws.randrange(9), draws.randrange(9)]
        elif kind == "call":
            choice = choice[0], draws.randrange(len(CALLS[choice[0]]))
        new = [(kind, choice, *numbers)]
    return [*moves[:place], *new, *moves[place + (how in ("move", "arguments", "call", "less")) :]], {}
