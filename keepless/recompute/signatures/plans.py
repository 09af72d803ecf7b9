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

from torch import nn

from ...inputs import check_module, shown
from ...torch_internals import warn
from ...units import UNITS, bytes_of, share_of, size_text
from ..passes.plan import MORE, Plan
from ..passes.recording import Recording
from ..step.dry import dry_step, rehearsed_step, text_of
from ..step.search import Choice, frontier
from ..step.sharded import is_sharded
from ..step.simulation import Simulation, plain_peak
from ..step.stand_ins import watch_of_example
from ..step.step import Kind, Step
from ..step.watch import Watch

_NEAR = 1.02  # search again without the outputs if the lowest peak is then at most this many times the budget
_BLOCK = 512  # bytes: CUDA's allocator rounds up to multiples, so exceeding a budget by less is not reported
_SHARE_OF_TIME = 0.02  # plans that are only faster are made while planning has taken at most this share of the time
_PAUSE = 2.0  # seconds of planning after which a message explains the pause
_PLANNING = "planning the step within its budget: this may take a few seconds"
_NEXT = "the next one is planned anew"
_log = logging.getLogger(__name__)


class Plans(NamedTuple):
    """The plans for one size of inputs."""

    accumulating: Plan  # for passes before which parameters have gradients, to which new ones are added
    coming: Plan  # for passes before which none has, as gradients come; the same object if it makes no difference


class Planner:
    """Makes the plans of a prepared network, and says what users should know about them."""

    def __init__(self, budget: float | int | None, strict: bool = False):
        self.budget = budget  # None: there is nothing to plan
        self.strict = strict
        self.start = time.perf_counter()  # of the training
        self.seconds = 0.0  # spent on planning
        self._subjects: set[str] = set()  # of the warnings so far: see `warn_once`

    def plans_of_watch(self, module: nn.Module, watch: Watch) -> Plans | None:
        """The plans of passes like one whose step was watched; None if there can be none."""
        try:
            with self._counted_pause():
                return self.plans_of(module, watch.step(module))
        except Exception as error:  # what operators do on tensors of ones, for instance
            self.warn_of_failure(error)
            return None

    @contextmanager
    def _counted_pause(self) -> Iterator[None]:
        """Context of planning, whose time counts. After two seconds, a logged warning says why the training waits."""
        start = time.perf_counter()
        timer = threading.Timer(_PAUSE, _log.warning, [_PLANNING])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            seconds = time.perf_counter() - start
            self.seconds += seconds
            if seconds > _PAUSE:
                _log.warning("planned in %.1f s", seconds)

    def is_cheap(self) -> bool:
        """Whether planning has taken little of the training so far."""
        return self.seconds <= _SHARE_OF_TIME * (time.perf_counter() - self.start)

    def warn_of_failure(self, error: Exception) -> None:
        if isinstance(self.budget, float):
            effect = "steps recompute what is cheap, and may exceed the budget"
        else:
            effect = "what a step saves beyond its budget is held elsewhere"
        self.warn_of_excess(f"no plan can be made, so {effect}: {text_of(error)}", "a failure")

    def warn_of_growth(self, plan: Plan, recording: Recording) -> None:
        """Warn about a pass that has made more than the planned one, unless it was within the budget all the same."""
        if recording.elsewhere is None:
            text = "a step with more results for its backward pass than planned may have exceeded its budget"
            self.warn_of_excess(f"{text}: {_NEXT}")
            return
        if not isinstance(self.budget, int):
            return
        peak = plan.peak + recording.excess_bytes
        if peak > MORE * self.budget:
            text = f"a step may have taken up to {size_text(peak)}, more than its budget of {size_text(self.budget)}"
            self.warn_of_excess(f"{text}, because its results were larger than planned: {_NEXT}")
        else:
            self.warn_once(f"a step with larger results than planned has held what it saved elsewhere: {_NEXT}")

    def warn_of_excess(self, message: str, subject: str = "") -> None:
        """Warn once about a budget that a step may exceed. RuntimeError instead, if the user wants no such step."""
        if self.strict:
            raise RuntimeError(f"{message} (strict=True)")
        self.warn_once(message, subject)

    def warn_once(self, message: str, subject: str = "") -> None:
        """Warn once about each subject, or with each message that has none."""
        if (subject or message) not in self._subjects:
            self._subjects.add(subject or message)
            warn(message)

    def plans_of(self, module: nn.Module, step: Step) -> Plans:
        """The plans of a step: for passes before which parameters have gradients, and before which none has.

        Where gradients come during the pass, activations may use their room until then. A budget in bytes is beside
        gradients; a share is of all that the baseline takes, with the gradients that come.
        """
        assert self.budget is not None
        step = step._replace(coming=()) if is_sharded(module) else step
        plan, choice = _plan_within(step, _limit(self.budget, step))
        coming_plan = plan
        coming_choice = choice
        if step.coming:
            coming_step = step.as_gradients_come()
            limit = _limit(self.budget, coming_step, step.gradients)
            beside = 0 if isinstance(self.budget, float) else step.gradients
            coming_plan, coming_choice = _plan_within(coming_step, limit, beside, choice.kept)
            if (coming_plan.flags, coming_plan.fits, coming_plan.remarks) == (plan.flags, plan.fits, plan.remarks):
                coming_plan = plan
        _log.info(
            "planned %d calls: a peak of %s instead of %s, for %.1f ms more; with gradients that come %s, for %.1f ms",
            len(step.calls),
            size_text(choice.peak),
            size_text(plain_peak(step)),
            choice.seconds * 1e3,
            size_text(coming_choice.peak),
            coming_choice.seconds * 1e3,
        )
        return Plans(plan, coming_plan)


def _limit(budget: float | int, step: Step, gradients: int = 0) -> int:
    """The bytes that a step may take within a budget.

    A budget in bytes does not count gradients: `gradients`, the bytes that come during the step, are added to it.
    """
    return budget + gradients if isinstance(budget, int) else int(budget * plain_peak(step))


def _plan_within(step: Step, limit: int, beside: int = 0, start: Sequence[bool] | None = None) -> tuple[Plan, Choice]:
    """The plan of a step within a limit, with remarks if it may exceed it, and the plan's choice.

    `beside`: bytes of gradients, which the user's budget does not count. `start`: see `frontier`.
    """
    plain = plain_peak(step)
    if plain > limit and not any(value.kind == Kind.FREE for value in step.values):
        kept = (True,) * len(step.values)
        text = (
            f"a budget of {size_text(limit - beside)} changes nothing, because no result of this network can be "
            f"recomputed; most is kept at {Simulation(step).place_of_peak(kept)}: train it without a budget, on a "
            f"smaller batch or shorter inputs"
        )
        return Plan(step.calls, bytes(len(step.calls)), remarks=[text]), Choice(plain, 0.0, kept)
    chosen_step, choice = _step_and_choice(step, limit, start)
    plan = choice.plan(chosen_step)
    remarks = _remarks(step, chosen_step, choice, limit - beside, beside)
    peak = plan.plain if plan.plain <= limit else plan.peak  # see `Plan.fits`
    return replace(plan, peak=peak, remarks=remarks), choice


def _remarks(step: Step, chosen_step: Step, choice: Choice, budget: int, beside: int) -> list[str]:
    """The texts of warnings about a choice of `chosen_step`. `beside`: see `_plan_within`."""
    remarks: list[str] = []
    least = choice.peak - beside
    peak_with_outputs = Simulation(step).run(choice.kept).peak - beside
    if least <= budget + _BLOCK < peak_with_outputs and chosen_step is not step:
        remarks.append(
            f"this step is within {size_text(budget)} only if the program drops the network's outputs before the "
            f"backward pass: while it has a name for them, the peak is {size_text(peak_with_outputs)}"
        )
    if least > budget + _BLOCK:
        budget_text, least_text = _distinct_texts(budget, least)
        remarks.append(
            f"no plan keeps this step within {budget_text}: the lowest peak is {least_text}, which is used; it is at "
            f"{Simulation(step).place_of_peak(choice.kept)}"
        )
    if chosen_step.unseen:
        remarks.append(
            f"a part of the network's forward pass is not planned, because it runs under {chosen_step.unseen}: remove "
            f"that, or give a smaller budget, because a step may exceed this one"
        )
    return remarks


def _distinct_texts(size: int, larger_size: int) -> tuple[str, str]:
    """Two sizes as texts, to the byte if they look equal otherwise."""
    if size_text(size) == size_text(larger_size):
        return f"{size:,} bytes", f"{larger_size:,} bytes"
    return size_text(size), size_text(larger_size)


def _step_and_choice(step: Step, limit: int, start: Sequence[bool] | None) -> tuple[Step, Choice]:
    """The step with its best choice; or, if that exceeds the limit, the step without its outputs, and a choice for it.

    A step holds its outputs to the end, but the program may drop them earlier. If the limit is out of reach without
    them too, the choice with the lowest peak stays.
    """
    choice = _best_choice(frontier(step, limit, start=start), limit)
    if choice.peak <= limit:
        return step, choice
    shorter = step.without_outputs()
    least = Simulation(shorter).run(choice.kept).peak
    if least > _NEAR * limit:
        return shorter, choice._replace(peak=least)
    return shorter, _best_choice(frontier(shorter, limit, start=start), limit)


def _best_choice(choices: Sequence[Choice], limit: int) -> Choice:
    """The fastest choice within a limit, or else that with the lowest peak. `choices`: as `frontier` sorts them."""
    return next((choice for choice in choices if choice.peak <= limit), choices[-1])


_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
FEWEST = 1000  # bytes: an int such as 1 or 50 was probably meant as a share or as GiB

Budget = float | int | str


def parsed_budget(budget: object) -> float | int:
    """A number of bytes (an int), or a share of the baseline's peak (a float). ValueError if it is neither.

    Floats such as `0.8 * free_bytes` are rounded down, and NumPy's numbers are taken too.
    """
    number: object = budget
    if isinstance(budget, str):
        number = bytes_of(budget) or share_of(budget)
    if isinstance(number, Real) and not isinstance(number, bool):
        amount = float(number)
        if FEWEST <= amount < math.inf:
            return int(amount)
        if 0 < amount <= 1 and not isinstance(number, Integral):
            return amount
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
            share = f"{row.peak / self.plain:.2f}"
            cells.append((budget, peak, share, kept, f"+{row.operations:.1%}", f"+{row.seconds:.1%}"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
        summary = f"plain: {size_text(self.plain)}; lowest budget: {size_text(self.least)}"
        if self.gradients:
            summary += f"; beside it {size_text(self.gradients)} of gradients come"
        return "\n".join([summary, *lines])


def plan(network: nn.Module, example: Any, budgets: Sequence[Budget] | Budget | None = None) -> Frontier:
    """Memory and time of a training step under different budgets, from one step on an example.

    The step runs on a copy of the network, on fake tensors. If that raises an error, as where the network reads values,
    a real step of the network itself runs, which leaves no trace there. The mean square of the outputs is its loss. The
    random state is restored. For a network that does not fit in memory, call this under `FakeTensorMode`: times are
    estimated, and the temporary memory of operators and of the loss is left out.

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
    if not network.training:
        warn("plan got a network in eval mode, whose step holds less than a training step: call network.train() first")
    if isinstance(budgets, (str, int, float, Real)):
        budgets = [budgets]
    amounts = [parsed_budget(budget) for budget in (_SHARES if budgets is None else budgets)]
    step = rehearsed_step(network, *arguments_of(example))
    gradients = 0
    if step.coming and not _may_have_gradients(network):
        gradients = step.gradients
        step = step.as_gradients_come()
    limits = [_limit(amount, step, gradients) for amount in amounts]
    choices = frontier(step, budgets=limits)
    least = choices[-1].peak
    if budgets is None:
        met_limits = [limit for limit in limits if limit >= least] or [least]
        rows_by_plan = {row[1:]: row for row in _rows_of_met_limits(step, met_limits, choices, gradients)}
        rows = list(rows_by_plan.values())  # of several budgets with one plan, the last, which is the lowest
    else:
        rows = _rows_of_met_limits(step, limits, choices, gradients)
    if not rows:
        raise ValueError(
            f"budgets={budgets}: expected one of at least {size_text(least - gradients)}, the lowest that a plan keeps"
        )
    return Frontier(plain_peak(step), least - gradients, rows, gradients)


def _may_have_gradients(network: nn.Module) -> bool:
    """Whether a trained parameter has a gradient already; always for networks that FSDP has sharded."""
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    return is_sharded(network) or any(parameter.grad is not None for parameter in trained)


def _rows_of_met_limits(
    step: Step, limits: Sequence[int], choices: Sequence[Choice], gradients: int
) -> list[BudgetRow]:
    """Rows of the limits that a choice meets. `gradients`: bytes, which budgets leave out."""
    simulation = Simulation(step)
    rows = []
    for limit in limits:
        choice = _best_choice(choices, limit)
        if choice.peak > limit or limit <= gradients:
            continue
        outcome = simulation.run(choice.kept)
        values = zip(step.values, choice.kept, outcome.consumers, strict=True)
        recomputed = sum(value.operations for value, is_kept, consumers in values if consumers and not is_kept)
        kept_bytes = outcome.levels[simulation.forward]
        operations = recomputed / max(step.operations, 1)
        rows.append(BudgetRow(limit - gradients, choice.peak, kept_bytes, operations, choice.seconds / step.seconds))
    return rows


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for: see `plan`. ValueError: it is the shape of a tensor."""
    if isinstance(example, tuple) and example and all(type(size) is int for size in example):
        raise ValueError(f"example={tuple(example)} has no tensor: expected one, such as torch.zeros{tuple(example)}")
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def step_of_example(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step:
    """The step of a network on an example, with the mean square of the outputs as its loss. It changes nothing.

    A copy runs instead of the network if FSDP has sharded it, or if what the step saves has no room elsewhere.
    """
    if is_sharded(module):
        return dry_step(module, args, kwargs)
    watch = watch_of_example(module, args, kwargs)
    return dry_step(module, args, kwargs) if watch.elsewhere.is_full else watch.step(module)
