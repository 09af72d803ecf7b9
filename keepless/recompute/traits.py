"""What is known of each function, looked up once."""

from functools import lru_cache

from torch import Tensor

from ..torch_internals import OpOverload, OpOverloadPacket
from .calls import Traits
from .custom_operators import learn
from .inplace_calls import writes
from .opened_calls import CALL_OTHERS
from .rules import EXPENSIVE, FOLLOWED, INSIDE, POSITIVE, RANDOM, READS_SHAPE_ONLY, RESULT_SERVES, Function

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
        is_random=function in RANDOM,
        is_opened=function in CALL_OTHERS and function not in FOLLOWED and function not in EXPENSIVE,
        only_asks=function in _QUESTIONS or getattr(function, "__name__", "") == "__get__",
        writes=writes(function),
    )
