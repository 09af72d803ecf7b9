"""The plans of a prepared network: made as new shapes of inputs come, from rehearsals and traced steps."""

import logging
import time
import warnings
from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import nn

from ..inputs import tensors_in
from ..recompute.report import KeptTensor
from ..recompute.values import autocast_of
from ..saved import is_ordinary, size_text
from ..torch_internals import profiler_runs
from .estimates import Estimates
from .execution import ByPlan, Guard
from .saved_plans import FORMAT, dtype_of, is_usable, plan_from_plain, plan_to_plain
from .scaling import Sized, remember, scaled
from .search import frontier
from .simulation import plain_peak, simulate
from .step import Plan, Step
from .trace import Progress, StepTrace
from .traced_step import rehearsed_step

_TRACES = 16  # whole steps of one shape that are traced, if the network takes different paths
_NEAREST = 4  # plans of other shapes that are tried
_CLOSE = 0.97  # of the budget: a plan that takes so much is not searched for again
_PAUSE = 1.0  # seconds of planning above which a message explains the pause
_ABOUT = 1.01  # a saved plan's peak may be higher by so much on fake tensors
_OF_SHAPE = ("passes", "traces", "needs_trace", "strays")  # attributes that are saved
_log = logging.getLogger(__name__)


class PlansByShape:
    """The plans of a prepared network.

    The first pass over a shape is rehearsed on fake tensors, and its plan is in force at once. The second step with
    new calls is traced: it says what the rehearsal cannot, e.g. the seconds that calls take in place, and corrects the
    plan. The same calls on other shapes are only rehearsed, or scaled between known sizes, and take over a plan that
    fits.
    """

    def __init__(self, budget: float | int):
        self.budget = budget
        self.estimates = Estimates()
        self._shapes: dict[Any, _Shape] = {}
        self._sized: dict[Hashable, list[Sized]] = {}  # rehearsed steps, by all but the dimensions of inputs
        self._families: dict[tuple[Any, ...], _Family] = {}  # by the functions that are called
        self._unconfirmed: set[tuple[Any, ...]] = set()  # whose plans were saved, and which have not run since

    def of_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ByPlan:
        """The policy of the next forward pass."""
        shape = self._shape(module, args, kwargs)
        if profiler_runs():  # measuring starts another, which would end it
            if not shape.plans and not shape.waits:
                shape.waits = True
                warnings.warn("a profiler of PyTorch runs: the budget is planned once it has ended", stacklevel=2)
            return ByPlan(shape.plans, guard=Guard())
        if self._unconfirmed and shape.plans:
            self._confirm(shape, module, args, kwargs)
        if not (shape.passes or shape.plans):
            self._rehearse(shape, module, args, kwargs)
        for other in self._shapes.values():
            if (step := other.traced()) is not None:
                self._refine(other, step)
        return shape.next_pass(self.estimates)

    def plan_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for a shape before its first pass. ValueError if that cannot be rehearsed."""
        shape = self._shape(module, args, kwargs)
        if (error := self._rehearse(shape, module, args, kwargs)) is not None:
            raise ValueError(
                f"a step on fake tensors like the example raises {type(error).__name__}: {error}; give an example that "
                f"the network can be trained on, or leave it out, as for networks that ask for values"
            ) from error

    def state(self) -> dict[str, Any]:
        """The plans in force, as plain containers: see `keepless.budget_state`."""
        shapes = []
        for ((forms, frozen, training, *autocast), dims), shape in self._shapes.items():
            inputs = [[size, str(dtype), needs_grad, device] for size, dtype, needs_grad, device in forms]
            families = [self._family_of(plan.calls) for plan in shape.plans]
            plans = [
                {**plan_to_plain(plan), "correction": family.correction, "traced": family.was_traced}
                for plan, family in zip(shape.plans, families, strict=True)
            ]
            found = {"inputs": inputs, "frozen": [*frozen], "training": training, "autocast": autocast, "dims": [*dims]}
            shapes.append({**found, "plans": plans, **{name: getattr(shape, name) for name in _OF_SHAPE}})
        return {"format": FORMAT, "torch": str(torch.__version__), "budget": self.budget, "shapes": shapes}

    def load(self, state: dict[str, Any]) -> None:
        """Follow the plans of `state` from now on, if they are for this budget and PyTorch; a warning says if not."""
        if not is_usable(state, self.budget):
            return
        shapes: dict[Any, _Shape] = {}
        families: dict[tuple[Any, ...], _Family] = {}
        try:
            for found in state["shapes"]:
                forms = tuple((n, dtype_of(kind), grad, device) for n, kind, grad, device in found["inputs"])
                key = (forms, tuple(found["frozen"]), found["training"], *found["autocast"])
                dims = tuple(found["dims"])
                shape = shapes[key, dims] = _Shape(dims, self._sized.setdefault(key, []))
                shape.plans = [plan_from_plain(plain) for plain in found["plans"]]
                for name in _OF_SHAPE:
                    setattr(shape, name, found[name])
                for plan, plain in zip(shape.plans, found["plans"], strict=True):
                    family = families.setdefault(_functions(plan.calls), _Family())
                    family.plans.append(plan)
                    family.correction, family.was_traced = plain["correction"], plain["traced"]
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            _plan_anew(f"cannot be read here ({type(error).__name__}: {error})")
            return
        self._shapes, self._families, self._unconfirmed = shapes, families, {*families}

    def adopt(self, plan: Plan, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], traced: bool) -> None:
        """Take over the plan of a step on these arguments. `traced`: it was no rehearsal."""
        shape, family = self._shape(module, args, kwargs), self._family_of(plan.calls)
        shape.plans, shape.needs_trace = [plan], not traced
        family.plans.append(plan)
        family.was_traced = traced

    def _confirm(self, shape: "_Shape", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rehearse a step whose plan was saved, without measuring or searching: forget all plans of another network."""
        functions = _functions(shape.plans[0].calls)
        if functions not in self._unconfirmed:
            return
        self._unconfirmed.remove(functions)
        try:
            step = rehearsed_step(module, args, kwargs, None)
        except Exception as error:  # a network may raise anything; the calls are compared as they come
            _log.info("the step cannot be rehearsed: %s: %s", type(error).__name__, error)
            return
        known = next((plan for plan in shape.plans if plan.calls == step.calls), None)
        if known is None or simulate(step, known.choice(step)).peak > _ABOUT * known.peak:
            _plan_anew(f"do not fit the network, which makes other {'calls' if known is None else 'tensors'} now")
            for other in self._shapes.values():
                other.plans = [plan for plan in other.plans if _functions(plan.calls) != functions]
                if not other.plans:
                    other.passes, other.needs_trace = 0, True
            del self._families[functions]

    def _shape(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "_Shape":
        """What is known of inputs of this shape."""
        inputs = tensors_in((args, kwargs))
        dims = tuple(size for tensor in inputs if is_ordinary(tensor) for size in tensor.shape)
        forms = tuple(
            (tensor.dim() if is_ordinary(tensor) else None, tensor.dtype, tensor.requires_grad, tensor.device.type)
            for tensor in inputs
        )
        frozen = tuple(number for number, one in enumerate(module.parameters()) if not one.requires_grad)
        devices = {tensor.device.type for tensor in inputs}
        key = (forms, frozen, module.training, *sorted(f"{device} {autocast_of(device)}" for device in devices))
        if (key, dims) not in self._shapes:
            self._shapes[key, dims] = _Shape(dims, self._sized.setdefault(key, []))
        return self._shapes[key, dims]

    def _rehearse(
        self, shape: "_Shape", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Exception | None:
        """Plan a shape from a rehearsal, or scaled from others. Returns the error if that is impossible."""
        began = time.perf_counter()
        try:
            if (step := scaled(shape.known, shape.dims)) is None:
                step = rehearsed_step(module, args, kwargs, self.estimates)
                remember(shape.known, Sized(shape.dims, step))
        except Exception as error:  # a network may raise anything
            _log.info("the step cannot be rehearsed: %s: %s", type(error).__name__, error)
            return error
        shape.plans.append(self._planned(step, began))
        shape.needs_trace = not self._family_of(step.calls).was_traced
        return None

    def _refine(self, shape: "_Shape", step: Step) -> None:
        """A step was traced: correct the plan of its calls, or add one."""
        before = next((plan for plan in shape.plans if plan.calls == step.calls), None)
        family = self._family_of(step.calls)
        family.was_traced, shape.needs_trace = True, False
        if before is None:
            shape.plans.append(self._planned(step))
            shape.strays = False
            return
        outcome = simulate(step, before.choice(step))
        limit = self._limit(step)
        family.correction = max(family.correction, outcome.peak / max(before.peak, 1))
        if outcome.peak > limit or (outcome.peak < _CLOSE * limit and outcome.seconds):
            family.plans.remove(before)
            shape.plans[shape.plans.index(before)] = self._planned(step)

    def _limit(self, step: Step) -> int:
        return self.budget if isinstance(self.budget, int) else int(self.budget * plain_peak(step))

    def _family_of(self, calls: Sequence[Any]) -> "_Family":
        return self._families.setdefault(_functions(calls), _Family())

    def _planned(self, step: Step, rehearsed: float | None = None) -> Plan:
        """The fastest plan within the budget. A warning if there is none, which names the least.

        `rehearsed`: when the rehearsal began, if there was one.
        """
        began = time.perf_counter() if rehearsed is None else rehearsed
        plain, family = plain_peak(step), self._family_of(step.calls)
        asked = self._limit(step)
        limit = asked if rehearsed is None else int(asked / family.correction)
        nearest = sorted(family.plans, key=lambda plan: abs(plan.plain - plain))[:_NEAREST]
        known = [plan.choice(step) for plan in nearest] if rehearsed is not None else []
        choices = frontier(step, limit, known)
        choice = next((choice for choice in choices if choice.peak <= limit), choices[-1])
        seconds = time.perf_counter() - began
        _log.log(
            logging.WARNING if seconds > _PAUSE else logging.INFO,  # warnings are seen by default: it explains a pause
            "planned %d calls in %.1f s: a peak of %s instead of %s, for %.1f ms more",
            *(len(step.calls), seconds, size_text(choice.peak), size_text(plain), choice.seconds * 1e3),
        )
        least = choice.peak if rehearsed is None else int(choice.peak * family.correction)
        if least > asked:
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
        plan = choice.plan(step)
        family.plans.append(plan)
        return plan


def _functions(calls: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(function for function, *_ in calls)


def _plan_anew(why: str) -> None:
    warnings.warn(f"the saved plans {why}: the network is planned anew", stacklevel=3)


class _Family:
    """What is known of the same calls in different shapes."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.was_traced = False
        self.correction = 1.0  # the peak of a traced step, as a multiple of the rehearsed one


class _Shape:
    """The plans for inputs of one shape.

    Args:
        dims: all dimensions of the inputs.
        known: rehearsed steps of inputs that differ in these alone.
    """

    def __init__(self, dims: tuple[int, ...], known: list[Sized]) -> None:
        self.dims, self.known = dims, known
        self.passes = 0
        self.plans: list[Plan] = []
        self.trace: StepTrace | None = None
        self.traces = 0
        self.last: ByPlan | None = None
        self.kept: tuple[Plan, Sequence[KeptTensor]] | None = None  # by the last whole pass, and its plan
        self.needs_trace = True
        self.strays = False  # the network takes paths that have no plan
        self.waits = False  # for a profiler to end, which was said

    def traced(self) -> Step | None:
        """The step that was traced last, if it has just ended."""
        if self.trace is None or (progress := self.trace.progress()) == Progress.RUNS:
            return None
        self._note_last()
        trace, self.trace = self.trace, None
        if progress == Progress.DROPPED:
            return None
        self.traces += 1
        return trace.step()

    def next_pass(self, estimates: Estimates) -> ByPlan:
        """The policy of the next pass: follows a plan, if there is one, and traces a step if that is needed."""
        self.passes += 1
        self._note_last()
        trace = None
        if self.passes > 1 and self.trace is None and self.traces < _TRACES and (self.strays or self.needs_trace):
            trace = self.trace = StepTrace(estimates)
        self.last = ByPlan(self.plans, trace, Guard(), self._kept_before() if trace is None else None)
        return self.last

    def _kept_before(self) -> Sequence[KeptTensor] | None:
        """What the last whole pass kept, if its plan is the only one."""
        if self.kept is None or self.strays or len(self.plans) != 1:
            return None
        plan, kept = self.kept
        return kept if plan is self.plans[0] else None

    def _note_last(self) -> None:
        """Note whether the last pass knew the calls, and forget it with its trace."""
        if self.last is not None:
            self.strays = self.strays or self.last.strayed
            if self.last.has_ended() and self.last.trace is None:  # which sees more tensors than are kept
                self.kept = self.last.plans[0], self.last.kept
        self.last = None
