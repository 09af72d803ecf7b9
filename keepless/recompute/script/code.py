"""An entry's call as code of its own. General code would take twice as long, and a step makes many small calls."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from ...inputs import tensors_in
from ...saved import PLAIN
from ...torch_internals import address, current_hooks, is_any_autocast_enabled, raw_stream, transform_level
from ..recorder.lesson import Path, argument_code, layout, same, unpacking
from .handles import DEEPEST, keep
from .script import Act, Keep, Slot, Take

_SEQUENCES = frozenset([list, tuple])
_SPACE: dict[str, Any] = {
    "Keep": Keep,
    "PLAIN": PLAIN,
    "SEQUENCES": _SEQUENCES,
    "Slot": Slot,
    "Tensor": Tensor,
    "address": address,
    "autocast_dtype": torch.get_autocast_dtype,
    "current_hooks": current_hooks,
    "is_any_autocast_enabled": is_any_autocast_enabled,
    "is_autocast_enabled": torch.is_autocast_enabled,
    "layout": layout,
    "raw_stream": raw_stream,
    "ref": ref,
    "same": same,
    "tensors_in": tensors_in,
    "strided": torch.strided,
    "transform_level": transform_level,
}
_IS_THIS = "one[0]() is tensor and one[1] == tensor._version"
_DIFFERS = "return follows.unlike(function, types, args, kwargs)"
_SURPRISED = "return follows.surprised(packing, result)"


def as_code(act: Act) -> Callable[..., Any]:
    """Write `act.run(follows, function, types, args, kwargs)`, which makes a call and notes what it drops.

    It first compares modes and arguments; if something differs, the recorder makes the call. At last it looks at the
    result: if the call has not done what the script expects, autograd keeps what it has saved.
    """
    act.run = _Code(act).made()
    return act.run


@lru_cache(2**8)
def _maker(source: str) -> Callable[..., Any]:
    """The function with this source; entries of the same kind share it."""
    space = dict(_SPACE)
    exec(source, space)
    maker: Callable[..., Any] = space["make"]
    return maker


class _Code:
    """The code of a call."""

    def __init__(self, act: Act):
        self.act = act
        self.lines: list[str] = []
        self.objects: list[Any] = []  # which the code names
        self.arguments = ["None"] * len(act.blank)  # of the recipes
        self.handles: list[str] = []  # those among them that may be slots
        if act.only is not None:
            self.lines += [f"if args != {self.name(act.only)}:", "    follows.leave()", f"    {_DIFFERS}"]
            self.lines.append("return function(*args, **kwargs)")
            return
        self.compare()
        if act.takes or act.simple:
            self.lines.append("found = follows.handles.found")
        for path, take, position in act.takes:
            self.take(path, take, position)
        if act.guards:
            is_taken = act.written and any(path == 0 for path, *_ in act.takes)  # then it is an ordinary tensor
            may_write = "may_write_over(arg_0)" if is_taken else "may_write(function, args, kwargs)"
            self.differs_if([f"not follows.handles.{may_write}"])
        self.call()

    def made(self) -> Callable[..., Any]:
        """The function."""
        names = ", ".join([f"of_{number}" for number in range(len(self.objects))])
        lines = [f"def make({names}):", "    def run(follows, function, types, args, kwargs):"]
        lines += [f"        {line}" for line in self.lines]
        run: Callable[..., Any] = _maker("\n".join([*lines, "    return run"]))(*self.objects)
        return run

    def name(self, one: Any) -> str:
        """How the code names an object."""
        self.objects.append(one)
        return f"of_{len(self.objects) - 1}"

    def differs_if(self, conditions: list[str], indent: str = "") -> None:
        """Let the recorder make the call."""
        self.lines += [f"{indent}if {' or '.join(conditions)}:", f"{indent}    {_DIFFERS}"]

    def compare(self) -> None:
        """Compare modes, and the arguments that are not taken as handles."""
        act, found = self.act, ["transform_level() is not None"]
        if act.stream >= 0 and raw_stream is not None:
            found.append(f"follows.stream != raw_stream({act.stream})")
        if act.packs is not None or act.saved:
            found.append("(current_hooks() is not None and not follows.is_innermost())")
        if act.makes:
            (is_on, dtype), device = act.autocast, self.name(act.device)
            if is_on:
                found += [f"not is_autocast_enabled({device})", f"autocast_dtype({device}) != {self.name(dtype)}"]
            else:
                found.append(f"(is_any_autocast_enabled() and is_autocast_enabled({device}))")
        if act.count >= 0:
            self.lines += unpacking(act.count, _DIFFERS)
            found.append(f"tuple(kwargs) != {self.name(act.names)}" if act.names else "kwargs")
        for path, count in act.counts:
            found += [f"type({argument_code(path)}) not in SEQUENCES", f"len({argument_code(path)}) != {count}"]
        for path, one in act.consts:
            given, learned = argument_code(path), self.name(one)
            found.append(f"({given} is not {learned} and not same({learned}, {given}))")
        found += [f"{argument_code(path)} is not {argument_code(first)}" for path, first in act.alike]
        for path, _, one in act.given:
            given = argument_code(path)
            found.append(f"type({given}) is not {self.name(type(one))}")
            if type(one) in _SEQUENCES:
                found.append(f"({given} is not {self.name(one)} and tensors_in({given}))")
        for path, needs, learned in act.layouts:
            given = argument_code(path)
            found += [f"not isinstance({given}, Tensor)", f"{given}.requires_grad is not {needs}"]
            if learned is not None:
                found += [f"{given}.layout is not strided", f"layout({given}) != {self.name(learned)}"]
        self.differs_if(found)
        for position, one in enumerate(act.blank):
            if one is not None:
                self.arguments[position] = self.name(one)
        for path, position, one in act.given:
            self.arguments[position] = f"tuple({argument_code(path)})" if type(one) is list else argument_code(path)

    def take(self, path: Path, take: Take, position: int) -> None:
        """Find the handle of a tensor that a recipe reads, or make it if the tensor is seen for the first time."""
        make, is_noted = take
        handle, lines, indent = f"handle_{position}", self.lines, ""
        self.arguments[position] = handle
        lines.append(f"tensor = {argument_code(path)}")
        if is_noted:
            self.handles.append(handle)
            lines += ["key = id(tensor)", "one = found[key] if key in found else None"]
            lines += [f"if one is not None and {_IS_THIS}:", f"    {handle} = one[2]"]
            lines += [f"    if type({handle}) is Slot:", f"        {handle}.taken += 1"]
            known = "follows.handles.known is None or "
            lines.append(f"elif {known}({handle} := follows.handles.adopted(tensor)) is None:")
            indent = "    "
        if make is None:
            lines.append(f"{indent}{_DIFFERS}")
            return
        writes_over = (
            ["address(tensor.untyped_storage()) == address(arg_0.untyped_storage())"] if self.act.written else []
        )
        self.differs_if(["type(tensor) not in PLAIN", *writes_over], indent)
        if make is keep:
            lines += [f"{indent}try:", f"{indent}    {handle} = Keep(tensor)"]
            lines += [f"{indent}except RuntimeError:", f"{indent}    {_DIFFERS}"]  # it was made in inference mode
        else:
            if is_noted:  # others are copied
                self.differs_if(["tensor.is_inference()"], indent)
            lines.append(f"{indent}{handle} = {self.name(make)}(follows.handles, tensor)")
            self.differs_if([f"{handle} is None"], indent)
        if is_noted:
            lines.append(f"    found[key] = ref(tensor), tensor._version, {handle}")
            lines += [f"    follows.handles.unnoted.append({handle})"] if make is keep else []

    def call(self) -> None:
        """Make the call, and note what it drops."""
        act, lines = self.act, self.lines
        lines.append("packing = None")
        lines.append("own = None" if act.conditions is None else f"own = Slot({self.name(act.conditions)})")
        if act.simple is None:
            ready = [self.name(one.ready) + "((args, kwargs))" for one in act.makes]
            lines.append(f"functions = [{', '.join(ready)}]")
        if act.written:
            lines.append("version = arg_0._version")
        if act.packs is None:
            has_names = act.names or act.count < 0
            lines.append("result = function(*args, **kwargs)" if has_names else "result = function(*args)")
        else:
            whole = self.name(act)
            lines.append(f"result, packing = follows.with_hooks({whole}, function, args, kwargs, own)")
            failed = "packing.has_failed or (packing.own is not None and packing.own is not result)"
            failed += f" or len(packing.packed) != {len(act.packs)}" if act.packed else ""
            lines += [f"if {failed}:", f"    {_SURPRISED}"]
        if act.conditions is not None:
            self.check_result()
        if act.simple is not None:
            self.note_result()
        elif act.conditions is not None or act.makes:
            lines.append(f"arguments = [{', '.join(self.arguments)}]")
            lines.append(f"if not follows.handles.drop({self.name(act)}, result, own, arguments, functions, packing):")
            lines.append(f"    {_SURPRISED}")
        lines.append("return result")

    def check_result(self) -> None:
        """Check whether the call has made a tensor, and note what it looks like."""
        act, conditions = self.act, ["type(result) is not Tensor", "not result.requires_grad"]
        if act.written:
            conditions += ["result is not arg_0", "result._version != version + 1"]
        else:
            conditions += ["result is arg_0"] if act.count > 0 else []
        self.lines += [f"if {' or '.join(conditions)}:", f"    {_SURPRISED}"]
        self.lines.append("own.dtype, own.stride = result.dtype, result.stride()")

    def note_result(self) -> None:
        """Note how to compute the result, where nothing else is dropped. `Handles.drop` does the same for all calls."""
        act, lines = self.act, self.lines
        if act.saved:
            lines.append("node = result.grad_fn")
        for saved_by, position in act.saved:
            lines.append(f"handle_{position} = {self.name(saved_by)}(node)")
            self.arguments[position] = f"handle_{position}"
            self.handles += [] if act.packs is None else [f"handle_{position}"]
        for handle in self.handles:
            lines += [f"if type({handle}) is Slot and {handle}.depth >= own.depth:"]
            lines += [f"    own.depth = 1 + {handle}.depth", f"    if own.depth > {DEEPEST}:", f"        {_SURPRISED}"]
        lines.append(f"own.function = {self.name(act.simple)}")
        lines += [f"own.spare = {self.name(act.makes[0].spare)}"] if act.makes[0].spare is not None else []
        lines.append(f"own.arguments = [{', '.join(self.arguments)}]")
        lines.append("found[id(result)] = ref(result), result._version, own")
