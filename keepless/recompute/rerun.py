"""Run a call again as in the forward pass: with gradients, for what it saves inside, and with its random numbers."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..saved import laid_out
from ..torch_internals import FakeTensor, is_capturing
from .values import Inside


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
