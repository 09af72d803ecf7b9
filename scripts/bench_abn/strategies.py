"""The strategies that are measured against each other; names are those of the tables."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, fx, nn

from models.blocks import NormAct
from models.layers import ABN, CheckpointedABN, InPlaceABN
from models.layers.backends import BACKENDS, backend_for, check_backend

from .cells import Cell

STANDARD = "standard"
COMPILED = "standard, compiled"
BUDGET = "standard, compiled, budget 0.5"
CHECKPOINTING_B = "checkpointing (b)"
CHECKPOINTING_C = "checkpointing (c)"
INPLACE_1 = "in-place I"
INPLACE_2 = "in-place II"
INPLACE_COMPILED = "in-place II, compiled"
SYNC = "in-place II, sync, alone"
PACKAGE = "released package"
COPY = "copy"  # of the input: not a strategy, but the unit of bandwidth, and what the package needs before it


class Strategy(NamedTuple):
    name: str
    norm_act: NormAct
    backend: str = "auto"
    compiled: bool = False  # the whole block or network by torch.compile
    budget: float = 1.0  # of activations that the compiler keeps, as a share of those it would keep
    overwrites: bool = False  # the norm writes over its input


def batch_norm_leaky_relu(channels: int) -> nn.Module:
    """The standard layers as a compiler likes them.

    Given an *in-place* activation, TorchInductor 2.12 keeps a mask of the signs as well, in a loop over BN + ACT that
    takes ten times as long on the CPU.
    """
    return nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01))


def strategies(cell: Cell, uncompiled: str | None, backend: str = "auto") -> tuple[list[Strategy], dict[str, str]]:
    """The strategies of a cell, and the reasons why others are left out, by their names.

    `uncompiled` is the reason to leave out those that need a compiler, None to keep them; `backend` that of ours.
    """
    chosen = [
        Strategy(STANDARD, ABN, "eager"),
        Strategy(CHECKPOINTING_B, functools.partial(CheckpointedABN, store="x", backend=backend), backend),
        Strategy(CHECKPOINTING_C, functools.partial(CheckpointedABN, store="x_hat", backend=backend), backend),
        Strategy(INPLACE_1, functools.partial(InPlaceABN, variant="I", backend=backend), backend),
        Strategy(INPLACE_2, functools.partial(InPlaceABN, backend=backend), backend),
    ]
    left_out = {}
    rivals = [Strategy(COMPILED, batch_norm_leaky_relu, compiled=True)]
    if cell.group != "bn_act":  # alone, BN + ACT has nothing behind it that would keep z
        rivals.append(Strategy(BUDGET, batch_norm_leaky_relu, compiled=True, budget=0.5))
    if cell.group == "network":
        rivals.append(Strategy(INPLACE_COMPILED, InPlaceABN, compiled=True))
    if uncompiled is None:
        chosen += rivals
    else:
        left_out |= {rival.name: uncompiled for rival in rivals}
    if cell.group == "network":
        return chosen, left_out

    chosen.append(Strategy(SYNC, functools.partial(InPlaceABN, sync=True, backend=backend), backend))
    if cell.group == "bn_act":
        for each in BACKENDS[1:]:
            name = f"in-place II, {each} backend"
            reason = uncompiled if each == "compiled" and uncompiled else _missing(each, cell)
            if reason is None:
                chosen.append(Strategy(name, functools.partial(InPlaceABN, backend=each), each))
            else:
                left_out[name] = reason
    try:
        from inplace_abn import InPlaceABN as ReleasedABN
    except ImportError as error:
        left_out[PACKAGE] = f"not importable ({error})"
    else:
        if cell.dtype == "float32":
            chosen.append(Strategy(PACKAGE, ReleasedABN, "released", overwrites=True))
        else:
            left_out[PACKAGE] = f"does not compute in {cell.dtype}"
    return chosen, left_out


def computing_backend(name: str, cell: Cell) -> str:
    """Name of the backend that a layer of ours uses for a cell: what "auto" stands for there."""
    backend = backend_for(name, cell.tensor(cell.size))
    return type(backend).__name__.removesuffix("Backend").lower()


def _missing(backend: str, cell: Cell) -> str | None:
    """Why a backend cannot run here, or None."""
    try:
        check_backend(backend)
        used = computing_backend(backend, cell)
    except ValueError as error:
        return str(error)
    return None if used == backend else f"is not available for this input: {used} takes its place"


def compiled(block: nn.Module, compiler: str, budget: float) -> Callable[[Tensor], Tensor]:
    """The block under torch.compile, for static shapes and as one graph."""
    backend = functools.partial(_compile_within, compiler=compiler, budget=budget)
    return torch.compile(block, fullgraph=True, dynamic=False, backend=backend)


def _compile_within(graph: fx.GraphModule, inputs: list[Tensor], *, compiler: str, budget: float):
    """A compiler that sees the memory budget, which is a global setting, for this graph only."""
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return torch._dynamo.lookup_backend(compiler)(graph, inputs)
