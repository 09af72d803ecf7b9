"""What is known of each function, looked up once."""

from functools import lru_cache

from torch import Tensor

from ..torch_internals import OpOverload, OpOverloadPacket, declared_results, written_arguments
from .calls import Traits
from .functions import CALL_OTHERS, writes
from .rules import (
    EXPENSIVE,
    FOLLOWED,
    INSIDE,
    POSITIVE,
    RANDOM,
    READS_SHAPE_ONLY,
    RESULT_SERVES,
    SAVES_NOTHING,
    Function,
    always,
    random_again,
)

_NOT_REPEATED = {"aten", "keepless", "prim", "prims"}  # namespaces: their functions have rules of their own
_COMMUNICATE = ("c10d", "fsdp", "symm_mem")  # parts of namespaces
_QUESTIONS = frozenset(
    getattr(Tensor, name)
    for name in "dim ndimension size stride numel nelement element_size storage_offset __len__ is_contiguous".split()
) | {Tensor.is_floating_point, Tensor.is_complex}


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
        only_asks=function in _QUESTIONS or getattr(function, "__name__", "") == "__get__",
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
        RANDOM[operator] = always


def _declares_one_new_tensor(overload: OpOverload) -> bool:
    if overload.namespace in _NOT_REPEATED or any(part in overload.namespace for part in _COMMUNICATE):
        return False
    is_new = [str(result.type) == "Tensor" and result.alias_info is None for result in declared_results(overload)]
    return is_new == [True] and not written_arguments(overload)
