"""A network that trains within a number of bytes."""

import copy
import logging
import warnings
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..inputs import check_module, tensors_in
from ..recompute.recording import Recording
from ..recompute.values import autocast_of
from ..saved import is_ordinary, size_text
from ..torch_internals import FakeTensor, FakeTensorMode, profiler_runs, tree_map
from ..units import UNITS, bytes_of
from .costs import seconds_of
from .execution import ByPlan
from .search import Choice, frontier
from .simulation import on_real_tensors, plain_peak, simulate
from .step import Plan, Step
from .trace import Progress, StepTrace

_TRACES = 16  # whole steps of one shape that are traced, if the network takes different paths
_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_FEWEST = 1000  # bytes: 1 or 50 is a share, or a number of GiB, that was written as an int
_log = logging.getLogger(__name__)

Budget = float | int | str


def checked(budget: Budget) -> float | int:
    """A number of bytes (an int), or a share of the plain network's peak (a float). ValueError if it is neither."""
    number: object = budget
    if isinstance(budget, str):
        number = bytes_of(budget)
    if (
        not isinstance(number, (int, float))
        or isinstance(number, bool)
        or not (0 < number <= 1 if isinstance(number, float) else number >= _FEWEST)
    ):
        raise ValueError(
            f"budget={budget!r}: expected at least {_FEWEST} bytes, such as '6GiB' ({', '.join(UNITS)}) or "
            f"{6 * 2**30}, or a share of the plain network's peak up to 1.0, such as 0.3"
        )
    return number


class PlansByShape:
    """The plans of a prepared network, made as new shapes of inputs come."""

    def __init__(self, budget: float | int):
        self.budget = budget
        self._shapes: dict[Hashable, _Shape] = {}

    def of_pass(self, module: nn.Module, inputs: Sequence[Tensor]) -> ByPlan | None:
        """The policy of the next forward pass: None at first; then one that traces the step; then one with a plan."""
        return self._shape(module, inputs).next_pass(self.budget)

    def plan_for(self, network: nn.Module, example: Any) -> None:
        """Make the plan for inputs like an example, from a step on fake tensors."""
        args, kwargs = arguments_of(example)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        inputs = tensors_in((args, kwargs))
        try:
            fakes = {id(one): mode.from_tensor(one) for one in [*network.parameters(), *network.buffers(), *inputs]}
            with mode:
                network_, args, kwargs = copy.deepcopy((network, args, kwargs), fakes)
                step, _ = traced_step(network_, args, kwargs)
        except Exception as error:  # a network may raise anything
            raise ValueError(
                f"a step on fake tensors like the example raises {type(error).__name__}: {error}; give an example that "
                f"the network can be trained on, or leave it out, as for networks that ask for values"
            ) from error
        self._shape(network, inputs).plans.append(_planned(step, self.budget))

    def _shape(self, module: nn.Module, inputs: Sequence[Tensor]) -> "_Shape":
        forms = tuple(
            (tensor.shape if is_ordinary(tensor) else None, tensor.dtype, tensor.requires_grad, tensor.device)
            for tensor in inputs
        )
        devices = {tensor.device.type for tensor in inputs}
        key = (forms, module.training, *sorted(f"{device} {autocast_of(device)}" for device in devices))
        return self._shapes.setdefault(key, _Shape())


class _Shape:
    """The plans for inputs of one shape."""

    def __init__(self) -> None:
        self.passes = 0
        self.plans: list[Plan] = []
        self.trace: StepTrace | None = None
        self.traces = 0
        self.last: ByPlan | None = None
        self.strays = False  # the network takes paths that have no plan
        self.waits = False  # for a profiler to end, which was said

    def next_pass(self, budget: float | int) -> ByPlan | None:
        """See `PlansByShape.of_pass`."""
        if profiler_runs():  # tracing starts another, which would end it
            if not self.plans and not self.waits:
                self.waits = True
                warnings.warn("a profiler of PyTorch runs: the budget is planned once it has ended", stacklevel=2)
            return ByPlan(self.plans) if self.plans else None
        self.passes += 1
        self.strays = self.strays or (self.last is not None and self.last.strayed)
        if self.trace is not None and self.trace.progress() == Progress.ENDED:
            self.traces += 1
            step = self.trace.step()
            if all(plan.calls != step.calls for plan in self.plans):
                self.plans.append(_planned(step, budget))
                self.strays = False
        if self.trace is not None and self.trace.progress() != Progress.RUNS:
            self.trace = None
        trace = None
        if self.passes > 1 and self.trace is None and self.traces < _TRACES and (self.strays or not self.plans):
            trace = self.trace = StepTrace()
        self.last = ByPlan(self.plans, trace) if self.plans or trace else None
        return self.last


def _planned(step: Step, budget: float | int) -> Plan:
    """The fastest plan within a budget. A warning if there is none, which names the least."""
    plain = plain_peak(step)
    limit = budget if isinstance(budget, int) else int(budget * plain)
    choices, seconds = seconds_of(lambda: frontier(step, limit), torch.device("cpu"))
    choice = next((choice for choice in choices if choice.peak <= limit), choices[-1])
    _log.warning(  # which is seen by default: it explains a pause
        "planned %d calls in %.1f s: a peak of %s instead of %s, for %.1f ms more",
        *(len(step.calls), seconds, size_text(choice.peak), size_text(plain), choice.seconds * 1e3),
    )
    if choice.peak > limit:
        warnings.warn(
            f"no plan keeps this step within {size_text(limit)}: the least is {size_text(choice.peak)}, which is taken",
            stacklevel=2,
        )
    return choice.plan(step)


class Row(NamedTuple):
    """A budget's plan. Bytes are of one step, beyond those before it; parameters and gradients are there already."""

    budget: int  # bytes asked for
    peak: int  # bytes
    kept: int  # bytes after the forward pass
    operations: float  # computed again, as a share of the step's
    seconds: float  # to compute values again, as a share of the step's


class Frontier(NamedTuple):
    """Memory and time of a training step under different budgets. Print it."""

    plain: int  # bytes at the peak of the network as it is
    least: int  # bytes at the lowest peak that a plan reaches
    rows: list[Row]

    def __repr__(self) -> str:  # what notebooks show
        return str(self)

    def __str__(self) -> str:
        cells = [("budget", "peak", "of plain", "kept", "operations", "time")]
        for row in self.rows:
            budget, peak, kept = map(size_text, (row.budget, row.peak, row.kept))
            more = f"+{row.operations:.1%}", f"+{row.seconds:.1%}"
            cells.append((budget, peak, f"{row.peak / self.plain:.2f}", kept, *more))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        return "\n".join([f"plain: {size_text(self.plain)}; the least: {size_text(self.least)}", *lines])


def plan(network: nn.Module, example: Any, budgets: Sequence[Budget] | None = None) -> Frontier:
    """Memory and time of a training step under different budgets, from one step on an example.

    The step is run: three times, with the mean square of the outputs as loss. Gradients, buffers and the random state
    are then as before; what hooks do stays done, e.g. optimizer steps in the backward pass. Under `FakeTensorMode`
    nothing is computed, for a network that does not fit: times are then estimated, and the bytes that operators take
    while they run are left out.

    Args:
        network: in training mode, prepared by `recompute_activations` or not.
        example: its input: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        budgets: as `recompute_activations` takes them. Those that no plan meets have no row. By default from 0.9 down
            to 0.1, or the least peak if it is above them.

    Raises:
        ValueError: a budget is not valid; no plan meets any of them (the message names the least peak); the step could
            not be traced, e.g. because outputs need no gradient.
    """
    check_module(network, "plan")
    asked = [checked(budget) for budget in (_SHARES if budgets is None else budgets)]
    args, kwargs = arguments_of(example)
    step, seconds = traced_step(network, *tree_map(_apart, (args, kwargs)))
    choices, plain = frontier(step), plain_peak(step)
    if budgets is None:
        asked = [share for share in asked if share * plain >= choices[-1].peak] or [choices[-1].peak]
    seconds = seconds or 3 * sum(value.seconds for value in step.values)
    operations = 3 * sum(value.operations for value in step.values)
    rows = []
    for budget in asked:
        limit = budget if isinstance(budget, int) else int(budget * plain)
        choice = next((choice for choice in choices if choice.peak <= limit), None)
        if choice is not None:
            again = sum(step.values[number].operations for number in _needed(step, choice))
            with on_real_tensors():
                kept = int(simulate(step, choice.kept).levels[step.forward - 1])
            rows.append(Row(limit, choice.peak, kept, again / max(operations, 1), choice.seconds / seconds))
    if not rows:
        least = size_text(choices[-1].peak)
        raise ValueError(f"budgets={budgets}: expected one of at least {least}, the least peak of all plans")
    return Frontier(plain, choices[-1].peak, rows)


def _apart(leaf: Any) -> Any:
    """An argument without its graph, and with a gradient of its own."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def _is_expanded(tensor: Tensor) -> bool:
    """Whether entries share memory, as in an expanded tensor, which cannot be written to."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _needed(step: Step, choice: Choice) -> list[int]:
    """The values that are computed again."""
    readers = simulate(step, choice.kept).readers
    return [number for number, kept in enumerate(choice.kept) if not kept and readers[number]]


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for: see `plan`."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def traced_step(network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Step, float]:
    """A step of a network, and the seconds that it takes; 0 on fake tensors."""
    inputs = tensors_in((args, kwargs))
    parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers() if not _is_expanded(buffer)]
    registered = [(module, dict(module._buffers)) for module in network.modules()]
    device = next((tensor.device for tensor in [*inputs, *parameters]), torch.device("cpu"))
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in [*inputs, *parameters])
    trace, seconds = StepTrace(), 0.0

    def run(policy: ByPlan | None) -> None:
        """A forward and a backward pass."""
        with Recording(policy, inputs=inputs) as recording:
            outputs = tensors_in(network(*args, **kwargs))
        outputs = [output for output in outputs if output.requires_grad and output.is_floating_point()]
        if not outputs:
            raise ValueError("no output needs a gradient: expected a network in training, outside torch.no_grad()")
        if policy is not None:
            trace.watch_backward(outputs, recording.known.start)
        torch.stack([output.float().square().mean() for output in outputs]).sum().backward()

    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=not is_fake):
            if not is_fake:
                run(None)  # warms up
                seconds = seconds_of(lambda: run(None), device)[1]
            run(ByPlan(trace=trace))
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, of_module in registered:  # it may have assigned others
            module._buffers.update(of_module)
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
    if trace.progress() != Progress.ENDED:
        raise ValueError("the step could not be traced: call plan outside saved-tensor hooks and checkpoints")
    return trace.step(), seconds
