"""Names that programs use which were written for older versions of the released `inplace_abn`."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

NAMES = {"slope": "activation_param", "devices": "group"}

P = ParamSpec("P")
T = TypeVar("T")


def names_arguments(function: Callable[P, T]) -> Callable[P, T]:
    """A function whose TypeError for an old name says the present one."""

    @wraps(function)
    def called(*args: Any, **kwargs: Any) -> T:
        for old in NAMES.keys() & kwargs.keys():
            name = function.__qualname__.removesuffix(".__init__")
            raise TypeError(f"{name} got {old}={kwargs[old]!r}: its name is {NAMES[old]}")
        return function(*args, **kwargs)

    return called
