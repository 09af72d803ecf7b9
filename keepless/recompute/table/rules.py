"""Rules for recomputing the results of functions, each with the inputs that it needs.

A rule takes `find`, the arguments and keyword arguments of a call, and its result. It returns a call that computes the
same result again. `find` returns the value of a tensor, and raises `NotRepeated` if it is not kept; with
`may_keep=True` the recipe may keep it (rules 4 and 5 in recording.py).
"""

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...norms.backends.eager import normalised
from ...norms.bn_act import BatchNormActivation
from ...saved import TensorSpec
from ...torch_internals import (
    FakeTensor,
    attention_backends,
    current_hooks,
    dropped_share,
    is_capturing,
    without_dispatch_modes,
    without_function_modes,
)
from ..held.values import Again
from .writes import may_overwrite


class NotRepeated(Exception):
    """Raised by a rule: the call cannot be repeated, so its result has to be kept. Reports show the message."""


class Find(Protocol):
    """Returns the value of a tensor, or what the recipe keeps in its place."""

    def __call__(self, tensor: Tensor, may_keep: bool = False) -> Any: ...

    def values_of(self, tensors: Sequence[Tensor]) -> list[Any]:
        """The values of several tensors, all of which may be kept."""

    def saved(self, node: Any, name: str) -> Any:
        """What a node has saved under this name."""


Function = Callable[..., Any]
Rule = Callable[[Find, tuple[Any, ...], dict[str, Any], Tensor], Again]

_NUMBERS = frozenset([int, float, bool])
_INPLACE_ALONE = frozenset(["input", "inplace"])
_RANDOM = "its random numbers cannot be drawn again"
_UNKNOWN = "its call has an unknown option"
_BATCH_NORMS = frozenset(["NativeBatchNormBackward0", "CudnnBatchNormBackward0"])
_MAX_POOLS = frozenset(["MaxPool2DWithIndicesBackward0", "MaxPool3DWithIndicesBackward0", "AdaptiveMaxPool2DBackward0"])
_PARAMETERS = {function: tuple(inspect.signature(function).parameters) for function in (F.batch_norm, F.instance_norm)}


def repeated(function: Function, *, may_keep: bool = False, fresh: bool = False) -> Rule:
    """Call a function again with the same arguments."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        again = function if not kwargs else partial(_call_by_name, function, len(args), tuple(kwargs))
        arguments: list[Any] = []
        for argument in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(argument, Tensor):
                arguments.append(find(argument, may_keep))
            elif isinstance(argument, (list, tuple)):
                arguments.append(_as_tuple(argument))
            else:
                arguments.append(argument)
        return Again(again, arguments, fresh)

    return rule


new_tensor: Callable[[Function], Rule] = partial(repeated, fresh=True)  # if the result is always a new tensor


def product(function: Function) -> Rule:
    """Multiply again, by the same algorithm.

    `matmul` folds a batch of matrices into one matrix if the other factor, a matrix or vector, needs a gradient.
    Without gradients it folds only contiguous batches that come first, so other products run again with gradients.
    """
    repeat = new_tensor(function)

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        again = repeat(find, args, kwargs, result)
        factors = args
        if kwargs:
            factors = (*args, *[kwargs[name] for name in ("input", "other", "weight") if name in kwargs])
        first, second = factors[:2]
        batch, matrix = (first, second) if first.dim() >= second.dim() else (second, first)
        is_folded = batch.dim() > 2 and matrix.dim() <= 2 and matrix.requires_grad
        if not is_folded or (matrix is second and batch.is_contiguous()):
            return again
        position = _position_of(matrix, (*args, *kwargs.values()))
        return again._replace(function=partial(with_gradient, position, again.function))

    return rule


def _position_of(tensor: Tensor, arguments: Sequence[Any]) -> int:
    """The position of this very tensor among arguments: `index` would compare tensors by their entries."""
    return [argument is tensor for argument in arguments].index(True)


def with_gradient(position: int, function: Function, *arguments: Any) -> Tensor:
    """Call a function as if its argument at this position needed a gradient."""
    operands = [*arguments]
    if not operands[position].requires_grad:
        operands[position] = operands[position].detach().requires_grad_()
    # The program's hooks, if there are any, do not see the call.
    inner_hooks = nullcontext() if current_hooks() is None else saved_tensors_hooks(id, Tensor.detach)
    with torch.enable_grad(), inner_hooks:
        return function(*operands).detach()


def random_again(function: Function) -> Rule:
    """Call a function again with the same random numbers."""
    repeat = new_tensor(function)

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        if kwargs.get("generator") is not None or not all(map(_is_aligned, (*args, *kwargs.values()))):
            raise NotRepeated(_RANDOM)
        return repeat(find, args, kwargs, result)._replace(draws=True)

    return rule


def drops_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention drops weights."""
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


def by_present_backends(attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An attention function that always chooses among the backends enabled now (`sdpa_kernel`)."""
    backends = attention_backends()

    def computed(*arguments: Any, **options: Any) -> Tensor:
        if attention_backends() == backends:
            return attention(*arguments, **options)
        with sdpa_kernel([SDPBackend(backend) for backend in backends], set_priority=True):
            return attention(*arguments, **options)

    return computed


def attention(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    """Compute attention again, by the backends enabled at the call, and with the same weights dropped."""
    rule = random_again if drops_weights(args, kwargs) else new_tensor
    return rule(by_present_backends(F.scaled_dot_product_attention))(find, args, kwargs, result)


def _is_aligned(argument: object) -> bool:
    """Whether a tensor is aligned; CUDA's kernels assign random numbers to unaligned tensors in another order."""
    return not isinstance(argument, Tensor) or bool(argument.storage_offset() * argument.itemsize % 16 == 0)


def mask(function: Function) -> Rule:
    """Draw the mask of a dropout again; it does not depend on the values."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        x, *options = args or (kwargs["input"],)
        named_options = {name: value for name, value in kwargs.items() if name != "input"}
        if may_overwrite(function, args, kwargs) or not _is_aligned(x):
            raise NotRepeated(_RANDOM)
        like = TensorSpec.from_tensor(x.new_empty(()).expand(x.shape) if mask_needs_only_shape(x) else x)
        return Again(partial(_on_any_values, function, tuple(options), named_options), [like], draws=True)

    return rule


def mask_needs_only_shape(x: Tensor) -> bool:
    """Whether a dropout's mask depends only on the shape of a tensor, not on its memory layout."""
    return x.is_cpu and x.is_contiguous()


def _on_any_values(
    function: Function, options: tuple[Any, ...], named_options: dict[str, Any], like: TensorSpec
) -> Tensor:
    return function(like.get().requires_grad_(), *options, **named_options)


def _as_tuple(argument: Sequence[Any]) -> tuple[Any, ...]:
    """A list as a tuple, because the caller may change it later. NotRepeated: it holds tensors."""
    if not _NUMBERS.issuperset(map(type, argument)) and any([isinstance(part, Tensor) for part in argument]):
        raise NotRepeated("an argument is a list of tensors")
    return tuple(argument)


def _call_by_name(function: Function, unnamed_count: int, names: tuple[str, ...], *arguments: Any) -> Tensor:
    """Call a function with so many unnamed arguments, and the others by name."""
    return function(*arguments[:unnamed_count], **dict(zip(names, arguments[unnamed_count:], strict=True)))


def activation(function: Function) -> Rule:
    """Repeat an activation function of `torch.nn.functional`; in place if its argument has no other consumer."""
    names = tuple(inspect.signature(function).parameters)
    plain = torch.relu if function is F.relu else function

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        if len(args) < 2 and kwargs.keys() <= _INPLACE_ALONE:
            return Again(plain, [find(args[0] if args else kwargs["input"])], fresh=True, can_overwrite=True)
        options = dict(zip(names, args, strict=False)) | kwargs
        x = options.pop("input")
        is_known = len(args) <= len(names) and options.keys() <= set(names)
        if not is_known or not isinstance(options.pop("inplace", False), bool):
            raise NotRepeated(_UNKNOWN)  # F.elu_ has two more options than F.elu
        if any([isinstance(option, Tensor) for option in options.values()]):  # it may change later
            raise NotRepeated("an option is a tensor")
        return Again(partial(function, **options), [find(x)], fresh=True, can_overwrite=True)

    return rule


def _find_all(find: Find, *vectors: Tensor | None) -> list[Any]:
    return [None if vector is None else find(vector) for vector in vectors]


def named_arguments(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call, by name."""
    return dict(zip(_PARAMETERS[function], args, strict=False)) | kwargs


def batch_norm(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    """Normalise again, by the running statistics, or by those of the batch that the node has saved."""
    arguments = named_arguments(F.batch_norm, args, kwargs)
    x = find(arguments["input"])
    eps = arguments.get("eps", 1e-5)
    weight, bias = _find_all(find, arguments.get("weight"), arguments.get("bias"))
    if not arguments.get("training", False):
        running = _find_all(find, arguments["running_mean"], arguments["running_var"])
        return Again(F.batch_norm, [x, *running, weight, bias, False, 0.0, eps], fresh=True)
    node: Any = result.grad_fn
    name = type(node).__name__
    if name not in _BATCH_NORMS:
        raise NotRepeated(f"no rule repeats {name}")
    if name == "CudnnBatchNormBackward0" and torch.are_deterministic_algorithms_enabled():
        return Again(_by_cudnn, [x, weight, bias, eps], fresh=True)
    mean = find.saved(node, "result1")
    invstd = find.saved(node, "result2")
    return Again(normalised, [x, mean, invstd, weight, bias], fresh=True)


def _by_cudnn(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise by cuDNN again, bitwise as before, unlike `normalised`. It computes the statistics again."""
    return torch.cudnn_batch_norm(x, weight, bias, None, None, True, 0.0, eps)[0]


def instance_norm(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    arguments = named_arguments(F.instance_norm, args, kwargs)
    uses_input_statistics = arguments.get("use_input_stats", True)
    mean, var, weight, bias = map(arguments.get, ("running_mean", "running_var", "weight", "bias"))
    if uses_input_statistics:  # running statistics would be updated again
        mean = var = None
    vectors = _find_all(find, mean, var, weight, bias)
    x = find(arguments["input"])
    return Again(F.instance_norm, [x, *vectors, uses_input_statistics, 0.0, arguments.get("eps", 1e-5)], fresh=True)


def layer(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    """Repeat one of our layers. Running statistics that it has updated are not updated again."""
    x, weight, bias, mean, var, arguments, strategy = args
    affine = _find_all(find, weight, bias)
    if arguments.use_batch_statistics:  # running statistics have changed, but are not read
        running = [None if vector is None else vector.dtype for vector in (mean, var)]
    else:
        running = _find_all(find, mean, var)
    return Again(_layer_again, [find(x), *affine, *running, arguments, strategy], fresh=True)


def _layer_again(x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, *settings: Any) -> Tensor:
    """`mean`, `var`: only their dtype if their values do not matter."""
    running = [
        x.new_empty(x.size(1), dtype=vector) if isinstance(vector, torch.dtype) else vector for vector in (mean, var)
    ]
    return BatchNormActivation.apply(x, weight, bias, *running, *settings)


def joined(function: Function) -> Rule:
    """Concatenate or stack tensors again; the recipe keeps them instead of the result."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        if not kwargs.keys() <= {"tensors", "dim"}:
            raise NotRepeated(_UNKNOWN)
        arguments = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
        values = find.values_of(arguments["tensors"])
        return Again(partial(_join, function, arguments.get("dim", 0)), values, fresh=True)

    return rule


def _join(function: Function, dim: int, *tensors: Tensor) -> Tensor:
    return function(tensors, dim)


def cast(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    if result.device != args[0].device:
        raise NotRepeated("copied from another device")
    return Again(Tensor.to, [find(args[0]), result.dtype])


def max_pool(dimensions: int) -> Rule:
    """Max-pooling over this many dimensions: the kept indices say which values were the largest."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        node: Any = result.grad_fn
        if type(node).__name__ == "SqueezeBackward1":  # one dimension is pooled as two
            node = node.next_functions[0][0]
        if type(node).__name__ not in _MAX_POOLS or not result.numel():
            raise NotRepeated(f"no rule repeats {type(node).__name__}")
        x = find(args[0] if args else kwargs["input"])
        return Again(_maxima_at, [x, find.saved(node, "result1"), dimensions], fresh=True)

    return rule


def _maxima_at(x: Tensor, indices: Tensor, dimensions: int) -> Tensor:
    outer_sizes = x.shape[: x.dim() - dimensions]
    pooled_sizes = indices.shape[-dimensions:]
    flat = indices.reshape(*outer_sizes, pooled_sizes.numel())  # no -1, because the batch may be empty
    return x.flatten(-dimensions).gather(-1, flat).view(*outer_sizes, *pooled_sizes)


def dropout(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    """Apply the kept mask, which says which values were dropped."""
    node: Any = result.grad_fn
    x = args[0] if args else kwargs["input"]
    if type(node).__name__ == "MulBackward0":
        return Again(torch.mul, [find(x), find.saved(node, "other")], fresh=True)
    share = dropped_share(node) if type(node).__name__ == "NativeDropoutBackward0" else None
    if share is None:
        raise NotRepeated(f"no rule repeats {type(node).__name__}")
    is_double = x.dtype == torch.float64
    scale = 1 / (1 - share) if isinstance(x, FakeTensor) else dropout_scale(x.device, is_double, share)
    return Again(_masked, [find(x), find.saved(node, "result1"), scale], fresh=True)


@cache
def dropout_scale(device: torch.device, is_double: bool, share: float) -> float:
    """The factor by which a dropout's kernel scales values, measured because kernels may round 1 - p before dividing.

    NotRepeated if it cannot be measured: while a CUDA graph is captured, or if all values are dropped.
    """
    if device.type == "cuda" and is_capturing():
        raise NotRepeated("a CUDA graph is captured")
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), without_function_modes(), without_dispatch_modes(), torch.random.fork_rng(devices):
        ones = torch.ones(2**12, dtype=torch.float64 if is_double else torch.float32, device=device)
        scale = torch.native_dropout(ones, share, True)[0].max().item()
    if not scale:
        raise NotRepeated("all values are dropped")
    return scale


def _masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (x * mask).mul_(scale)
