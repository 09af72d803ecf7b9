"""Norms that already include an activation which the network's own code calls afterwards.

Such a norm returns an `Activated`, and a `MergedActivation` in place of the activation unwraps it. So a ReLU module
that a block calls in several places passes on activated tensors and activates all others. Any other code that gets an
`Activated`, e.g. in a branch that did not run on the example, raises an error instead of computing wrong values.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..torch_internals import register_pytree_node

# Attributes of the norm's output that a network may read; the activation does not change them.
METADATA = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "dim", "size", "numel")


@dataclass(eq=False)
class Activated:
    """The output of a norm that includes an activation, readable only by the module of that activation."""

    tensor: Tensor  # any shape and floating dtype
    activation: Activation  # included in the norm
    with_grad: bool  # computed with gradients enabled

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(f"{_ELSEWHERE} to {getattr(function, '__name__', function)}: {_FIX}")

    def __getattr__(self, name: str) -> Any:
        if name in METADATA:
            return getattr(self.tensor, name)
        raise AttributeError(f"{_ELSEWHERE} to code that reads its .{name}: {_FIX}")


def _refuses(operation: str) -> Callable[..., NoReturn]:
    def refuse(self: Activated, *others: object) -> NoReturn:
        raise RuntimeError(f"{_ELSEWHERE} to code that applies {operation} to it: {_FIX}")

    return refuse


_OPERATIONS = "eq getitem iter len neg pow add radd sub rsub mul rmul truediv rtruediv matmul lt le gt ge"
for _name in _OPERATIONS.split():
    setattr(Activated, f"__{_name}__", _refuses(f"__{_name}__"))


# FSDP2 looks for tensors in a module's output: in dataclasses, or else in pytree nodes.
register_pytree_node(
    Activated,
    lambda activated: ([activated.tensor], (activated.activation, activated.with_grad)),
    lambda tensors, context: Activated(*tensors, *context),
)


class MergedActivation(nn.Module):
    """Replaces an activation that some norms include: passes on their outputs, and activates all other tensors."""

    def __init__(self, activation: nn.Module):
        super().__init__()
        self.activation = activation
        self.included: tuple[Activation, ...] = ()  # computed by the norms instead, e.g. a leaky ReLU for a ReLU
        self.train(activation.training)

    def forward(self, x: Tensor | Activated) -> Tensor:
        """x: any shape and floating dtype.

        RuntimeError if the norm includes another activation; or if x was computed without gradients but they are
        enabled here. `torch.utils.checkpoint` with use_reentrant=True between the two would lose them.
        """
        if not isinstance(x, Activated):
            return self.activation(x)
        if x.activation not in self.included:
            raise RuntimeError(f"{_ELSEWHERE} to {type(self.activation).__name__}: {_FIX}")
        if torch.is_grad_enabled() and not x.with_grad:
            raise RuntimeError(
                "a norm ran without gradients, its activation with gradients: run both or neither under "
                "torch.no_grad(), and use torch.utils.checkpoint with use_reentrant=False"
            )
        return x.tensor

    def extra_repr(self) -> str:
        return "after norms with " + ", ".join(f"{name}({param})" for name, param in self.included)


def hand_over(layer: ABN, args: Any, output: Tensor) -> Activated:
    """Forward hook of a norm that includes the activation of a `MergedActivation`."""
    return Activated(output, Activation(layer.activation, layer.activation_param), torch.is_grad_enabled())


def hands_over(layer: nn.Module) -> bool:
    """Whether a layer has the hook `hand_over`."""
    return hand_over in layer._forward_hooks.values()


def is_customised(module: nn.Module) -> bool:
    """Whether a module has hooks other than `hand_over`, or its own forward as an instance attribute."""
    hooks = {key: value for key, value in vars(module).items() if key.endswith("_hooks") and value}
    if hands_over(module) and len(module._forward_hooks) == 1:
        del hooks["_forward_hooks"]
    return "forward" in vars(module) or bool(hooks)


_ELSEWHERE = "the output of a norm that includes its activation did not go where it went on the example, but"
_FIX = "convert the network with an example that takes this path"
