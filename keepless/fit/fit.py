"""Find out which training step of a network fits on a device: a table and a line of code."""

import math
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn

from ..inputs import check_has_forward, check_module, is_number, shown
from ..recompute.signatures.plans import FEWEST, arguments_of
from ..recompute.step.costs import times_of
from ..recompute.step.dry import on_copy
from ..torch_internals import ASKS_FOR_VALUES
from ..units import size_text
from .device import CONTEXT, FRAGMENTATION, WORKSPACE, bytes_for_tensors, check_optimizer
from .sizes import check_growth, growth
from .steps import CHECKPOINTED, PLAIN, PLANNED, RECOMPUTED, Steps, Way, shape_text

_LONGEST = 1.15  # default of `time`


class Fit(NamedTuple):
    """What fits on a device; print it. Bytes are of tensors; times are estimated."""

    memory: int | str  # of the device, as given
    available: int  # bytes of the device left for tensors
    weights: int  # bytes of parameters and buffers
    gradients: int  # bytes
    states: int  # bytes, of the optimiser
    ways: list[Way]
    line: str  # code for the way with the largest example; of several, the fastest

    def __repr__(self) -> str:  # what notebooks and print show
        cells = [("", "example", "memory", "", "time")]
        for way in self.ways:
            verdict = "fits" if way.fits else "too much"
            cells.append((way.name, shape_text(way.shape), size_text(way.peak), verdict, f"{way.time:.2f}"))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        rows = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        left = (
            f"{self.memory} leave {size_text(self.available)} for tensors: less {CONTEXT} for CUDA, {WORKSPACE} for "
            f"convolutions, {FRAGMENTATION:.0%} of the rest"
        )
        parts = {"weights": self.weights, "gradients": self.gradients, "optimiser": self.states}
        resident = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
        return "\n".join([left, resident, *rows, self.line])


def fit(
    network: nn.Module,
    example: Any,
    memory: int | str,
    *,
    optimizer: str | float = "adamw",
    grow: str | None = None,
    time: float | None = None,
) -> Fit:
    """Count the memory of a training step, and find the largest step that fits on a device.

    Four ways are compared: the unmodified network; `recompute_activations(network)`; the same with all the memory that
    the device has left as budget; and activation checkpointing of repeated blocks (`fit.steps.repeated_blocks`).
    A copy runs on fake tensors: nothing is computed or changed, and a network made under `torch.device("meta")` may be
    larger than this machine's memory. Call it under autocast to count a step under autocast.

    Bytes are exact: weights, gradients, optimiser states, the example, and all tensors of the forward and backward
    pass; within a budget they are the plan's. Backward starts from the loss if the network returns one; otherwise the
    gradients of the outputs count.
    Operators run as on the network's device (on the CPU for meta tensors). Their temporary memory is covered only by
    the allowance for convolutions; workspaces of recurrent layers count, within 2 %. Times are estimated for this
    machine's CUDA device, or for recent GPUs.

    Args:
        network: any that runs on fake tensors; it is counted in training mode.
        example: its input: a tensor, a tuple of arguments, or a dictionary of keyword arguments.
        memory: of the device, such as "12GiB" or a number of bytes.
        optimizer: "sgd", "momentum", "adam", "adamw", "none", or bytes of optimiser states per trained weight.
        grow: find the largest example that fits: "batch" grows dimension 0, "size" the sides of images or the length
            of texts; see `keepless.fit.sizes`.
        time: with `grow`: longest step within a budget, as a multiple of the baseline step; by default 1.15.

    Raises:
        ValueError: an argument is not valid; the network asks for values of tensors; a recurrent layer does not run on
            its device here; nothing fits.
        Exception: whatever the network raises.
    """
    check_module(network, "fit")
    check_has_forward(network, "fit")
    available, longest = limits(memory, optimizer, grow, time)
    arguments = arguments_of(example)
    check_growth(arguments, grow)

    def fit_of_copy(copied: nn.Module, *fake_arguments: Any) -> Fit:
        with torch.enable_grad():
            steps = Steps(copied, growth(fake_arguments, grow), available, optimizer, longest)
            ways = steps.ways()
        line = _line_for_best(ways, steps, memory)
        return Fit(memory, available, steps.weights, steps.gradients, steps.states, ways, line)

    try:
        with times_of("cuda"):
            return on_copy(fit_of_copy, network, *arguments)
    except ASKS_FOR_VALUES as error:
        raise ValueError(
            f"the network asks for values of tensors ({error}), which a step on fake tensors does not have: remove "
            f"code that reads them, such as x.item(), x[mask] or `if x.sum() > 0`; keepless.plan runs real steps"
        ) from error


def limits(memory: int | str, optimizer: str | float, grow: str | None, time: float | None) -> tuple[int, float]:
    """Bytes for tensors, and the longest step within a budget. ValueError: one of the arguments is not valid."""
    check_optimizer(optimizer)
    is_multiple = time is None or (is_number(time) and not isinstance(time, bool) and time >= 1)
    if not is_multiple or (time is not None and grow is None):
        raise ValueError(f"time={shown(time)}, grow={shown(grow)}: expected at least 1.0, with grow='batch' or 'size'")
    return bytes_for_tensors(memory), math.inf if grow is None else time or _LONGEST


def _line_for_best(ways: list[Way], steps: Steps, memory: int | str) -> str:
    """Code for the way with the largest example that fits; of several, the fastest. ValueError: nothing fits."""
    fitting = [way for way in ways if way.fits and way.time <= steps.time]
    if not fitting:
        least = min(ways, key=attrgetter("peak"))
        raise ValueError(
            f"memory={memory}: nothing fits; a step on {shape_text(least.shape)} takes at least "
            f"{size_text(least.peak)} ({least.name}), and {size_text(steps.available)} are left for tensors"
        )
    best = max(fitting, key=lambda way: (math.prod(way.shape), -way.time))
    budget = f'"{best.budget >> 20}MiB"' if best.budget >> 20 else max(best.budget, FEWEST)
    kinds = " and ".join(sorted({type(block).__name__ for block in steps.blocks}))
    code = {
        PLAIN: "as it is",
        RECOMPUTED: "keepless.recompute_activations(network)",
        PLANNED: f"keepless.recompute_activations(network, budget={budget})",
        CHECKPOINTED: f"torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) for each {kinds}",
    }
    return f"{shape_text(best.shape)}: {code[best.name]}"
