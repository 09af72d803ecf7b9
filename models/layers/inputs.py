"""Checks of what users give."""

from torch import nn


def check_module(value: object, receiver: str) -> None:
    """Raise ValueError if a value is no module. `receiver`: the function or class that got it."""
    if isinstance(value, type):
        raise ValueError(f"{receiver} got the class {value.__name__}: expected an object, {value.__name__}(…)")
    if not isinstance(value, nn.Module):
        raise ValueError(
            f"{receiver} got a {type(value).__name__}: expected an nn.Module; put functions and tensors into one"
        )
