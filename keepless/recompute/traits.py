"""What is known of each function, looked up once: its rules, and the questions to ask about each of its calls.

A question takes the arguments and keyword arguments of a call.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..torch_internals import OpOverload, OpOverloadPacket, declared_results, written_arguments
from .calls import Traits
from .functions import CALL_OTHERS, writes
from .rules import (
    CONVOLUTIONS,
    EXPENSIVE,
    FOLLOWED,
    INSIDE,
    RELUS,
    Function,
    drops_weights,
    named_arguments,
    random_again,
)
from .signs import positive, positive_or_nan

Question = Callable[[tuple[Any, ...], dict[str, Any]], bool]

_NOT_REPEATED = {"aten", "keepless", "prim", "prims"}  # namespaces: their functions have rules of their own
_COMMUNICATE = ("c10d", "fsdp", "symm_mem")  # parts of namespaces
_ASK = frozenset(
    getattr(Tensor, name)
    for name in "dim ndimension size stride numel nelement element_size storage_offset __len__ is_contiguous".split()
) | {Tensor.is_floating_point, Tensor.is_complex}
_VIEWS = (
    "chunk diagonal expand expand_as movedim narrow permute select split squeeze swapaxes swapdims t transpose unbind "
    "unflatten unfold unsqueeze view view_as"
).split()
_INDICES = frozenset([int, slice, type(None), type(...)])


def _always(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return True


def _is_contiguous(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return len(args) == 1 and not kwargs and args[0].is_contiguous()


def _indexes_no_values(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is indexed by numbers, slices and the like, not by other tensors."""
    index = args[1]
    return _INDICES.issuperset(map(type, index if type(index) is tuple else (index,)))


def _drops_nothing(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
    return not (given.get("p", 0.5) and given.get("training", True))


def _keeps_signs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a leaky ReLU's result has the signs of its argument."""
    return bool((args[1] if len(args) > 1 else kwargs.get("negative_slope", 0.01)) >= 0)


def _has_exact_bounds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the bounds of a hardtanh are exact in every dtype."""
    bounds = (*args[1:3], *(kwargs[name] for name in ("min_val", "max_val") if name in kwargs))
    return all(abs(bound) <= 2**8 and bound == int(bound) for bound in bounds)


def _has_frozen_weight(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return not (args[1] if len(args) > 1 else kwargs["weight"]).requires_grad


def _is_frozen_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = kwargs if kwargs.get("training") else named_arguments(F.batch_norm, args, kwargs)
    vectors = given.get("weight"), given.get("bias")
    return not (given.get("training", False) or any(vector is not None and vector.requires_grad for vector in vectors))


# Whether a call returns views of its argument, or the argument, and has autograd save nothing.
SAVES_NOTHING: dict[Function, Question] = {
    **{getattr(owner, name): _always for owner in (Tensor, torch) for name in _VIEWS if hasattr(owner, name)},
    Tensor.__getitem__: _indexes_no_values,
    Tensor.contiguous: _is_contiguous,
    F.dropout: _drops_nothing,
}
# Whether a call saves its argument although its result would do for the gradient.
RESULT_SERVES: dict[Function, Question] = {
    F.relu6: _always,
    F.leaky_relu: _keeps_signs,
    F.hardtanh: _has_exact_bounds,
}
# Whether a call saves its input although the gradient needs none of its values.
READS_SHAPE_ONLY: dict[Function, Question] = {
    **dict.fromkeys(CONVOLUTIONS, _has_frozen_weight),
    F.batch_norm: _is_frozen_norm,
}
# Whether a call draws random numbers.
RANDOM: dict[Function, Question] = {
    **dict.fromkeys((F.dropout, torch.dropout, F.alpha_dropout, torch.bernoulli, torch.rrelu), _always),
    F.scaled_dot_product_attention: drops_weights,
}
# Activations that read only signs of what they save.
POSITIVE = dict.fromkeys(RELUS, positive_or_nan) | dict.fromkeys((F.leaky_relu, F.leaky_relu_), positive)


@lru_cache(2**10)
def traits_of(function: Function) -> Traits:
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        learn(function)
    return Traits(
        rule=FOLLOWED.get(function),
        expensive=EXPENSIVE.get(function),
        inside=INSIDE.get(function),
        positive=POSITIVE.get(function),
        result_serves=RESULT_SERVES.get(function),
        reads_shape_only=READS_SHAPE_ONLY.get(function),
        draws=RANDOM.get(function),
        is_opened=function in CALL_OTHERS and function not in FOLLOWED and function not in EXPENSIVE,
        only_asks=function in _ASK or getattr(function, "__name__", "") == "__get__",
        saves_nothing=SAVES_NOTHING.get(function),
        writes=writes(function),
    )


def learn(operator: OpOverload | OpOverloadPacket) -> None:
    """Give a custom operator of `torch.ops` a rule, if its schema declares one new tensor and nothing written over.

    It is repeated as one call, with the random numbers that it may draw.
    """
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]
    if overloads and all(map(_declares_one_new_tensor, overloads)):
        EXPENSIVE[operator] = INSIDE[operator] = random_again(operator)
        RANDOM[operator] = _always


def _declares_one_new_tensor(overload: OpOverload) -> bool:
    if overload.namespace in _NOT_REPEATED or any(part in overload.namespace for part in _COMMUNICATE):
        return False
    is_new = [str(result.type) == "Tensor" and result.alias_info is None for result in declared_results(overload)]
    return is_new == [True] and not written_arguments(overload)
