"""Checkpointed batch normalisation and activation: strategies (b) and (c) of the paper's Figure 2."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .abn import ABN
from .bn_act import Strategy, is_node, recompute_output
from .saved import Kept, current_hooks

STORES = ("x", "x_hat")


class CheckpointedABN(ABN):
    """`ABN` that keeps x (strategy b) or x_hat (strategy c) for the backward pass, and recomputes z from it.

    Later operations need z in their own backward passes and keep it, unless `recompute_activations` has prepared the
    network (all networks of this project are). Then z is recomputed when the first of them needs it, and only one
    activation-sized buffer is kept. Any activation works.

    Under `torch.autocast` z must have the precision that the following convolution computes in, or the convolution
    keeps a converted copy. It does whenever x comes from a convolution.

    Args (in addition to `ABN`):
        store: "x" to recompute batch normalisation (one scale and shift with the forward pass's statistics) and the
            activation, or "x_hat" to recompute the scale and shift and the activation.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        store: Literal["x", "x_hat"] = "x",
        learn_scale: bool = True,
        *,
        sync: bool = False,
        group: dist.ProcessGroup | None = None,
        backend: str = "auto",
    ):
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            activation,
            activation_param,
            learn_scale=learn_scale,
            sync=sync,
            group=group,
            backend=backend,
        )
        if store not in STORES:
            raise ValueError(f"store={store!r}: expected 'x' or 'x_hat'")
        self.store = store

    def strategy(self) -> Strategy:
        return Strategy(keep=self.store, recompute_output=True, backend=self.backend)

    def extra_repr(self) -> str:
        return super().extra_repr() + f", store={self.store}"


def recompute_activations(network: nn.Module) -> nn.Module:
    """Make a network's operations recompute the outputs of its `CheckpointedABN` layers instead of keeping them.

    Adds hooks around the network's own forward pass; does nothing if it has no such layers. Other saved-tensor hooks
    around it, such as `torch.autograd.graph.save_on_cpu`, keep working. Inside `torch.compile` the compiler decides
    what to keep: set `torch._functorch.config.activation_memory_budget` instead.

    Returns:
        The network itself.
    """
    if _has_checkpointed_layers(network) and not _hooks(network._forward_pre_hooks):
        hooks = _ForwardHooks()
        network.register_forward_pre_hook(hooks.enter)
        network.register_forward_hook(hooks.leave, always_call=True)
    return network


def stop_recomputing(network: nn.Module) -> None:
    """Undo `recompute_activations` in every module that no longer contains checkpointed layers."""
    for module in network.modules():
        if not _has_checkpointed_layers(module):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in _hooks(hooks):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)


def _has_checkpointed_layers(network: nn.Module) -> bool:
    return any(isinstance(module, CheckpointedABN) for module in network.modules())


def _hooks(registered: dict) -> list[int]:
    """Keys of our own hooks among the registered ones."""
    return [key for key, hook in registered.items() if isinstance(getattr(hook, "__self__", None), _ForwardHooks)]


class _ForwardHooks:
    """Module hooks that keep a `_Recomputation` open during a forward pass."""

    def __init__(self) -> None:
        self.open: list[_Recomputation] = []

    def enter(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling():
            recomputation = _Recomputation()
            recomputation.__enter__()
            self.open.append(recomputation)

    def leave(self, module: nn.Module, args: tuple, output: object) -> None:
        if not torch.compiler.is_compiling():
            self.open.pop().__exit__(None, None, None)


class _Recomputation(saved_tensors_hooks):
    """Context in which autograd saves the node of a checkpointed layer instead of its output."""

    def __init__(self) -> None:
        super().__init__(self.pack, self.unpack)
        self.outer = current_hooks()

    def pack(self, tensor: Tensor) -> Any:
        # Views and differentiable in-place operations replace grad_fn. In-place operations that autograd does not see
        # (under no_grad, or on a detached z) change the version.
        node = tensor.grad_fn
        if is_node(node) and node.strategy.recompute_output and tensor._version == node.output_version:
            return node
        return Kept(tensor, self.outer)

    def unpack(self, packed: Any) -> Tensor:
        return recompute_output(packed) if is_node(packed) else packed.get()
