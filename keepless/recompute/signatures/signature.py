"""Signatures of a network's inputs, and what passes with such inputs get: advice, and within a budget a plan."""

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
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
    post_accumulate_hooks,
    profiler_runs,
)
from ..passes.advice import Advice
from ..passes.advised import Advised
from ..passes.plan import MORE, ByPlan, Plan
from ..passes.recording import Recording
from ..passes.report import KeptTensor
from ..step.costs import measures
from ..step.sharded import is_sharded, may_have_buckets
from ..step.stand_ins import OPTIMIZERS
from ..step.watch import State, Watch, Watched
from .plans import Planner, Plans
from .watched import step_of_example, watched_pass

_MOST = 16  # signatures with plans of their own, and as many others; the least recently used one goes
_LARGER = 1.5  # the plan of a size with at most so many times an input's bytes is good enough for the input
_SELDOM = 10  # in one step of so many a larger size is watched, once there were many sizes
_TRIES = 4  # steps that are watched to meet one as large as one that was larger than planned
_HOOKED = (
    "the budget is ignored in passes inside a checkpoint, save_on_cpu or other saved-tensor hooks, which decide what "
    "is kept: call the network outside of them, or prepare it without a budget"
)
_CHOICES = (bool, type(None))  # types of arguments that may choose a path

_Size = tuple[tuple[int, ...], tuple[int, ...]]  # all dimensions of inputs, and the bytes of each


class Signature:
    """Inputs whose passes share advice, and with a budget, where they have one size, the same plan.

    While it is due, the next pass is an attempt: without a budget its calls are learned as advice for further ones;
    within one the whole step is watched, and the pass after it gets a plan.
    Without a budget, some passes are recorded by the rules whatever happened: see `must_be_recorded`.
    """

    def __init__(self, kind: tuple[Any, ...], size: _Size, is_coming: bool = False) -> None:
        self.kind = kind  # what does not depend on the size
        self.size = size
        self.is_coming = is_coming  # only of passes before which no parameter has a gradient: see `Plans`
        self.base = self  # the one of all passes with these inputs
        self.coming: Signature | None = None  # the one of such passes, if they follow another plan
        self.passes = self.attempts = 0
        self.is_due = True
        self.is_new = True  # no pass has ended since the last attempt
        self.larger = 0  # bytes of the results of a plan that were too few for a pass, until there are more
        self.tries = 0  # steps that were watched since
        self.strays = 0  # passes that have left the plan, before one that has followed it
        self.slack = 0  # bytes of results that a pass may make too early, as experts with more tokens than others do
        self.watch: Watch | None = None  # the last step that was watched, until it is planned
        self.marker: _Backward | None = None  # of the last pass, if no backward pass has followed the watched one
        self.plan: Plan | None = None
        self.is_own = False  # the plan was made for this size
        self.is_far = False  # the plan was made for another size, and there may be a much faster one
        self.advice: Advice | None = None
        self.kept: Sequence[KeptTensor] = ()  # by the last pass that was not like earlier ones
        # Without a budget
        self.bytes = 0  # the most bytes of inputs of a pass that was recorded
        self.nodes = 0  # the most nodes of a pass that had a longer graph than recorded ones
        self.functions = frozenset[Any]()  # of calls that recorded passes lack
        self.is_unlike = False  # the last pass had more nodes, or a new function

    def must_be_recorded(self, bytes: int) -> bool:
        """Whether the next pass, with inputs of so many bytes, is recorded by the rules: no unusual pass decides long.

        Passes k + 2**k are (3, 6, 11, 20, 37, …, so that what comes every second or fourth pass is not met alone); so
        are those with over twice the inputs of recorded ones, or after a pass with calls that these lack: of another
        function, or for a longer graph than any pass before.
        """
        number = self.passes + 1
        k = number.bit_length() - 1
        return self.is_unlike or number == k + 2**k or bytes > 2 * self.bytes

    def note_recorded(self, bytes: int) -> None:
        """Note that the next pass, with inputs of so many bytes, is recorded."""
        self.bytes = max(self.bytes, bytes)
        self.is_unlike = False

    def note_functions(self, functions: Iterable[Any]) -> None:
        """Note that a pass had calls of these functions that recorded ones lack."""
        count = len(self.functions)
        self.functions = self.functions.union(functions)
        self.is_unlike = self.is_unlike or len(self.functions) > count

    def note_nodes(self, nodes: int) -> None:
        """Note that a pass had a longer graph than recorded ones."""
        self.is_unlike = nodes > self.nodes
        self.nodes = max(self.nodes, nodes)

    def attempt(self, plan: Plan | None, is_own: bool = True, advice: Advice | None = None) -> None:
        """Let the next pass follow a plan, and learn advice unless there is some."""
        self.plan = plan
        self.advice = advice
        self.is_own = is_own and plan is not None
        self.is_far = False
        self.is_due = False
        self.is_new = True
        self.attempts += 1
        self.strays = 0

    def plan_passes(self, plans: Plans | None) -> None:
        """Give new plans to the passes."""
        plan, coming_plan = (None, None) if plans is None else plans
        self.attempt(plan)
        self.set_coming(None if coming_plan is plan else coming_plan)
        is_smaller = plan is not None and plan.bytes < MORE * self.larger
        self.is_due = is_smaller and self.tries < _TRIES
        if self.is_due:
            self.tries += 1
        else:
            self.larger = 0
            self.tries = 0

    def borrow(self, lender: "Signature") -> None:
        """Follow the plan and the advice of another size."""
        self.attempt(lender.plan, is_own=False, advice=lender.advice)
        if lender.coming is not None:
            self.set_coming(lender.coming.plan, is_own=False, advice=lender.coming.advice)

    def set_coming(self, plan: Plan | None, is_own: bool = True, advice: Advice | None = None) -> None:
        """Give passes before which no parameter has a gradient a plan of their own; None: they have none."""
        self.coming = None if plan is None else Signature(self.kind, self.size, is_coming=True)
        if self.coming is not None:
            self.coming.base = self
            self.coming.attempt(plan, is_own, advice)
            self.coming.attempts = self.attempts

    def awaits_backward(self) -> bool:
        """Whether the pass that was watched, or one after it, still waits for its backward pass."""
        if self.watch is not None:
            return self.watch.is_awaited()
        return self.marker is not None and not self.marker.has_begun


class _Backward:
    """Notes that a backward pass has begun. It exists as long as the graph.

    A pass that makes a graph itself, as for a penalty on gradients, keeps the network's: another one follows.
    """

    has_begun = False

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        self.has_begun = self.has_begun or not torch.is_grad_enabled()


def _order(tensor: Tensor) -> tuple[int, ...]:
    """The dimensions in the order of their strides; none if that is their own order."""
    if tensor.is_contiguous():
        return ()
    strides = tensor.stride()
    return tuple(sorted(range(len(strides)), key=strides.__getitem__))


def _bytes(signature: Signature) -> int:
    return sum(signature.size[1])


def _is_near(signature: Signature, lender: Signature) -> bool:
    return _bytes(signature) <= _bytes(lender) <= _LARGER * _bytes(signature)


def _learns(module: nn.Module, inputs: Sequence[Tensor]) -> bool:
    return any(tensor.requires_grad for tensor in [*module.parameters(), *inputs])


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
        self._parameters: list[Any] = []
        self._awaited: weakref.ref[_Backward] | None = None  # of the last pass before which no gradient was there
        self._has_overlap = False  # several forward passes come before a backward pass
        self._watched_sizes = 0
        self._passes_since = 0  # a size was watched

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
        has_changing_mode = bool(function_modes_on() or dispatch_modes_on()) and changing_mode() is not None
        signature = self._signature(module, inputs, args, kwargs)
        planner = self._planner
        is_ignored = False
        if planner is None:
            self._renew_advice(signature, inputs)
        else:
            self._renew_plan(module, signature)
            if not signature.is_due:
                pass
            elif has_changing_mode or is_transformed((args, kwargs)) or not _learns(module, inputs):
                is_ignored = True
            elif is_capturing():
                planner.warn_once(
                    "waits", "a CUDA graph is captured without a plan: run three steps before the capture"
                )
                is_ignored = True
            elif not signature.awaits_backward():
                self._note_watched(signature)
                recording = watched_pass(module, inputs, frame)
                recording.signature = signature
                signature.watch = recording.counting
                return recording
        if is_ignored:
            return self._unwatched(None, inputs, frame, has_shards, has_changing_mode)
        if signature.coming is not None:
            self._note_overlap()
            if self._gradients_come():
                signature = signature.coming
        return self._unwatched(signature, inputs, frame, has_shards, has_changing_mode)

    def _renew_advice(self, signature: Signature, inputs: Sequence[Tensor]) -> None:
        """Without a budget: let the next pass be recorded and learned, if it has to be."""
        bytes = sum([tensor.nbytes for tensor in inputs if is_ordinary(tensor)])
        if signature.must_be_recorded(bytes):
            signature.note_recorded(bytes)
            signature.advice = None
            signature.is_new = True
        if signature.is_due:
            signature.attempt(None)

    def _unwatched(
        self,
        signature: Signature | None,
        inputs: Sequence[Tensor],
        frame: FrameType,
        has_shards: bool,
        has_changing_mode: bool,
    ) -> Recording:
        """The context of a forward pass by the plan and the advice of its signature, or without one.

        `has_changing_mode`: a mode of the program may change what functions compute.
        """
        planner = self._planner
        if planner is not None and signature is not None and signature.plan is None and not signature.is_due:
            beyond = self.budget if isinstance(self.budget, int) else None
            return Recording(copy_parameters=has_shards, inputs=inputs, frame=frame, beyond=beyond)
        policy = None
        if planner is not None:
            policy = ByPlan() if signature is None else ByPlan(signature.plan, signature.slack)
        recording = Recording(policy, copy_parameters=has_shards, inputs=inputs, frame=frame)
        if signature is None or has_changing_mode or is_capturing():
            return recording
        if planner is not None and signature.is_new and signature.plan is not None:
            for remark in signature.plan.remarks:
                planner.warn_of_excess(*remark)
        signature.passes += 1
        if not (signature.is_due or has_shards or None in signature.kind[0]):
            if signature.advice is not None and not signature.is_new:
                policy = policy and ByPlan()  # sites know what it has decided
                recording = Advised(
                    signature.advice,
                    policy,
                    inputs=inputs,
                    frame=frame,
                    earlier=signature.kept,
                    slack=signature.slack,
                )
            elif signature.advice is None and signature.is_new:
                recording = Advised(Advice(), policy, inputs=inputs, frame=frame)
        recording.signature = signature
        return recording

    def _signature(
        self, module: nn.Module, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Signature:
        """The signature of these inputs, which becomes the last one used."""
        kind, size = self._described(module, inputs, args, kwargs)
        for signature in self.recent:
            if signature.kind == kind and signature.size == size:
                break
        else:
            signature = Signature(kind, size)
        if self.recent[-1:] != [signature]:
            self._use(signature)
        return signature

    def _renew_plan(self, module: nn.Module, signature: Signature) -> None:
        """Within a budget: plan the steps that were watched, and let the next pass of a signature borrow or be due."""
        for watched in self.recent:
            if watched.watch is not None:
                self._plan_watched(module, watched, watched.watch)
        self._passes_since += 1
        lender = self._lender(signature) if signature.plan is None and signature.is_due else None
        if lender is not None:
            signature.borrow(lender)
            signature.is_far = not _is_near(signature, lender)
            self._use(lender)
            self._use(signature)
        elif signature.is_far and self._may_watch(signature):
            signature.is_due = True

    def _may_watch(self, signature: Signature) -> bool:
        """Whether a size may be watched that follows, or could follow, the plan of another one."""
        assert self._planner is not None
        if self._planner.is_cheap():
            return True
        is_largest = all(_bytes(planned) < _bytes(signature) for planned in self.recent if planned.is_own)
        return is_largest and (self._watched_sizes < _MOST or self._passes_since >= _SELDOM)

    def _plan_watched(self, module: nn.Module, signature: Signature, watch: Watch) -> None:
        """Plan the passes of a signature, if the step that was watched has ended."""
        planner = self._planner
        assert planner is not None
        if watch.state is State.AWAITS and not watch.in_pass:
            if watch.has_backward:  # what is left of its graph will not run
                watch.concludes()
            elif not watch.is_awaited():  # the program has dropped it
                watch.end(State.LOST)
        if not watch.is_over:
            return
        # Measuring operators waits for the device, and ends a profiler.
        if watch.state is State.COUNTED and (is_capturing() or profiler_runs()):
            if not measures():
                planner.warn_once("waits", "a PyTorch profiler is running: the budget is planned once it has ended")
            return
        signature.watch = None
        if watch.state is State.COUNTED:
            signature.plan_passes(planner.plans_of_watch(module, watch))
        elif watch.error is not None:
            planner.warn_of_failure(watch.error)
            signature.plan_passes(None)
        else:
            signature.marker = _Backward()  # which no graph has: watch again after a pass with a backward pass

    def _note_watched(self, signature: Signature) -> None:
        signature.marker = None
        self._watched_sizes += 1
        self._passes_since = 0

    def _note_overlap(self) -> None:
        """Note whether an earlier pass still awaits its backward pass as the next one begins."""
        awaited = None if self._awaited is None else self._awaited()
        self._has_overlap = self._has_overlap or (awaited is not None and not awaited.has_begun)

    def _gradients_come(self) -> bool:
        """Whether each gradient of the next pass takes new memory, and stays there, as far as a parameter shows it.

        Not if it is there already, if DDP has memory for it, if an optimiser or post-accumulate hook may take it away,
        or if an earlier pass has awaited its backward pass: then the gradients of both come once.
        """
        if self._has_overlap or may_have_buckets():
            return False
        for owner, name in self._parameters:
            parameter = owner()._parameters[name]
            if parameter.requires_grad:
                is_taken = not parameter.is_leaf or post_accumulate_hooks(parameter) or OPTIMIZERS in parameter.__dict__
                if is_taken or parameter.grad is not None:
                    return False
        return True

    def _use(self, signature: Signature) -> None:
        """Make this the last one used. At most `_MOST` have a plan of their own, and as many have none."""
        recent = [*(earlier for earlier in self.recent if earlier is not signature), signature]
        for is_own in (False, True):  # a size that was watched gets its own later
            alike = [earlier for earlier in recent if earlier.is_own is is_own]
            for earlier in alike[: max(0, len(alike) - _MOST)]:
                recent.remove(earlier)
        self.recent = recent

    def _lender(self, signature: Signature) -> Signature | None:
        """The planned size whose plan and advice a new one is to borrow; None: it is to be watched."""
        planned = [candidate for candidate in self.recent if candidate.is_own and candidate.kind == signature.kind]
        larger = [candidate for candidate in planned if _bytes(signature) <= _bytes(candidate)]
        nearest = min(larger, key=_bytes, default=None) or max(planned, key=_bytes, default=None)
        if nearest is None or _is_near(signature, nearest):
            return nearest
        return None if self._may_watch(signature) else nearest

    def pass_has_ended(self, module: nn.Module, recording: Recording, output: object) -> None:
        """Learn advice from a pass, or that its plan no longer holds. `output`: None if it raised an error."""
        signature: Signature | None = recording.signature
        if isinstance(recording, Watched):
            self._watched_pass_has_ended(module, recording, output)
            return
        if signature is not None and (signature.is_coming or signature.is_due):
            self._await_backward(signature, output)
        has_followed = isinstance(recording, Advised) and recording.has_followed
        if signature is None or (has_followed and recording.elsewhere is None):
            return
        has_diverged = self._note_divergence(signature, recording)
        if signature.base.is_due or output is None or recording.elsewhere is not None:
            return
        if isinstance(recording, Advised) and recording.is_learnable:
            if self._planner is None and not recording.is_first:
                signature.note_functions([site.function for site in recording.unknown_sites])
            if recording.is_first and has_diverged and self._planner is not None and signature.strays < _TRIES:
                signature.strays += 1
                signature.kept = recording.kept
                return  # a pass that follows the plan teaches more
            fits = signature.plan is not None and signature.plan.fits
            recording.learn(fits=fits and not has_diverged)
            signature.advice = recording.advice
        signature.kept = recording.kept
        signature.is_new = False
        self._parameters = []  # new calls may come with new parameters

    def _await_backward(self, signature: Signature, output: object) -> None:
        """Let it be noted that the backward pass of an output has begun."""
        backward = _Backward()
        for node in [tensor.grad_fn for tensor in tensors_in(output) if tensor.grad_fn is not None]:
            node.register_prehook(backward)
        if signature.is_coming:
            self._awaited = weakref.ref(backward)
        else:
            signature.marker = backward

    def _watched_pass_has_ended(self, module: nn.Module, recording: Watched, output: object) -> None:
        if output is None:
            recording.counting.end(State.LOST)
            recording.signature.watch = None
        else:
            recording.counting.awaits(module, output)

    def _note_divergence(self, signature: Signature, recording: Recording) -> bool:
        """Let a step be watched again if a pass has made more than the planned one, or if that is cheap, other calls.

        Returns whether it has.
        """
        planner = self._planner
        policy = recording.policy
        has_diverged = signature.plan is not None and policy is not None and policy.plan is None
        is_outdated = False
        if isinstance(recording, Advised) and not recording.is_first:
            is_outdated = recording.is_outdated
            has_diverged = recording.has_left_plan or is_outdated
        if planner is None:
            if has_diverged and isinstance(recording, Advised):
                signature.note_nodes(recording.node_count)
        elif recording.elsewhere is not None and not (is_outdated or recording.growth > MORE):
            signature.slack = max(signature.slack, 2 * recording.fluctuation)
        elif recording.elsewhere is not None or is_outdated:
            signature.base.is_due = True
            if signature.plan is not None:
                signature.base.larger = signature.plan.bytes if recording.growth > MORE else 0
                planner.warn_of_growth(signature.plan, recording)
        elif has_diverged:
            signature.base.is_due = planner.is_cheap()
        return has_diverged

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
        signature = self._signature(module, tensors_in((args, kwargs)), args, kwargs)
        if not is_sharded(module):
            self._note_watched(signature)
        signature.watch = None
        signature.plan_passes(plans)

    def share(self) -> None:
        """Use the plans of rank 0 for the inputs on which it has planned the same calls."""
        signatures: dict[Any, Any] = {}
        shared = {}  # without calls, which are alike
        for signature in self.recent:
            plan = signature.plan
            if plan is not None:
                key = signature.kind[:-1], signature.size, tuple(total for _, total in plan.calls)
                coming_plan = plan if signature.coming is None else signature.coming.plan
                assert coming_plan is not None
                signatures[key] = signature
                shared[key] = [replace(bare, calls=(), remarks=()) for bare in (plan, coming_plan)]
        received: list[Any] = [shared]
        dist.broadcast_object_list(received)
        for key in signatures.keys() & received[0].keys():
            if received[0][key] != shared[key]:
                signature = signatures[key]
                plan, coming_plan = (replace(bare, calls=signature.plan.calls) for bare in received[0][key])
                signature.plan = plan
                signature.advice = None
                signature.is_new = True
                signature.set_coming(None if coming_plan == plan else coming_plan)

    def _described(
        self, module: nn.Module, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], _Size]:
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
            self._trained(module),
            module.training,
            devices,
            is_any_autocast_enabled() and tuple([autocast_of(device) for device in devices]),
            tuple(map(_order, ordinary)),
            tuple([tensor.device for tensor in inputs]),
        )
        if self._planner is None:
            return kind, ((), ())
        dimensions = tuple([size for tensor in ordinary for size in tensor.shape])
        return kind, (dimensions, tuple([tensor.nbytes for tensor in ordinary]))

    def _trained(self, module: nn.Module) -> tuple[bool, ...]:
        """Which parameters need gradients. The module is searched again only once one of them is removed.

        There is no weak reference to a parameter: `torch.utils.swap_tensors` refuses tensors that have one.
        """
        if self._parameters:
            try:
                return tuple([owner()._parameters[name].requires_grad for owner, name in self._parameters])
            except (AttributeError, KeyError):  # of None: a module was freed, or has lost a parameter
                pass
        parameters = [
            (owner, name, parameter)
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._parameters = [(weakref.ref(owner), name) for owner, name, _ in parameters]
        return tuple([parameter.requires_grad for _, _, parameter in parameters])  # a tied one comes several times
