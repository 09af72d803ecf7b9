"""The call that runs, and what a recording asks of its function before and after."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ..inputs import tensors_in
from ..saved import Kept, is_ordinary
from ..torch_internals import address, next_node_number, node_number
from .signs import Positive
from .values import Saved, Value


class Traits(NamedTuple):
    """Which questions have to be asked about the calls of a function: see `traits_of`."""

    rule: Any  # how to repeat its calls
    expensive: Any  # likewise, where a plan says so
    inside: Any  # likewise, for all that a call saves inside
    positive: Positive | None  # its gradient only asks which values of the saved tensor are positive
    result_serves: Callable[..., bool] | None  # as in RESULT_SERVES; None: never
    reads_shape_only: Callable[..., bool] | None  # as in READS_SHAPE_ONLY; None: never
    draws: Callable[..., bool] | None  # random numbers, as in RANDOM; None: never
    is_opened: bool  # it is run to see the functions that it calls
    only_asks: bool  # for an attribute, such as `grad`, or a number, such as `dim()`: autograd saves nothing
    saves_nothing: Callable[..., bool] | None  # as in SAVES_NOTHING; None: never
    writes: bool  # over an argument, perhaps


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
        self.random: Any = None  # state of the generator before the call, if it may be needed

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

    def answers(self, question: Callable[..., bool]) -> bool:
        """The answer to a question of its function's traits."""
        return question(self.args, self.kwargs)
