"""Put back what a network's code changes outside of its copy: Python state that both of them reach."""

import dis
import gc
import random
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import IOBase
from types import CodeType, FunctionType, MemberDescriptorType, ModuleType
from typing import Any

from torch import Tensor, nn

from ..table.functions import names_in
from .closures import cells_of, parts_of

_LEFT_ALONE = frozenset(["torch", "keepless", "numpy", "triton", "logging", "builtins"])  # packages
LruCache: type[Any] = type(cache(len))
_METHODS = FunctionType, staticmethod, classmethod, property
_VALUES = str, int, float, bytes, type(None), Tensor, ModuleType


@contextmanager
def put_back(copied: object, copies: set[int]) -> Iterator[set[int]]:
    """Context whose end puts back the Python state that a copied network's code reaches, but that is not copied.

    That is collections, arrays, attributes of objects and classes, variables of closures, global variables that
    functions name, random generators and `functools.lru_cache`s, also behind weak references. `copies`: ids of what
    belongs to the copy. Yields the ids of what is reached. A class's methods are not followed, which could reach a
    whole library, but for the `forward` of modules and methods of modules that followed code names.

    RuntimeError: the code reaches an iterator, whose items cannot be put back. Files for writing may be reached.
    """
    undo: list[Callable[[], None]] = []
    pending, seen = [copied], {id(sys.modules)}
    named, methods = {"forward"}, list[tuple[str, Any]]()  # names in followed code; methods that wait for theirs
    while pending:
        one = pending.pop()
        if id(one) not in seen and not isinstance(one, _VALUES):
            seen.add(id(one))
            ways, reached = _state(one)
            if isinstance(one, type):
                own = {id(each): name for name, each in vars(one).items() if isinstance(each, _METHODS)}
                methods += [(own[id(each)], each) for each in reached if id(each) in own and issubclass(one, nn.Module)]
                reached = [each for each in reached if id(each) not in own]
            elif isinstance(one, FunctionType):
                named |= names_in(one.__code__)
            pending += reached
            if id(one) not in copies:
                is_file = isinstance(one, IOBase) and (one.closed or one.writable())
                is_own = isinstance(getattr(type(one), "__next__", 0), FunctionType)  # its attributes are put back
                if isinstance(one, Iterator) and not (is_file or is_own):
                    raise RuntimeError(
                        f"the network's code takes items of a {type(one).__name__}, which cannot be copied: keep a "
                        f"list and a position in a module instead"
                    )
                undo += ways
        if not pending:
            pending += [each for name, each in methods if name in named]
            methods = [(name, each) for name, each in methods if name not in named]
    del pending, one, ways, reached, methods
    try:
        yield seen
    finally:
        while undo:
            undo.pop()()


def _is_followed(one: Any) -> bool:
    """Whether an object, or a class, function or module, may be a program's own, and not Python's or PyTorch's."""
    kind = one if isinstance(one, type) else type(one)
    if issubclass(kind, nn.Module):
        return True
    named = one if isinstance(one, (FunctionType, ModuleType)) else kind
    package = str(getattr(named, "__module__", None) or named.__name__).partition(".")[0]
    return package not in _LEFT_ALONE and (named is not one or package not in sys.stdlib_module_names)


def _state(one: Any) -> tuple[list[Callable[[], None]], list[Any]]:
    """Functions that put back what an object holds now, and what it refers to and its code names."""
    if isinstance(one, weakref.ref):
        return [], [one()]
    if isinstance(one, (type, FunctionType)) and not _is_followed(one):
        return [], []
    undo: list[Callable[[], None]] = []
    reached = [*parts_of(one), *(one.__bases__ if isinstance(one, type) else [type(one)])]
    if isinstance(one, (list, deque, set)):
        undo.append(partial(_put_members, one, list(one)))
    elif isinstance(one, dict):
        undo.append(partial(_put_items, one, dict(dict.items(one)), one.__setitem__, one.__delitem__))
        reached += dict.keys(one)  # keys may be weak references; a subclass may import what it lists
    elif isinstance(one, LruCache):
        undo.append(partial(_forget_new, one, {*_results(one)}))
    elif type(one) is random.Random:
        undo.append(partial(one.setstate, one.getstate()))
    elif str(type(one)) == "<class 'numpy.ndarray'>" and one.flags.writeable:
        undo.append(partial(one.__setitem__, ..., one.copy()))
    elif type(one).__module__.startswith("numpy.random.") and hasattr(one, "bit_generator"):
        undo.append(partial(setattr, one.bit_generator, "state", one.bit_generator.state))
    if _is_followed(one):
        space: Any = getattr(one, "__dict__", {})
        if isinstance(space, dict):
            undo.append(partial(_put_items, space, dict(space), space.__setitem__, space.__delitem__))
        else:  # a class
            undo.append(partial(_put_items, space, dict(space), partial(setattr, one), partial(delattr, one)))
        variables = [*_variables(one)]
        undo += [partial(put, value) for put, value in variables]
        reached += [*space.values(), *(value for _, value in variables)]
    return undo, reached


def _variables(one: Any) -> Iterator[tuple[Callable[[Any], None], Any]]:
    """The slots of an object, and the global variables and closures that a function names: how to set one; its value.

    Code may name variables of modules that it names, and contains the code of functions that it makes.
    """
    for kind in filter(_is_followed, type(one).__mro__):
        for name in [name for name, slot in vars(kind).items() if isinstance(slot, MemberDescriptorType)]:
            if hasattr(one, name):
                yield partial(object.__setattr__, one, name), getattr(one, name)
    if isinstance(one, FunctionType):
        for cell in cells_of(one):
            yield partial(setattr, cell, "cell_contents"), cell.cell_contents
        named, attributes, spaces = _global_names(one.__code__), names_in(one.__code__), [one.__globals__]
        for space in spaces:
            names = named if space is one.__globals__ else attributes
            for name, value in [(name, space[name]) for name in names if name in space]:
                yield partial(space.__setitem__, name), value
                if isinstance(value, ModuleType) and _is_followed(value) and all(vars(value) is not s for s in spaces):
                    spaces.append(vars(value))


def _global_names(code: CodeType) -> set[str]:
    """The global variables that a function and those inside it name. Unlike `names_in`, without attributes."""
    own = {each.argval for each in dis.get_instructions(code) if each.opname.endswith(("GLOBAL", "GLOBALS", "NAME"))}
    return own.union(*(_global_names(one) for one in code.co_consts if isinstance(one, CodeType)))


def _results(one: Any) -> dict[Any, Any]:
    """The results of a `functools.lru_cache`, by their keys. If it has a maximum, they are inside links."""
    return next((part for part in gc.get_referents(one) if type(part) is dict and part is not vars(one)), {})


def _forget_new(one: Any, before: set[Any]) -> None:
    results = _results(one)
    for key in results.keys() - before:  # CPython passes over a link that is not found here
        results.pop(key)


def _put_members(one: Any, before: list[Any]) -> None:
    if [*map(id, one)] != [*map(id, before)]:
        one.clear()
        (one.update if isinstance(one, set) else one.extend)(before)


def _put_items(space: Any, before: dict[Any, Any], put: Callable[..., None], remove: Callable[[Any], None]) -> None:
    for key in [key for key in space if key not in before]:
        remove(key)
    if isinstance(space, dict) and [*map(id, space)] != [*map(id, before)]:  # another order
        space.clear()
    for key, value in before.items():
        if key not in space or space[key] is not value:
            put(key, value)
