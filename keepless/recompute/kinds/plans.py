"""Budgets, and the plans of a prepared network, made from counted steps as new input sizes come."""

import logging
import math
import reprlib
import threading
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, NamedTuple
from weakref import ref

import torch.distributed as dist
from torch import Tensor, nn

from ...inputs import check_module, check_one_example, tensors_in
from ...saved import autocast_of, is_ordinary, size_text
from ...torch_internals import is_capturing, is_compiled, profiler_runs, tree_map, warn
from ...units import UNITS, bytes_of, share_of
from ..entries.plan import ByPlan, Plan
from ..step.closures import has_hooks_of_users
from ..step.rehearsal import rehearsed_step
from ..step.search import Choice, frontier
from ..step.simulation import Simulation, plain_peak, simulate
from ..step.step import Step

_MOST = 16  # planned sizes of one family of inputs; also rehearsals of one size, as there may be several paths
_LARGER = 1.5  # an input may use the plan of a size with at most this many times its bytes
_NEAR = 1.02  # a budget is searched again without the outputs if the lowest peak is at most this many times its bytes
_BLOCK = 512  # bytes: CUDA's allocator rounds to it, so exceeding a budget by less is not reported
_PAUSE = 2.0  # seconds of planning after which a message explains the pause
_log = logging.getLogger(__name__)


@contextmanager
def _pauses_are_explained() -> Iterator[None]:
    """Context of planning. If it takes over two seconds, a warning (shown by default) says why the training waits."""
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
    is more than 1.5 times as large, the pass is rehearsed on a copy, and follows the resulting plan at once. If the
    network takes a path that was not rehearsed, the next passes are, until that path has a plan.
    """

    def __init__(self, budget: float | int):
        self.budget = budget
        self._families: dict[Hashable, list[Size]] = {}  # by what inputs of different sizes have in common
        self._said: set[str] = set()  # subjects of warnings
        self._error: Exception | None = None  # of the last rehearsal
        self._cannot_rehearse = False
        self._differs_on_fakes: bool | None = None  # in its calls, as Hugging Face's attention does. None: not known

    def of_pass(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ByPlan:
        """The policy of the next forward pass."""
        family, given = _described(module, args, kwargs)
        size = self._followed(self._families.get(family, []), given)
        if (captures := is_capturing()) or profiler_runs():  # measuring waits for the device, or ends the profiler
            if size is None:
                cure = "a CUDA graph is captured without a plan: run three steps before the capture"
                later = "a PyTorch profiler is running: the budget is planned once it has ended"
                self._say("waits", cure if captures else later)
            return ByPlan([] if size is None else size.plans)
        if size is None:
            size = self._added(family, given)
        if given == size.given and size.is_unsettled and not self._cannot_rehearse:
            self._rehearse(size, module, args, kwargs)
        size.passes += 1
        return ByPlan(size.plans, size, given)

    def pass_has_ended(self, policy: ByPlan | None, has_raised: bool) -> None:
        """Note whether a pass has left its plans. If its rehearsal alone has raised an error, warn and make no more."""
        if policy is not None and (size := policy.size) is not None:
            rehearsed, size.rehearsed = size.rehearsed, None
            if not policy.plans and policy.given != size.given:  # too large despite fewer bytes, or other calls
                size.serves = min(size.serves, sum(policy.given[1]) - 1)
            elif not policy.plans:
                size.strays, size.missed, size.left = True, rehearsed, policy.left
                if size.rehearsals == _MOST:
                    self._say(
                        "paths", f"steps on paths without a plan, after {_MOST} rehearsals, may exceed the budget"
                    )
        error = self._error
        if error is not None and not has_raised:
            self._error = None
            self._cannot_rehearse = True
            warn(f"no plan can be made, so a step may exceed the budget: {type(error).__name__}: {error}")

    def _say(self, subject: str, message: str) -> None:
        """Warn once about each subject."""
        if subject not in self._said:
            self._said.add(subject)
            warn(message)

    def plan_for(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make the plan for a size before its first pass. ValueError if it cannot be rehearsed."""
        self._rehearse(self._added(*_described(module, args, kwargs)), module, args, kwargs)
        if (error := self._error) is not None:
            raise ValueError(
                f"a step on a copy of the network with the example raises {type(error).__name__}: {error}; give an "
                f"example that the network can be trained on, several inputs as a tuple"
            ) from error

    def share(self) -> None:
        """Use the plans of rank 0 where it has planned the same calls on the same inputs."""
        mine = {
            (family, size.given, tuple(total for _, total in plan.calls)): (size, number, plan)
            for family, sizes in self._families.items()
            for size in sizes
            for number, plan in enumerate(size.plans)
        }
        theirs: list[Any] = [{key: (plan.flags, plan.peak, plan.plain) for key, (_, _, plan) in mine.items()}]
        dist.broadcast_object_list(theirs)
        for key in mine.keys() & theirs[0].keys():
            size, number, plan = mine[key]
            size.plans[number] = Plan(plan.calls, *theirs[0][key])

    @staticmethod
    def _followed(sizes: "Sequence[Size]", given: "_Given") -> "Size | None":
        """The planned size for these inputs: their own, or the smallest that is large enough."""
        own = next((size for size in sizes if size.given == given), None)
        bytes = sum(given[1])
        larger = [one for one in sizes if one.plans and bytes <= one.serves <= _LARGER * bytes]
        return own or min(larger, key=lambda one: one.serves, default=None)

    def _added(self, family: Hashable, given: "_Given") -> "Size":
        """A new size. If there are too many, the one that served the fewest passes is dropped."""
        sizes = self._families.setdefault(family, [])
        if len(sizes) == _MOST:
            sizes.remove(min(sizes, key=lambda size: size.passes))
        sizes.append(Size(given))
        return sizes[-1]

    @_pauses_are_explained()
    def _rehearse(self, size: "Size", module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan the next pass with inputs of a size, unless there is a plan for its calls."""
        size.rehearsals, self._error = size.rehearsals + 1, None
        if not any(one.requires_grad for one in [*module.parameters(), *tensors_in((args, kwargs))]):
            return
        try:
            missed = None if self._differs_on_fakes is not None else size.missed
            step = rehearsed_step(module, args, kwargs, missed is not None or bool(self._differs_on_fakes), self.budget)
            if missed is not None:
                self._differs_on_fakes = step.calls != missed.calls
        except Exception as error:  # a network may raise anything
            self._error = error
            return
        known = next((plan for plan in size.plans if plan.calls == step.calls), None)
        if known is None:
            size.strays = False
            size.plans.append(known := self._planned(step))
            size.plans.sort(key=lambda plan: plan.plain)  # the smallest that is large enough comes first
        elif known is size.missed:
            size.rehearsals = _MOST
            self._say("paths", _unlike(module, size.left))
        size.rehearsed = known

    def _limit(self, step: Step) -> int:
        return self.budget if isinstance(self.budget, int) else int(self.budget * plain_peak(step))

    def _planned(self, rehearsed: Step) -> Plan:
        """The plan of a rehearsed step, with one warning if it may exceed the budget."""
        if not rehearsed.is_whole:
            place = Simulation(rehearsed).peak_of([True] * len(rehearsed.values))
            self._say(
                "missed",
                f"budget={self.budget} changes nothing, because no result of this network can be recomputed; most is "
                f"kept at {place}: train it without a budget, on a smaller batch or shorter inputs",
            )
            return Plan(rehearsed.calls, bytes(len(rehearsed.calls)))
        asked = self._limit(rehearsed)
        step, choice = _chosen(rehearsed, asked)
        least = choice.peak
        _log.info(
            "planned %d calls: a peak of %s instead of %s, for %.1f ms more",
            *(len(step.calls), size_text(choice.peak), size_text(plain_peak(step)), choice.seconds * 1e3),
        )
        if (taken := rehearsed.rehearsal) > asked + _BLOCK:
            self._say(
                "rehearsal",
                f"the first step with a shape takes about {size_text(taken)}, more than {size_text(asked)}: it is "
                f"planned on real tensors, because the network reads values, as x.item() and x[mask] do; remove such "
                f"code from forward, or plan before other memory is taken: recompute_activations(…, example=…)",
            )
        held = least if step is rehearsed else simulate(rehearsed, choice.kept).peak
        if least <= asked + _BLOCK < held:
            self._say(
                "missed",
                f"this step is within {size_text(asked)} only if the program drops the network's outputs before the "
                f"backward pass: while it has a name for them, the peak is {size_text(held)}",
            )
        if least > asked + _BLOCK:
            texts = size_text(asked), size_text(least)
            if texts[0] == texts[1]:
                texts = f"{asked:,} bytes", f"{least:,} bytes"
            place = Simulation(rehearsed).peak_of(choice.kept)
            peak = f"the lowest peak is {texts[1]}, which is used; it is at {place}"
            self._say("missed", f"no plan keeps this step within {texts[0]}: {peak}")
        if step.unseen:
            warn(
                f"a part of the network's forward pass is not planned, because it runs under {step.unseen}: remove "
                f"that, or give a smaller budget, because a step may exceed this one"
            )
        plan, plain = choice.plan(step), plain_peak(step)
        return replace(plan, peak=plain) if plain <= asked else plan  # nothing is recorded: see `ByPlan`


def _chosen(step: Step, limit: int) -> tuple[Step, Choice]:
    """A rehearsed step and its best choice.

    A rehearsal holds the outputs to the end of the step, but the program may drop them earlier. If the budget cannot be
    met with them, they are left out; if it is out of reach without them too, the choice with the lowest peak stays.
    """
    if (choice := _best(step, limit)).peak <= limit:
        return step, choice
    dropped = step.without_outputs()
    least = simulate(dropped, choice.kept).peak
    return dropped, choice._replace(peak=least) if least > _NEAR * limit else _best(dropped, limit)


def _best(step: Step, limit: int) -> Choice:
    """The fastest choice within a limit, or the one with the lowest peak."""
    choices = frontier(step, limit)
    return next((choice for choice in choices if choice.peak <= limit), choices[-1])


def _unlike(network: nn.Module, left: "ref[nn.Module] | None") -> str:
    """The warning about a network whose steps differ from their rehearsals since one of its modules, `left`."""
    names = {id(one): f"{name or 'the network'} ({type(one).__name__})" for name, one in network.named_modules()}
    place = names.get(id(left and left()), "code outside its modules")
    text = f"steps make other calls than their rehearsals, first in {place}, and may exceed the budget, because"
    if compiled := [names[id(one)] for one in network.modules() if is_compiled(one)]:
        return f"{text} calls under torch.compile cannot be seen: leave {compiled[0]} uncompiled"
    if hooked := [names[id(one)] for one in network.modules() if has_hooks_of_users(one)]:
        return f"{text} rehearsals leave out hooks: do in forward what those of {', '.join(hooked[:3])} do to outputs"
    return f"{text} state outside the network chooses the path of a step: keep it in the network"


_Given = tuple[tuple[int, ...], tuple[int, ...]]  # all dimensions of inputs, and the bytes of each


def _described(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Hashable, _Given]:
    """What inputs of different sizes have in common (dtypes, devices, modes, …), and their sizes."""
    inputs = tensors_in((args, kwargs))
    ordinary = [tensor for tensor in inputs if is_ordinary(tensor)]
    forms = tuple(
        (tensor.dim() if is_ordinary(tensor) else None, tensor.dtype, tensor.requires_grad, tensor.device.type)
        for tensor in inputs
    )
    frozen = tuple(number for number, one in enumerate(module.parameters()) if not one.requires_grad)
    devices = {tensor.device.type for tensor in inputs}
    family = (forms, frozen, module.training, *sorted(f"{device} {autocast_of(device)}" for device in devices))
    return family, (tuple(size for one in ordinary for size in one.shape), tuple(one.nbytes for one in ordinary))


class Size:
    """The plans for inputs of one size, also used for smaller inputs."""

    def __init__(self, given: _Given) -> None:
        self.given = given
        self.serves = sum(given[1])  # the most bytes of inputs that use these plans
        self.passes = 0
        self.plans: list[Plan] = []
        self.rehearsals = 0
        self.strays = False  # the network takes paths that have no plan
        self.rehearsed: Plan | None = None  # the plan of the running pass, if this was just rehearsed
        self.missed: Plan | None = None  # the last such plan that the pass has left all the same
        self.left: ref[nn.Module] | None = None  # the module in which a pass has left its plans

    @property
    def is_unsettled(self) -> bool:
        """Whether the next pass is to be rehearsed."""
        return (self.strays or not self.plans) and self.rehearsals < _MOST

    def is_settled_on(self, plan: Plan | None) -> bool:
        """Whether a pass may follow a script of this plan."""
        return any(one is plan for one in self.plans) and not self.is_unsettled


_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_FEWEST = 1000  # bytes: an int such as 1 or 50 was probably meant as a share or as GiB

Budget = float | int | str


def checked(budget: object) -> float | int:
    """A number of bytes (an int), or a share of the plain network's peak (a float). ValueError if it is neither.

    Floats such as `0.8 * free_bytes` are rounded down, and NumPy's numbers are taken too.
    """
    given: object = budget
    if isinstance(budget, str):
        given = bytes_of(budget) or share_of(budget)
    if isinstance(given, Real) and not isinstance(given, bool):
        number = float(given)
        if _FEWEST <= number < math.inf:
            return int(number)
        if 0 < number <= 1 and not isinstance(given, Integral):
            return number
    raise ValueError(
        f"budget={reprlib.repr(budget)}: expected at least {_FEWEST} bytes, such as '6GiB' ({', '.join(UNITS)}) or "
        f"{6 * 2**30}, or a share of the plain network's peak up to 1.0, such as 0.3 or '30%'"
    )


class BudgetRow(NamedTuple):
    """A budget's plan. Bytes of one step, not counting what existed before it, such as parameters and gradients."""

    budget: int  # bytes asked for
    peak: int  # bytes
    kept: int  # bytes after the forward pass
    operations: float  # recomputed, as a share of the step's
    seconds: float  # spent on recomputation, as a share of the step's


class Frontier(NamedTuple):
    """Memory and time of a training step under different budgets. Print it."""

    plain: int  # bytes at the peak of the plain network
    least: int  # bytes at the lowest peak that a plan reaches
    rows: list[BudgetRow]

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
        return "\n".join([f"plain: {size_text(self.plain)}; lowest: {size_text(self.least)}", *lines])


def plan(network: nn.Module, example: Any, budgets: Sequence[Budget] | Budget | None = None) -> Frontier:
    """Memory and time of a training step under different budgets, from one step on an example.

    The step runs on a copy of the network, on fake tensors if it reads no values. The mean square of the outputs is its
    loss. The random state is restored. For a network that does not fit in memory, call this under `FakeTensorMode`:
    times are estimated, and the temporary memory of operators and of the loss is left out.

    Args:
        network: in training mode, prepared by `recompute_activations` or not.
        example: its input: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        budgets: one or several, as `recompute_activations` takes them. Budgets that no plan meets have no row. By
            default from 0.9 down to 0.1, or the lowest peak if no default budget can be met.

    Raises:
        ValueError: a budget is not valid; no plan meets any of them (the message gives the lowest peak); the step could
            not be counted, e.g. because outputs need no gradient.
    """
    check_module(network, "plan")
    check_one_example(budgets, "plan")
    if isinstance(budgets, (str, int, float, Real)):
        budgets = [budgets]
    asked = [checked(budget) for budget in (_SHARES if budgets is None else budgets)]
    args, kwargs = tree_map(_apart, arguments_of(example))
    step = rehearsed_step(network, args, kwargs)
    choices, plain, simulation = frontier(step), plain_peak(step), Simulation(step)
    if budgets is None:
        asked = [share for share in asked if share * plain >= choices[-1].peak] or [choices[-1].peak]
    rows = []
    for budget in asked:
        limit = budget if isinstance(budget, int) else int(budget * plain)
        choice = next((choice for choice in choices if choice.peak <= limit), None)
        if choice is not None:
            outcome = simulation.run(choice.kept)
            needed = zip(step.values, choice.kept, outcome.readers, strict=True)
            again = sum(value.operations for value, is_kept, readers in needed if readers and not is_kept)
            kept = outcome.levels[simulation.forward]
            share = again / max(step.operations, 1)
            rows.append(BudgetRow(limit, choice.peak, kept, share, choice.seconds / step.seconds))
    if not rows:
        least = size_text(choices[-1].peak)
        raise ValueError(f"budgets={budgets}: expected one of at least {least}, the lowest peak of all plans")
    return Frontier(plain, choices[-1].peak, rows)


def _apart(leaf: Any) -> Any:
    """An argument detached from its graph, with a gradient of its own."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for: see `plan`. ValueError: it is the shape of a tensor."""
    if isinstance(example, tuple) and example and all(type(size) is int for size in example):
        raise ValueError(f"example={tuple(example)} has no tensor: expected one, such as torch.zeros{tuple(example)}")
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}
