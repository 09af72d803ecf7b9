"""The call that runs, with the random numbers that it may draw, and what autograd has saved in it."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import tensors_in
from ..saved import Kept, is_ordinary
from ..torch_internals import (
    FakeTensor,
    address,
    next_node_number,
    node_number,
)
from .functions import Question, Row
from .values import Saved, Value


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
        *("random", "replaceable", "saves", "row", "unsettled"),
    )

    def __init__(self, function: Callable[..., Any], row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, self.row, self.args, self.kwargs = function, row, args, kwargs
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
        draws = self.row.draws
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
