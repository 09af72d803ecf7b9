"""Custom operators of `torch.ops` that may be repeated as one call, by what their schemas declare."""

from ..torch_internals import OpOverload, OpOverloadPacket, declared_results, written_arguments
from .rules import EXPENSIVE, INSIDE, RANDOM, random_again

_NOT_REPEATED = {"aten", "keepless", "prim", "prims"}  # namespaces: their functions have rules of their own
_COMMUNICATE = ("c10d", "fsdp", "symm_mem")  # parts of namespaces


def learn(operator: OpOverload | OpOverloadPacket) -> None:
    """Give a custom operator of `torch.ops` a rule, if its schema declares one new tensor and nothing written over.

    It is repeated as one call, with the random numbers that it may draw.
    """
    overloads = [operator] if isinstance(operator, OpOverload) else [getattr(operator, n) for n in operator.overloads()]
    if overloads and all(map(_declares_one_new_tensor, overloads)):
        EXPENSIVE[operator] = INSIDE[operator] = random_again(operator)
        RANDOM.add(operator)


def _declares_one_new_tensor(overload: OpOverload) -> bool:
    if overload.namespace in _NOT_REPEATED or any(part in overload.namespace for part in _COMMUNICATE):
        return False
    is_new = [str(result.type) == "Tensor" and result.alias_info is None for result in declared_results(overload)]
    return is_new == [True] and not written_arguments(overload)
