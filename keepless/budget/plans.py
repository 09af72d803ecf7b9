"""The plans of a prepared network: made as new sizes of inputs come, from rehearsals and traced steps."""

import logging
import threading
import time
import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn

from ..inputs import tensors_in
from ..recompute.report import KeptTensor
from ..recompute.values import autocast_of
from ..saved import is_ordinary, size_text
from ..torch_internals import profiler_runs
from .estimates import Estimates
from .execution import ByPlan, Guard
from .search import frontier
from .simulation import plain_peak, simulate
from .step import Plan, Step
from .trace import Progress, StepTrace
from .traced_step import rehearsed_step

_MOST = 16  # planned sizes of one kind of inputs; and whole steps that are traced, if the network takes several paths
_LARGER = 1.5  # a size follows the plan of one that has at most so many times its bytes
_CLOSE = 0.97  # of the budget: a plan that takes so much is not searched for again
_NEARLY = 1.05  # times the budget: whether it is missed by no more is said once the step has been traced
_PAUSE = 2.0  # seconds of planning after which a message explains the pause
_log = logging.getLogger(__name__)


@contextmanager
def _pauses_are_explained() -> Iterator[None]:
    """Context of planning. Warnings are seen by default: one after two seconds says why the training waits."""
    began = time.perf_counter()
    said = threading.Timer(_PAUSE, _log.warning, ["planning the step within its budget: this may take a few seconds"])
    said.daemon = True
    said.start()
    try:
        yield
    finally:
        said.cancel()
        if (seconds := time.perf_counter() - began) > _PAUSE:
            _log.warning("planned in %.1f s", seconds)


class Plans:
    """The plans of a prepared network.

    A pass follows the plan of the smallest planned size that has at least its bytes of inputs. If there is none, or it
    is 1.5 times as large, the pass is rehearsed on fake tensors, and its plan is in force at once. The second step with
    new calls is traced: it says what the rehearsal cannot, e.g. the seconds that calls take in place, and corrects the
    plan.
    """

    def __init__(self, budget: float | int):
        self.budget = budget
        self.estimates = Estimates()
        self._kinds: dict[Hashable, list[_Size]] = {}  # by what inputs of different sizes have in common
        self._corrections: dict[tuple[Any, ...], float] = {}  # see `_refine`, by the functions that are called
        self._traced: list[_Size] = []  # whose last step is traced
        self._last: _Size | None = None  # that a pass has followed
        self._waits = False  # for a profiler to end, which was said
        self._was_missed = False  # the budget, which was said

    def of_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ByPlan:
        """The policy of the next forward pass."""
        if self._last is not None:
            self._last.note_last()
        kind, given = _described(module, args, kwargs)
        size = self._followed(self._kinds.get(kind, []), given)
        if profiler_runs():  # measuring starts another, which would end it
            if size is None and not self._waits:
                self._waits = True
                warnings.warn("a profiler of PyTorch runs: the budget is planned once it has ended", stacklevel=2)
            return ByPlan([] if size is None else size.plans, guard=Guard())
        if size is None:
            size = self._added(kind, given)
            self._rehearse(size, module, args, kwargs)
        for other in list(self._traced):
            assert other.trace is not None, "only sizes whose step is traced are listed"
            if (progress := other.trace.progress()) != Progress.RUNS:
                self._traced.remove(other)
                if (step := other.traced(progress)) is not None:
                    self._refine(other, step)
        policy, self._last = size.next_pass(given, self.estimates), size
        if policy.trace is not None:
            self._traced.append(size)
        return policy

    def plan_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for a size before its first pass. ValueError if that cannot be rehearsed."""
        size = self._added(*_described(module, args, kwargs))
        if (error := self._rehearse(size, module, args, kwargs)) is not None:
            raise ValueError(
                f"a step on fake tensors like the example raises {type(error).__name__}: {error}; give an example that "
                f"the network can be trained on, or leave it out, as for networks that ask for values"
            ) from error

    def share(self) -> None:
        """Follow the plans of rank 0, where it has planned the same calls on the same inputs."""
        mine = {
            (kind, size.given, tuple(total for _, total in plan.calls)): (size, number)
            for kind, sizes in self._kinds.items()
            for size in sizes
            for number, plan in enumerate(size.plans)
        }
        theirs: list[Any] = [{key: size.plans[number]._replace(calls=[]) for key, (size, number) in mine.items()}]
        dist.broadcast_object_list(theirs)
        for key in mine.keys() & theirs[0].keys():
            size, number = mine[key]
            size.plans[number] = theirs[0][key]._replace(calls=size.plans[number].calls)

    @staticmethod
    def _followed(sizes: "Sequence[_Size]", given: "_Given") -> "_Size | None":
        """The planned size that these inputs follow: their own, or the smallest that is large enough."""
        own = next((size for size in sizes if size.given == given), None)
        bytes = sum(given[1])
        larger = [one for one in sizes if one.plans and bytes <= one.serves <= _LARGER * bytes]
        return own or min(larger, key=lambda one: one.serves, default=None)

    def _added(self, kind: Hashable, given: "_Given") -> "_Size":
        """A new size. If there are too many, the one that served the fewest passes is dropped."""
        sizes = self._kinds.setdefault(kind, [])
        if len(sizes) == _MOST:
            sizes.remove(min(sizes, key=lambda size: size.passes))
        sizes.append(_Size(given, is_first=not sizes))
        return sizes[-1]

    @_pauses_are_explained()
    def _rehearse(
        self, size: "_Size", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Exception | None:
        """Plan a size from a rehearsal. Returns the error if that is impossible."""
        try:
            step = rehearsed_step(module, args, kwargs, self.estimates)
        except Exception as error:  # a network may raise anything
            _log.info("the step cannot be rehearsed: %s: %s", type(error).__name__, error)
            return error
        size.plans = [self._planned(step, is_rehearsed=True)]
        size.needs_trace = _functions(step.calls) not in self._corrections
        return None

    @_pauses_are_explained()
    def _refine(self, size: "_Size", step: Step) -> None:
        """A step was traced: correct the plan of its calls, or add one. Rehearsals of other sizes are corrected too."""
        before = next((plan for plan in size.plans if plan.calls == step.calls), None)
        functions, size.needs_trace = _functions(step.calls), False
        correction = self._corrections.setdefault(functions, 1.0)
        if before is None:
            size.plans.append(self._planned(step))
            size.plans.sort(key=lambda plan: plan.plain)  # the smallest that is large enough is followed
            size.strays = False
            return
        outcome, limit = simulate(step, before.choice(step)), self._limit(step)
        self._corrections[functions] = max(correction, outcome.peak / max(before.peak, 1))
        if outcome.peak > limit or (outcome.peak < _CLOSE * limit and outcome.seconds):
            size.plans[size.plans.index(before)] = self._planned(step)

    def _limit(self, step: Step) -> int:
        return self.budget if isinstance(self.budget, int) else int(self.budget * plain_peak(step))

    def _planned(self, step: Step, is_rehearsed: bool = False) -> Plan:
        """The fastest plan within the budget. If there is none, a warning names the least, once."""
        asked, correction = self._limit(step), 1.0
        if is_rehearsed:  # a traced step needs no correction
            correction = self._corrections.get(_functions(step.calls), 1.0)
        limit = int(asked / correction)
        choices = frontier(step, limit)
        choice = next((choice for choice in choices if choice.peak <= limit), choices[-1])
        _log.info(
            "planned %d calls: a peak of %s instead of %s, for %.1f ms more",
            *(len(step.calls), size_text(choice.peak), size_text(plain_peak(step)), choice.seconds * 1e3),
        )
        least = int(choice.peak * correction)
        may_be_met = is_rehearsed and least < _NEARLY * asked  # rehearsals estimate what operators take while they run
        if least > asked and not (may_be_met or self._was_missed):
            self._was_missed = True
            texts = size_text(asked), size_text(least)
            if texts[0] == texts[1]:
                texts = f"{asked:,} bytes", f"{least:,} bytes"
            warnings.warn(
                f"no plan keeps this step within {texts[0]}: the least is {texts[1]}, which is taken", stacklevel=2
            )
        if step.unseen:
            warnings.warn(
                f"the network runs a part of its forward pass under {step.unseen}, which the budget cannot plan: a "
                f"step may take more than the budget unless that is switched off",
                stacklevel=2,
            )
        return choice.plan(step)


_Given = tuple[tuple[int, ...], tuple[int, ...]]  # all dimensions of inputs, and the bytes of each


def _described(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, _Given]:
    """What inputs of different sizes have in common when a network is called with them; and their sizes."""
    inputs = tensors_in((args, kwargs))
    ordinary = [tensor for tensor in inputs if is_ordinary(tensor)]
    forms = tuple(
        (tensor.dim() if is_ordinary(tensor) else None, tensor.dtype, tensor.requires_grad, tensor.device.type)
        for tensor in inputs
    )
    frozen = tuple(number for number, one in enumerate(module.parameters()) if not one.requires_grad)
    devices = {tensor.device.type for tensor in inputs}
    kind = (forms, frozen, module.training, *sorted(f"{device} {autocast_of(device)}" for device in devices))
    return kind, (tuple(size for one in ordinary for size in one.shape), tuple(one.nbytes for one in ordinary))


def _functions(calls: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(function for function, *_ in calls)


class _Size:
    """The plans for inputs of one size, and for smaller ones that follow them. `is_first`: of its kind."""

    def __init__(self, given: _Given, is_first: bool) -> None:
        self.given = given
        self.serves = sum(given[1])  # the most bytes of inputs that follow
        self.waits = is_first  # the first pass of all warms up, and is not traced
        self.passes = 0
        self.plans: list[Plan] = []
        self.trace: StepTrace | None = None
        self.traces = 0
        self.last: tuple[ByPlan, _Given] | None = None
        self.kept: tuple[Plan, Sequence[KeptTensor]] | None = None  # by the last whole pass, and its plan
        self.needs_trace = True
        self.strays = False  # the network takes paths that have no plan

    def traced(self, progress: Progress) -> Step | None:
        """The step whose trace has ended; None if it was dropped."""
        trace, self.trace = self.trace, None
        if trace is None or progress == Progress.DROPPED:
            return None
        self.traces += 1
        return trace.step()

    def next_pass(self, given: _Given, estimates: Estimates) -> ByPlan:
        """The policy of the next pass: follows a plan, if there is one, and traces a step if that is needed."""
        self.passes += 1
        is_wanted = given == self.given and (self.strays or self.needs_trace) and self.traces < _MOST
        if is_wanted and not self.waits and self.trace is None:
            self.trace = trace = StepTrace(estimates)
        else:
            trace = None
        self.waits = False
        policy = ByPlan(self.plans, trace, Guard(), self._kept_before() if trace is None else None)
        self.last = policy, given
        return policy

    def _kept_before(self) -> Sequence[KeptTensor] | None:
        """What the last whole pass kept, if its plan is the only one."""
        if self.kept is None or self.strays or len(self.plans) != 1:
            return None
        plan, kept = self.kept
        return kept if plan is self.plans[0] else None

    def note_last(self) -> None:
        """Note whether the last pass knew the calls, and forget it with its trace."""
        if self.last is not None:
            policy, given = self.last
            if given != self.given and policy.strayed:  # it was too large in spite of its bytes, or makes other calls
                self.serves = min(self.serves, sum(given[1]) - 1)
            else:
                self.strays = self.strays or policy.strayed
            if policy.has_ended() and policy.trace is None:  # which sees more tensors than are kept
                self.kept = policy.plans[0], policy.kept
        self.last = None
