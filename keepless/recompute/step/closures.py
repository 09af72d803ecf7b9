"""Copy what `copy.deepcopy` would share or copy otherwise, such as functions, and tell users' hooks from others."""

import copy
import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, MethodWrapperType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_COLLECTIONS = (list, dict, set, tuple, deque, partial, random.Random)
_FOLLOWED = (*_COLLECTIONS, FunctionType, MethodType)
_METHODS = BuiltinFunctionType, MethodType, MethodWrapperType, staticmethod, classmethod
_LOCKS = type(threading.Lock()), type(threading.RLock())
_OPERATORS = torch.library.CustomOpDef, torch.jit.ScriptFunction
_SHARED: tuple[Any, ...] = (*_LOCKS, *_OPERATORS, getattr(dist, "ProcessGroup", ()))
REGISTERED: list[Callable[..., Any]] = []  # forward hooks of other parts of this package that copies have, too


def add_to(
    memo: dict[int, Any], network: nn.Module, args: Any, kwargs: Any, like: Callable[[Tensor], Tensor]
) -> list[FunctionType]:
    """Add to the memo of `copy.deepcopy` what it would copy otherwise; return the functions whose copies need `fill`.

    They are tensors, generators, hooks of modules without users' ones, and functions that refer to objects: held by
    modules, also in lists, other objects and other functions. `like`: makes a copy of a tensor.
    """
    found: list[FunctionType] = []
    pending: list[Any] = [args, kwargs, *network.modules()]
    seen: set[int] = set()
    while pending:
        one = pending.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, (dict, list, tuple, set, deque, partial)):
            pending += parts_of(one)
        elif isinstance(one, MethodType):
            pending.append(one.__func__)
        elif isinstance(one, _SHARED):
            memo[id(one)] = one
        elif isinstance(one, FunctionType) and (one.__closure__ or _holds_modules(one)):
            found.append(one)
            cells = tuple(CellType() for _ in one.__closure__ or ())
            memo[id(one)] = FunctionType(one.__code__, one.__globals__, one.__name__, None, cells)
            pending += [part for part in parts_of(one) if isinstance(part, _FOLLOWED)]
        elif isinstance(one, Tensor):
            if id(one) not in memo:
                memo[id(one)] = like(one)
        elif isinstance(one, torch.Generator):
            memo[id(one)] = one.clone_state()
        elif isinstance(one, nn.Module):
            packages = ("torch",) if one is network else ("torch", "keepless")  # not our hooks for this pass
            for hooks in [getattr(one, name) for name in HOOKS]:
                memo[id(hooks)] = type(hooks)((key, hook) for key, hook in hooks.items() if is_of(hook, *packages))
            pending.append(vars(one))
        elif not isinstance(one, (type, ModuleType, *weakref.ProxyTypes)):
            pending.append(getattr(one, "__dict__", None))
    return found


def _holds_modules(function: FunctionType) -> bool:
    """Whether defaults of a function's arguments are modules, or their methods."""
    defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return any(isinstance(one, (nn.Module, MethodType)) for one in defaults)


def parts_of(one: Any) -> Iterable[Any]:
    """What a collection, a function or a method refers to. Variables of a closure that are not set are left out."""
    if isinstance(one, dict):
        return dict.values(one)
    if isinstance(one, (list, tuple, set, deque)):
        return one
    if isinstance(one, partial):
        return one.func, one.args, one.keywords
    if isinstance(one, FunctionType):
        return [*(cell.cell_contents for cell in cells_of(one)), one.__defaults__, one.__kwdefaults__]
    if isinstance(one, property):
        return [one.fget]
    return [getattr(one, "__func__", None), getattr(one, "__self__", None)] if isinstance(one, _METHODS) else ()


def cells_of(one: Any) -> list[CellType]:
    """The variables of a function's closure that are set; none for other objects."""
    return [cell for cell in getattr(one, "__closure__", None) or () if cell != CellType()]


def fill(functions: list[FunctionType], memo: dict[int, Any]) -> None:
    """Fill the empty copies of functions, and let methods and weak references of copied modules refer to copies."""
    for function in functions:
        other = memo[id(function)]
        other.__defaults__ = _copied(function.__defaults__, memo)
        other.__kwdefaults__ = _copied(function.__kwdefaults__, memo)
        vars(other).update({name: _copied(one, memo) for name, one in vars(function).items()})
        for cell, found in zip(other.__closure__ or (), function.__closure__ or (), strict=True):
            if found != CellType():
                cell.cell_contents = _copied(found.cell_contents, memo)
    for module in [one for one in memo.values() if isinstance(one, nn.Module)]:
        refer = {name: one for name, one in vars(module).items() if isinstance(one, (MethodType, weakref.ref))}
        vars(module).update({name: _copied(one, memo) for name, one in refer.items()})


def _copied(one: Any, memo: dict[int, Any]) -> Any:
    """What a copied function refers to: copies of parts of the network, of collections and of random generators."""
    if isinstance(one, MethodType):  # `copy` keeps its function
        return MethodType(memo.get(id(one.__func__), one.__func__), memo.get(id(one.__self__), one.__self__))
    if isinstance(one, weakref.ref):
        return weakref.ref(memo[id(one())]) if id(one()) in memo else one
    if id(one) in memo:
        return memo[id(one)]
    if not isinstance(one, _COLLECTIONS) and not type(one).__module__.startswith("numpy."):
        return one
    tried = dict(memo)
    try:
        other = copy.deepcopy(one, tried)
    except Exception:  # e.g. a list of files
        return one
    kept_alive = tried.pop(id(tried), [])  # temporary objects, whose ids must not be reused while they are in the memo
    memo.update(tried)
    memo.setdefault(id(memo), []).extend(kept_alive)
    return other


def has_hooks_of_users(module: nn.Module) -> bool:
    """Whether a module has hooks that its copies lack."""
    hooks = [hook for name in HOOKS for hook in getattr(module, name).values()]
    return not all(is_of(hook, "torch", "keepless") for hook in hooks)


def is_of(hook: object, *packages: str) -> bool:
    """Whether a hook is registered, or is an object of one of these packages or its method. Functions are of none."""
    module = type(getattr(hook, "__self__", hook)).__module__
    is_registered = any(hook is one for one in REGISTERED)
    return is_registered or (module.partition(".")[0] in packages and ".fsdp." not in module)
