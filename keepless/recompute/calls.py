"""The running call, and how to run it again as in the forward pass, with gradients or the same random numbers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..inputs import tensors_in
from ..saved import is_ordinary, laid_out
from ..torch_internals import FakeTensor, address, is_capturing, next_node_number, node_number
from .functions import Row
from .rules import Again
from .values import Recipe, Saved, Value


class Inside(NamedTuple):
    """A tensor that the running call has made itself, and saves."""

    value: Value
    number: int  # among the tensors that the call saves
    is_base: bool  # the saved tensor is a view of it


class Call:
    """The running call of a function, and what autograd has saved in it. It holds tensors only while the call runs."""

    def __init__(self, function: Callable[..., Any], row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.function, self.row, self.args, self.kwargs = function, row, args, kwargs
        self.arguments = (*args, *kwargs.values())
        self.first_node = next_node_number()
        self.overwrites = False  # it overwrites an argument
        self.before: Value | None = None  # value of the first argument, if the call overwrites it
        self.random: RandomState | None = None  # state of the generator before the call, if it may be needed
        self.saves = 0  # number of tensors saved so far
        self.packed: list[tuple[Tensor, Any]] = []  # tensors that autograd saves, and what it holds instead
        self.inside: list[Inside] = []  # tensors saved inside the call, which it may have made itself
        self.replaceable: list[Saved] = []  # saved arguments that the result can stand for
        self.unsettled: list[tuple[Value, Tensor]] = []  # kept, but not yet given to the outer hooks (rule 10)
        # What recipes read: tensors, or the names under which the result's node has saved them; and their values.
        self.found: list[tuple[Tensor | str, Any]] = []
        self.recipes: list[tuple[Recipe, Again]] = []
        self.began = (0, 0)  # in a counted step: the numbers of its first event and operator

    def note_random(self) -> None:
        """Note the state of the generator, if the call will draw from it."""
        draws = self.row.draws
        if draws is not None and draws(self.args, self.kwargs) and (given := tensors_in(self.arguments)):
            self.random = random_state(given[0])

    def has_made(self, base: Tensor) -> bool:
        """Whether a result that is a view of `base` has new memory. Always False for calls that overwrite."""
        node = base.grad_fn
        if self.overwrites or node is None or node_number(node) < self.first_node:
            return False
        memory = address(base.untyped_storage())  # compared too: another thread's tensor may have a later node
        given = filter(is_ordinary, tensors_in(self.arguments))
        return all(address(tensor.untyped_storage()) != memory for tensor in given)

    def room(self, result: Tensor) -> int:
        """Bytes that can be freed if the call is repeated in the backward pass."""
        return result.nbytes + sum(part.value.bytes for part in self.inside)


class Rerun:
    """Runs a function with gradients, as in the forward pass; returns what it saves inside, and perhaps its result."""

    def __init__(
        self,
        function: Callable[..., Any],
        needs_grad: Sequence[bool],
        inside: Sequence[Inside],
        originals: Sequence[Tensor],
    ):
        self.function, self.needs_grad = function, needs_grad
        self.positions = {part.number: (position, part.is_base) for position, part in enumerate(inside)}
        self.forms = [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in originals]

    def around(self, function: Callable[..., Any]) -> "Rerun":
        """The same for another function that does the same, e.g. with other random numbers."""
        other = copy.copy(self)
        other.function = function
        return other

    def __call__(self, *arguments: Any) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        number = -1

        def pack(tensor: Tensor) -> None:
            nonlocal number
            number += 1
            if number in self.positions:
                position, is_base = self.positions[number]
                base = tensor._base
                found[position] = (base if is_base and base is not None else tensor).detach()

        given = [
            one.detach().requires_grad_(needs) if isinstance(one, Tensor) else one
            for one, needs in zip(arguments, self.needs_grad, strict=True)
        ]
        with torch.enable_grad(), saved_tensors_hooks(pack, _never):
            result = self.function(*given)
        tensors = [*(found[position] for position in sorted(found)), result.detach()][: len(self.forms)]
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != [form[:2] for form in self.forms]:
            raise RuntimeError(
                f"{self.function} has run again for the backward pass, and has saved other tensors than in the forward "
                f"pass: with a budget, a function must do the same each time it runs"
            )
        return [laid_out(tensor, stride) for tensor, (*_, stride) in zip(tensors, self.forms, strict=True)]


def _never(_: object) -> Tensor:
    raise AssertionError("the graph of a call that ran again is not differentiated")


class RandomState:
    """State of a generator (CPU: 5 KB, CUDA: 16 bytes) before a call, so that it can draw the same numbers again."""

    __slots__ = ("generator", "state")

    def __init__(self, generator: torch.Generator):
        self.generator, self.state = generator, generator.get_state()

    def call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function with these random numbers. The generator's current state is restored."""
        present = self.generator.get_state()
        self.generator.set_state(self.state)
        try:
            return function(*arguments, **options)
        finally:
            self.generator.set_state(present)


_STATE_BYTES = torch.default_generator.get_state().nbytes


def state_bytes(like: Tensor) -> int:
    """Bytes of the state of the generator of a tensor's device; a fake tensor has no generator of its own."""
    return 16 if like.is_cuda else _STATE_BYTES


def random_state(like: Tensor) -> RandomState | None:
    """The state of the generator of a tensor's device; None if that generator is unknown.

    Also None while a CUDA graph is captured: the backward pass has its own graph, which would draw other numbers.
    """
    if is_capturing():
        return None
    if like.is_cuda and not isinstance(like, FakeTensor):
        return RandomState(torch.cuda.default_generators[like.device.index])
    return RandomState(torch.default_generator) if like.is_cpu or isinstance(like, FakeTensor) else None
