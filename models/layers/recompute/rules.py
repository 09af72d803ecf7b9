"""The operations whose results are computed again instead of kept, and what each of them needs for that.

A rule takes `find`, the arguments and keyword arguments of a call, and its result. It returns a call that computes the
same result again. `find` gives the value of a tensor, and raises `NotFollowed` if it is not kept; with `lend=True` the
recipe may keep it (rule 4 in recording.py).
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..saved import Kept
from .inplace_calls import INPLACE
from .values import Saved, Value


class NotFollowed(Exception):
    """Raised by a rule: the call cannot be repeated, so its result has to be kept."""


class Find(Protocol):
    """Returns the value of a tensor, or the tensor itself if the recipe is to keep it."""

    def __call__(self, tensor: Tensor, lend: bool = False) -> Any: ...


class Again(NamedTuple):
    """A call that gives the same result again. See `Recipe` for `fresh` and `can_overwrite`."""

    function: Callable[..., Tensor]
    arguments: Sequence[Any]
    fresh: bool = False
    can_overwrite: bool = False


Function = Callable[..., Any]
Rule = Callable[[Find, tuple[Any, ...], dict[str, Any], Tensor], Again]
Vector = Tensor | None

FOLLOWED: dict[Function, Rule] = {}

_BATCH_NORMS = frozenset(["NativeBatchNormBackward0", "CudnnBatchNormBackward0"])
_PARAMETERS = {function: tuple(inspect.signature(function).parameters) for function in (F.batch_norm, F.instance_norm)}


def result_serves(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call saves its argument although its result would do for the gradient."""
    if function is F.relu6:
        return True
    if function is F.leaky_relu:
        return (args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)) >= 0  # the signs stay
    if function is F.hardtanh:
        bounds = (*args[1:3], *(kwargs[name] for name in ("min_val", "max_val") if name in kwargs))
        return all(abs(bound) <= 2**8 and bound == int(bound) for bound in bounds)  # exact in every dtype
    return False


def _repeated(function: Function, *, lend: bool = False, fresh: bool = False) -> Rule:
    """Call a function once more, with the same arguments."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        if "out" in kwargs:
            raise NotFollowed
        again = function if not kwargs else _ByName(function, len(args), tuple(kwargs)).call
        arguments = [find(a, lend) if isinstance(a, Tensor) else _fixed(a) for a in (*args, *kwargs.values())]
        return Again(again, arguments, fresh)

    return rule


def _fixed(argument: object) -> object:
    """An argument as it is now: the caller may change a list later."""
    return tuple(argument) if isinstance(argument, list) else argument


class _ByName(NamedTuple):
    """A function that gets its last arguments by name."""

    function: Function
    unnamed: int  # number of arguments
    names: tuple[str, ...]

    def call(self, *arguments: Any) -> Tensor:
        named = zip(self.names, arguments[self.unnamed :], strict=True)
        return self.function(*arguments[: self.unnamed], **dict(named))


def _activation(function: Function) -> Rule:
    """Call an activation function of `torch.nn.functional` once more; over its argument only where that is spare."""
    position = INPLACE[function]

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        x, *others = args or (kwargs["input"],)
        named = {name: value for name, value in kwargs.items() if name not in ("input", "inplace")}
        again = partial(function, **named) if named else function
        return Again(again, [find(x), *others[: position - 1]], fresh=True, can_overwrite=True)

    return rule


def _found(find: Find, *vectors: Vector) -> list[Any]:
    return [None if vector is None else find(vector) for vector in vectors]


def _named(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments that a call gives, by name."""
    return dict(zip(_PARAMETERS[function], args, strict=False)) | kwargs


def _batch_norm(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    given = _named(F.batch_norm, args, kwargs)
    x, affine = find(given["input"]), _found(find, given.get("weight"), given.get("bias"))
    if not given.get("training", False):
        running = _found(find, given["running_mean"], given["running_var"])
        return Again(F.batch_norm, [x, *running, *affine, False, 0.0, given.get("eps", 1e-5)], fresh=True)
    node: Any = result.grad_fn
    if type(node).__name__ not in _BATCH_NORMS:
        raise NotFollowed
    return Again(normalised, [x, *_saved(node._raw_saved_result1, node._raw_saved_result2), *affine], fresh=True)


def _saved(*saved: Any) -> list[Value | Kept]:
    """The values that a node has saved."""
    values = [saved_value(one) for one in saved]
    if not all(isinstance(value, (Value, Kept)) for value in values):
        raise NotFollowed
    return values


def saved_value(saved: Any) -> Any:
    """The `Value` or `Kept` tensor that a node holds, if it is ours; None for an absent tensor."""
    return saved.data.value if isinstance(saved.data, Saved) else saved.data


def normalised(x: Tensor, mean: Tensor, invstd: Tensor, weight: Vector, bias: Vector) -> Tensor:
    """Batch normalisation with the statistics of the forward pass. x: (N, C, ...), the others (C,)."""
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
    # The operator takes a variance in eval mode. Multiplying the weight instead, as it would do, changes no bit.
    scale = invstd if weight is None else weight * invstd
    return torch.native_batch_norm(x, scale, bias, mean, torch.ones_like(mean), False, 0.0, 0.0)[0]


def _instance_norm(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    given = _named(F.instance_norm, args, kwargs)
    of_images = given.get("use_input_stats", True)
    running = () if of_images else (given.get("running_mean"), given.get("running_var"))  # which would move again
    vectors = _found(find, *(running or (None, None)), given.get("weight"), given.get("bias"))
    arguments = [find(given["input"]), *vectors, of_images, 0.0, given.get("eps", 1e-5)]
    return Again(F.instance_norm, arguments, fresh=True)


def _joined(function: Function) -> Rule:
    """Concatenate or stack tensors once more. They are kept instead of the result."""

    def rule(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
        if not kwargs.keys() <= {"tensors", "dim"}:
            raise NotFollowed
        given = dict(zip(("tensors", "dim"), args, strict=False)) | kwargs
        parts = [find(tensor, lend=True) for tensor in given["tensors"]]
        return Again(partial(_join, function, given.get("dim", 0)), parts, fresh=True)

    return rule


def _join(function: Function, dim: int, *tensors: Tensor) -> Tensor:
    return function(tensors, dim)


def _cast(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    if result.device != args[0].device:
        raise NotFollowed
    return Again(Tensor.to, [find(args[0]), result.dtype])


def _max_pool(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    """The kept indices say which values were the largest."""
    node: Any = result.grad_fn
    if type(node).__name__ != "MaxPool2DWithIndicesBackward0":
        raise NotFollowed
    x = find(args[0] if args else kwargs["input"])
    return Again(_gathered, [x, *_saved(node._raw_saved_result1)], fresh=True)


def _gathered(x: Tensor, indices: Tensor) -> Tensor:
    return x.flatten(-2).gather(-1, indices.flatten(-2)).view_as(indices)


def _dropout(find: Find, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> Again:
    """The kept mask says which values were dropped."""
    node: Any = result.grad_fn
    x = args[0] if args else kwargs["input"]
    if type(node).__name__ == "MulBackward0":
        return Again(torch.mul, [find(x), *_saved(node._raw_saved_other)], fresh=True)
    if type(node).__name__ == "NativeDropoutBackward0":
        return Again(_masked, [find(x), *_saved(node._raw_saved_result1), 1 / (1 - node._saved_p)], fresh=True)
    raise NotFollowed


def _masked(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    return (x * mask).mul_(scale)


def _register(make: Callable[[Function], Rule], *functions: Function, like: Function | None = None) -> None:
    """Give functions the rule that `make` makes for each of them, or for the one that they all are `like`."""
    for function in functions:
        FOLLOWED[function] = make(like or function)


_made: Callable[[Function], Rule] = partial(_repeated, fresh=True)
_register(_activation, F.relu, F.relu6, F.hardtanh, F.leaky_relu, F.elu, F.selu, F.celu)
_register(_activation, F.silu, F.mish, F.hardswish, F.hardsigmoid)
_register(_activation, F.relu_, torch.relu, Tensor.relu, Tensor.relu_, like=F.relu)
for _plain in (F.leaky_relu, F.elu, F.selu, F.celu):
    _register(_activation, getattr(F, _plain.__name__ + "_"), like=_plain)
_register(_made, torch.sigmoid, torch.sigmoid_, Tensor.sigmoid, Tensor.sigmoid_, like=torch.sigmoid)
_register(_made, torch.tanh, torch.tanh_, Tensor.tanh, Tensor.tanh_, like=torch.tanh)
_register(_made, F.layer_norm, torch.layer_norm, F.group_norm, torch.group_norm, F.rms_norm, torch.rms_norm)
_register(_made, F.sigmoid, F.tanh, F.gelu, F.softplus, F.logsigmoid)
_register(_repeated, torch.clone, torch.reshape, torch.flatten, torch.roll, F.pad)
_register(_repeated, Tensor.contiguous, Tensor.clone, Tensor.reshape, Tensor.flatten, Tensor.roll)
for _name, _operator in (("mul", "mul"), ("add", "add"), ("sub", "sub"), ("div", "truediv")):
    _methods = [_name, f"{_name}_", f"__{_operator}__", f"__i{_operator}__"]
    _methods += [f"__r{_operator}__"] if _name in ("mul", "add") else []  # the others swap their arguments
    _function = getattr(torch, _name)
    _register(_made, _function, *(getattr(Tensor, method) for method in _methods), like=_function)
_register(_joined, torch.cat, torch.concat, torch.concatenate, torch.stack)
FOLLOWED |= dict.fromkeys((Tensor.to, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16), _cast)
FOLLOWED |= dict.fromkeys((F.max_pool2d, torch.max_pool2d), _max_pool)
FOLLOWED |= {F.batch_norm: _batch_norm, F.instance_norm: _instance_norm, F.dropout: _dropout}
FOLLOWED[F.interpolate] = _repeated(F.interpolate, lend=True)
