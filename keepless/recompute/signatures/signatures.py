"""Which advice and which plan the next pass of a prepared network follows, and which steps are watched."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from ...inputs import tensors_in
from ...saved import PLAIN, autocast_of, is_ordinary
from ...torch_internals import (
    changing_mode,
    current_hooks,
    dispatch_modes_on,
    function_modes_on,
    is_any_autocast_enabled,
    is_capturing,
    is_transformed,
    profiler_runs,
)
from ..passes.advice import Advice
from ..passes.advised import Advised
from ..passes.plan import MORE, ByPlan, Plan
from ..passes.recording import Recording
from ..step.costs import is_measuring
from ..step.sharded import is_sharded
from ..step.watch import State, Watch, WatchedRecording, watched_pass
from .gradients import Backward, Gradients
from .plans import Planner, step_of_example
from .signature import Signature

_CAPACITY = 16  # signatures with plans of their own, and as many others; the least recently used one goes
_SELDOM = 10  # in one step of so many a larger size is watched, once there were many sizes
_STRAYS = 4  # passes that may leave a new plan, before one of them teaches advice
_HOOKED = (
    "the budget is ignored in passes inside a checkpoint, save_on_cpu or other saved-tensor hooks, which decide what "
    "is kept: call the network outside of them, or prepare it without a budget"
)
_CAPTURED = "a CUDA graph is captured without a plan: run three steps before the capture"
_PROFILED = "a PyTorch profiler is running: the budget is planned once it has ended"
_CHOICES = (bool, type(None))  # types of arguments that may choose a path


def _stride_order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions in the order of their strides; none if that is their own order."""
    if tensor.is_contiguous():
        return ()
    return tuple(sorted(range(tensor.dim()), key=tensor.stride().__getitem__))


class Signatures:
    """The signatures of a prepared network's inputs.

    `budget`: as `parsed_budget` returns it. `strict`: see `Planner.warn_of_excess`.

    Inputs of a new size borrow the plan of the smallest planned size that has at least their bytes. If it has over 1.5
    times as many, they are watched once that is cheap. Larger inputs than any planned ones are watched, after sixteen
    sizes at most in one step of ten; others follow the plan of the largest size.
    """

    def __init__(self, budget: float | int | None = None, strict: bool = False) -> None:
        self.budget = budget
        self.strict = strict
        self.recent: list[Signature] = []  # the one used last comes last
        self._planner = Planner(budget, strict)
        self.gradients = Gradients()
        self._watched_count = 0  # steps, and examples
        self._passes_since_watch = 0

    def recording(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Recording:
        """The context of the next forward pass, called by this frame: with advice, or by the rules alone."""
        is_simple = not kwargs and PLAIN.issuperset(map(type, args))  # a faster path to the same inputs
        inputs = [*args] if is_simple else tensors_in((args, kwargs))
        has_shards = is_sharded(module)
        by_rules = partial(Recording, copy_parameters=has_shards, inputs=inputs, frame=frame)
        if current_hooks() is not None:  # hooks around the network decide what is kept
            if self.budget is not None:
                self._planner.warn_once(_HOOKED)
            return by_rules()
        has_mode = bool(function_modes_on() or dispatch_modes_on()) and changing_mode() is not None
        signature = self._use_signature(module, inputs, args, kwargs)
        policy = None
        if self.budget is None:
            signature.renew_advice(sum([tensor.nbytes for tensor in inputs if is_ordinary(tensor)]))
        else:
            self._passes_since_watch += 1
            self._plan_watched_steps(module)
            self._borrow_or_make_due(signature)
            if signature.is_due:
                needs_gradient = any(tensor.requires_grad for tensor in [*module.parameters(), *inputs])
                if not needs_gradient or has_mode or is_transformed((args, kwargs)):  # no step can be watched
                    return by_rules(ByPlan())
                if is_capturing():
                    self._planner.warn_once(_CAPTURED)
                    return by_rules(ByPlan())
                if not signature.awaits_backward():
                    return self._watched_recording(signature, module, inputs, frame)
            elif signature.plan is None:
                return by_rules(kept_limit_bytes=self.budget if isinstance(self.budget, int) else None)
            signature = self._choose_by_gradients(signature, has_shards)
            policy = ByPlan(signature.plan, signature.slack)
        if has_mode or is_capturing():
            return by_rules(policy)
        return self._recording_of(signature, policy, inputs, frame, has_shards)

    def _choose_by_gradients(self, signature: Signature, has_shards: bool) -> Signature:
        """A signature, or `Signature.coming` if no parameter has a gradient now. Notes whether passes overlap."""
        if has_shards:  # plans may have been made before FSDP sharded the network
            signature.set_coming(None)
        if signature.coming is None:
            return signature
        self.gradients.note_overlap()
        return signature.coming if self.gradients.are_coming() else signature

    def _watched_recording(
        self, signature: Signature, module: nn.Module, inputs: Sequence[Tensor], frame: FrameType
    ) -> WatchedRecording:
        """The context of a pass whose step is watched."""
        self._note_watched(signature)
        recording = watched_pass(module, inputs, frame)
        recording.signature = signature
        signature.watch = recording.watch
        return recording

    def _note_watched(self, signature: Signature) -> None:
        signature.backward = None
        self._watched_count += 1
        self._passes_since_watch = 0

    def _recording_of(
        self, signature: Signature, policy: ByPlan | None, inputs: Sequence[Tensor], frame: FrameType, has_shards: bool
    ) -> Recording:
        """The context of a pass by a policy, and if there can be any, by the advice of its signature."""
        if signature.plan is not None and signature.teaches:
            for remark in signature.plan.remarks:
                self._planner.warn_of_excess(remark)
        signature.pass_count += 1
        advice = Advice() if signature.teaches else signature.advice
        if advice is None or signature.is_due or has_shards or None in signature.kind[0]:
            recording = Recording(policy, copy_parameters=has_shards, inputs=inputs, frame=frame)
        else:
            if policy is not None and not signature.teaches:
                policy = ByPlan(slack=signature.slack)  # sites know what the plan has decided
            recording = Advised(advice, policy, inputs=inputs, frame=frame, earlier=signature.kept)
        recording.signature = signature
        return recording

    def _use_signature(
        self, module: nn.Module, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        """Find or make the signature of these inputs, and note that it is the last one used."""
        ordinary = [] if self.budget is None else [tensor for tensor in inputs if is_ordinary(tensor)]
        kind = self._kind_of(module, inputs, ordinary, args, kwargs)
        shapes = tuple([tensor.shape for tensor in ordinary])
        for signature in self.recent:
            if signature.kind == kind and signature.shapes == shapes:
                break
        else:
            input_bytes = sum([tensor.nbytes for tensor in ordinary])
            signature = Signature(kind, shapes, input_bytes, is_due=self.budget is not None)
        if self.recent[-1:] != [signature]:
            self._note_use(signature)
        return signature

    def _kind_of(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        ordinary: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Any, ...]:
        """All that plans and advice depend on, except sizes. See `Signature.kind` for the first and the last part.

        `ordinary`: the inputs on whose sizes and strides plans depend.
        """
        device_types = tuple([tensor.device.type for tensor in inputs])
        return (
            tuple([tensor.dim() if type(tensor) in PLAIN and is_ordinary(tensor) else None for tensor in inputs]),
            tuple([(tensor.dtype, tensor.requires_grad) for tensor in inputs]),
            tuple([argument if isinstance(argument, _CHOICES) else ... for argument in args]),
            tuple([(name, argument if isinstance(argument, _CHOICES) else ...) for name, argument in kwargs.items()]),
            self.gradients.trained_flags(module),
            module.training,
            device_types,
            is_any_autocast_enabled() and tuple([autocast_of(device_type) for device_type in device_types]),
            tuple(map(_stride_order, ordinary)),
            tuple([tensor.device for tensor in inputs]),
        )

    def _plan_watched_steps(self, module: nn.Module) -> None:
        for signature in self.recent:
            if signature.watch is not None:
                self._plan_watched(module, signature, signature.watch)

    def _borrow_or_make_due(self, signature: Signature) -> None:
        """Within a budget: let the next pass of a size without a near plan follow another size's, or be watched."""
        if not signature.may_borrow():
            return
        lender = self._nearest_planned(signature)
        if lender is None or (not signature.is_near(lender) and self._may_watch(signature)):
            signature.is_due = True
        elif lender is not signature.lender:
            signature.borrow(lender)
            self._note_use(lender)
            self._note_use(signature)

    def _may_watch(self, signature: Signature) -> bool:
        """Whether a size may be watched that follows, or could follow, the plan of another one."""
        planned = [candidate for candidate in self.recent if candidate.has_own_plan]
        is_largest = all(candidate.input_bytes < signature.input_bytes for candidate in planned)
        is_seldom = self._watched_count < _CAPACITY or self._passes_since_watch >= _SELDOM
        return self._planner.is_cheap() or (is_largest and is_seldom)

    def _plan_watched(self, module: nn.Module, signature: Signature, watch: Watch) -> None:
        """Plan the passes of a signature, if the step that was watched has ended."""
        _end_between_passes(watch)
        if not watch.is_over:
            return
        if watch.state is State.COUNTED and not self._may_measure():
            return
        signature.watch = None
        if watch.state is State.COUNTED:
            signature.follow_own(self._planner.plans_of_watch(module, watch))
        elif watch.error is not None:
            self._planner.warn_of_failure(watch.error)
            signature.follow_own(None)
        else:
            signature.note_lost()

    def _may_measure(self) -> bool:
        """Whether operators may be measured now. It waits for the device, and would end a profiler: warn of that."""
        if is_capturing():
            return False
        has_profiler = profiler_runs()
        if has_profiler and not is_measuring():  # it is the program's
            self._planner.warn_once(_PROFILED)
        return not has_profiler

    def _note_use(self, signature: Signature) -> None:
        """Make this the last one used. At most `_CAPACITY` have a plan of their own, and as many have none."""
        recent = [*(earlier for earlier in self.recent if earlier is not signature), signature]
        planned = [earlier for earlier in recent if earlier.has_own_plan][-_CAPACITY:]
        unplanned = [earlier for earlier in recent if not earlier.has_own_plan][-_CAPACITY:]
        self.recent = [earlier for earlier in recent if earlier in planned or earlier in unplanned]

    def _nearest_planned(self, signature: Signature) -> Signature | None:
        """The smallest size of the same kind that has a plan and at least as many bytes, or else the largest."""
        planned = [
            candidate for candidate in self.recent if candidate.has_own_plan and candidate.kind == signature.kind
        ]
        larger = [candidate for candidate in planned if signature.input_bytes <= candidate.input_bytes]
        size = attrgetter("input_bytes")
        return min(larger, key=size, default=None) or max(planned, key=size, default=None)

    def pass_has_ended(self, module: nn.Module, recording: Recording, output: object) -> None:
        """Learn advice from a pass, or that its plan no longer holds. `output`: None if it raised an error."""
        signature: Signature | None = recording.signature
        if signature is None:
            return
        if isinstance(recording, WatchedRecording):
            if output is None:
                recording.watch.end(State.LOST)
                signature.watch = None
            else:
                recording.watch.await_backward(module, output)
            return
        if signature.base is not signature:  # gradients came
            self.gradients.await_backward(Backward(output))
        elif signature.is_due:
            signature.note_unwatched(output)
        is_complete = recording.elsewhere is None  # nothing is held elsewhere
        if is_complete and isinstance(recording, Advised) and recording.has_followed:
            return
        if self.budget is not None:
            self._watch_again(signature, recording)
        if is_complete and output is not None and not signature.base.is_due:
            self._learn(signature, recording)

    def _learn(self, signature: Signature, recording: Recording) -> None:
        """Note what a pass has kept, and the advice that it has taught."""
        signature.kept = recording.kept
        if isinstance(recording, Advised) and recording.is_learnable:
            has_left = _has_left_plan(signature, recording)
            if recording.is_first and has_left and signature.stray_count < _STRAYS:
                signature.stray_count += 1
                return  # a pass that follows the plan teaches more
            if self.budget is None and not recording.is_first:
                node_count = recording.node_count if recording.is_outdated else 0
                signature.note_differences(node_count, [site.function for site in recording.unknown_sites])
            fits = signature.plan is not None and signature.plan.fits
            recording.learn(fits=fits and not has_left)
            signature.advice = recording.advice
        signature.teaches = False
        self.gradients.parameters = []  # new calls may come with new ones

    def _watch_again(self, signature: Signature, recording: Recording) -> None:
        """Let a step be watched if a pass has made more than the planned one, or if that is cheap, other calls."""
        is_outdated = isinstance(recording, Advised) and recording.is_outdated
        is_larger = recording.growth > MORE
        is_held_elsewhere = recording.elsewhere is not None
        if is_held_elsewhere and not (is_outdated or is_larger):  # its results came earlier than planned, but no more
            signature.slack = max(signature.slack, 2 * recording.fluctuation_bytes)
        elif is_held_elsewhere or is_outdated:
            signature.base.is_due = True
            if signature.plan is not None:
                signature.base.exceeded_bytes = signature.plan.bytes if is_larger else 0
                self._planner.warn_of_growth(signature.plan, recording)
        elif _has_left_plan(signature, recording) and self._planner.is_cheap():
            signature.base.is_due = True

    def plan_example(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let passes with arguments of an example's size follow plans from their first one on, made of a real step.

        ValueError if that step raises an error.
        """
        try:
            plans = self._planner.plans_of(module, step_of_example(module, args, kwargs))
        except Exception as error:  # a network may raise anything
            raise ValueError(
                f"a step with the example raises {type(error).__name__}: {error}; give an example that the network can "
                f"be trained on, several inputs as a tuple"
            ) from error
        signature = self._use_signature(module, tensors_in((args, kwargs)), args, kwargs)
        self._note_watched(signature)
        signature.watch = None
        signature.follow_own(plans)

    def share_plans(self) -> None:
        """Use the plans of rank 0 for the inputs on which it has planned the same calls."""
        signatures: dict[Any, Signature] = {}
        own_plans: dict[Any, list[Plan]] = {}  # without calls, which are alike
        for signature in self.recent:
            plan = signature.plan
            if plan is not None:
                key = signature.kind[:-1], signature.shapes, tuple(total for _, total in plan.calls)
                signatures[key] = signature
                coming_plan = None if signature.coming is None else signature.coming.plan
                own_plans[key] = [replace(bare, calls=(), remarks=()) for bare in (plan, coming_plan or plan)]
        received: list[Any] = [own_plans]
        dist.broadcast_object_list(received)
        for key in signatures.keys() & received[0].keys():
            if received[0][key] != own_plans[key]:
                signatures[key].exchange_plans(*received[0][key])


def _end_between_passes(watch: Watch) -> None:
    """End a watch between two passes if no further node of its graph will run."""
    if watch.state is State.AWAITS and not watch.in_pass:
        if watch.has_backward:  # what is left of its graph will not run
            watch.conclude()
        elif not watch.is_awaited():  # the program has dropped it
            watch.end(State.LOST)


def _has_left_plan(signature: Signature, recording: Recording) -> bool:
    """Whether a pass has made other calls than planned, or many others than earlier ones, or `Advised.is_outdated`."""
    if isinstance(recording, Advised) and not recording.is_first:
        return recording.has_left_plan or recording.is_outdated
    policy = recording.policy
    return signature.plan is not None and policy is not None and policy.plan is None
