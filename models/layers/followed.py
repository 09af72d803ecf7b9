"""The operations whose results are computed again instead of kept, and what each of them needs for that.

A rule takes `find`, the arguments and keyword arguments of a call, and its result. It returns a function and the
arguments that give the same result again, every tensor of them found by `find`, which raises `NotFollowed` for a tensor
that is not kept. With `lend=True` a tensor is kept for this purpose, if it is no larger than the result.
"""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .saved import Kept
from .values import Value


class NotFollowed(Exception):
    """The result of a call has to be kept."""


class Find(Protocol):
    """The value of a tensor, or the tensor itself if it is to be kept."""

    def __call__(self, tensor: Tensor, lend: bool = False) -> Any: ...


Function = Callable[..., Any]
Rule = Callable[[Find, tuple[Any, ...], dict[str, Any], Tensor], tuple[Any, ...]]
Vector = Tensor | None

FOLLOWED: dict[Function, Rule] = {}

_BATCH_NORMS = frozenset(["NativeBatchNormBackward0", "CudnnBatchNormBackward0"])
_OPERATORS = frozenset(
    f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul".split()
) | {"__setitem__"}
_ALWAYS, _NEVER = -1, 1000
_IN_PLACE: dict[Function, int] = {  # position of the argument `inplace`
    function: list(inspect.signature(function).parameters).index("inplace")
    for function in vars(F).values()
    if inspect.isfunction(function) and "inplace" in inspect.signature(function).parameters
}
_PARAMETERS = {function: tuple(inspect.signature(function).parameters) for function in (F.batch_norm, F.instance_norm)}


def may_overwrite(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call writes over its first argument or `out`, as far as its name and arguments tell."""
    position = _IN_PLACE.get(function)
    if position is None:
        name = getattr(function, "__name__", "")
        ends = name.endswith("_") and not name.endswith("__")
        position = _IN_PLACE[function] = _ALWAYS if ends or name in _OPERATORS else _NEVER
    if position is _ALWAYS or "out" in kwargs:
        return True
    return bool(kwargs.get("inplace") or (position < len(args) and args[position]))


def _repeated(function: Function, lend: bool = False) -> Rule:
    """Call a function once more, with the same arguments."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Any, ...]:
        names, count = tuple(kwargs), len(args)

        def again(*arguments: Any) -> Tensor:
            return function(*arguments[:count], **dict(zip(names, arguments[count:], strict=True)))

        if "out" in kwargs:
            raise NotFollowed
        found = (find(a, lend) if isinstance(a, Tensor) else a for a in (*args, *kwargs.values()))
        return again, *found

    return rule


def _not_in_place(function: Function) -> Function:
    """A functional without its argument `inplace`."""
    position = _IN_PLACE[function]

    def computed(*args: Any, inplace: bool = False, **kwargs: Any) -> Tensor:
        return function(*args[:position], **kwargs)

    return computed


def _found(find: Find, *vectors: Vector) -> list[Any]:
    return [None if vector is None else find(vector) for vector in vectors]


def _named(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call gives, by name."""
    return dict(zip(_PARAMETERS[function], args, strict=False)) | kwargs


def _batch_norm(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Any, ...]:
    given = _named(F.batch_norm, args, kwargs)
    x, affine = find(given["input"]), _found(find, given.get("weight"), given.get("bias"))
    if not given.get("training", False):
        running = _found(find, given["running_mean"], given["running_var"])
        return F.batch_norm, x, *running, *affine, False, 0.0, given.get("eps", 1e-5)
    node: Any = result.grad_fn
    if type(node).__name__ not in _BATCH_NORMS:
        raise NotFollowed
    return normalised, x, *_saved(node._raw_saved_result1, node._raw_saved_result2), *affine


def _saved(*saved: Any) -> list[Value | Kept]:
    """The values that a node has saved."""
    values = [one.data for one in saved]
    if not all(isinstance(value, (Value, Kept)) for value in values):
        raise NotFollowed
    return values


def normalised(x: Tensor, mean: Tensor, invstd: Tensor, weight: Vector, bias: Vector) -> Tensor:
    """Batch normalisation with the statistics of the forward pass. x: (N, C, ...), the others (C,)."""
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
    # The operator takes a variance in eval mode. Multiplying the weight instead, as it would do, changes no bit.
    scale = invstd if weight is None else weight * invstd
    return torch.native_batch_norm(x, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def _instance_norm(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Any, ...]:
    given = _named(F.instance_norm, args, kwargs)
    of_images = given.get("use_input_stats", True)
    running = () if of_images else (given.get("running_mean"), given.get("running_var"))  # which would move again
    vectors = _found(find, *(running or (None, None)), given.get("weight"), given.get("bias"))
    return F.instance_norm, find(given["input"]), *vectors, of_images, 0.0, given.get("eps", 1e-5)


def _concatenation(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Any, ...]:
    def called(tensors: Any, dim: int = 0) -> tuple[Any, ...]:
        return partial(_concatenated, dim), *(find(tensor, lend=True) for tensor in tensors)

    if not kwargs.keys() <= {"tensors", "dim"}:
        raise NotFollowed
    return called(*args, **kwargs)


def _concatenated(dim: int, *tensors: Tensor) -> Tensor:
    return torch.cat(tensors, dim)


def _cast(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Any, ...]:
    if result.device != args[0].device:
        raise NotFollowed
    return Tensor.to, find(args[0]), result.dtype


def _max_pool(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Any, ...]:
    """The kept indices say which values were the largest."""
    node: Any = result.grad_fn
    if type(node).__name__ != "MaxPool2DWithIndicesBackward0":
        raise NotFollowed
    return _gathered, find(args[0] if args else kwargs["input"]), *_saved(node._raw_saved_result1)


def _gathered(x: Tensor, indices: Tensor) -> Tensor:
    return x.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)


def _dropout(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> tuple[Any, ...]:
    """The kept mask says which values were dropped."""
    node: Any = result.grad_fn
    x = args[0] if args else kwargs["input"]
    if type(node).__name__ == "MulBackward0":
        return torch.mul, find(x), *_saved(node._raw_saved_other)
    if type(node).__name__ == "NativeDropoutBackward0":
        return _masked, find(x), *_saved(node._raw_saved_result1), 1 / (1 - node._saved_p)
    raise NotFollowed


def _masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (x * mask).mul_(scale)


def _register() -> None:
    activations: list[Function] = [F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.elu, F.selu, F.celu]
    activations += [F.silu, F.mish, F.hardswish, F.hardsigmoid]
    function: Function
    for function in activations:
        FOLLOWED[function] = _repeated(_not_in_place(function))
    for name in ("relu", "sigmoid", "tanh"):
        plain: Function = getattr(torch, name)
        for function in (plain, getattr(torch, name + "_"), getattr(Tensor, name), getattr(Tensor, name + "_")):
            FOLLOWED[function] = _repeated(plain)
    norms: list[Function] = [F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.rms_norm, torch.rms_norm]
    copies: list[Function] = [torch.clone, torch.reshape, torch.flatten, torch.roll, F.pad]
    copies += [Tensor.contiguous, Tensor.clone, Tensor.reshape, Tensor.flatten, Tensor.roll]
    for function in (*norms, *copies, F.sigmoid, F.tanh, F.gelu, F.softplus, F.logsigmoid):
        FOLLOWED[function] = _repeated(function)
    for name in ("mul", "add"):
        plain = getattr(torch, name)
        methods = [name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__"]
        for function in (plain, *(getattr(Tensor, method) for method in methods)):
            FOLLOWED[function] = _repeated(plain)
    for name in ("to", "float", "double", "half", "bfloat16"):
        FOLLOWED[getattr(Tensor, name)] = _cast
    FOLLOWED[F.batch_norm] = _batch_norm
    FOLLOWED[F.instance_norm] = _instance_norm
    FOLLOWED[torch.cat] = FOLLOWED[torch.concat] = FOLLOWED[torch.concatenate] = _concatenation
    FOLLOWED[F.max_pool2d] = FOLLOWED[torch.max_pool2d] = _max_pool
    FOLLOWED[F.dropout] = _dropout
    FOLLOWED[F.interpolate] = _repeated(F.interpolate, lend=True)


_register()
