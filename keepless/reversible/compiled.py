"""Reversible modules inside `torch.compile`, which cannot follow the hooks of `chain`: one node for a whole chain."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..norms.inplace_abn import OWN_LAYERS
from ..norms.statistics import BATCH_NORMS
from .couplings import AffineAdapterNaive, AffineAdapterSigmoid, Coupling, HalfStep, Halves, detached, has_hooks
from .environment import statistics_kept

# Modules that compute the same each time; inside a graph random numbers cannot be drawn again.
_REPEATABLE = {
    *(*OWN_LAYERS, *BATCH_NORMS, nn.GroupNorm, nn.LayerNorm, AffineAdapterNaive, AffineAdapterSigmoid),
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.Sequential, nn.Identity),
    *(nn.ELU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ReLU, nn.SiLU, nn.Sigmoid, nn.Tanh),
}


def is_compilable(coupling: Coupling, row: Sequence[Coupling]) -> bool:
    """Whether a coupling is known to compute the same each time, and can join others in a row.

    Others split another dimension, or share parameters: PyTorch compiles wrong gradients for repeated arguments.
    """
    parts = [part for child in coupling.children() for part in child.modules()]
    tensors = [parameter for other in (*row, coupling) for move in moves_of(other) for parameter in _trained(move)]
    return (
        all(map(_is_repeatable, parts))
        and len({id(tensor) for tensor in tensors}) == len(tensors)
        and all(other.split_dim == coupling.split_dim for other in row)
    )


def moves_of(coupling: Coupling) -> list[HalfStep | Coupling]:
    """The half-steps of a coupling, or itself if it has no inverse."""
    return [*coupling.half_steps()] if coupling.invertible else [coupling]


def _is_repeatable(module: nn.Module) -> bool:
    """Whether a module has a known type, exactly, and no hooks: subclasses and hooks may compute anything."""
    known = type(module) in _REPEATABLE or "repeatable" in vars(type(module))
    return known and "forward" not in vars(module) and not has_hooks(module)


def run_row(row: list[Coupling], x: Tensor) -> Tensor:
    """Run couplings of one `split_dim`. Only the last output is kept, and the inputs of couplings without inverse."""
    moves = [move for coupling in row for move in moves_of(coupling)]
    parameters = [parameter for move in moves for parameter in _trained(move)]
    autocast = torch.is_autocast_enabled(x.device.type), torch.get_autocast_dtype(x.device.type)
    return row[-1].join(_Chain.apply(moves, autocast, *row[0].split(x), *parameters))


class _Chain(torch.autograd.Function):
    """Updates of halves, one after the other (RevNet, Algorithm 1)."""

    @staticmethod
    def forward(
        ctx: Any, moves: list[HalfStep | Coupling], autocast: tuple[bool, torch.dtype], *tensors: Tensor
    ) -> Halves:
        """tensors: two halves, then the parameters of each move, which autograd must know to ask for gradients."""
        kept: list[Tensor] = []
        halves: Halves = tensors[:2]
        for move in moves:
            if isinstance(move, Coupling):
                kept += halves
                halves = move.couple(*halves)
            else:
                halves = move.run(halves)
        ctx.save_for_backward(*halves, *kept)
        ctx.moves, ctx.autocast = moves, autocast
        return halves

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        """Undo the updates from the last to the first, and repeat each with gradients."""
        enabled, dtype = ctx.autocast
        y1, y2, *kept = ctx.saved_tensors
        halves: Halves = (y1, y2)
        of_parameters: list[Tensor | None] = []
        for move in reversed(ctx.moves):
            with statistics_kept(_module(move)), torch.enable_grad(), torch.autocast(y1.device.type, dtype, enabled):
                if isinstance(move, Coupling):
                    halves, kept = (_leaf(kept[-2]), _leaf(kept[-1])), kept[:-2]
                    outputs = move.couple(*halves)
                else:
                    halves, outputs = _undone(move, halves)
                inputs = (*halves, *_trained(move))
                first, second, *rest = torch.autograd.grad(outputs, inputs, gradients, allow_unused=True)
            gradients = (first, second)
            of_parameters = [*rest, *of_parameters]
        return None, None, *gradients, *of_parameters


def _undone(half: HalfStep, halves: Halves) -> tuple[Halves, Halves]:
    """The halves before an update, and after it again with a graph."""
    halves = (_leaf(halves[0]), _leaf(halves[1]))
    output = half.output(halves)
    before = _leaf(half.undo(halves[half.target].detach(), detached(output)))
    inputs = half.replaced(halves, before)
    return inputs, half.replaced(inputs, half.combine(before, output))


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_()


def _module(move: HalfStep | Coupling) -> nn.Module:
    return move if isinstance(move, Coupling) else move.branch


def _trained(move: HalfStep | Coupling) -> list[nn.Parameter]:
    return [parameter for parameter in _module(move).parameters() if parameter.requires_grad]
