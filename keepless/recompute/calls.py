"""The running call of a function, as a `Trace` sees it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import tensors_in
from ..saved import is_ordinary
from ..torch_internals import address, next_node_number, node_number
from .functions import Row
from .step import StepValue


class Ran(NamedTuple):
    """A call that has run: the numbers of its events and operators, and temporary bytes besides those of its events."""

    begin: int
    end: int
    first: int
    last: int
    besides: int = 0


class RunningCall:
    """The running call of a function."""

    def __init__(self, function: Callable[..., Any], row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, self.row, self.args, self.kwargs = function, row, args, kwargs
        self.arguments = (*args, *kwargs.values())
        self.first_node = next_node_number()
        self.target: Tensor | None = None  # the argument that it may write over
        self.version, self.before = 0, -1  # of the target: its version, and its value
        self.event = self.operator = 0  # the numbers of its first event and operator
        self.inside: list[int] = []  # values that it has made and saved itself
        self.replaceable: list[int] = []  # saves for which its result would do

    def room(self, result: Tensor, values: Sequence[StepValue]) -> int:
        """Bytes that can be freed if the call is repeated in the backward pass."""
        return result.nbytes + sum(values[number].bytes for number in self.inside)

    def asks(self, name: str) -> bool:
        """The answer of a question of the function's row."""
        question = getattr(self.row, name)
        return question is not None and bool(question(self.args, self.kwargs))

    def has_made(self, base: Tensor) -> bool:
        """Whether a result that is a view of `base` has new memory."""
        node = base.grad_fn
        if self.target is not None or node is None or node_number(node) < self.first_node:
            return False
        memory = address(base.untyped_storage())
        return all(address(one.untyped_storage()) != memory for one in filter(is_ordinary, tensors_in(self.arguments)))


def argument_copied_by(node: Any, arguments: Sequence[Any]) -> Tensor | None:
    """The argument of a call that is a node's input, perhaps after being expanded."""
    source, number = node.next_functions[0]
    if type(source).__name__ == "ExpandBackward0":
        source, number = source.next_functions[0]
    leaf = getattr(source, "variable", None)
    for argument in arguments:
        if isinstance(argument, Tensor):
            if argument is leaf or (argument.grad_fn is source and argument.output_nr == number):
                return argument
    return None


def state_bytes(like: Tensor) -> int:
    """Bytes of the state of a generator."""
    return 16 if like.is_cuda else torch.default_generator.get_state().nbytes


def nodes_of(outputs: Iterable[Tensor]) -> Iterator[Any]:
    """The nodes of a graph from its outputs on."""
    pending: list[Any] = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
    seen = set(pending)
    while pending:
        node = pending.pop()
        yield node
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        pending += new
