"""Check modules given by users, and find tensors in arguments and results."""

import reprlib
from dataclasses import fields, is_dataclass
from numbers import Real
from typing import Any, TypeVar

from torch import Tensor, nn

from .torch_internals import tree_leaves

Network = TypeVar("Network", bound=nn.Module)  # the type of a module that a function returns

_WITHOUT_PARTS = frozenset([int, float, bool, str, type(None)])


def tensors_in(argument: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples, dictionaries and dataclasses."""
    if isinstance(argument, Tensor):
        return [argument]
    kind = type(argument)
    if kind is tuple or kind is list or kind is dict:  # the usual case, ten times as fast as a tree walk
        return [tensor for part in (argument.values() if kind is dict else argument) for tensor in tensors_in(part)]
    if kind in _WITHOUT_PARTS:
        return []
    leaves = tree_leaves(argument)
    if len(leaves) != 1 or leaves[0] is not argument:
        return tensors_in(leaves)
    if not is_dataclass(argument) or isinstance(argument, type):
        return []
    return [tensor for field in fields(argument) for tensor in tensors_in(getattr(argument, field.name, None))]


def check_module(value: object, receiver: str) -> None:
    """Raise ValueError if a value is not a module. `receiver`: the function or class that got it."""
    if isinstance(value, type):
        raise ValueError(f"{receiver} got the class {value.__name__}: expected an object, {value.__name__}(…)")
    if not isinstance(value, nn.Module):
        raise ValueError(
            f"{receiver} got a {type(value).__name__}: expected an nn.Module; wrap functions and tensors in one"
        )


def check_has_forward(network: nn.Module, receiver: str) -> None:
    """Raise ValueError for a module without a forward pass of its own, such as an nn.ModuleList.

    A LightningModule inherits a forward pass that raises: its `training_step` calls other modules.
    """
    if _has_forward(network):
        return
    parts = list(parts_with_forward(network))
    several = ", ".join(f"network.{path}" for path in parts[:3]) + (", …" if len(parts) > 3 else "")
    raise ValueError(
        f"{receiver} got a {type(network).__name__}, whose forward pass is never called: give it the module that calls "
        f"this one{', or the parts ' + several if parts else ''}"
    )


def parts_with_forward(network: nn.Module, prefix: str = "") -> dict[str, nn.Module]:
    """The outermost modules inside a network that have a forward pass of their own, by name."""
    parts: dict[str, nn.Module] = {}
    for name, child in network.named_children():
        path = f"{prefix}{name}"
        parts |= {path: child} if _has_forward(child) else parts_with_forward(child, f"{path}.")
    return parts


def _has_forward(module: nn.Module) -> bool:
    """Whether a module has a forward pass that does not only raise, as PyTorch's and Lightning's base classes have."""
    owner = next(kind for kind in type(module).__mro__ if "forward" in vars(kind))
    return "forward" in vars(module) or (owner is not nn.Module and owner.__name__ != "LightningModule")


def is_number(value: object) -> bool:
    """Whether a value is a real number, Python's or NumPy's."""
    return isinstance(value, Real)


def shown(value: object) -> str:
    """A short text for a value that a user gave, in one line."""
    return " ".join(reprlib.repr(value).split())
