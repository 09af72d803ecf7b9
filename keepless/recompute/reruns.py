"""Calls that run again with the random numbers of the first time, or for the tensors that they save inside."""

import weakref
from collections.abc import Callable, Generator, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ..saved import Kept, laid_out
from ..torch_internals import FakeTensor
from .calls import Inside
from .values import Again, Recipe, Value


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


class Bundle(Value):
    """All that a call makes when it runs again. Each part gets its tensor then, and frees it after its last reader.

    Args:
        again: repeats the call.
        needs_grad: which of its arguments need gradients.
        inside: the parts, beside the result.
        result: of the call.
    """

    __slots__ = ("parts",)

    def __init__(self, again: Again, needs_grad: Sequence[bool], inside: Sequence[Inside], result: Tensor):
        originals = [_kept(part.value) for part in inside]
        function: Any = _Rerun(again.function, needs_grad, inside, originals)
        super().__init__(_WholeCall(again._replace(function=function, can_overwrite=False), result))
        self.parts = [weakref.ref(part.value) for part in inside]
        for position, (part, original) in enumerate(zip(inside, originals, strict=True)):
            part.value.become(Recipe(Again(itemgetter(position), [self]), original))

    def result(self) -> Again:
        """Recipe of the call's result, whose value is to be appended to `parts`."""
        return Again(itemgetter(len(self.parts)), [self])

    def steps(self) -> Generator[Value, Any, Any]:
        assert isinstance(self.source, Recipe)
        tensors = yield from self.source.steps()
        for reference, tensor in zip(self.parts, tensors, strict=False):
            part = reference()
            if part is not None and part.readers and part.computed is None and isinstance(part.source, Recipe):
                part.hold(tensor)
        return tensors


def _kept(value: Value) -> Tensor:
    assert isinstance(value.source, Kept)
    return value.source.get()


class _WholeCall(Recipe):
    """Computes a list of tensors."""

    __slots__ = ()

    def finished(self, result: Any) -> Any:
        return result


class _Rerun:
    """Runs a function with gradients, as in the forward pass; returns what it saves inside, and its result."""

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
        tensors = [found[position] for position in sorted(found)]
        if [(tensor.shape, tensor.dtype) for tensor in tensors] != [form[:2] for form in self.forms]:
            raise RuntimeError(
                f"{self.function} has run again for the backward pass, and has saved other tensors than in the forward "
                f"pass: a function must do the same each time to be trained within a budget"
            )
        laid_out_alike = map(laid_out, tensors, (stride for *_, stride in self.forms))
        return [*laid_out_alike, result.detach()]


def _never(_: object) -> Tensor:
    raise AssertionError("the graph of a call that ran again is not differentiated")
