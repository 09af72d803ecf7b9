"""Tensors that a graph keeps for its backward pass, beside those that autograd saves itself."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


def current_hooks() -> Hooks | None:
    """The saved-tensor hooks in effect now, e.g. from `torch.autograd.graph.save_on_cpu`; None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False)


def hooks_are_allowed() -> bool:
    """Whether saved-tensor hooks may be set, which `torch.func.grad` and `disable_saved_tensors_hooks` forbid."""
    return torch._C._autograd._saved_tensors_hooks_get_disabled_error_message() is None


class Kept:
    """A tensor kept as autograd would keep it: packed by `hooks`, if any, and refused if it was modified in place."""

    __slots__ = ("hooks", "name", "packed", "version")

    def __init__(self, tensor: Tensor, hooks: Hooks | None, name: str = "a tensor"):
        self.hooks = hooks
        self.name = name
        if hooks is not None:
            self.packed: Any = hooks[0](tensor)
        elif tensor.grad_fn is None:
            self.packed = tensor
        else:  # with its graph, an operation's own output would keep itself alive
            self.packed = tensor.detach()
        self.version = tensor._version

    def get(self) -> Tensor:
        """The tensor. RuntimeError if it was modified in place, which autograd does not check under hooks."""
        if self.hooks:
            return self.hooks[1](self.packed)
        check_version(self.packed, self.version, self.name)
        return self.packed


def check_version(tensor: Tensor, version: int, name: str = "a tensor") -> None:
    """Raise RuntimeError if a tensor was modified in place since it had this version. `name` begins the message."""
    if tensor._version != version:
        raise RuntimeError(
            f"{name} of shape {tuple(tensor.shape)} needed for the gradient was modified by an inplace operation: it "
            f"is at version {tensor._version}, expected version {version}"
        )
