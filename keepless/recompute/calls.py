"""Calls of functions: what is known of each function, looked up once, and the call that runs.

A question about a call takes its arguments and keyword arguments.
"""

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..inputs import tensors_in
from ..saved import Kept, is_ordinary
from ..torch_internals import (
    FakeTensor,
    OpOverload,
    OpOverloadPacket,
    address,
    declared_results,
    next_node_number,
    node_number,
    written_arguments,
)
from .overwriting import overloads_of, writes
from .rules import (
    CONVOLUTIONS,
    EXPENSIVE,
    FOLLOWED,
    INSIDE,
    RELUS,
    Function,
    Rule,
    drops_weights,
    named_arguments,
    random_again,
)
from .signs import Positive, positive, positive_or_nan
from .values import Saved, Value

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
    **dict.fromkeys((F.dropout, torch.dropout, torch.bernoulli), _always),
    F.scaled_dot_product_attention: drops_weights,
}
# Activations that read only signs of what they save.
POSITIVE = dict.fromkeys(RELUS, positive_or_nan) | dict.fromkeys((F.leaky_relu, F.leaky_relu_), positive)


# With a function mode in effect these return True, and the function hands itself to the mode instead of running.
_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


def _calls_others(function: object) -> bool:
    return isinstance(function, FunctionType) and not {*_CHECKS}.isdisjoint(function.__code__.co_names)


_CALL_OTHERS: frozenset[Callable[..., Any]] = frozenset(filter(_calls_others, vars(F).values()))


def body(function: FunctionType) -> FunctionType:
    """A copy of a function of `torch.nn.functional` whose body runs under a function mode, which sees its inner calls.

    For arguments without a `__torch_function__` of their own.
    """
    names = function.__globals__ | dict.fromkeys(_CHECKS, _no)
    opened = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    opened.__kwdefaults__ = function.__kwdefaults__
    return opened


def _no(*_: object) -> bool:
    return False


class Traits(NamedTuple):
    """What is known of a function, and which questions to ask about each of its calls."""

    rule: Rule | None  # how to repeat its calls
    expensive: Rule | None  # likewise, where a plan says so
    inside: Rule | None  # likewise, for all that a call saves inside
    positive: Positive | None  # its gradient only asks which values of the saved tensor are positive
    result_serves: Question | None  # as in RESULT_SERVES; None: never
    reads_shape_only: Question | None  # as in READS_SHAPE_ONLY; None: never
    draws: Question | None  # random numbers, as in RANDOM; None: never
    is_opened: bool  # it is run to see the functions that it calls
    only_asks: bool  # for an attribute, such as `grad`, or a number, such as `dim()`: autograd saves nothing
    saves_nothing: Question | None  # as in SAVES_NOTHING; None: never
    writes: bool  # over an argument, perhaps


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
        is_opened=function in _CALL_OTHERS and function not in FOLLOWED and function not in EXPENSIVE,
        only_asks=function in _ASK or getattr(function, "__name__", "") == "__get__",
        saves_nothing=SAVES_NOTHING.get(function),
        writes=writes(function),
    )


def learn(operator: OpOverload | OpOverloadPacket) -> None:
    """Give a custom operator of `torch.ops` a rule, if its schema declares one new tensor and nothing written over.

    It is repeated as one call, with the random numbers that it may draw.
    """
    overloads = overloads_of(operator)
    if overloads and all(map(_declares_one_new_tensor, overloads)):
        EXPENSIVE[operator] = INSIDE[operator] = random_again(operator)
        RANDOM[operator] = _always


def _declares_one_new_tensor(overload: OpOverload) -> bool:
    if overload.namespace in _NOT_REPEATED or any(part in overload.namespace for part in _COMMUNICATE):
        return False
    is_new = [str(result.type) == "Tensor" and result.alias_info is None for result in declared_results(overload)]
    return is_new == [True] and not written_arguments(overload)


class RandomState:
    """State of a generator (CPU: 5 KB, CUDA: 16 bytes) before a call, which can then draw the same numbers again."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator):
        self.generator, self.state = generator, generator.get_state()

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function with these random numbers. The generator's present state stays as it is."""
        present = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return function(*arguments, **options)
        finally:
            self.generator.set_state(present)


def random_state(like: Tensor) -> RandomState | None:
    """The state of the generator of a tensor's device; None for devices whose generator is not known."""
    if like.is_cuda and not isinstance(like, FakeTensor):
        return RandomState(torch.cuda.default_generators[like.device.index])
    return RandomState(torch.default_generator) if like.is_cpu or isinstance(like, FakeTensor) else None


class Inside(NamedTuple):
    """A tensor that a running call saves, and has made itself."""

    value: Value
    number: int  # among the tensors that the call saves
    is_base: bool  # the saved tensor is a view of it


class Call:
    """The running call of a function, and the tensors that autograd has saved in it."""

    __slots__ = (
        *("args", "arguments", "before", "first_node", "function", "inside", "kwargs", "overwrites", "parameters"),
        *("random", "replaceable", "saves", "traits", "unsettled"),
    )

    def __init__(self, function: Callable[..., Any], traits: Traits, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, self.traits, self.args, self.kwargs = function, traits, args, kwargs
        self.arguments = (*args, *kwargs.values()) if kwargs else args
        self.first_node = next_node_number()
        self.overwrites = False  # an argument
        self.before: Value | None = None  # value of the first argument, if the call overwrites it
        self.replaceable: tuple[Saved, ...] = ()  # saved arguments that the result can stand for
        self.parameters: tuple[tuple[Tensor, Kept], ...] = ()  # leaves saved without a `Value`
        self.unsettled: tuple[tuple[Value, Tensor], ...] = ()  # kept, but not yet given to the outer hooks (rule 10)
        self.saves = 0  # number of tensors saved so far
        self.inside: tuple[Inside, ...] = ()  # tensors saved inside the call, which it may have made itself
        self.random: RandomState | None = None  # state of the generator before the call, if it may be needed

    def note_random(self) -> None:
        """Note the state of the generator, if the call is going to draw from it."""
        draws = self.traits.draws
        if draws is not None and self.answers(draws) and (given := tensors_in(self.arguments)):
            self.random = random_state(given[0])

    def has_made(self, base: Tensor) -> bool:
        """Whether the memory of a result, which is a view of `base`, is new. Not told of calls that overwrite."""
        node = base.grad_fn
        if self.overwrites or node is None or node_number(node) < self.first_node:
            return False
        memory = address(base.untyped_storage())  # a tensor of another thread may have a later node
        given = filter(is_ordinary, tensors_in(self.arguments))
        return all(address(tensor.untyped_storage()) != memory for tensor in given)

    def room(self, result: Tensor) -> int:
        """Bytes that computing the call again can free."""
        return result.nbytes + (sum(part.value.bytes for part in self.inside) if self.inside else 0)

    def answers(self, question: Question) -> bool:
        """The answer to a question of its function's traits."""
        return question(self.args, self.kwargs)
