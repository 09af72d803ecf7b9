"""Norms that include an activation which the network's own code calls afterwards, perhaps for sums too, as in ResNets.

Such a norm returns an `Activated`, which only that activation accepts. If a forward pass takes another path than the
trace, e.g. because of an argument, other code that gets an `Activated` raises an error.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..norms.abn import ABN
from ..norms.backends.activations import Activation
from ..torch_internals import register_pytree_node

_ELSEWHERE = "the output of a norm that includes its activation did not go where it went in the trace: convert only \
the parts of the network that always run alike"


@dataclass(eq=False)
class Activated:
    """The output of a norm that includes an activation."""

    tensor: Tensor  # any shape and floating dtype
    activation: Activation  # included in the norm
    with_grad: bool  # computed with gradients enabled

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        raise RuntimeError(_ELSEWHERE)


# FSDP2 looks for tensors in a module's output: in dataclasses, or else in pytree nodes.
register_pytree_node(
    Activated,
    lambda activated: ([activated.tensor], (activated.activation, activated.with_grad)),
    lambda tensors, context: Activated(*tensors, *context),
)


class Merged(nn.Module):
    """An activation that some norms include: passes on their outputs, and activates all other tensors.

    The module stays the same object, with its attributes, and gets this class.
    """

    kind: type[nn.Module]  # its class before
    included: set[Activation]  # that norms compute in its place, e.g. a leaky ReLU for a ReLU

    def forward(self, x: Tensor | Activated) -> Tensor:
        """x: any shape and floating dtype. RuntimeError if x includes another activation, or has lost its gradient."""
        if not isinstance(x, Activated):
            return self.kind.forward(self, x)
        if x.activation not in self.included:
            raise RuntimeError(_ELSEWHERE)
        if torch.is_grad_enabled() and not x.with_grad:
            raise RuntimeError(
                "a norm ran without gradients, its activation with gradients: run both or neither under "
                "torch.no_grad(), and use torch.utils.checkpoint with use_reentrant=False"
            )
        return x.tensor


ACTIVATIONS = {  # by their names in our layers, with the name of their parameter
    "relu": (nn.ReLU, ""),
    "leaky_relu": (nn.LeakyReLU, "negative_slope"),
    "elu": (nn.ELU, "alpha"),
    "sigmoid": (nn.Sigmoid, ""),
    "tanh": (nn.Tanh, ""),
}


def merge(norm: ABN, activation: Any) -> None:
    """Let a norm hand its output over to the activation that it includes."""
    if not hands_over(norm):
        norm.register_forward_hook(hand_over)
    if not isinstance(activation, Merged):
        activation.kind = type(activation)
        activation.included = set()
        activation.__class__ = Merged
    activation.included.add(Activation(norm.activation, norm.activation_param))


def hand_over(layer: ABN, args: Any, output: Tensor) -> Activated:
    """Forward hook of a norm that includes an activation after it."""
    return Activated(output, Activation(layer.activation, layer.activation_param), torch.is_grad_enabled())


def hands_over(layer: nn.Module) -> bool:
    """Whether a layer has the hook `hand_over`."""
    return hand_over in layer._forward_hooks.values()


def activation_of(module: nn.Module) -> Activation | None:
    """The activation that a module computes for tensors; None if our layers have none like it, or it has hooks."""
    kind = module.kind if isinstance(module, Merged) else type(module)
    for name, (activation_class, param) in ACTIVATIONS.items():
        if kind is activation_class and not is_customised(module):
            return Activation(name, getattr(module, param, 0.01))
    return None


def is_customised(module: nn.Module) -> bool:
    """Whether a module has hooks other than `hand_over`, or its own forward as an instance attribute."""
    if "forward" in vars(module):
        return True
    hooks_by_kind = [hooks for name, hooks in vars(module).items() if name.endswith("_hooks")]
    return any(list(hooks.values()) != [hand_over] for hooks in hooks_by_kind if hooks)
