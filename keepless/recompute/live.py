"""Observe a step of a training, to plan a network that cannot run on fake tensors, e.g. because it reads values."""

import logging
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..inputs import tensors_in
from ..saved import ByStorage, Gone, is_ordinary
from ..torch_internals import (
    FakeTensorMode,
    backward_runs,
    node_number,
    unpack,
    with_dispatch_modes_off,
    without_function_modes,
)
from .costs import TensorSpec, computing_device, seconds_of, spec_of
from .counting import Counting
from .functions import Row
from .step import Event, Step, busy
from .sums import Edges, Sums, edges_of, nodes_of
from .trace import Trace

_log = logging.getLogger(__name__)
Gradients = Sequence[Tensor | None]

_OF_WRITTEN_VIEW = "CopySlices"  # the node of a call that has written over a view, e.g. over an instance norm's result


class Progress(Enum):
    """State of an observed step. DROPPED: its graph was freed without a backward pass, or the backward pass failed."""

    RUNS = "runs"
    ENDED = "ended"
    DROPPED = "dropped"


class _Form(NamedTuple):
    """A call without the values of its tensors."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]  # `TensorSpec`s, and constants
    names: tuple[str, ...]  # names of the last arguments, which are passed by keyword
    trained: tuple[bool, ...]  # which arguments need gradients

    def temporaries(self) -> tuple[int, int]:
        """Temporary bytes of the call, and of its backward pass, counted on fake tensors; zeros if that fails."""
        try:
            with with_dispatch_modes_off(), without_function_modes():
                return self._counted()
        except Exception as error:  # a function may raise anything
            _log.info("%s cannot be counted: %s", self.function, error)
            return 0, 0

    def _counted(self) -> tuple[int, int]:
        counting = Counting([], measures=True)
        with FakeTensorMode(), torch.enable_grad():
            given = [one.empty() if isinstance(one, TensorSpec) else one for one in self.arguments]
            given = [one.requires_grad_() if need else one for one, need in zip(given, self.trained, strict=True)]
            unnamed = len(given) - len(self.names)
            named = dict(zip(self.names, given[unnamed:], strict=True))
            result = counting.forward_pass(self.function, tuple(given[:unnamed]), named)
            with counting.made:
                outputs = [one for one in tensors_in(result) if one.requires_grad]
                gradients = [torch.empty_like(one) for one in outputs]
                between = len(counting.events)
                torch.autograd.backward(outputs, gradients)
            events = counting.happened()
        return busy(events[:between], counting.memories), busy(events[between:], counting.memories)


_forms: dict[_Form, tuple[int, int]] = {}


class Live(Trace):
    """Observes a recorded forward pass, and the backward pass that follows.

    It sees the tensors that the program holds and the gradients between nodes. What functions and nodes take while they
    run is counted once the step has ended.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__(inputs)
        self.ran = False  # a backward pass has run, at least through a part of the graph
        self.times: list[float] = []  # seconds of each call
        self._numbers: ByStorage[int] = ByStorage()  # numbers of memories
        self._watched: dict[int, Gone] = {}  # by id
        self._handles: list[Any] = []
        self._sums = Sums(self.events, self.memories)
        self._copies: list[int] = []  # numbers of the memories that running nodes hold
        self._backward: dict[int, _Form] = {}  # by the number of a call's node
        self._busy: list[tuple[int, _Form, int]] = []  # (event, call, 0 or 1 for its backward pass)

    def memory(self, tensor: Tensor) -> int:
        return self._memory(tensor, tensor.untyped_storage().nbytes())

    def _memory(self, tensor: Tensor, size: int) -> int:
        storage = tensor.untyped_storage()
        number = self._numbers.get(storage)
        if number is None:
            number = self._numbers.put(storage, len(self.memories))
            self.memories.append(size)
        return number

    def holds(self, tensor: Tensor) -> None:
        """Record that the program holds a reference to this tensor until it is freed."""
        watched = self._watched.get(id(tensor))
        if is_ordinary(tensor) and (watched is None or watched() is not tensor):
            memory = self.memory(tensor)
            self.events.append((Event.HOLD, memory))
            self._watched[id(tensor)] = Gone(tensor, self.events, (Event.LET, memory))

    def operators_so_far(self) -> int:
        return len(self.times)

    def run(self, function: Callable[..., Any], row: Row, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that is recorded."""
        given = tensors_in((args, kwargs))
        for tensor in filter(is_ordinary, given):
            if self.is_made(tensor):  # made in this pass, but not by a recorded call
                self.holds(tensor)
            else:
                self._memory(tensor, 0)
        self.begins(function, row, args, kwargs)
        try:
            result, seconds = seconds_of(lambda: function(*args, **kwargs), computing_device(given))
        except BaseException:
            self.call = None
            raise
        self.times.append(seconds)
        self.ends(result)
        for tensor in tensors_in(result):
            self.holds(tensor)
        if row.again is not None and (form := _form_of(function, args, kwargs)) is not None:
            self._takes(form, 0)
            if isinstance(result, Tensor) and result.grad_fn is not None:
                self._backward[node_number(result.grad_fn)] = form
        return result

    def _takes(self, form: _Form, of_backward: int) -> None:
        self._busy.append((len(self.events), form, of_backward))
        self.events.append((Event.BUSY, 0))

    def unpack(self, packed: Any) -> Tensor:
        """The unpack hook, which autograd calls in the backward pass."""
        self.reads(packed)
        return unpack(packed)

    def forward_ends(self, outputs: Iterable[Tensor]) -> None:
        outputs = list(outputs)
        super().forward_ends(outputs)
        for node in nodes_of(outputs, self.start):
            number, is_copying = node_number(node), type(node).__name__ == _OF_WRITTEN_VIEW
            after = partial(self._after, edges_of(node), is_copying, self._backward.get(number))
            self._handles.append(node.register_prehook(partial(self._before, number, is_copying)))
            self._handles.append(node.register_hook(after))

    def _before(self, number: int, is_copying: bool, gradients: Gradients) -> None:
        """A node of the backward pass is about to run.

        `is_copying`: the node is an `_OF_WRITTEN_VIEW`, which holds the view's gradient before and after, while another
        node runs inside.
        """
        self._sums.run(number)
        self._gradients(gradients)
        if is_copying:
            self._copies.append(len(self.memories))
            self.memories.append(0 if gradients[0] is None else 2 * gradients[0].nbytes)
            self.events.append((Event.HOLD, self._copies[-1]))

    def _after(self, edges: Edges, is_copying: bool, form: _Form | None, found: Gradients, given: Gradients) -> None:
        """A node of the backward pass has run."""
        self._gradients(found)
        if form is not None:
            self._takes(form, 1)
        if is_copying:
            self.events.append((Event.LET, self._copies.pop()))
        self.events.append((Event.DONE, 0))
        self._sums.add(edges, found)

    def _gradients(self, gradients: Gradients) -> None:
        """The backward pass holds these tensors."""
        self.backward_begins()
        for gradient in gradients:
            if gradient is not None:
                self.holds(gradient)

    def backward_begins(self) -> None:
        self.ran = True
        super().backward_begins()

    def backward_ends(self) -> None:
        self._sums.end()
        super().backward_ends()

    def progress(self) -> Progress:
        """The state of the step."""
        is_released = self.forward >= 0 and not any(gone() is not None for gone in self.open)
        if self.ran and not is_released and backward_runs():  # a reentrant checkpoint runs a backward pass inside
            return Progress.RUNS
        if self.ran:
            return Progress.DROPPED if self.in_pass and not backward_runs() else Progress.ENDED
        return Progress.DROPPED if is_released else Progress.RUNS

    def step(self) -> Step:
        """The step, once it has ended."""
        for handle in self._handles:
            handle.remove()
        events = self.happened()
        for event, form, of_backward in self._busy:
            if form not in _forms:
                _forms[form] = form.temporaries()
            events[event] = Event.BUSY, _forms[form][of_backward]
        return self.step_of(events, self.times, [0] * len(self.times), 0.0)


def _form_of(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Form | None:
    """The form of a call; None if it has other arguments than tensors and constants."""
    given = [*args, *kwargs.values()]
    arguments = tuple(tuple(one) if isinstance(one, list) else spec_of(one) for one in given)
    if any(one is NotImplemented or (type(one) is tuple and tensors_in(one)) for one in arguments):
        return None
    trained = tuple(isinstance(one, Tensor) and one.requires_grad for one in given)
    return _Form(function, arguments, tuple(kwargs), trained)
