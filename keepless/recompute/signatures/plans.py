"""Budgets, and the plans of a prepared network: made from counted steps, whenever a new input size comes."""

import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...inputs import check_module, check_one_example, shown
from ...torch_internals import tree_map, warn
from ...units import UNITS, bytes_of, share_of, size_text
from ..passes.plan import MORE, Plan
from ..passes.recording import Recording
from ..step.dry import rehearsed_step, text_of
from ..step.search import Choice, frontier
from ..step.sharded import is_sharded
from ..step.simulation import Simulation, plain_peak, simulate
from ..step.step import Kind, Step
from ..step.watch import Watch

_NEAR = 1.02  # search again without the outputs if the lowest peak is then at most this many times the budget
_BLOCK = 512  # bytes: CUDA's allocator rounds up to multiples, so exceeding a budget by less is not reported
_SHARE_OF_TIME = 0.02  # plans that are only faster are made while planning has taken at most this share of the time
_PAUSE = 2.0  # seconds of planning after which a message explains the pause
_log = logging.getLogger(__name__)


@contextmanager
def _pauses_are_explained() -> Iterator[None]:
    """Context of planning. If it takes over two seconds, a logged warning says why the training waits."""
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


class Plans(NamedTuple):
    """The plans for one size of inputs."""

    there: Plan  # for passes before which parameters have gradients, to which theirs are added
    coming: Plan | None  # for passes before which none has; the same object if it makes no difference


class Planner:
    """Makes the plans of a prepared network, and says what users should know about them."""

    clock = staticmethod(time.perf_counter)

    def __init__(self, budget: float | int, strict: bool = False):
        self.budget, self.strict = budget, strict
        self.began, self.spent = self.clock(), 0.0  # seconds: when the training began, and spent on planning
        self._said: set[str] = set()  # subjects of the warnings given so far

    @_pauses_are_explained()
    def plan(self, module: nn.Module, watch: Watch) -> Plans | None:
        """The plans of passes like one whose step was watched; None if there can be none."""
        began = self.clock()
        try:
            return self.planned(module, watch.step(module))
        except Exception as error:  # what operators do on tensors of ones, for instance
            self.say_that_it_fails(error)
            return None
        finally:
            self.spent += self.clock() - began

    def is_cheap(self) -> bool:
        """Whether planning has taken little of the training so far."""
        return self.spent <= _SHARE_OF_TIME * (self.clock() - self.began)

    def say_that_it_fails(self, error: Exception) -> None:
        text = "no plan can be made, so what a step saves beyond its budget is held elsewhere"
        if isinstance(self.budget, float):
            text = "no plan can be made, so steps recompute what is cheap, and may exceed the budget"
        self.miss("fails", f"{text}: {text_of(error)}")

    def say_that_it_grew(self, plan: Plan, recording: Recording) -> None:
        """Warn about a pass that has made more than the planned one, unless it was within the budget all the same."""
        again = "the next one is planned anew"
        if recording.elsewhere is None:
            text = "a step with more results for its backward pass than planned may have exceeded its budget"
            self.miss("longer", f"{text}: {again}")
        elif isinstance(self.budget, int) and (peak := plan.peak + recording.excess) > MORE * self.budget:
            text = f"a step may have taken up to {size_text(peak)}, more than its budget of {size_text(self.budget)}"
            self.miss(f"up to {size_text(peak)}", f"{text}, because its results were larger than planned: {again}")
        elif isinstance(self.budget, int):
            self.say("grew", f"a step with larger results than planned has held what it saved elsewhere: {again}")

    def miss(self, subject: str, message: str) -> None:
        """Warn once about a budget that a step may exceed. RuntimeError instead, if the user wants no such step."""
        if self.strict:
            raise RuntimeError(f"{message} (strict=True)")
        self.say(subject, message)

    def say(self, subject: str, message: str) -> None:
        """Warn once about each subject."""
        if subject not in self._said:
            self._said.add(subject)
            warn(message)

    def planned(self, module: nn.Module, step: Step) -> Plans:
        """The plans of a step: for passes before which parameters have gradients, and before which none has.

        Where gradients come during the pass, activations may use their room until then. A budget in bytes is beside
        gradients; a share is of all that the baseline takes, with the gradients that come.
        """
        step = step._replace(coming=()) if is_sharded(module) else step
        is_share = isinstance(self.budget, float)
        there, choice = _within(step, _limit(self.budget, step))
        coming, found = there, choice
        if step.coming:
            comes, gradients = step.as_gradients_come(), step.gradients
            coming, found = _within(comes, _limit(self.budget, comes, gradients), 0 if is_share else gradients, choice)
        _log.info(
            "planned %d calls: a peak of %s instead of %s, for %.1f ms more; with gradients that come %s, for %.1f ms",
            len(step.calls),
            *(size_text(choice.peak), size_text(plain_peak(step)), choice.seconds * 1e3),
            *(size_text(found.peak), found.seconds * 1e3),
        )
        is_same = (coming.flags, coming.fits, coming.remarks) == (there.flags, there.fits, there.remarks)
        return Plans(there, there if is_same else coming)


def _limit(budget: float | int, step: Step, gradients: int = 0) -> int:
    """The bytes that a step may take within a budget.

    A budget in bytes does not count gradients: `gradients`, the bytes that come during the step, are added to it.
    """
    return budget + gradients if isinstance(budget, int) else int(budget * plain_peak(step))


def _within(step: Step, limit: int, beside: int = 0, known: Choice | None = None) -> tuple[Plan, Choice]:
    """The plan of a step within a limit, with remarks if it may exceed it, and the plan's choice.

    `beside`: bytes of gradients, which the user's budget does not count. `known`: a choice to begin with.
    """
    calls, budget, counted = step.calls, limit - beside, step
    remarks: list[tuple[str, str]] = []
    if plain_peak(step) > limit and not any(value.kind == Kind.FREE for value in step.values):
        kept = (True,) * len(step.values)
        text = (
            f"a budget of {size_text(budget)} changes nothing, because no result of this network can be "
            f"recomputed; most is kept at {Simulation(step).peak_of(kept)}: train it without a budget, on a "
            f"smaller batch or shorter inputs"
        )
        remarks.append((text, text))
        return Plan(calls, bytes(len(calls)), remarks=remarks), Choice(plain_peak(step), 0.0, kept)
    step, choice = _chosen(counted, limit, known)
    least, held = choice.peak - beside, simulate(counted, choice.kept).peak - beside
    if least <= budget + _BLOCK < held and step is not counted:
        text = (
            f"this step is within {size_text(budget)} only if the program drops the network's outputs before the "
            f"backward pass: while it has a name for them, the peak is {size_text(held)}"
        )
        remarks.append((text, text))
    if least > budget + _BLOCK:
        texts = size_text(budget), size_text(least)
        if texts[0] == texts[1]:
            texts = f"{budget:,} bytes", f"{least:,} bytes"
        place = Simulation(counted).peak_of(choice.kept)
        peak = f"the lowest peak is {texts[1]}, which is used; it is at {place}"
        text = f"no plan keeps this step within {texts[0]}: {peak}"
        remarks.append((text, text))
    if step.unseen:
        text = (
            f"a part of the network's forward pass is not planned, because it runs under {step.unseen}: remove "
            f"that, or give a smaller budget, because a step may exceed this one"
        )
        remarks.append((step.unseen, text))
    plan, plain = replace(choice.plan(step), remarks=remarks), plain_peak(step)
    return replace(plan, peak=plain) if plain <= limit else plan, choice  # see `Plan.fits`


def _chosen(step: Step, limit: int, known: Choice | None) -> tuple[Step, Choice]:
    """A step and its best choice.

    It holds the outputs to the end of the step, but the program may drop them earlier. If the budget cannot be
    met with them, they are left out; if it is out of reach without them too, the choice with the lowest peak stays.
    """
    if (choice := _best(step, limit, known)).peak <= limit:
        return step, choice
    dropped = step.without_outputs()
    least = simulate(dropped, choice.kept).peak
    return dropped, choice._replace(peak=least) if least > _NEAR * limit else _best(dropped, limit, known)


def _best(step: Step, limit: int, known: Choice | None) -> Choice:
    """The fastest choice within a limit, or the one with the lowest peak. `known`: see `frontier`."""
    choices = frontier(step, limit, start=None if known is None else known.kept)
    return next((choice for choice in choices if choice.peak <= limit), choices[-1])


_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
FEWEST = 1000  # bytes: an int such as 1 or 50 was probably meant as a share or as GiB

Budget = float | int | str


def checked(budget: object) -> float | int:
    """A number of bytes (an int), or a share of the baseline's peak (a float). ValueError if it is neither.

    Floats such as `0.8 * free_bytes` are rounded down, and NumPy's numbers are taken too.
    """
    given: object = budget
    if isinstance(budget, str):
        given = bytes_of(budget) or share_of(budget)
    if isinstance(given, Real) and not isinstance(given, bool):
        number = float(given)
        if FEWEST <= number < math.inf:
            return int(number)
        if 0 < number <= 1 and not isinstance(given, Integral):
            return number
    raise ValueError(
        f"budget={shown(budget)}: expected at least {FEWEST} bytes, such as '6GiB' ({', '.join(UNITS)}) or "
        f"{6 * 2**30}, or a share of the baseline's peak up to 1.0, such as 0.3 or '30%'"
    )


class BudgetRow(NamedTuple):
    """A budget's plan. Bytes of one step, not counting what existed before it, such as parameters."""

    budget: int  # bytes asked for, beside gradients
    peak: int  # bytes, with the gradients that have come: at most the budget and `Frontier.gradients`
    kept: int  # bytes after the forward pass
    operations: float  # recomputed, as a share of the step's
    seconds: float  # spent on recomputation, as a share of the step's


class Frontier(NamedTuple):
    """Memory and time of a training step under different budgets. Print it."""

    plain: int  # bytes at the peak of the baseline, which recomputes nothing
    least: int  # bytes of the lowest budget that a plan keeps, in passes with such gradients
    rows: list[BudgetRow]
    gradients: int  # bytes of the gradients that come during the step; 0 if parameters have theirs before it

    def __repr__(self) -> str:  # what notebooks and print show
        cells: list[tuple[str, ...]] = [("budget", "peak", "of plain", "kept", "operations", "time")]
        for row in self.rows:
            budget, peak, kept = map(size_text, (row.budget, row.peak, row.kept))
            more = f"+{row.operations:.1%}", f"+{row.seconds:.1%}"
            cells.append((budget, peak, f"{row.peak / self.plain:.2f}", kept, *more))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        comes = f"; beside it {size_text(self.gradients)} of gradients come" if self.gradients else ""
        return "\n".join([f"plain: {size_text(self.plain)}; lowest budget: {size_text(self.least)}{comes}", *lines])


def plan(network: nn.Module, example: Any, budgets: Sequence[Budget] | Budget | None = None) -> Frontier:
    """Memory and time of a training step under different budgets, from one step on an example.

    The step runs on a copy of the network, on fake tensors if it reads no values. The mean square of the outputs is its
    loss. The random state is restored. For a network that does not fit in memory, call this under `FakeTensorMode`:
    times are estimated, and the temporary memory of operators and of the loss is left out.

    A budget is beside gradients. If no parameter has one, as after `zero_grad()`, gradients take memory as they come,
    peaks include them, and their room is free until then: a peak is at most the budget and all gradients.

    Args:
        network: in training mode, prepared by `recompute_activations` or not.
        example: its input: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        budgets: one or several, as `recompute_activations` takes them. Budgets that no plan meets have no row. By
            default from 0.9 down to 0.1, of those with one plan the lowest; or the lowest that a plan keeps.

    Raises:
        ValueError: a budget is not valid; no plan keeps any of them (the message gives the lowest that one keeps); the
            step could not be counted, e.g. because outputs need no gradient.
    """
    check_module(network, "plan")
    check_one_example(budgets, "plan")
    if not network.training:
        warn("plan got a network in eval mode, whose step holds less than a training step: call network.train() first")
    if isinstance(budgets, (str, int, float, Real)):
        budgets = [budgets]
    for budget in budgets or ():
        checked(budget)  # raises before the step runs
    args, kwargs = tree_map(_apart, arguments_of(example))
    step = rehearsed_step(network, args, kwargs)
    is_there = is_sharded(network) or any(one.grad is not None for one in network.parameters() if one.requires_grad)
    comes = bool(step.coming) and not is_there
    step, gradients = (step.as_gradients_come(), step.gradients) if comes else (step, 0)
    limits = [_limit(checked(budget), step, gradients) for budget in (_SHARES if budgets is None else budgets)]
    plain, simulation = plain_peak(step), Simulation(step)
    choices = frontier(step, budgets=limits)
    least = choices[-1].peak
    if budgets is None:
        limits = [limit for limit in limits if limit >= least] or [least]
    rows: list[BudgetRow] = []
    for limit in limits:
        choice = next((choice for choice in choices if choice.peak <= limit), None)
        if choice is not None and limit > gradients:
            outcome = simulation.run(choice.kept)
            needed = zip(step.values, choice.kept, outcome.consumers, strict=True)
            again = sum(value.operations for value, is_kept, consumers in needed if consumers and not is_kept)
            kept = outcome.levels[simulation.forward]
            share = again / max(step.operations, 1)
            row = BudgetRow(limit - gradients, choice.peak, kept, share, choice.seconds / step.seconds)
            is_same = budgets is None and rows and rows[-1][1:] == row[1:]
            rows = [*(rows[:-1] if is_same else rows), row]
    if not rows:
        raise ValueError(
            f"budgets={budgets}: expected one of at least {size_text(least - gradients)}, the lowest that a plan keeps"
        )
    return Frontier(plain, least - gradients, rows, gradients)


def _apart(leaf: Any) -> Any:
    """An argument as a leaf, detached from its graph."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for: see `plan`. ValueError: it is the shape of a tensor."""
    if isinstance(example, tuple) and example and all(type(size) is int for size in example):
        raise ValueError(f"example={tuple(example)} has no tensor: expected one, such as torch.zeros{tuple(example)}")
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}
