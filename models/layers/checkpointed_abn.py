"""Checkpointed batch normalisation and activation: strategies (b) and (c) of the paper's Figure 2."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from .abn import ABN
from .bn_act import BatchNormActivation, Strategy, recompute_output

STORES = ("x", "x_hat")


class CheckpointedABN(ABN):
    """`ABN` that keeps x (strategy b) or x_hat (strategy c) for the backward pass, and recomputes z from it.

    The operations that follow need z in their own backward passes and would keep it. They do so unless the layer is in
    a network that `recompute_activations` has prepared, as all networks of this project are: then z is recomputed
    when the first of them asks for it, and the strategy keeps one activation-sized buffer. Any activation will do.

    Under `torch.autocast` the convolution that follows must find z in the precision it computes in, or it keeps a
    converted copy: so it is wherever x comes from a convolution.

    Args beyond those of `ABN`:
        store: "x", from which batch normalisation (with the statistics of the forward pass, so as one scale and
            shift) and activation are repeated; or "x_hat", from which the scale and shift and the activation are.
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
        store: str = "x",
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
    """Let the operations in a network recompute the outputs of its `CheckpointedABN` layers instead of keeping them.

    Nothing changes for a network without such layers. The network's own forward pass is what is covered, whatever
    calls it. Other saved-tensor hooks, such as `torch.autograd.graph.save_on_cpu`, keep working around it. Inside
    `torch.compile` the compiler decides what is kept; `torch._functorch.config.activation_memory_budget` is there what
    this function is here.

    Returns:
        The network itself.
    """
    if _has_checkpointed_layers(network) and not _hooks(network._forward_pre_hooks):
        hooks = _ForwardHooks()
        network.register_forward_pre_hook(hooks.enter)
        network.register_forward_hook(hooks.leave, always_call=True)
    return network


def stop_recomputing(network: nn.Module) -> None:
    """Undo `recompute_activations` in every module of a network that has no checkpointed layers any more."""
    for module in network.modules():
        if not _has_checkpointed_layers(module):
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                for key in _hooks(hooks):
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)


def _has_checkpointed_layers(network: nn.Module) -> bool:
    return any(isinstance(module, CheckpointedABN) for module in network.modules())


def _hooks(registered: dict) -> list[int]:
    """The keys of our hooks among those of a module."""
    return [key for key, hook in registered.items() if isinstance(getattr(hook, "__self__", None), _ForwardHooks)]


class _ForwardHooks:
    """Module hooks that hold a `_Recomputation` open during a forward pass."""

    def __init__(self):
        self.open: list[_Recomputation] = []

    def enter(self, module: nn.Module, args: tuple) -> None:
        if not torch.compiler.is_compiling():
            recomputation = _Recomputation()
            recomputation.__enter__()
            self.open.append(recomputation)

    def leave(self, module: nn.Module, args: tuple, output) -> None:
        if not torch.compiler.is_compiling():
            self.open.pop().__exit__(None, None, None)


class _Recomputation(saved_tensors_hooks):
    """Autograd nodes made in this context keep, for the output of a checkpointed layer, the layer's node alone."""

    def __init__(self):
        super().__init__(self.pack, self.unpack)
        self.outer: tuple[Callable, Callable] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)

    def pack(self, tensor: Tensor):
        # A view, or an in-place operation that is differentiated, would have put another node there; one that is not
        # (under no_grad, or on a detached z) has changed the version.
        node = tensor.grad_fn
        if isinstance(node, BatchNormActivation._backward_cls) and node.strategy.recompute_output:
            if tensor._version == node.output_version:
                return node
        if self.outer is not None:
            return self.outer[0](tensor)
        return tensor.detach(), tensor._version  # with its grad_fn, an operation's output would keep itself alive

    def unpack(self, packed) -> Tensor:
        if isinstance(packed, BatchNormActivation._backward_cls):
            return recompute_output(packed)
        if self.outer is not None:
            return self.outer[1](packed)
        tensor, version = packed
        if tensor._version != version:  # autograd checks this itself only where there are no hooks
            raise RuntimeError(
                f"a tensor of shape {tuple(tensor.shape)} that is needed for the gradient was modified by an inplace "
                f"operation: it is at version {tensor._version}, expected version {version}"
            )
        return tensor
