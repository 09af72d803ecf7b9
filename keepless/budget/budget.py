"""Budgets, and what they cost: a plan from one step on an example."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..inputs import check_module
from ..saved import size_text
from ..torch_internals import tree_map
from ..units import UNITS, bytes_of
from .search import frontier
from .simulation import on_real_tensors, plain_peak, simulate
from .traced_step import traced_step

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_FEWEST = 1000  # bytes: 1 or 50 is a share, or a number of GiB, that was written as an int

Budget = float | int | str


def checked(budget: object) -> float | int:
    """A number of bytes (an int), or a share of the plain network's peak (a float). ValueError if it is neither."""
    number = budget
    if isinstance(budget, str):
        number = bytes_of(budget)
    if (
        not isinstance(number, (int, float))
        or isinstance(number, bool)
        or not (0 < number <= 1 if isinstance(number, float) else number >= _FEWEST)
    ):
        raise ValueError(
            f"budget={budget!r}: expected at least {_FEWEST} bytes, such as '6GiB' ({', '.join(UNITS)}) or "
            f"{6 * 2**30}, or a share of the plain network's peak up to 1.0, such as 0.3"
        )
    return number


class Row(NamedTuple):
    """A budget's plan. Bytes are of one step, beyond those before it; parameters and gradients are there already."""

    budget: int  # bytes asked for
    peak: int  # bytes
    kept: int  # bytes after the forward pass
    operations: float  # computed again, as a share of the step's
    seconds: float  # to compute values again, as a share of the step's


class Frontier(NamedTuple):
    """Memory and time of a training step under different budgets. Print it."""

    plain: int  # bytes at the peak of the network as it is
    least: int  # bytes at the lowest peak that a plan reaches
    rows: list[Row]

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
        return "\n".join([f"plain: {size_text(self.plain)}; the least: {size_text(self.least)}", *lines])


def plan(network: nn.Module, example: Any, budgets: Sequence[Budget] | None = None) -> Frontier:
    """Memory and time of a training step under different budgets, from one step on an example.

    The step is run: three times, with the mean square of the outputs as loss. Gradients, buffers and the random state
    are then as before; what hooks do stays done, e.g. optimizer steps in the backward pass. Under `FakeTensorMode`
    nothing is computed, for a network that does not fit: times are then estimated, and the bytes that operators take
    while they run are left out.

    Args:
        network: in training mode, prepared by `recompute_activations` or not.
        example: its input: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        budgets: as `recompute_activations` takes them. Those that no plan meets have no row. By default from 0.9 down
            to 0.1, or the least peak if it is above them.

    Raises:
        ValueError: a budget is not valid; no plan meets any of them (the message names the least peak); the step could
            not be traced, e.g. because outputs need no gradient.
    """
    check_module(network, "plan")
    asked = [checked(budget) for budget in (_SHARES if budgets is None else budgets)]
    args, kwargs = arguments_of(example)
    step, seconds = traced_step(network, *tree_map(_apart, (args, kwargs)))
    choices, plain = frontier(step), plain_peak(step)
    if budgets is None:
        asked = [share for share in asked if share * plain >= choices[-1].peak] or [choices[-1].peak]
    seconds = seconds or 3 * sum(value.seconds for value in step.values)
    operations = 3 * sum(value.operations for value in step.values)
    rows = []
    for budget in asked:
        limit = budget if isinstance(budget, int) else int(budget * plain)
        choice = next((choice for choice in choices if choice.peak <= limit), None)
        if choice is not None:
            outcome = simulate(step, choice.kept)
            needed = zip(step.values, choice.kept, outcome.readers, strict=True)
            again = sum(value.operations for value, is_kept, readers in needed if readers and not is_kept)
            with on_real_tensors():
                kept = int(outcome.levels[step.forward - 1])
            rows.append(Row(limit, choice.peak, kept, again / max(operations, 1), choice.seconds / seconds))
    if not rows:
        least = size_text(choices[-1].peak)
        raise ValueError(f"budgets={budgets}: expected one of at least {least}, the least peak of all plans")
    return Frontier(plain, choices[-1].peak, rows)


def _apart(leaf: Any) -> Any:
    """An argument without its graph, and with a gradient of its own."""
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that an example stands for: see `plan`."""
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}
