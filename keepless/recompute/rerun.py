"""Run a call again with gradients, as in the forward pass, for what it saves inside."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..saved import laid_out
from .functions import Inside


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
