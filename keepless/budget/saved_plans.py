"""Plans as plain containers, for files and checkpoints."""

import os
import warnings
from operator import attrgetter
from typing import Any, TypeGuard

import torch

from ..recompute.rules import EXPENSIVE, FOLLOWED, Function
from ..torch_internals import OpOverload, OpOverloadPacket
from .step import Plan

FORMAT = "keepless plans, version 1"
_SETS = ("again", "kept", "inside", "unhooked")  # of calls


def plan_to_plain(plan: Plan) -> dict[str, Any]:
    """A plan in strings, numbers and lists."""
    functions = sorted({function_name(function) for function, *_ in plan.calls})
    numbers = {name: number for number, name in enumerate(functions)}
    calls = [[numbers[function_name(function)], [*shape], str(dtype)] for function, shape, dtype in plan.calls]
    sets = {name: sorted(getattr(plan, name)) for name in _SETS}
    return {"functions": functions, "calls": calls, **sets, "peak": plan.peak, "plain": plan.plain}


def plan_from_plain(plain: dict[str, Any]) -> Plan:
    """The plan that `plan_to_plain` has written. KeyError: a function is not there any more."""
    functions = [_function(name) for name in plain["functions"]]
    calls = [(functions[number], torch.Size(shape), dtype_of(dtype)) for number, shape, dtype in plain["calls"]]
    sets = {name: frozenset(plain[name]) for name in _SETS}
    return Plan(calls, **sets, peak=plain["peak"], plain=plain["plain"])


def dtype_of(text: str) -> torch.dtype:
    """The dtype of a text such as torch.float32."""
    dtype = getattr(torch, text.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text} is not a dtype")
    return dtype


def function_name(function: Function) -> str:
    """A name that tells a function from all others that have rules."""
    if isinstance(function, (OpOverload, OpOverloadPacket)):
        return f"torch.ops.{function}"
    names = [str(getattr(function, name, function)) for name in ("__module__", "__qualname__", "__name__")]
    return " ".join(names)  # F.max_pool2d and its like have nothing but the last one for themselves


def _function(name: str) -> Function:
    if name.startswith("torch.ops."):
        return attrgetter(name.removeprefix("torch.ops."))(torch.ops)
    return {function_name(function): function for function in (*FOLLOWED, *EXPENSIVE)}[name]


def is_file_of_plans(budget: object) -> TypeGuard[str | os.PathLike[str]]:
    """Whether a budget is a path; a string is one if there is such a file."""
    return isinstance(budget, os.PathLike) or (isinstance(budget, str) and os.path.isfile(budget))


def read_plans(file: str | os.PathLike[str]) -> dict[str, Any]:
    """The state in a file. ValueError if the file holds something else."""
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load raises anything
        raise ValueError(f"{file} is no file of plans: {type(error).__name__}: {error}") from error
    return checked_state(state, str(file))


def checked_state(state: Any, name: str) -> dict[str, Any]:
    """The state, if its format is known; `name` begins the error."""
    found = state.get("format") if isinstance(state, dict) else None
    if found != FORMAT:
        raise ValueError(
            f"{name} holds no plans that this keepless knows: its format is {found!r}, expected {FORMAT!r}; give what "
            f"plan(network, example).save(FILE) or budget_state(network) has written"
        )
    return state


def is_usable(state: dict[str, Any], budget: float | int) -> bool:
    """Whether saved plans are for this PyTorch and this budget. A warning says why not."""
    if state["torch"] != torch.__version__:
        why = f"were made with torch {state['torch']}, and this is torch {torch.__version__}"
    elif state["budget"] != budget:
        why = f"are for the budget {state['budget']}, and this network's is {budget}"
    else:
        return True
    warnings.warn(f"the saved plans {why}: the network is planned anew", stacklevel=3)
    return False
