"""Which activations a network saves: `trainer.recompute`.

A body's blocks can be checkpointed by `torch.utils.checkpoint`, with any norm: their activations are computed again in
the backward pass. The stem, the final norm and everything after the body keep their activations.
"""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from keepless import CheckpointedABN, recompute_activations
from keepless.norms import statistics_kept

BLOCKS = ("none", "blocks", "sqrt")
RECOMPUTE = ("none", "activations", *BLOCKS[1:])

Tensors = tuple[Tensor, ...]
Block = nn.Module | partial  # tensors -> a tensor or several; the arguments of a partial are modules, or None


def choose_recomputation(network: nn.Module, body: Any, recompute: str, budget: int | None = None) -> None:
    """Choose which activations a network with a body of `models.bodies` saves.

    Outputs of `CheckpointedABN` layers are recomputed in any case.
    `recompute`: "activations", or "budget" for a `budget` in bytes (None: no limit): see `recompute_activations`;
    otherwise see `recompute_blocks`, also for its ValueErrors.
    """
    if recompute == "activations":
        recompute_activations(network)
    elif recompute == "budget":
        if budget is not None:
            recompute_activations(network, budget=budget)
    else:
        recompute_blocks(body, recompute)
        if any(isinstance(module, CheckpointedABN) for module in network.modules()):
            recompute_activations(network, checkpointed_only=True)


def recompute_blocks(body: Any, recompute: str) -> None:
    """Choose how a body of `models.bodies` runs its blocks, see `run_blocks`.

    ValueError if `recompute` is not in BLOCKS, or the body is reversible.
    """
    if recompute not in BLOCKS:
        raise ValueError(f"recompute={recompute!r}: expected one of {', '.join(BLOCKS)}")
    if recompute != "none" and getattr(body, "reversible", False):
        raise ValueError(
            f"recompute={recompute!r} for a reversible {type(body).__name__}: it keeps no activations anyway; "
            f"expected 'none', or a body with reversible=False"
        )
    body.recompute = recompute


def units_of(stage: nn.Module, recompute: str) -> list[Block]:
    """The units of a stage for `run_blocks`: its blocks, or itself if all activations are saved, so that hooks fire."""
    return [*stage] if recompute != "none" and isinstance(stage, nn.Sequential) else [stage]


def chain(*layers_and_x: Any) -> Tensor:
    """Run layers one after the other. They are arguments, where `run_blocks` looks for norms with statistics."""
    *layers, x = layers_and_x
    for layer in layers:
        x = layer(x)
    return x


def run_blocks(blocks: Sequence[Block], x: Tensor, recompute: str, ends: Sequence[int] | None = None) -> list[Tensors]:
    """Run blocks in order; each takes the tensors that the previous one returned.

    Args:
        blocks: of all stages; pooling and transitions belong to the block after them.
        x: the input of the first block.
        recompute: "none": keep the activations of every block. "blocks": keep its inputs, and repeat its forward pass
            in the backward pass. "sqrt": keep the inputs of every sqrt(L)-th of L blocks (Chen et al., Training Deep
            Nets with Sublinear Memory Cost, 2016), and repeat sqrt(L) blocks at a time.
        ends: numbers of blocks, ascending; None: all. Later blocks do not run. What is repeated at a time ends there.

    Returns:
        The result after so many blocks, for each of `ends`. Running statistics are updated once, although the norms run
        twice. ValueError: a later block wrote over one of them.
    """
    tensors: Tensors = (x,)
    del x  # to free it after its last use
    run = _run_checkpointed if recompute != "none" and torch.is_grad_enabled() else _run
    length = round(math.sqrt(len(blocks))) or 1 if recompute == "sqrt" else 1
    begin = 0
    results = []
    versions = []
    for end in [len(blocks)] if ends is None else ends:
        for start in range(begin, end, length):
            tensors = run(blocks[start : min(start + length, end)], *tensors)
        results.append(tensors)
        versions.append(_versions(tensors))
        begin = end
    if versions != [*map(_versions, results)]:
        raise ValueError("a block wrote over its input, which is a feature: inject norms without overwrite_input=True")
    return results


def _versions(tensors: Tensors) -> list[int]:
    """How often each was written to; nothing in inference mode, compiled code and symbolic traces: nobody counts."""
    if torch.compiler.is_compiling():
        return []
    is_counted = all(isinstance(tensor, Tensor) and not tensor.is_inference() for tensor in tensors)
    return [tensor._version for tensor in tensors] if is_counted else []


def _run(blocks: Sequence[Block], *tensors: Tensor) -> Tensors:
    for block in blocks:
        output = block(*tensors)
        tensors = output if isinstance(output, tuple) else (output,)
    return tensors


def _run_checkpointed(blocks: Sequence[Block], *tensors: Tensor) -> Tensors:
    if torch.compiler.is_compiling():  # compiled code repeats operators, but no updates of statistics
        return checkpoint(partial(_run, blocks), *tensors, use_reentrant=False)
    modules = [module for block in blocks for module in _modules_of(block)]
    is_repetition = False

    def run_or_repeat(*tensors: Tensor) -> Tensors:
        """Only the first run updates running statistics."""
        nonlocal is_repetition
        context = statistics_kept(*modules) if is_repetition else nullcontext()
        is_repetition = True
        with context:
            return _run(blocks, *tensors)

    # A generator cannot be read while a CUDA graph is captured; nothing draws there: `trainer.capture` has checked it.
    is_captured = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return checkpoint(run_or_repeat, *tensors, use_reentrant=False, preserve_rng_state=not is_captured)


def _modules_of(block: Block) -> list[nn.Module]:
    if isinstance(block, nn.Module):
        return [block]
    return [argument for argument in block.args if isinstance(argument, nn.Module)]
