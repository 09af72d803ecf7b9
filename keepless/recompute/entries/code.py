"""Each entry's call as generated Python code. General code takes twice as long, and a step makes many small calls.

For a SiLU whose argument an earlier entry has dropped, and whose result is dropped too, it is about this:

    def run(follows, function, types, args, kwargs):
        try:
            arg_0, = args
        except ValueError:
            return follows.unlike(function, types, args, kwargs)  # the rules decide about this call
        if transform_level() is not None or dispatch_modes_on() != follows.modes:
            return follows.unlike(function, types, args, kwargs)
        if tuple(kwargs) != ("inplace",) or kwargs["inplace"] is not False:
            return follows.unlike(function, types, args, kwargs)
        known, found = follows.known, follows.known.found
        one = found.get(id(arg_0))
        if one is not None and one[0]() is arg_0 and one[1] == arg_0._version:
            value_1 = one[2]
        elif (value_1 := known.derived(arg_0)) is None:  # nor a view of a dropped tensor
            return follows.unlike(function, types, args, kwargs)
        result, packing = follows.with_hooks(entry, function, types, args, kwargs, None)  # autograd saves `value_1`
        if packing is None:  # the rules have made the call, as hooks are disabled
            return result
        if type(result) is not Tensor or not result.requires_grad or result is arg_0:
            return follows.surprised(packing, result)  # the result gets no recipe
        recipe = Recipe(F.silu, [value_1], how, result, follows.stream)
        found[id(result)] = ref(result), result._version, Value(recipe), 0
        return result
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...saved import PLAIN, Kept, copied, is_ordinary
from ...torch_internals import (
    address,
    current_hooks,
    dispatch_modes_on,
    is_any_autocast_enabled,
    node_number,
    raw_stream,
    saved_as,
    transform_level,
)
from ..held.calls import Call
from ..held.values import Recipe, Value, saved_value
from ..table.functions import is_still, row_of
from ..table.rules import any_values
from ..table.writes import may_overwrite
from .entry import OWN, Entry, Source, argument_code, differs_in_origin, layout, origin, same, unpacking

DEEPEST = 250  # recipes in a chain, which call each other: a plan has up to 200; views and casts may lengthen it
_SEQUENCES = frozenset([list, tuple])
_SPACE: dict[str, Any] = {
    "HELD": (Value, Kept),
    "Kept": Kept,
    "PLAIN": PLAIN,
    "Parameter": nn.Parameter,
    "Recipe": Recipe,
    "SEQUENCES": _SEQUENCES,
    "Tensor": Tensor,
    "Value": Value,
    "address": address,
    "any_values": any_values,
    "autocast_dtype": torch.get_autocast_dtype,
    "copied": copied,
    "current_hooks": current_hooks,
    "dispatch_modes_on": dispatch_modes_on,
    "is_any_autocast_enabled": is_any_autocast_enabled,
    "is_autocast_enabled": torch.is_autocast_enabled,
    "layout": layout,
    "raw_stream": raw_stream,
    "node_number": node_number,
    "origin": origin,
    "ref": ref,
    "same": same,
    "saved_value": saved_value,
    "strided": torch.strided,
    "tensors_in": tensors_in,
    "transform_level": transform_level,
}
_MADE = {  # what a recipe reads if it is not the value of a dropped tensor
    "keep": "Value(Kept({0}, None, detaches=False))",
    "kept": "Kept({0}, None)",
    "copy": "{0}.detach().clone() if type({0}) is Parameter else copied({0})",
    "shape": "any_values({0})",
}
_DIFFERS = "return follows.unlike(function, types, args, kwargs)"
_SURPRISED = "return follows.surprised(packing, result)"


def write(follows: Any, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The code of a call that only writes over a tensor."""
    if not kwargs and type(first := args[0]) in PLAIN and not (first.ndim or first.requires_grad):
        if first._base is None:
            return function(*args)  # e.g. a count of minibatches; numbers have no values
    return follows.writing(function, args, kwargs)


def may_write(follows: Any, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The code of a call that did not write when it was learned, but may: it has an argument `inplace`."""
    if may_overwrite(function, args, kwargs):
        return follows.writing(function, args, kwargs)
    return function(*args, **kwargs)


def expose(follows: Any, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The code of a call that gives the program access to memory: see `KnownValues.expose`."""
    if is_ordinary(args[0]):
        follows.known.expose(args[0])
    return function(*args)


def note_made(run: Any, follows: Any, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The code of a call whose result, e.g. a mask, recipes keep uncopied, because the pass has made it."""
    result = run(follows, function, types, args, kwargs) if run else function(*args, **kwargs)
    follows.known.note_made(Call(function, row_of(function), args, kwargs), result)
    return result


def watched(
    entry: Entry, run: Any, follows: Any, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The code of a call that drops nothing, but would if it changed. `run`: its code otherwise."""
    is_seen = entry.is_hidden and torch.is_grad_enabled() and dispatch_modes_on() == follows.modes
    is_seen = is_seen and transform_level() is None and (current_hooks() is None or follows.is_innermost())
    if is_seen or (entry.is_still and not is_still(function, args, kwargs)):
        follows.note_outdated()
        return follows.unlike(function, types, args, kwargs)
    result = run(follows, function, types, args, kwargs) if run else function(*args, **kwargs)
    if entry.is_flat and getattr(result, "requires_grad", False):
        follows.looks_again(entry)
    if entry.is_sized:
        follows.note_size(result)
    return result


def look_again(
    entry: Entry, run: Any, follows: Any, function: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The code of a call whose result has got a gradient in the last pass: the rules decide about it."""
    entry.run = run
    follows.next -= 1  # the new entry comes before this one, which compares nothing
    result = follows.interpret(function, types, args, kwargs)
    follows.next += not follows.leaves
    return result


def as_code(entry: Entry, follows: Any, *call: Any) -> Any:
    """The code of an entry until it first runs: generates `entry.run`, and runs it.

    The generated code first compares modes and arguments; if something differs, the rules decide about this call. At
    the end it checks the result: if the call has not done what the entry expects, the result is kept.
    """
    entry.run = _Code(entry).made()
    return entry.run(follows, *call)


@lru_cache(2**8)
def _maker(source: str) -> Callable[..., Any]:
    """The function with this source; entries with the same code share it."""
    space = dict(_SPACE)
    exec(source, space)
    maker: Callable[..., Any] = space["make"]
    return maker


class _Code:
    """Generates the code of an entry's call."""

    def __init__(self, entry: Entry):
        self.entry = entry
        self.lines: list[str] = []
        self.objects: list[Any] = []  # that the code refers to
        self.count = 0  # of the names `value_…` so far
        self.late: list[str] = []  # expressions that are evaluated after the call
        if entry.only is not None:
            self.lines += [f"if args != {self.name(entry.only)}:", "    follows.leave()", f"    {_DIFFERS}"]
            self.lines.append("return function(*args, **kwargs)")
            return
        self.compare()
        self.lines += ["known = follows.known", "found = known.found"]
        self.before = [[self.source(one) for one in make.sources] for make in entry.makes]
        for path in entry.keeps:
            self.source(Source("keep", path))
        self.call()
        self.conclude()

    def made(self) -> Callable[..., Any]:
        """Compile the code."""
        names = ", ".join([f"of_{number}" for number in range(len(self.objects))])
        lines = [f"def make({names}):", "    def run(follows, function, types, args, kwargs):"]
        lines += [f"        {line}" for line in self.lines]
        run: Callable[..., Any] = _maker("\n".join([*lines, "    return run"]))(*self.objects)
        return run

    def name(self, one: Any) -> str:
        """The name of an object in the code."""
        self.objects.append(one)
        return f"of_{len(self.objects) - 1}"

    def differs_if(self, conditions: list[str], indent: str = "") -> None:
        """Leave the call to the rules if one of these conditions holds."""
        self.lines += [f"{indent}if {' or '.join(conditions)}:", f"{indent}    {_DIFFERS}"]

    def compare(self) -> None:
        """Compare modes, and the arguments that no recipe reads as values."""
        entry, found = self.entry, ["transform_level() is not None", "dispatch_modes_on() != follows.modes"]
        if entry.stream >= 0 and raw_stream is not None:
            found.append(f"follows.stream_address != raw_stream({entry.stream})")
        if entry.packs or "saved" in [one.kind for make in entry.makes for one in make.sources]:
            found.append("(current_hooks() is not None and not follows.is_innermost())")
        for kind, (is_on, dtype), *_ in {make.how for make in entry.makes}:
            device = self.name(kind)
            if is_on:
                found += [f"not is_autocast_enabled({device})", f"autocast_dtype({device}) != {self.name(dtype)}"]
            else:
                found.append(f"(is_any_autocast_enabled() and is_autocast_enabled({device}))")
        self.lines += unpacking(entry.count, _DIFFERS)
        found.append(f"tuple(kwargs) != {self.name(entry.names)}" if entry.names else "kwargs")
        for path, count in entry.counts:
            found += [f"type({argument_code(path)}) not in SEQUENCES", f"len({argument_code(path)}) != {count}"]
        for path, one in entry.consts:
            given, learned = argument_code(path), self.name(one)
            found.append(f"({given} is not {learned} and not same({learned}, {given}))")
        found += [f"{argument_code(path)} is not {argument_code(first)}" for path, first in entry.alike]
        for make in entry.makes:
            for path, one in [(source.what, source.learned) for source in make.sources if source.kind == "given"]:
                given = argument_code(path)
                found.append(f"type({given}) is not {self.name(type(one))}")
                if type(one) in _SEQUENCES:
                    found.append(f"({given} is not {self.name(one)} and tensors_in({given}))")
        for path, needs, learned in entry.layouts:
            given = argument_code(path)
            found += [f"not isinstance({given}, Tensor)", f"{given}.requires_grad is not {needs}"]
            if learned is not None:
                found += [f"{given}.layout is not strided", f"layout({given}) != {self.name(learned)}"]
        self.differs_if(found)

    def source(self, source: Source) -> str:
        """Generate code that finds what a recipe reads before the call; returns the expression for it."""
        kind, what, learned = source
        if kind == "constant":
            return self.name(what)
        if kind == "given":
            return f"tuple({argument_code(what)})" if type(learned) is list else argument_code(what)
        if kind == "saved":
            is_tensor = not (self.entry.packs or self.entry.has_hooks or what == "other")
            code = f"{self.name(saved_as(what, is_tensor))}(result.grad_fn)"
            return code if is_tensor else f"saved_value({code})"
        if kind in ("packed", "in a copy"):
            is_packed = kind == "packed"
            self.late.append(
                f"saved_value(packing.packed[{what}])" if is_packed else "known.find(result, overwrites=1)"
            )
            return self.late[-1]
        self.count += 1
        name, lines, tensor = f"value_{self.count}", self.lines, argument_code(what)
        if kind in ("found", "keep"):
            lines += [f"key = id({tensor})", "one = found[key] if key in found else None"]
            lines += [f"if one is not None and one[0]() is {tensor} and one[1] == {tensor}._version:"]
            lines += [f"    {name} = one[2]", "else:"]
            if kind == "found":
                lines += [f"    {name} = known.derived({tensor}) if type({tensor}) in PLAIN else None"]
                self.differs_if([f"{name} is None"], "    ")
                return name
        indent = "    " if kind == "keep" else ""
        made = _MADE[kind].format(tensor)
        wrong = [f"type({tensor}) not in PLAIN"]
        if kind in ("keep", "kept"):
            learned = self.entry.origins[what]
            wrong += differs_in_origin(tensor, self.name(learned), learned)
            wrong.append(f"(known.exposed.found and known.is_exposed({tensor}))")
        self.differs_if(wrong, indent)
        lines.append(f"{indent}try:")
        lines.append(f"{indent}    {name} = {made}")
        lines += [f"{indent}except RuntimeError:", f"{indent}    {_DIFFERS}"]  # e.g. made in inference mode
        if kind == "kept":
            lines.append(f"known.staying += [{name}]")  # `append` would be a call
        if kind == "keep":
            lines.append(f"    found[key] = ref({tensor}), {tensor}._version, {name}, 0")
            lines.append(f"    known.unnoted.append({name})")
        return name

    def call(self) -> None:
        """Generate the call."""
        entry, lines = self.entry, self.lines
        lines += ["packing = None", "own = Value(None)" if OWN in entry.packs else "own = None"]
        if entry.written:
            self.differs_if(["type(arg_0) not in PLAIN or arg_0.is_inference()"])  # it may have no version
            lines.append("version = arg_0._version")
        if entry.writes:
            begin = "follows.begin_writing(function, args, kwargs)"
            if entry.written and any(one.startswith("value_") for given in self.before for one in given):
                lines += ["if known.unnoted:", "    known.note_memories()", "storage = arg_0.untyped_storage()"]
                lines.append("one = known.memories.found.get(address(storage))")
                lines.append("is_known = one is not None and one[0]() is storage  # something kept or saved is in it")
                lines += [f"writes = {begin} if is_known else ()", "try:"]
            else:
                lines += ["is_known = True", f"writes = {begin}", "try:"]
        indent = "    " if entry.writes else ""
        if entry.packs or entry.by_rules:
            whole = self.name(entry)
            given = "function, types, args, kwargs, own"
            lines.append(f"{indent}result, packing = follows.with_hooks({whole}, {given})")
        else:
            lines.append(f"{indent}result = function(*args{', **kwargs' if entry.names else ''})")
        if entry.writes:
            lines += ["finally:", "    if writes:", "        follows.end_writing(writes)"]
        if entry.packs or entry.by_rules:
            lines += ["if packing is None:", "    return result"]
        if entry.packs:
            failed = "packing.own is not None and packing.own is not result"
            if entry.reads_packed:
                failed += f" or len(packing.packed) != {len(entry.packs)}"
            lines += [f"if {failed}:", f"    {_SURPRISED}"]

    def conclude(self) -> None:
        """Check what the call has returned, and note the recipes of what it drops."""
        entry, lines = self.entry, self.lines
        drops_own = any([make.is_whole or not make.is_inside for make in entry.makes])
        names = [one.what for make in entry.makes for one in make.sources if one.kind == "saved"]
        if drops_own or entry.is_kept or names:
            wrong = ["type(result) is not Tensor", "not result.requires_grad"]
            wrong += [f"not hasattr(type(result.grad_fn), '_saved_{one}')" for one in names[:1]]  # e.g. empty
            if entry.written:
                wrong += ["result is not arg_0", "result._version != version + 1"]
                values = sorted({one for given in self.before for one in given if one.startswith("value_")})
                lost = [f"type({one}) is Value and known.is_lost({one}, result)" for one in values]
                wrong += [f"(is_known and ({' or '.join(lost)}))"] if lost else []
            elif entry.count > 0:
                wrong.append("result is arg_0")
            lines += [f"if {' or '.join(wrong)}:", f"    {_SURPRISED}"]
        for number, one in enumerate([one for given in self.before for one in given if one in self.late]):
            lines += [f"late_{number} = {one}", f"if type(late_{number}) not in HELD:", f"    {_SURPRISED}"]
            self.before = [[f"late_{number}" if other == one else other for other in given] for given in self.before]
        if entry.by_rules:
            all_given = ", ".join([f"[{', '.join(one)}]" for one in self.before])
            lines.append(f"if not follows.concluded({self.name(entry)}, packing, result, [{all_given}]):")
            lines.append(f"    {_SURPRISED}")
        elif drops_own:
            (make,), (given,) = entry.makes, self.before
            of = f"{self.name(make.function)}, [{', '.join(given)}], {self.name(make.how)}"
            wanted = ", own.consumers > 0" if OWN in entry.packs else ""
            lines.append(f"recipe = Recipe({of}, result, follows.stream{wanted})")
            lines += [f"if recipe.depth > {DEEPEST}:", f"    {_SURPRISED}"]
            if OWN in entry.packs:
                lines.append("own.source = recipe")
            else:
                lines.append("own = Value(recipe)")
            lines.append("found[id(result)] = ref(result), result._version, own, 0")
        if entry.is_sized:
            lines.append("follows.note_size(result)")
        lines.append("return result")
