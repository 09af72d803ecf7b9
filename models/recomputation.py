"""How a network keeps its activations: `trainer.recompute`.

Checkpointing of a body's blocks drops their activations, and computes them again in the backward pass, by PyTorch's own
means (`torch.utils.checkpoint`), for any body and any norm. The stem, the final norm and whatever follows the body keep
their activations.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from models.layers import CheckpointedABN, recompute_activations
from models.layers.reversible.environment import statistics_kept

BLOCKS = ("none", "blocks", "selective", "sqrt")
RECOMPUTE = ("none", "activations", *BLOCKS[1:])

State = tuple[Tensor, ...]
Block = nn.Module | partial  # tensors -> a tensor or several; the arguments of a partial are modules, or None
Contexts = tuple[AbstractContextManager, AbstractContextManager]  # of the forward pass, and of its repetition


def choose_recomputation(network: nn.Module, body: Any, recompute: str) -> None:
    """Choose how a network with a body of `models.bodies` keeps its activations.

    The operations of the whole network compute the outputs of its `CheckpointedABN` layers again in any case.

    Args:
        recompute: "activations": see `recompute_activations`; otherwise see `run_blocks`.

    Raises:
        ValueError: see `recompute_blocks`.
    """
    if recompute == "activations":
        recompute_activations(network)
    else:
        recompute_blocks(body, recompute)
        if any(isinstance(module, CheckpointedABN) for module in network.modules()):
            recompute_activations(network, checkpointed_only=True)


def recompute_blocks(body: Any, recompute: str) -> None:
    """Choose how a body of `models.bodies` keeps the activations of its blocks, see `run_blocks`.

    Raises:
        ValueError: `recompute` is not in BLOCKS, or the body is reversible.
    """
    if recompute not in BLOCKS:
        raise ValueError(f"recompute={recompute!r}: expected one of {', '.join(BLOCKS)}")
    if recompute != "none" and getattr(body, "reversible", False):
        raise ValueError(
            f"recompute={recompute!r} for a reversible {type(body).__name__}: it already forgets its activations; "
            f"expected 'none', or a body with reversible=False"
        )
    body.recompute = recompute


def units_of(stages: Iterable[nn.Module], recompute: str) -> list[Block]:
    """What `run_blocks` runs: the blocks of all stages; or whole stages, so that their hooks fire, if all is kept."""
    if recompute == "none":
        return list(stages)
    return [block for stage in stages for block in (stage if isinstance(stage, nn.Sequential) else [stage])]


def run_blocks(blocks: Sequence[Block], x: Tensor, recompute: str) -> State:
    """Run blocks one after the other; each takes the tensors that the one before returned.

    Without gradients (`torch.no_grad`) nothing is kept anyway, and the blocks just run.

    Args:
        blocks: of all stages; pooling and transitions belong to the block after them.
        x: the input of the first block.
        recompute: "none": keep the activations of every block. "blocks": keep its inputs, and repeat its forward pass
            in the backward pass. "selective": keep its inputs and the outputs of its convolutions, and repeat the rest.
            "sqrt": keep the inputs of every sqrt(L)-th of L blocks (Chen et al., Training Deep Nets with Sublinear
            Memory Cost, 2016), and repeat sqrt(L) blocks at a time.

    Returns:
        What the last block returns. Running statistics move once, although the norms run twice.
    """
    state: State = (x,)
    del x  # nobody else should hold a tensor that is not needed any more
    forget = recompute != "none" and torch.is_grad_enabled()
    length = round(math.sqrt(len(blocks))) if recompute == "sqrt" else 1
    for start in range(0, len(blocks), length):
        part = blocks[start : start + length]
        state = _checkpointed(part, state, recompute == "selective") if forget else _run(part, *state)
    return state


def _run(blocks: Sequence[Block], *state: Tensor) -> State:
    for block in blocks:
        output = block(*state)
        state = output if isinstance(output, tuple) else (output,)
    return state


def _checkpointed(blocks: Sequence[Block], state: State, selective: bool) -> State:
    kept = _needed_convolutions(blocks) if selective else 0
    contexts: Callable[[], Contexts] | None = partial(_selective, kept) if kept else None
    if not torch.compiler.is_compiling():  # compiled code repeats operators, but no updates of statistics
        contexts = partial(_eager, contexts, [module for block in blocks for module in _modules(block)])
    options: dict[str, Any] = {} if contexts is None else {"context_fn": contexts}
    return checkpoint(partial(_run, blocks), *state, use_reentrant=False, **options)


def _selective(kept_convolutions: int) -> Contexts:
    return create_selective_checkpoint_contexts(_FirstConvolutions(kept_convolutions))


def _eager(contexts: Callable[[], Contexts] | None, modules: list[nn.Module]) -> Contexts:
    forward, repetition = contexts() if contexts else (nullcontext(), nullcontext())
    return forward, _Repetition(repetition, modules)


class _Repetition(AbstractContextManager):
    """Context of a repeated forward pass: the norms leave their running statistics as they are.

    It can be entered several times, for several backward passes.
    """

    def __init__(self, inner: AbstractContextManager, modules: list[nn.Module]):
        self.inner, self.modules = inner, modules
        self.entered = ExitStack()

    def __enter__(self) -> None:
        self.entered.enter_context(self.inner)
        self.entered.enter_context(statistics_kept(*self.modules))

    def __exit__(self, *error: Any) -> None:
        self.entered.__exit__(*error)


class _FirstConvolutions:
    """Policy: keep the outputs of the first `count` convolutions. The two passes count for themselves."""

    def __init__(self, count: int):
        self.left = [count, count]

    def __call__(
        self, context: SelectiveCheckpointContext, operator: OpOverload, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if operator is not torch.ops.aten.convolution.default:
            return CheckpointPolicy.PREFER_RECOMPUTE
        self.left[context.is_recompute] -= 1
        kept = self.left[context.is_recompute] >= 0
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _needed_convolutions(blocks: Sequence[Block]) -> int:
    """How many convolutions run before the last one whose output the backward pass reads.

    If blocks end in a convolution, its output is only added to a shortcut or returned: nothing in the blocks reads it.
    """
    layers = [layer for block in blocks for module in _modules(block) for layer in module.modules()]
    layers = [layer for layer in layers if len(layer._parameters)]
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    return len(convolutions) - isinstance(layers[-1], nn.Conv2d)


def _modules(block: Block) -> list[nn.Module]:
    parts = [block] if isinstance(block, nn.Module) else block.args
    return [part for part in parts if isinstance(part, nn.Module)]
