"""Any network in less memory, exactly: cheap activations are computed again instead of kept."""

import sys
import threading
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..reversible.couplings import Coupling
from ..saved import current_hooks, hooks_are_allowed
from .recording import Recording


def recompute_activations(network: nn.Module, *, checkpointed_only: bool = False) -> nn.Module:
    """Make a network compute cheap activations again in its backward pass, instead of keeping them.

    Cheap are the results of norms, activations, products, sums, concatenations, copies, views, dropout, max-pooling and
    upsampling, if their inputs are kept anyway; modules and functions count alike. So are the outputs of
    `CheckpointedABN`. Each is computed once per backward pass, for its first reader, and held until its last reader has
    read it. No module is replaced, and outputs and gradients do not change.

    It works eagerly, while gradients are recorded, inside the network's own forward pass. Inside `torch.compile` the
    compiler decides what to keep, and a warning says so: set `torch._functorch.config.activation_memory_budget`. Other
    saved-tensor hooks around it, such as `torch.autograd.graph.save_on_cpu`, keep working and get what is kept.

    Tensors that the backward pass reads, parameters included, may not be modified in place before it: this raises
    PyTorch's error about an in-place operation. Changes through `.data` cannot be seen, here as elsewhere in autograd.

    Args:
        network: any, returned with two hooks around its forward pass. The branches of couplings inside are prepared as
            well, because they run again by themselves.
        checkpointed_only: only the outputs of `CheckpointedABN` (the paper's checkpointing).
    """
    couplings = [module for module in network.modules() if isinstance(module, Coupling)]
    for module in [network, *(branch for coupling in couplings for branch in coupling.children())]:
        for registered in (module._forward_pre_hooks, module._forward_hooks):
            for key in [key for key, hook in registered.items() if _is_ours(hook)]:
                del registered[key]
        hooks = _Hooks(checkpointed_only)
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        module.register_forward_hook(hooks.leave, always_call=True)
    return network


class _Open(threading.local):
    """The forward passes that run in a thread, innermost last; None for a pass that needs no recording."""

    def __init__(self) -> None:
        self.passes: list[tuple[nn.Module, Recording | None]] = []


_open = _Open()


class _Hooks:
    """Module hooks that record a forward pass."""

    def __init__(self, checkpointed_only: bool):
        self.checkpointed_only = checkpointed_only

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_compiling():
            if not self.checkpointed_only:
                from torch._dynamo.comptime import comptime  # the import takes a second

                comptime(_say_that_the_compiler_decides)
            return
        recording = None
        if torch.is_grad_enabled() and hooks_are_allowed() and not _is_recorded():
            inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            recording = Recording(
                checkpointed_only=self.checkpointed_only, copy_parameters=_is_sharded(module), inputs=inputs
            )
            recording.__enter__()
        _open.passes.append((module, recording))

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        if torch.compiler.is_compiling():
            return
        if _open.passes and _open.passes[-1][0] is module:  # not if an earlier hook raised
            _, recording = _open.passes.pop()
            if recording is not None:
                recording.__exit__(None, None, None)


def _say_that_the_compiler_decides(_: object) -> None:
    """Called while a graph is traced."""
    warnings.warn(
        "recompute_activations does nothing inside torch.compile, where the compiler decides what to keep: set "
        "torch._functorch.config.activation_memory_budget, e.g. to 0.5, or train without torch.compile",
        stacklevel=1,
    )


def _is_ours(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), _Hooks)


def _is_sharded(network: nn.Module) -> bool:
    """Whether FSDP shards parameters of a network, and frees the gathered ones after each use."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None or not dist.is_initialized():
        return False
    return any(isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)) for module in network.modules())


def _is_recorded() -> bool:
    """Whether a recording's hooks are in effect, and no others inside it."""
    hooks = current_hooks()
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Recording)
