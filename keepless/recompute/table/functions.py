"""The table of functions, with a row for each.

A plan may repeat each of PyTorch's C++ functions that returns only new tensors and draws no random numbers
(`_row_of_builtin`). To repeat one without a plan too, name it in its group of the table: with `rules.activation` if it
has an argument `inplace`, else with `rules.new_tensor` if its result is always a new tensor, or `rules.repeated` if it
may be an argument or a view of one: `new_tensor` would let an activation overwrite it while others still read it, so
gradients would be silently wrong. `is_slow` leaves a function written in Python to plans. What it saves need not be
said. Its test is an entry of `ACTIVATIONS` or `FUNCTIONS` in test_functions.py.

A question about a call takes its arguments and keyword arguments. None in a row: the answer is always no.
"""

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, MethodDescriptorType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...norms.bn_act import norm_and_activation
from ...torch_internals import OpOverload, OpOverloadPacket, declared_results, written_arguments
from ..held.signs import Positive, positive, positive_or_nan
from . import rules
from .rules import Function, Rule
from .writes import NEVER, may_write, overloads_of

# Writes through what these return change no version.
EXPOSE: frozenset[Any] = frozenset([Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__])  # type: ignore[attr-defined]

Question = Callable[[tuple[Any, ...], dict[str, Any]], bool]

_NOT_REPEATED = {"aten", "keepless", "prim", "prims"}  # namespaces: their functions have rules of their own
_COMMUNICATE = ("c10d", "fsdp", "symm_mem")  # parts of namespaces
# What these make is not equal when they run again: they update statistics; or add in an order that differs on CUDA (see
# `torch.use_deterministic_algorithms`); or use other algorithms if no gradient is needed.
_NOT_EQUAL = frozenset(
    """
    batch_norm instance_norm
    cross_entropy_loss cumprod cumsum cumulative_trapezoid index_add index_copy index_put index_reduce logcumsumexp
    max_unpool2d max_unpool3d nll_loss nll_loss2d nll_loss_nd put scatter scatter_add scatter_reduce segment_reduce
    linalg_cond linalg_eigvalsh linalg_matrix_norm linalg_matrix_rank linalg_norm linalg_svdvals nuclear_norm
    """.split()
)


class Row(NamedTuple):
    """The properties of a function."""

    again: Rule | None = None  # how to repeat its calls
    is_slow: bool = False  # its calls are repeated only if a plan says so
    inside: bool = False  # what its calls save inside is recomputed too, by `again` unless there is a `mask`
    mask: Rule | None = None  # draws the saved mask again, from which the result follows
    positive: Positive | None = None  # its gradient only needs the sign mask of the saved tensor, by this function
    result_serves: Question | None = None  # whether a call saves its argument although its result would do
    reads_shape_only: Question | None = None  # whether a call saves its input although the gradient needs no values
    narrow: Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype] | None = None  # dtype of indices that a call saves
    draws: Question | None = None  # whether a call draws random numbers
    only_asks: bool = False  # it reads an attribute, such as `grad`, or a number, such as `dim()`: it saves nothing
    is_opened: bool = False  # it is written in Python without a rule: the functions that it calls are recorded instead
    writes: int = NEVER  # whether its calls may write over tensors, see `may_write`


TABLE: dict[Function, Row] = {}


@lru_cache(2**10)
def row_of(function: Function) -> Row:
    """The row of a function, with what follows from its name and schema."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        row = _row_of_custom_operator(function)
    elif isinstance(function, (BuiltinFunctionType, MethodDescriptorType)) and function not in TABLE:
        row = _row_of_builtin(function)
    else:
        row = TABLE.get(function, Row())
    return row._replace(
        only_asks=row.only_asks or (getattr(function, "__name__", "") == "__get__" and function not in EXPOSE),
        is_opened=function in _CALL_OTHERS and row.again is None,
        writes=may_write(function),
    )


def _add(functions: Iterable[Function], **facts: Any) -> None:
    for function in functions:
        TABLE[function] = TABLE.get(function, Row())._replace(**facts)


def _row_of_custom_operator(operator: OpOverload | OpOverloadPacket) -> Row:
    """The row of a custom operator of `torch.ops`: with a rule if its schema declares one new tensor and no mutation.

    It is repeated as one call, with the same random numbers.
    """
    overloads = overloads_of(operator)
    if not (overloads and all(map(_declares_one_new_tensor, overloads))):
        return Row()
    return Row(again=rules.random_again(operator), is_slow=True, inside=True, draws=_always)


def _row_of_builtin(function: BuiltinFunctionType | MethodDescriptorType) -> Row:
    """The row of a C++ function of PyTorch: with a rule for plans if it returns only new tensors and draws nothing."""
    operator = getattr(torch.ops.aten, function.__name__, None)
    if not isinstance(operator, OpOverloadPacket) or function.__name__.removeprefix("_unsafe_") in _NOT_EQUAL:
        return Row()
    overloads = [overload for overload in overloads_of(operator) if not written_arguments(overload)]
    is_random = any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)
    aliases = [result.alias_info for overload in overloads for result in declared_results(overload)]
    if is_random or not aliases or any(alias is not None for alias in aliases):
        return Row()
    return Row(again=rules.repeated(function), is_slow=True)


def _declares_one_new_tensor(overload: OpOverload) -> bool:
    if overload.namespace in _NOT_REPEATED or any(part in overload.namespace for part in _COMMUNICATE):
        return False
    is_new = [str(result.type) == "Tensor" and result.alias_info is None for result in declared_results(overload)]
    return is_new == [True] and not written_arguments(overload)


# With an active function mode these return True, and the function passes itself to the mode instead of running.
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
_UNCHECKED = dict.fromkeys(_CHECKS, lambda *_: False)
_CALL_OTHERS: frozenset[Any] = frozenset(
    function
    for function in (*vars(F).values(), *vars(torch.functional).values())
    if isinstance(function, FunctionType) and not {*_CHECKS}.isdisjoint(function.__code__.co_names)
)


def body(function: FunctionType) -> FunctionType:
    """A copy of a function written in Python whose body runs under a function mode, which sees its inner calls.

    Only for arguments without their own `__torch_function__`.
    """
    module_globals = function.__globals__  # it may change, and is large
    names = ["__builtins__", *(module_globals.keys() & _names_in(function.__code__))]
    opened_globals = {name: module_globals[name] for name in names} | _UNCHECKED
    opened = FunctionType(
        function.__code__, opened_globals, function.__name__, function.__defaults__, function.__closure__
    )
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


@cache  # of PyTorch's code alone: a program's would stay alive with it
def _names_in(code: CodeType) -> frozenset[str]:
    """The names that a function and those inside it may look up."""
    inner_codes = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return frozenset(code.co_names).union(*map(_names_in, inner_codes))


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _keeps_signs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a leaky ReLU's result has the sign mask of its argument."""
    return bool((args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)) >= 0)


def _has_exact_bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the bounds of a hardtanh are exact in every dtype."""
    bounds = (*args[1:3], *(kwargs[name] for name in ("min_val", "max_val") if name in kwargs))
    return all([abs(bound) <= 2**8 and bound == int(bound) for bound in bounds])


def _has_frozen_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not (args[1] if len(args) > 1 else kwargs["weight"]).requires_grad


def _is_frozen_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if kwargs.get("training"):  # the usual case, before arguments are named
        return False
    arguments = rules.named_arguments(F.batch_norm, args, kwargs)
    if arguments.get("training", False):
        return False
    vectors = arguments.get("weight"), arguments.get("bias")
    return all([vector is None or not vector.requires_grad for vector in vectors])


def _is_pooled_by_shape(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """On CPUs and CUDA, pooling's gradient reads the indices of maxima, if any, but only the shape of the input."""
    return (args[0] if args else kwargs["input"]).device.type in ("cpu", "cuda")


def _indices_in(dimensions: int) -> Callable[[tuple[Any, ...], dict[str, Any]], torch.dtype]:
    """The smallest type that holds an index into the last dimensions of a call's input."""

    def narrow(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.dtype:
        count = (args[0] if args else kwargs["input"]).shape[-dimensions:].numel()
        dtypes = [dtype for dtype in (torch.int16, torch.int32) if count <= torch.iinfo(dtype).max]
        return dtypes[0] if dtypes else torch.int64

    return narrow


def _named(names: str, *owners: Any) -> list[Function]:
    """The functions with these names that exist."""
    return [getattr(owner, name) for name in names.split() for owner in owners if hasattr(owner, name)]


def _add_each(make: Callable[[Function], Rule], functions: Iterable[Function], **facts: Any) -> None:
    """Add functions that are each repeated by the rule `make(function)`."""
    for function in functions:
        _add([function], again=make(function), **facts)


_CONVOLUTIONS = _named("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", F)

# Activations
_add_each(
    rules.activation, _named("relu6 hardtanh leaky_relu elu selu celu silu mish hardswish hardsigmoid threshold", F)
)
for _name in "leaky_relu elu selu celu".split():
    _add(_named(f"{_name}_", F), again=rules.activation(getattr(F, _name)))
_add(_named("relu relu_", F, torch, Tensor), again=rules.activation(F.relu), positive=positive_or_nan)
_add([F.leaky_relu, F.leaky_relu_], positive=positive)
_add([F.relu6], result_serves=_always)
_add([F.leaky_relu], result_serves=_keeps_signs)
_add([F.hardtanh], result_serves=_has_exact_bounds)
_add_each(rules.new_tensor, _named("sigmoid tanh gelu softplus logsigmoid prelu glu", F))

# Arithmetic
for _name, _operator in (("mul", "mul"), ("add", "add"), ("sub", "sub"), ("div", "truediv")):
    _methods = f"{_name} {_name}_ __{_operator}__ __i{_operator}__"
    if _name in ("mul", "add"):  # the others swap their arguments
        _methods += f" __r{_operator}__"
    _add([getattr(torch, _name), *_named(_methods, Tensor)], again=rules.new_tensor(getattr(torch, _name)))
for _name in "neg abs square reciprocal sqrt rsqrt exp log1p erf pow clamp masked_fill sigmoid tanh".split():
    _functions = _named(f"{_name} {_name}_", torch, Tensor)
    if _name in ("neg", "abs", "pow"):
        _functions += _named(f"__{_name}__", Tensor)
    _add(_functions, again=rules.new_tensor(getattr(torch, _name)))
_add_each(rules.new_tensor, _named("__rsub__ __rpow__ __rtruediv__", Tensor))
_add_each(rules.new_tensor, [torch.rsub, torch.where, Tensor.where, torch.mean, Tensor.mean])

# Norms
_add_each(rules.new_tensor, _named("layer_norm group_norm rms_norm", F, torch))
_add(_named("rms_norm", F, torch), inside=True)  # on CPUs it also saves the normalised input
_add([F.batch_norm], again=rules.batch_norm, reads_shape_only=_is_frozen_norm)
_add([F.instance_norm], again=rules.instance_norm)
_add([norm_and_activation], again=rules.layer, is_slow=True, inside=True)

# Copies, views and casts
_add_each(rules.repeated, [*_named("clone reshape flatten roll", torch, Tensor), Tensor.contiguous])
_add_each(rules.repeated, _named("pad pixel_shuffle pixel_unshuffle", F))
_add_each(rules.joined, _named("cat concat concatenate stack", torch))
_add(_named("to float double half bfloat16", Tensor), again=rules.cast)
_add(_named("dim ndimension size stride numel nelement element_size storage_offset __len__", Tensor), only_asks=True)
_add(_named("is_contiguous is_floating_point is_complex", Tensor, torch), only_asks=True)
_add(_named("register_hook retain_grad untyped_storage data_ptr", Tensor), only_asks=True)  # as observers call

# Pooling and resampling
_add_each(rules.new_tensor, _named("avg_pool1d avg_pool2d avg_pool3d", F))
_add_each(rules.new_tensor, _named("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", F))
_add([F.max_pool1d, F.adaptive_max_pool1d], again=rules.max_pool(1), narrow=_indices_in(1))
_add([F.max_pool2d, torch.max_pool2d, F.adaptive_max_pool2d], again=rules.max_pool(2), narrow=_indices_in(2))
_add([F.max_pool3d], again=rules.max_pool(3), narrow=_indices_in(3))
_POOLS = _named("avg_pool2d avg_pool3d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool2d max_pool3d", F)
_add([*_POOLS, F.max_pool2d, torch.max_pool2d], reads_shape_only=_is_pooled_by_shape)
_add([F.interpolate], again=rules.repeated(F.interpolate, may_keep=True))
_add_each(rules.new_tensor, [F.grid_sample], is_slow=True)

# Random numbers
_add([F.dropout, torch.dropout, F.dropout1d, F.dropout2d, F.dropout3d], again=rules.dropout)
for _function in (F.dropout, torch.dropout):
    _add([_function], inside=True, mask=rules.mask(_function), draws=_always)
_add_each(rules.random_again, [torch.bernoulli], is_slow=True, draws=_always)

# Convolutions, products and the like
_add_each(rules.new_tensor, _CONVOLUTIONS, is_slow=True, reads_shape_only=_has_frozen_weight)
_add_each(rules.new_tensor, _named("mm bmm addmm baddbmm softmax log_softmax", torch, Tensor), is_slow=True)
_add_each(rules.new_tensor, [F.softmax, F.log_softmax, F.embedding], is_slow=True)
_add_each(rules.product, [torch.matmul, torch.linalg.matmul, Tensor.matmul, Tensor.__matmul__, F.linear], is_slow=True)
_add_each(rules.repeated, [torch.einsum], is_slow=True)  # it may return a permuted view
_add([F.scaled_dot_product_attention], again=rules.attention, is_slow=True, inside=True, draws=rules.drops_weights)
_add_each(rules.new_tensor, [F.cross_entropy], is_slow=True, inside=True)
