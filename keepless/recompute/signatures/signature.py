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
from ..passes.plan import ByPlan, Plan
from ..passes.recording import Recording
from ..passes.report import KeptTensor
from ..step.rehearsal import follows
from ..step.sharded import is_sharded, may_have_buckets
from .plans import Planner, Plans

_MOST = 16  # signatures with plans of their own, and as many others; the least recently used one goes
_LARGER = 1.5  # an input may borrow the plan of a size with at most this many times its bytes
_PATIENCE = 100  # passes before the third attempt, and how many times as many before each further one
_OPTIMIZERS = "_in_backward_optimizers"  # attribute of parameters whose optimiser steps in the backward pass
_HOOKED = (
    "the budget is ignored in passes inside a checkpoint, save_on_cpu or other saved-tensor hooks, which decide what "
    "is kept: call the network outside of them, or prepare it without a budget"
)
_CHOICES = (bool, type(None))  # types of arguments that may choose a path

_Size = tuple[tuple[int, ...], tuple[int, ...]]  # all dimensions of inputs, and the bytes of each


class Signature:
    """Inputs whose passes share advice, and with a budget, where they have one size, the same plan.

    While it is due, the next pass is an attempt: it gets a plan, and its calls are learned as advice for further ones.
    If a pass makes more, or other calls, the signature is due again; but for the third time only after 100 passes, the
    fourth after 10,000, because a network may take several paths at random.

    Without a budget, some passes are recorded by the rules whatever happened: see `must_be_recorded`.
    """

    def __init__(self, kind: tuple[Any, ...], size: _Size, comes: bool = False) -> None:
        self.kind, self.size = kind, size  # kind: what does not depend on the size
        self.comes = comes  # only of passes before which no parameter has a gradient: see `Plans`
        self.coming: Signature | None = None  # the one of such passes, if they follow another plan
        self.passes = self.attempts = 0
        self.is_due = True
        self.is_new = True  # no pass has ended since the last attempt
        self.is_first = False  # the pass is the first one since the network was rehearsed
        self.has_missed = False  # already the pass for which the plan was made has left it
        self.plan: Plan | None = None
        self.is_own = False  # the plan was made for this size
        self.advice: Advice | None = None
        self.kept: Sequence[KeptTensor] = ()  # by the last pass that was not like earlier ones
        # Without a budget: the most bytes of inputs of a pass that was recorded; the functions of calls that came later
        # than in recorded passes; and whether the last pass had a new one.
        self.bytes, self.later, self.lacks = 0, frozenset[Any](), False

    def must_be_recorded(self, inputs: Sequence[Tensor]) -> bool:
        """Whether the next pass is recorded by the rules anew, so that no unusual pass decides for long.

        Passes k + 2**k are (3, 6, 11, 20, 37, …, so that what comes every second or fourth pass is not met alone); so
        are those with over twice the inputs of recorded ones, or after a pass with calls of functions that these lack.
        """
        number, bytes = self.passes + 1, sum([one.nbytes for one in inputs if is_ordinary(one)])
        k = number.bit_length() - 1
        if not (self.lacks or number == k + 2**k or bytes > 2 * self.bytes):
            return False
        self.lacks, self.bytes = False, max(self.bytes, bytes)
        return True

    def note_later(self, functions: Iterable[Any]) -> None:
        """Note that a pass had calls of these functions that recorded ones lack."""
        new = self.later.union(functions)
        self.later, self.lacks = new, len(new) > len(self.later)

    def attempt(self, plan: Plan | None, is_own: bool = True, advice: Advice | None = None) -> None:
        """Let the next pass follow a plan, and learn advice unless there is some."""
        self.plan, self.is_own, self.advice = plan, is_own and plan is not None, advice
        self.is_due, self.is_new, self.has_missed, self.attempts = False, True, False, self.attempts + 1

    def plan_passes(self, plans: Plans | None, one: "Signature") -> None:
        """Give new plans to the passes of `one`, which is due. Other passes keep theirs, unless it no longer holds."""
        there, coming = (None, None) if plans is None else plans
        if self.coming is None or one.plan is None or one.has_missed:
            self.attempt(there)
            self.has_coming(None if coming is there else coming)
        else:
            one.attempt(coming if one.comes else there)

    def borrow(self, larger: "Signature") -> None:
        """Follow the plan and the advice of a larger size."""
        self.attempt(larger.plan, is_own=False, advice=larger.advice)
        if larger.coming is not None:
            self.has_coming(larger.coming.plan, is_own=False, advice=larger.coming.advice)

    def has_coming(self, plan: Plan | None, is_own: bool = True, advice: Advice | None = None) -> None:
        """Give passes before which no parameter has a gradient a plan of their own; None: they have none."""
        self.coming = None if plan is None else Signature(self.kind, self.size, comes=True)
        if self.coming is not None:
            self.coming.attempt(plan, is_own, advice)
            self.coming.attempts = self.attempts


class _Backward:
    """Notes that a backward pass has begun. It exists as long as the graph.

    A pass that makes a graph itself, as for a penalty on gradients, keeps the network's: another one follows.
    """

    has_begun = False

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        self.has_begun = self.has_begun or not torch.is_grad_enabled()


class Signatures:
    """The signatures of a prepared network's inputs. `budget`: as `checked` returns it.

    Inputs of a new size borrow the plan and the advice of the smallest planned size that has at least their bytes,
    and at most 1.5 times as many. If their results are larger than planned, they get a plan of their own. Where sizes
    grow, a larger one than has come is planned, for further ones to borrow: see `Planner.plan_larger`.
    """

    def __init__(self, budget: float | int | None = None) -> None:
        self.budget = budget
        self.known: list[Signature] = []  # the one used last comes last
        self._planner = None if budget is None else Planner(budget)
        self._parameters: list[Any] = []
        self._awaited: weakref.ref[_Backward] | None = None  # of the last pass before which no gradient was there
        self._overlap = False  # several forward passes come before a backward pass

    def recording(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Recording:
        """The context of the next forward pass, called by this frame: with advice, or by the rules alone."""
        is_simple = not kwargs and PLAIN.issuperset(map(type, args))  # a faster path to the same result
        inputs, has_shards = [*args] if is_simple else tensors_in((args, kwargs)), is_sharded(module)
        if current_hooks() is not None:  # hooks around the network decide what is kept
            if self._planner is not None:
                self._planner.say("hooks", _HOOKED)
            return Recording(copy_parameters=has_shards, inputs=inputs, frame=frame)
        for known in self.known if has_shards else ():  # planned before FSDP sharded the network
            known.has_coming(None)
        changes = (function_modes_on() or dispatch_modes_on()) and changing_mode() is not None
        one = self.of_pass(module, inputs, args, kwargs, not changes)
        policy = None if self._planner is None else ByPlan(None if one is None else one.plan)
        recording = Recording(policy, copy_parameters=has_shards, inputs=inputs, frame=frame)
        if one is None or changes or is_capturing():
            return recording
        if not has_shards and None not in one.kind[0]:
            if one.advice is not None and not one.is_new:
                policy = policy and ByPlan()  # sites know what it has decided
                recording = Advised(one.advice, policy, inputs=inputs, frame=frame, earlier=one.kept)
            elif one.advice is None and one.is_new:
                recording = Advised(Advice(), policy, inputs=inputs, frame=frame)
        recording.signature = one
        return recording

    def of_pass(
        self,
        module: nn.Module,
        inputs: Sequence[Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        may_plan: bool = True,
    ) -> Signature | None:
        """The signature of the next pass; None if it has no plan, and none can be made now, or may be."""
        kind, size = self._described(module, inputs, args, kwargs)
        for known in self.known:
            if known.kind == kind and known.size == size:
                break
        else:
            known = Signature(kind, size)
        one = self._of_gradients(known)
        was_due = one.is_due
        if self._planner is None:
            if one.must_be_recorded(inputs) and not one.is_due:
                one.advice, one.is_new = None, True
            elif one.is_due:
                one.attempt(None)
        elif one.is_due and (larger := self._to_borrow_from(one)) is not None:
            one.borrow(larger)
            self._use(larger)
        elif one.is_due and self._planner is not None:
            if not may_plan or is_transformed((args, kwargs)):  # a program that asks for a Jacobian or a graph
                return None
            if not (is_capturing() or profiler_runs()):  # measuring waits for the device, or ends the profiler
                if (larger := self._with_room(module, args, kwargs, one)) is not None:
                    one.borrow(larger)
                else:
                    known.plan_passes(self._planner.plan(module, args, kwargs, one.plan, one.has_missed), one)
            elif one.attempts == 0:
                cure = "a CUDA graph is captured without a plan: run three steps before the capture"
                later = "a PyTorch profiler is running: the budget is planned once it has ended"
                self._planner.say("waits", cure if is_capturing() else later)
                return None
        one = self._of_gradients(known) if was_due else one
        if self._planner is not None and one.is_new and one.plan is not None:
            for remark in one.plan.remarks:
                self._planner.say(*remark)
        one.is_first = known.is_new and (known.coming is None or known.coming.is_new)
        one.passes += 1
        if self.known[-1:] != [known]:
            self._use(known)
        return one

    def _of_gradients(self, one: Signature) -> Signature:
        """The signature of the next pass, by the gradients before it."""
        return one if one.coming is None or not self._gradients_come() else one.coming

    def _gradients_come(self) -> bool:
        """Whether each gradient of the next pass takes new memory, and stays there, as far as a parameter shows it.

        Not if it is there already, if DDP has memory for it, if an optimiser or post-accumulate hook may take it away,
        or if an earlier pass still awaits its backward pass: then the gradients of both come once.
        """
        awaited = None if self._awaited is None else self._awaited()
        self._overlap = self._overlap or (awaited is not None and not awaited.has_begun)
        if self._overlap or may_have_buckets():
            return False
        for owner, name in self._parameters:
            one = owner()._parameters[name]
            if one.requires_grad:
                is_taken = not one.is_leaf or post_accumulate_hooks(one) or _OPTIMIZERS in one.__dict__
                if is_taken or one.grad is not None:
                    return False
        return True

    def _use(self, one: Signature) -> None:
        """Make this the last one used. At most `_MOST` have a plan of their own, and as many have none."""
        others = [other for other in self.known if other is not one]
        alike = [other for other in others if other.is_own is one.is_own]
        if len(alike) == _MOST:
            others.remove(alike[0])
        self.known = [*others, one]

    def _to_borrow_from(self, one: Signature) -> Signature | None:
        """The smallest planned size whose plan and advice a new one may borrow."""
        bytes = sum(one.size[1])
        alike = [other for other in self.known if other.is_own and other.kind == one.kind]
        larger = [other for other in alike if bytes <= sum(other.size[1]) <= _LARGER * bytes]
        return min(larger, key=lambda other: sum(other.size[1]), default=None) if one.attempts == 0 else None

    def _with_room(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], one: Signature
    ) -> Signature | None:
        """A planned size with up to 1.5 times the bytes of a new one, if that is larger than one that was planned."""
        bytes = sum(one.size[1])
        alike = [other for other in self.known if other.is_own and other.kind == one.kind and one.attempts == 0]
        smaller = [other for other in alike if sum(other.size[1]) < bytes <= _LARGER * sum(other.size[1])]
        if self._planner is None or not self._planner.has_room or not smaller:
            return None
        before = max(smaller, key=lambda other: sum(other.size[1]))
        if (planned := self._planner.plan_larger(module, args, kwargs, before.size[0], _LARGER)) is None:
            return None
        given, plans = planned
        larger = Signature(*self._described(module, tensors_in(given), *given))
        larger.plan_passes(plans, larger)
        self._use(larger)
        return larger

    def pass_has_ended(self, module: nn.Module, recording: Recording, output: object) -> None:
        """Learn advice from a pass, or that its plan no longer holds. `output`: None if it raised an error."""
        one, policy = recording.signature, recording.policy
        if self._planner is not None and self._planner.must_plan_again(has_raised=output is None) and one is not None:
            one.is_due = True
        if one is not None and one.comes:
            backward = _Backward()
            for node in [made.grad_fn for made in tensors_in(output) if made.grad_fn is not None]:
                node.register_prehook(backward)
            self._awaited = weakref.ref(backward)
        if one is None or (isinstance(recording, Advised) and recording.has_followed):
            return
        has_diverged = one.plan is not None and policy is not None and policy.plan is None
        left = None if policy is None else policy.left
        is_outdated = False
        if isinstance(recording, Advised) and (is_outdated := recording.is_outdated):
            if self._planner is not None and one.plan is not None:
                self._planner.say_that_it_grew(one.plan, recording.growth)
        if isinstance(recording, Advised) and not recording.is_first:
            has_diverged, left = recording.leaves or is_outdated, left or recording.left
        if has_diverged and one.passes >= _PATIENCE ** (one.attempts - 1):
            one.is_due, one.has_missed = True, one.is_own and one.is_first
            if is_outdated:
                one.plan = None  # also if the calls are the same
        elif has_diverged and self._planner is not None:
            self._planner.say_that_it_leaves(module, left, one.is_first)
        if one.is_due or output is None:
            return
        if isinstance(recording, Advised) and recording.is_learnable:
            if self._planner is None and not recording.is_first:
                one.note_later([site.function for site in recording.unknown])
            recording.learn(fits=one.plan is not None and one.plan.fits and not has_diverged)
            one.advice = recording.advice
        one.kept = recording.kept
        one.is_new, self._parameters = False, []  # new calls may come with new parameters

    def plan_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for a size before its first pass. ValueError if the network cannot be rehearsed on it."""
        if (planner := self._planner) is None:
            return
        planner.is_early, inputs = True, tensors_in((args, kwargs))
        one = self.of_pass(module, inputs, args, kwargs)
        if one is not None and one.plan is not None and not follows(one.plan, module, args, kwargs):
            one.is_due = one.has_missed = True
            self.of_pass(module, inputs, args, kwargs)
        planner.is_early = False
        if (error := planner.error) is not None:
            raise ValueError(
                f"a step on a copy of the network with the example raises {type(error).__name__}: {error}; give an "
                f"example that the network can be trained on, several inputs as a tuple"
            ) from error

    def share(self) -> None:
        """Use the plans of rank 0 for the inputs on which it has planned the same calls."""
        mine = {}
        for one in self.known:
            if one.plan is not None:
                key = one.kind[:-1], one.size, tuple(total for _, total in one.plan.calls)
                mine[key] = one, Plans(one.plan, one.plan if one.coming is None else one.coming.plan)
        bare = {
            key: [plan and replace(plan, calls=(), remarks=()) for plan in plans] for key, (_, plans) in mine.items()
        }
        theirs: list[Any] = [bare]
        dist.broadcast_object_list(theirs)
        for key in mine.keys() & theirs[0].keys():
            if theirs[0][key] != bare[key]:
                one, plans = mine[key]
                there, coming = (plan and replace(plan, calls=plans.there.calls) for plan in theirs[0][key])
                one.plan, one.advice, one.is_new = there, None, True
                one.has_coming(None if coming == there else coming)

    def _described(
        self, module: nn.Module, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], _Size]:
        """The kind of inputs, see `Signature`, and with a budget their sizes.

        The kind holds all that plans depend on. It begins with the inputs' numbers of dimensions (None: a tensor for
        which there is no advice), and ends with their devices.
        """
        types = tuple([one.device.type for one in inputs])
        kind = (
            tuple([one.dim() if type(one) in PLAIN and is_ordinary(one) else None for one in inputs]),
            tuple([(one.dtype, one.requires_grad) for one in inputs]),
            tuple([one if isinstance(one, _CHOICES) else ... for one in args]),
            tuple([(name, one if isinstance(one, _CHOICES) else ...) for name, one in kwargs.items()]),
            self._trained(module),
            module.training,
            types,
            is_any_autocast_enabled() and tuple([autocast_of(one) for one in types]),
            tuple([one.device for one in inputs]),
        )
        if self._planner is None:
            return kind, ((), ())
        ordinary = [one for one in inputs if is_ordinary(one)]
        return kind, (tuple([size for one in ordinary for size in one.shape]), tuple([one.nbytes for one in ordinary]))

    def _trained(self, module: nn.Module) -> tuple[bool, ...]:
        """Which parameters need gradients. The module is searched again only once one of them is removed.

        There is no weak reference to a parameter: `torch.utils.swap_tensors` refuses tensors that have one.
        """
        if self._parameters:
            try:
                return tuple([owner()._parameters[name].requires_grad for owner, name in self._parameters])
            except (AttributeError, KeyError):  # of None: a module was freed, or has lost a parameter
                pass
        owned = [
            (one, name, own) for one in module.modules() for name, own in one._parameters.items() if own is not None
        ]
        self._parameters = [(weakref.ref(one), name) for one, name, _ in owned]
        return tuple([own.requires_grad for _, _, own in owned])  # a tied one as often as it is there
