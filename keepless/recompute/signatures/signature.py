"""Signatures of a network's inputs, and what passes with such inputs follow: a script, and with a budget a plan."""

import weakref
from collections.abc import Callable, Sequence
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
from ..entries.entry import Script
from ..entries.following import Following
from ..entries.learning import Lesson, grown, script_of
from ..entries.plan import ByPlan, Plan
from ..entries.recording import Recording
from ..step.sharded import is_sharded, may_have_buckets
from .plans import Planned, Planner, Plans

_MOST = 16  # signatures with plans of their own, and as many others; the least recently used one goes
_LARGER = 1.5  # an input may borrow the plan of a size with at most this many times its bytes
_PATIENCE = 100  # passes before the third attempt, and how many times as many before each further one
_OPTIMIZERS = "_in_backward_optimizers"  # attribute of parameters whose optimiser steps in the backward pass
_CHOICES = (bool, type(None))  # types of arguments that may choose a path

_Size = tuple[tuple[int, ...], tuple[int, ...]]  # all dimensions of inputs, and the bytes of each


class Way:
    """What passes of a signature follow."""

    def __init__(self, planned: Planned | None = None, script: Script | None = None) -> None:
        self.planned, self.script = planned, script
        self.is_new = True  # no pass has ended since the last attempt

    @property
    def plan(self) -> Plan | None:
        return None if self.planned is None else self.planned.plan


class Signature:
    """Inputs whose passes follow the same script, and with a budget, where they have one size, the same plan.

    While it is due, the next pass is an attempt: it gets a plan, is recorded, and is learned as a script, which further
    passes follow. If one diverges, the signature is due again; but for the third time only after 100 passes, for the
    fourth after 10,000, because a network may take several paths at random.

    Passes before which no parameter has a gradient may have a way of their own: see `Plans`.
    """

    def __init__(self, kind: tuple[Any, ...], size: _Size) -> None:
        self.kind, self.size = kind, size  # kind: what does not depend on the size
        self.passes = self.attempts = 0
        self.is_due = True
        self.has_missed = False  # already the pass for which a plan was made has left it
        self.is_own = False  # the plans were made for this size
        self.there = self.coming = Way()

    def attempt(self, there: Way, coming: Way, is_own: bool = True) -> None:
        """Record the next passes, and learn their scripts unless there is one."""
        self.there, self.coming, self.is_own = there, coming, is_own and there.planned is not None
        self.is_due, self.attempts = False, self.attempts + 1

    @property
    def plans(self) -> Plans | None:
        there, coming = self.there.planned, self.coming.planned
        return None if there is None or coming is None else Plans(there, coming)


class _Backward:
    """Notes that a backward pass has begun. It exists as long as the graph."""

    has_begun = False

    def __call__(self, gradients: Sequence[Tensor | None]) -> None:
        self.has_begun = True


def _backward_of(outputs: object) -> "weakref.ref[_Backward]":
    found = _Backward()
    for one in tensors_in(outputs):
        if one.grad_fn is not None:
            one.grad_fn.register_prehook(found)
    return weakref.ref(found)


def _ways(plans: Plans | None, of: Signature | None = None) -> tuple[Way, Way]:
    """Ways with these plans, and with the scripts of a signature that has the same ones."""
    there, coming = (None, None) if plans is None else plans
    scripts = (None, None) if of is None else (of.there.script, of.coming.script)
    found = Way(there, scripts[0])
    return found, found if coming is there else Way(coming, scripts[1])


class Signatures:
    """The signatures of a prepared network's inputs. `budget`: as `checked` returns it.

    Inputs of a new size borrow the plan and the script of the smallest planned size that has at least their bytes,
    and at most 1.5 times as many. If their results are larger than planned, they get a plan of their own.
    """

    def __init__(self, budget: float | int | None = None) -> None:
        self.budget = budget
        self.known: list[Signature] = []  # the one used last comes last
        self._planner = None if budget is None else Planner(budget)
        self._parameters: list[Any] = []
        self._awaited: Callable[[], _Backward | None] = lambda: (
            None
        )  # of the last pass before which no gradient was there
        self._overlap = False  # several forward passes come before a backward pass

    def recording(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType
    ) -> Recording:
        """The context of the next forward pass, called by this frame: the pass follows a script, or is recorded."""
        is_simple = not kwargs and PLAIN.issuperset(map(type, args))  # a faster path to the same result
        inputs, has_shards = [*args] if is_simple else tensors_in((args, kwargs)), is_sharded(module)
        if current_hooks() is not None:  # hooks around the network decide what is kept
            return Recording(copy_parameters=has_shards, inputs=inputs, frame=frame)
        changes = (function_modes_on() or dispatch_modes_on()) and changing_mode() is not None
        one = self.of_pass(module, inputs, args, kwargs, not changes)
        way = None if one is None else self._way(one)
        policy = None if self._planner is None else ByPlan(None if way is None else way.plan)
        recording = Recording(policy, copy_parameters=has_shards, inputs=inputs, frame=frame)
        if one is None or way is None or changes or is_capturing():
            return recording
        script, is_learnable = way.script, not has_shards and None not in one.kind[0]
        if is_learnable and script is not None and not way.is_new:
            recording = Following(script, policy is not None, inputs=inputs, frame=frame)
        elif is_learnable and script is None and way.is_new:
            recording.lesson = Lesson()
        recording.followed = one, way
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
        for one in self.known:
            if one.kind == kind and one.size == size:
                break
        else:
            one = Signature(kind, size)
        if one.is_due and self._planner is None:
            one.attempt(*_ways(None))
        elif one.is_due and (larger := self._to_borrow_from(one)) is not None:
            self._use(larger)
            one.attempt(*_ways(larger.plans, larger), is_own=False)
        elif one.is_due and self._planner is not None:
            if not may_plan or is_transformed((args, kwargs)):  # a program that asks for a Jacobian or a graph
                return None
            if not (is_capturing() or profiler_runs()):  # measuring waits for the device, or ends the profiler
                one.attempt(*_ways(self._planner.plan(module, args, kwargs, one.plans, one.has_missed)))
            elif one.attempts == 0:
                self._planner.say_that_it_waits(is_capturing())
                return None
        one.passes += 1
        if self.known[-1:] != [one]:
            self._use(one)
        return one

    def _way(self, one: Signature) -> Way:
        """What the next pass follows."""
        way = one.coming if one.coming is not one.there and self._gradients_come() else one.there
        if self._planner is not None and way.is_new and way.planned is not None:
            self._planner.say(way.planned.remarks)
        return way

    def _gradients_come(self) -> bool:
        """Whether each gradient of the next pass surely takes new memory, and stays there.

        Not if it is there already, if DDP has memory for it, if an optimiser or another hook takes it away, or if an
        earlier pass still awaits its backward pass: then the gradients of both come once.
        """
        awaited = self._awaited()
        self._overlap = self._overlap or (awaited is not None and not awaited.has_begun)
        if self._overlap or may_have_buckets():
            return False
        for owner, name in self._parameters:
            one = owner()._parameters[name]
            if one.requires_grad:
                is_taken = not one.is_leaf or one._post_accumulate_grad_hooks or _OPTIMIZERS in one.__dict__
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
        """The smallest planned size whose plan and script a new one may borrow."""
        bytes = sum(one.size[1])
        alike = [other for other in self.known if other.is_own and other.kind == one.kind]
        larger = [other for other in alike if bytes <= sum(other.size[1]) <= _LARGER * bytes]
        return min(larger, key=lambda other: sum(other.size[1]), default=None) if one.attempts == 0 else None

    def pass_has_ended(self, module: nn.Module, recording: Recording, output: object) -> None:
        """Learn from a pass: a script, or the calls that differed from it. `output`: None if it raised an error."""
        policy = recording.policy
        one, way = recording.followed
        if self._planner is not None and self._planner.must_plan_again(has_raised=output is None) and one is not None:
            one.is_due = True
        if way is not None and way is not one.there:
            self._awaited = _backward_of(output)
        if one is None or way is None or (isinstance(recording, Following) and recording.has_followed):
            return
        if isinstance(recording, Following):
            has_diverged = recording.leaves or recording.is_outdated
        else:
            has_diverged = way.plan is not None and policy is not None and policy.plan is None
        if has_diverged and one.passes >= _PATIENCE ** (one.attempts - 1):
            one.is_due, one.has_missed = True, one.is_own and way.is_new
            if isinstance(recording, Following) and recording.is_outdated:
                one.there.planned = None  # also if the calls are the same
        elif has_diverged and self._planner is not None:
            self._planner.say_that_it_leaves(module, recording.left if policy is None else policy.left, way.is_new)
        if one.is_due or output is None:
            return
        if isinstance(recording, Following):
            if recording.lesson is not None and (recording.left_at is not None or not recording.leaves):
                script = grown(recording.script, recording.lesson, recording.places, recording.kept)
                way.script = script or way.script
        elif recording.lesson is not None:
            plan = None if has_diverged else way.plan
            way.script = script_of(recording.lesson, recording.kept, plan)
        elif (script := way.script) is not None:
            way.script = script._replace(kept=recording.kept)
        way.is_new, self._parameters = False, []  # new calls may come with new parameters

    def plan_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for a size before its first pass. ValueError if the network cannot be rehearsed on it."""
        if (one := self.of_pass(module, tensors_in((args, kwargs)), args, kwargs)) is not None:
            self._way(one)  # says what users should know
        if self._planner is not None and (error := self._planner.error) is not None:
            raise ValueError(
                f"a step on a copy of the network with the example raises {type(error).__name__}: {error}; give an "
                f"example that the network can be trained on, several inputs as a tuple"
            ) from error

    def share(self) -> None:
        """Use the plans of rank 0 for the inputs on which it has planned the same calls."""
        mine: dict[Any, tuple[Signature, list[Plan]]] = {}
        for one in self.known:
            if (plans := one.plans) is not None:
                key = one.kind[:-1], one.size, tuple(total for _, total in plans.there.plan.calls)
                mine[key] = one, [planned.plan for planned in plans]
        theirs: list[Any] = [{key: [vars(plan) | {"calls": ()} for plan in plans] for key, (_, plans) in mine.items()}]
        dist.broadcast_object_list(theirs)
        for key in mine.keys() & theirs[0].keys():
            one, own = mine[key]
            shared = [Plan(**found | {"calls": own[0].calls}) for found in theirs[0][key]]
            if shared != own:
                there, coming = (Planned(plan, []) for plan in shared)
                one.there, one.coming = _ways(Plans(there, there if coming == there else coming))

    def _described(
        self, module: nn.Module, inputs: Sequence[Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], _Size]:
        """The kind of inputs, see `Signature`, and with a budget their sizes.

        The kind holds all that plans depend on; a script notices other differences itself. It begins with the inputs'
        numbers of dimensions (None: a tensor that no script takes), and ends with their devices.
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
        owned = [(one, name, own) for one in module.modules() for name, own in one._parameters.items()]
        self._parameters = [(weakref.ref(one), name) for one, name, own in owned if own is not None]
        return tuple([one.requires_grad for one in module.parameters()])
