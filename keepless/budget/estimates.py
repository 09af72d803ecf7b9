"""Seconds and temporary bytes of calls: measured on tensors like theirs, or interpolated between measured sizes."""

from bisect import bisect_left
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

from ..torch_internals import profiler_runs, without_dispatch_modes, without_function_modes
from .costs import MeasuredCall, TensorSpec, backward_temporaries, forward_seconds, forward_temporaries

_APART = 2  # a size is measured unless smaller and larger ones were that are at most this many times apart


class Taken(NamedTuple):
    """The costs of a call. `busy`: temporary bytes, beside its arguments and results, while it runs."""

    seconds: float
    busy: float


class Estimates:
    """The costs of a network's calls.

    Calls are of one kind if they differ in the sizes of their activations alone. Bytes grow at least linearly with
    these sizes, so that a straight line between two measured ones is never too low.
    """

    def __init__(self) -> None:
        self._measured: dict[Hashable, dict[int, Taken]] = {}  # by the kind of call, and bytes of its tensors

    def forward(self, call: MeasuredCall, exact: bool) -> Taken:
        """Seconds and temporary bytes of a call. `exact`: do not interpolate."""
        return self._of(call, ("forward",), exact, lambda: _forward(call))

    def backward(self, call: MeasuredCall, stride: tuple[int, ...], exact: bool, of_many: bool) -> int:
        """Temporary bytes of its backward node, or of many: see `backward_temporaries`. `exact`: as above."""
        order = tuple(sorted(range(len(stride)), key=stride.__getitem__))
        return int(self._of(call, ("backward", order), exact, lambda: _backward(call, stride, of_many)).busy)

    def _of(self, call: MeasuredCall, key: tuple[Any, ...], exact: bool, measure: Callable[[], Taken]) -> Taken:
        known = self._measured.setdefault((*key, *_kind(call)), {})
        size = call.size
        if size not in known:
            sizes = sorted(known)
            place = bisect_left(sizes, size)
            if 0 < place < len(sizes) and sizes[place] <= _APART * sizes[place - 1] and not exact:
                return _between(size, sizes[place - 1], known[sizes[place - 1]], sizes[place], known[sizes[place]])
            if profiler_runs():  # measuring starts another, which would end it
                nearest = min(sizes, key=lambda other: abs(other - size), default=None)
                return Taken(0.0, 0) if nearest is None else known[nearest]
            try:
                with without_dispatch_modes(), without_function_modes():
                    known[size] = measure()
            except RuntimeError:  # it may not work on ones, such as a Cholesky decomposition
                known[size] = Taken(0.0, 0)
        return known[size]


def _between(size: int, small: int, less: Taken, large: int, more: Taken) -> Taken:
    share = (size - small) / (large - small)
    return Taken(*(a + share * (b - a) for a, b in zip(less, more, strict=True)))


def _forward(call: MeasuredCall) -> Taken:
    busy = forward_temporaries(call)
    return Taken(forward_seconds(call), busy)


def _backward(call: MeasuredCall, stride: tuple[int, ...], of_many: bool) -> Taken:
    return Taken(0.0, backward_temporaries(call, stride, of_many))


def _kind(call: MeasuredCall) -> tuple[Hashable, ...]:
    """What calls of one kind have in common."""
    return call.function, call.names, call.autocast, *(_kind_of(one) for one in call.arguments)


def _kind_of(argument: object) -> Hashable:
    if isinstance(argument, tuple) and not isinstance(argument, TensorSpec):
        return tuple(map(_kind_of, argument))
    if not isinstance(argument, TensorSpec):
        return argument
    order = tuple(sorted(range(len(argument.shape)), key=argument.stride.__getitem__))
    shape = argument.shape if argument.is_parameter else order
    return shape, argument.dtype, argument.device, argument.requires_grad
