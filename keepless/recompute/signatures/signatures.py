"""Which advice and which plan the next pass of a prepared network follows, and which steps are watched."""

from collections.abc import Sequence
from dataclasses import replace
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
from ..passes.plan import MORE, ByPlan
from ..passes.recording import Recording
from ..step.costs import is_measuring
from ..step.sharded import is_sharded
from ..step.watch import State, Watch, WatchedRecording
from .gradients import Backward, Gradients
from .plans import Planner, Plans, step_of_example, watched_pass
from .signature import Lesson, Origin, Signature, Size

_CAPACITY = 16  # signatures with plans of their own, and as many others; the least recently used one goes
_NEAR = 1.5  # the plan of a size with at most so many times an input's bytes is good enough for the input
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
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=strides.__getitem__))


def _is_near(signature: Signature, lender: Signature) -> bool:
    return signature.input_bytes <= lender.input_bytes <= _NEAR * signature.input_bytes


def _needs_gradient(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in [*module.parameters(), *inputs])


def _has_diverged(signature: Signature, recording: Recording, is_outdated: bool) -> bool:
    """Whether a pass has made other calls than planned, or many others than earlier ones, or `Advised.is_outdated`."""
    if isinstance(recording, Advised) and not recording.is_first:
        return recording.has_left_plan or is_outdated
    policy = recording.policy
    return signature.plan is not None and policy is not None and policy.plan is None


class Signatures:
    """The signatures of a prepared network's inputs.

    `budget`: as `checked` returns it. `strict`: see `Planner.warn_of_excess`.

    Inputs of a new size borrow the plan and the advice of the smallest planned size that has at least their bytes. If
    it has over 1.5 times as many, they are watched once that is cheap. Larger inputs than any planned ones are watched,
    after sixteen sizes at most in one step of ten; others follow the plan of the largest size.
    """

    def __init__(self, budget: float | int | None = None, strict: bool = False) -> None:
        self.budget = budget
        self.strict = strict
        self.recent: list[Signature] = []  # the one used last comes last
        self._planner = None if budget is None else Planner(budget, strict)
        self.gradients = Gradients()
        self._watched_sizes = 0
        self._passes_since_watch = 0

    def recording(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Recording:
        """The context of the next forward pass, called by this frame: with advice, or by the rules alone."""
        is_simple = not kwargs and PLAIN.issuperset(map(type, args))  # a faster path to the same inputs
        inputs = [*args] if is_simple else tensors_in((args, kwargs))
        has_shards = is_sharded(module)
        if current_hooks() is not None:  # hooks around the network decide what is kept
            if self._planner is not None:
                self._planner.warn_once("hooks", _HOOKED)
            return Recording(copy_parameters=has_shards, inputs=inputs, frame=frame)
        if has_shards:  # plans may have been made before FSDP sharded the network
            for signature in self.recent:
                signature.set_coming(None)
        has_mode = bool(function_modes_on() or dispatch_modes_on()) and changing_mode() is not None
        signature = self._signature_of(module, inputs, args, kwargs)
        planner = self._planner
        if planner is None:
            self._renew_advice(signature, inputs)
        else:
            self._renew_plan(planner, module, signature)
            if signature.is_due:
                if has_mode or is_transformed((args, kwargs)) or not _needs_gradient(module, inputs):
                    return self._recording_of(None, inputs, frame, has_shards, has_mode)
                if is_capturing():
                    planner.warn_once("waits", _CAPTURED)
                    return self._recording_of(None, inputs, frame, has_shards, has_mode)
                if not signature.awaits_backward():
                    return self._watched_recording(signature, module, inputs, frame)
        if signature.coming is not None:
            self.gradients.note_overlap()
            if self.gradients.are_coming():
                signature = signature.coming
        return self._recording_of(signature, inputs, frame, has_shards, has_mode)

    def _watched_recording(
        self, signature: Signature, module: nn.Module, inputs: Sequence[Tensor], frame: FrameType
    ) -> WatchedRecording:
        self._note_watched(signature)
        recording = watched_pass(module, inputs, frame)
        recording.signature = signature
        signature.watch = recording.counting
        return recording

    def _note_watched(self, signature: Signature) -> None:
        signature.backward = None
        self._watched_sizes += 1
        self._passes_since_watch = 0

    def _renew_advice(self, signature: Signature, inputs: Sequence[Tensor]) -> None:
        """Without a budget: let the next pass be recorded and learned, if it has to be."""
        pass_bytes = sum([tensor.nbytes for tensor in inputs if is_ordinary(tensor)])
        if signature.must_be_recorded(pass_bytes):
            signature.record(pass_bytes)
        if signature.is_due:
            signature.follow(None)

    def _recording_of(
        self, signature: Signature | None, inputs: Sequence[Tensor], frame: FrameType, has_shards: bool, has_mode: bool
    ) -> Recording:
        """The context of a forward pass by the plan and the advice of its signature, or without one.

        `has_mode`: a mode of the program may change what functions compute.
        """
        planner = self._planner
        if planner is not None and signature is not None and signature.plan is None and not signature.is_due:
            limit = self.budget if isinstance(self.budget, int) else None
            return Recording(copy_parameters=has_shards, inputs=inputs, frame=frame, kept_limit_bytes=limit)
        policy = None
        if planner is not None:
            policy = ByPlan() if signature is None else ByPlan(signature.plan, signature.slack)
        if signature is None or has_mode or is_capturing():
            return Recording(policy, copy_parameters=has_shards, inputs=inputs, frame=frame)
        if planner is not None and signature.plan is not None and signature.lesson in (Lesson.NEW, Lesson.LENT):
            for remark in signature.plan.remarks:
                planner.warn_of_excess(*remark)
        signature.pass_count += 1
        takes_advice = not (signature.is_due or has_shards or None in signature.kind[0])
        if takes_advice and signature.lesson is Lesson.NEW:
            recording: Recording = Advised(Advice(), policy, inputs=inputs, frame=frame)
        elif takes_advice and signature.advice is not None and signature.lesson is Lesson.LEARNED:
            policy = policy and ByPlan()  # sites know what it has decided
            recording = Advised(
                signature.advice, policy, inputs=inputs, frame=frame, earlier=signature.kept, slack=signature.slack
            )
        else:
            recording = Recording(policy, copy_parameters=has_shards, inputs=inputs, frame=frame)
        recording.signature = signature
        return recording

    def _signature_of(
        self, module: nn.Module, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        """The signature of these inputs, which becomes the last one used."""
        kind, size = self._kind_and_size(module, inputs, args, kwargs)
        for signature in self.recent:
            if signature.kind == kind and signature.size == size:
                break
        else:
            signature = Signature(kind, size)
        if self.recent[-1:] != [signature]:
            self._note_use(signature)
        return signature

    def _renew_plan(self, planner: Planner, module: nn.Module, signature: Signature) -> None:
        """Within a budget: plan the steps that were watched, and let the next pass of a signature borrow or be due."""
        for watched in self.recent:
            if watched.watch is not None:
                self._plan_watched(planner, module, watched, watched.watch)
        self._passes_since_watch += 1
        lender = self._lender_for(planner, signature) if signature.plan is None and signature.is_due else None
        if lender is not None:
            signature.borrow(lender, Origin.NEAR if _is_near(signature, lender) else Origin.FAR)
            self._note_use(lender)
            self._note_use(signature)
        elif signature.origin is Origin.FAR and self._may_watch(planner, signature):
            signature.is_due = True

    def _may_watch(self, planner: Planner, signature: Signature) -> bool:
        """Whether a size may be watched that follows, or could follow, the plan of another one."""
        if planner.is_cheap():
            return True
        planned = [candidate for candidate in self.recent if candidate.origin is Origin.OWN]
        is_largest = all(candidate.input_bytes < signature.input_bytes for candidate in planned)
        return is_largest and (self._watched_sizes < _CAPACITY or self._passes_since_watch >= _SELDOM)

    def _plan_watched(self, planner: Planner, module: nn.Module, signature: Signature, watch: Watch) -> None:
        """Plan the passes of a signature, if the step that was watched has ended."""
        if watch.state is State.AWAITS and not watch.in_pass:
            if watch.has_backward:  # what is left of its graph will not run
                watch.conclude()
            elif not watch.is_awaited():  # the program has dropped it
                watch.end(State.LOST)
        if not watch.is_over:
            return
        # Measuring operators waits for the device, and ends a profiler.
        if watch.state is State.COUNTED and (is_capturing() or profiler_runs()):
            if not is_measuring():
                planner.warn_once("waits", _PROFILED)
            return
        signature.watch = None
        if watch.state is State.COUNTED:
            signature.follow_own(planner.plans_of_watch(module, watch))
        elif watch.error is not None:
            planner.warn_of_failure(watch.error)
            signature.follow_own(None)
        else:
            signature.backward = Backward(None)  # which no graph has: watch again after a pass with a backward pass

    def _note_use(self, signature: Signature) -> None:
        """Make this the last one used. At most `_CAPACITY` have a plan of their own, and as many have none."""
        recent = [*(earlier for earlier in self.recent if earlier is not signature), signature]
        for is_own in (False, True):  # a size that was watched gets its own later
            alike = [earlier for earlier in recent if (earlier.origin is Origin.OWN) is is_own]
            for earlier in alike[: max(0, len(alike) - _CAPACITY)]:
                recent.remove(earlier)
        self.recent = recent

    def _lender_for(self, planner: Planner, signature: Signature) -> Signature | None:
        """The planned size whose plan and advice a new one is to borrow; None: it is to be watched."""
        planned = [candidate for candidate in self.recent if candidate.origin is Origin.OWN]
        candidates = [candidate for candidate in planned if candidate.kind == signature.kind]
        larger = [candidate for candidate in candidates if signature.input_bytes <= candidate.input_bytes]
        size = attrgetter("input_bytes")
        nearest = min(larger, key=size, default=None) or max(candidates, key=size, default=None)
        if nearest is None or _is_near(signature, nearest):
            return nearest
        return None if self._may_watch(planner, signature) else nearest

    def pass_has_ended(self, module: nn.Module, recording: Recording, output: object) -> None:
        """Learn advice from a pass, or that its plan no longer holds. `output`: None if it raised an error."""
        signature: Signature | None = recording.signature
        if isinstance(recording, WatchedRecording):
            self._watched_pass_has_ended(module, recording, output)
            return
        if signature is not None and signature.base is not signature:  # gradients came
            self.gradients.await_backward(Backward(output))
        elif signature is not None and signature.is_due:
            signature.backward = Backward(output)
        has_followed = isinstance(recording, Advised) and recording.has_followed
        if signature is None or (has_followed and recording.elsewhere is None):
            return
        planner = self._planner
        is_outdated = isinstance(recording, Advised) and recording.is_outdated
        has_diverged = _has_diverged(signature, recording, is_outdated)
        if planner is not None:
            self._watch_again(planner, signature, recording, is_outdated, has_diverged)
        elif has_diverged and isinstance(recording, Advised):
            signature.note_nodes(recording.node_count)
        if signature.base.is_due or output is None or recording.elsewhere is not None:
            return
        self._learn(signature, recording, has_diverged)

    def _learn(self, signature: Signature, recording: Recording, has_diverged: bool) -> None:
        """Note what a pass has kept, and the advice that it has taught."""
        signature.kept = recording.kept
        if isinstance(recording, Advised) and recording.is_learnable:
            if self._planner is None and not recording.is_first:
                signature.note_functions([site.function for site in recording.unknown_sites])
            if recording.is_first and has_diverged and self._planner is not None and signature.stray_count < _STRAYS:
                signature.stray_count += 1
                return  # a pass that follows the plan teaches more
            fits = signature.plan is not None and signature.plan.fits
            recording.learn(fits=fits and not has_diverged)
            signature.advice = recording.advice
        signature.lesson = Lesson.NONE if signature.advice is None else Lesson.LEARNED
        self.gradients.parameters = []  # new calls may come with new ones

    def _watched_pass_has_ended(self, module: nn.Module, recording: WatchedRecording, output: object) -> None:
        if output is None:
            recording.counting.end(State.LOST)
            recording.signature.watch = None
        else:
            recording.counting.await_backward(module, output)

    def _watch_again(
        self, planner: Planner, signature: Signature, recording: Recording, is_outdated: bool, has_diverged: bool
    ) -> None:
        """Let a step be watched if a pass has made more than the planned one, or if that is cheap, other calls."""
        if recording.elsewhere is not None and not (is_outdated or recording.growth > MORE):
            signature.slack = max(signature.slack, 2 * recording.fluctuation_bytes)
        elif recording.elsewhere is not None or is_outdated:
            signature.base.is_due = True
            if signature.plan is not None:
                signature.base.exceeded_bytes = signature.plan.bytes if recording.growth > MORE else 0
                planner.warn_of_growth(signature.plan, recording)
        elif has_diverged:
            signature.base.is_due = planner.is_cheap()

    def plans_of_example(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Plans:
        """The plans for the size of an example, from a real step. ValueError if that raises an error."""
        assert self._planner is not None
        try:
            return self._planner.plans_of(module, step_of_example(module, args, kwargs))
        except Exception as error:  # a network may raise anything
            raise ValueError(
                f"a step with the example raises {type(error).__name__}: {error}; give an example that the network can "
                f"be trained on, several inputs as a tuple"
            ) from error

    def add_plans(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], plans: Plans) -> None:
        """Let passes with arguments of this size follow plans from their first one on."""
        signature = self._signature_of(module, tensors_in((args, kwargs)), args, kwargs)
        if not is_sharded(module):
            self._note_watched(signature)
        signature.watch = None
        signature.follow_own(plans)

    def share_plans(self) -> None:
        """Use the plans of rank 0 for the inputs on which it has planned the same calls."""
        signatures: dict[Any, Any] = {}
        shared = {}  # without calls, which are alike
        for signature in self.recent:
            plan = signature.plan
            if plan is not None:
                key = signature.kind[:-1], signature.size, tuple(total for _, total in plan.calls)
                signatures[key] = signature
                coming_plan = plan if signature.coming is None else signature.coming.plan
                shared[key] = [bare and replace(bare, calls=(), remarks=()) for bare in (plan, coming_plan)]
        received: list[Any] = [shared]
        dist.broadcast_object_list(received)
        for key in signatures.keys() & received[0].keys():
            if received[0][key] != shared[key]:
                signature = signatures[key]
                plan, coming_plan = (replace(bare, calls=signature.plan.calls) for bare in received[0][key])
                signature.plan = plan
                signature.forget_advice()
                signature.set_coming(None if coming_plan == plan else coming_plan)

    def _kind_and_size(
        self, module: nn.Module, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Size]:
        """The kind of inputs, see `Signature`, and with a budget their sizes.

        The kind holds all that plans depend on. It begins with the inputs' numbers of dimensions (None: a tensor for
        which there is no advice), and ends with the order of their strides, if there is a budget, and their devices.
        """
        devices = tuple([tensor.device.type for tensor in inputs])
        ordinary = [] if self._planner is None else [tensor for tensor in inputs if is_ordinary(tensor)]
        kind = (
            tuple([tensor.dim() if type(tensor) in PLAIN and is_ordinary(tensor) else None for tensor in inputs]),
            tuple([(tensor.dtype, tensor.requires_grad) for tensor in inputs]),
            tuple([argument if isinstance(argument, _CHOICES) else ... for argument in args]),
            tuple([(name, argument if isinstance(argument, _CHOICES) else ...) for name, argument in kwargs.items()]),
            self.gradients.trained_flags(module),
            module.training,
            devices,
            is_any_autocast_enabled() and tuple([autocast_of(device) for device in devices]),
            tuple(map(_stride_order, ordinary)),
            tuple([tensor.device for tensor in inputs]),
        )
        if self._planner is None:
            return kind, ((), ())
        dimensions = tuple([size for tensor in ordinary for size in tensor.shape])
        return kind, (dimensions, tuple([tensor.nbytes for tensor in ordinary]))
