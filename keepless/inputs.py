"""Check modules given by users, and find tensors in arguments and results."""

from dataclasses import fields, is_dataclass

from torch import Tensor, nn

from .torch_internals import tree_leaves


def tensors_in(thing: object) -> list[Tensor]:
    """The tensors in nested lists, tuples, dictionaries and dataclasses."""
    found = []
    for leaf in tree_leaves(thing):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name, None) for field in fields(leaf)])
    return found


def check_module(value: object, receiver: str) -> None:
    """Raise ValueError if a value is not a module. `receiver`: the function or class that got it."""
    if isinstance(value, type):
        raise ValueError(f"{receiver} got the class {value.__name__}: expected an object, {value.__name__}(…)")
    if not isinstance(value, nn.Module):
        raise ValueError(
            f"{receiver} got a {type(value).__name__}: expected an nn.Module; put functions and tensors into one"
        )
