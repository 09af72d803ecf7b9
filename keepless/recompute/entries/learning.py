"""Learn entries: note what each call saves and its recipes, and decide at the end of the pass what it drops."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn

from ...saved import Kept, ShapeOnly, is_ordinary, laid_out, view
from ..held.calls import Call
from ..held.signs import Signs
from ..held.values import Recipe, Saved, Value
from ..table.functions import GETS_DATA, PRODUCTS, Row
from ..table.rules import attention
from ..table.writes import INPLACE
from .code import as_code, expose, may_write, note_made, watched, write
from .entry import (
    END,
    FOUND,
    ITSELF,
    OWN,
    RULES,
    WITHOUT_GRADIENT,
    Entry,
    Make,
    Path,
    Script,
    Source,
    constants,
    is_constant,
    layout,
    origin,
    tensors_by_path,
)
from .plan import Plan
from .registry import KnownValues, checkpointed_output
from .report import KeptTensor

_GROWS = 4  # a script grows to at most about so many times the entries of the recorded pass
_VARIANTS = 4  # at most so many entries in a row for calls of one function that differ in their arguments
# Arguments that no recipe reads: the momentum
_IGNORED: dict[Any, tuple[Any, ...]] = {F.batch_norm: (6, "momentum"), F.instance_norm: (6, "momentum")}


class _Unlearnable(Exception):
    """A step has something that no script can do."""


class _Notes(NamedTuple):
    """From what an entry is made at the end of the pass. It refers to values weakly, and to no tensors."""

    own: Any  # reference to the value of the result
    base: Any  # and of its base
    packs: list["_Pack"]


class _Pack(NamedTuple):
    """A saved tensor."""

    held: Any  # by autograd: a reference, or "shape"; None: the tensor itself
    is_result: bool
    is_given: bool  # it is an argument
    is_known: bool  # it, or its base, had a value already
    copied: Path | None  # the argument of which it is a copy, or a view of a copy,
    of: Any  # and the reference to this argument's value


class Lesson:
    """The entries of a pass while it is recorded."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.outside: list[Any] = []  # what autograd holds for tensors saved outside calls
        self.why_not = ""  # why there can be no script
        self.sized = 0  # bytes of results whose size depends on values

    def begins(self, function: Callable[..., Any], row: Row) -> Entry:
        self.entries.append(Entry(function, row))
        return self.entries[-1]

    def ends(self, call: Call, result: Any, known: KnownValues) -> None:
        """Note what a call has done that has run with our hooks."""
        if not (call.packed or call.recipes):
            return
        entry, own, base, find = self.entries[-1], None, None, known.find
        if isinstance(result, Tensor) and is_ordinary(result):
            entry.written = bool(call.args) and result is call.args[0]
            entry.stream = result.device.index if result.is_cuda else -1
            own, base = find(result), None if result._base is None else find(result._base)
        tensors = list(tensors_by_path(call.args, call.kwargs))
        paths = {id(tensor): path for path, tensor in reversed(tensors)}
        for path, tensor in tensors:
            if is_ordinary(tensor):
                entry.origins[path] = origin(known, tensor)
                if entry.origins[path] == WITHOUT_GRADIENT:
                    entry.makers[path] = known.without_gradient.get(tensor.untyped_storage())
        packs = []
        for tensor, saved, is_known in call.packed:
            held = weakref.ref(saved) if isinstance(saved, Saved) else "shape" if type(saved) is ShapeOnly else None
            of = call.copied.get(id(tensor), call.copied.get(id(tensor._base)))
            copied, value = (None, None) if of is None else (paths[id(of)], find(of))
            is_result, is_given = tensor is result, id(tensor) in paths
            packs.append(_Pack(held, is_result, is_given, is_known, copied, _reference(value)))
        entry.noted = _Notes(_reference(own), _reference(base), packs)
        entry.names, entry.count = tuple(call.kwargs), len(call.args)
        for path, one in tensors:
            has_layout = is_ordinary(one) and not (isinstance(one, nn.Parameter) and one.dim() < 3)  # by `.data = …`
            entry.layouts.append((path, one.requires_grad, layout(one) if has_layout else None))
        entry.consts = list(constants(call.args, call.kwargs))
        entry.alike = [(path, paths[id(one)]) for path, one in tensors if path != paths[id(one)]]
        given: dict[Path, Any] = {**dict(enumerate(call.args)), **call.kwargs}
        entry.counts = [(one, len(given[one])) for one in {path[0]: 0 for path, _ in tensors if type(path) is tuple}]
        entry.compares_consts = False  # not if it is repeated with its own arguments, whatever they are
        for recipe, again in call.recipes:
            make = Make(recipe, again.function.args[0] if again.draws else again.function, [], again.draws)  # type: ignore[attr-defined]
            make.sources = [_source(one, call, paths, entry.written) for one in again.arguments]
            make.is_whole = make.is_inside and own is not None and own in [one() for one in recipe.outputs]
            is_same = not isinstance(make.function, partial) and len(make.sources) == len(call.arguments)
            if is_same:
                for number, (argument, one) in enumerate(zip(again.arguments, call.arguments, strict=True)):
                    if argument is one or (isinstance(one, list) and argument == tuple(one)):
                        path = [*range(len(call.args)), *call.kwargs][number]
                        make.sources[number] = Source("given", path, dict(entry.consts)[path])
            of_arguments = all([one.kind not in ("constant", "saved", "packed", "unknown") for one in make.sources])
            entry.compares_consts = entry.compares_consts or make.is_inside or not (is_same and of_arguments)
            entry.makes.append(make)


def _reference(value: Any) -> Any:
    return _nothing if value is None else weakref.ref(value)


def _nothing() -> None:
    return None


def _source(argument: Any, call: Call, paths: dict[int, Path], is_written: bool) -> Source:
    """Where an entry finds an argument of a recipe."""
    if isinstance(argument, ShapeOnly):
        return Source("shape", next(paths[id(tensor)] for tensor, found in call.found if found is argument))
    if isinstance(argument, (Value, Kept)):
        names = [one for one, found in call.found if found is argument and isinstance(one, str)]
        for tensor, found in call.found:
            if found is argument and isinstance(tensor, Tensor) and id(tensor) in paths:
                path = paths[id(tensor)]
                return Source(_kind(argument, is_written and path == 0), path)
        numbers = [n for n, (_, one, _) in enumerate(call.packed) if getattr(one, "value", one) is argument]
        if names and (isinstance(argument, Kept) or isinstance(argument.source, Kept)):
            return Source("saved", names[0])
        return Source("packed", numbers[0]) if numbers else Source("unknown")
    return Source("unknown") if isinstance(argument, Tensor) else Source("constant", argument)


def _kind(argument: Value | Kept, is_overwritten: bool) -> str:
    """How an entry finds the value of an argument: see `Source`."""
    if isinstance(argument, Kept):
        return "kept"
    source = argument.source
    if isinstance(source, Recipe):
        if source.function is laid_out and isinstance(source.inputs[0].source, Kept):  # `KnownValues.kept_in_copy`
            return "in a copy" if is_overwritten else "keep"
        return "keep" if _is_kept_view(argument) and not is_overwritten else "found"
    if is_overwritten:
        return "in a copy" if argument.storage else "found"
    return "keep" if argument.storage else "copy"


def script_of(lesson: Lesson, kept: Sequence[KeptTensor], plan: Plan | None = None) -> Script | None:
    """The script of a pass that has just ended; None if there can be none: see `lesson.why_not`.

    `kept`: of its recording. `plan`: that it has followed.
    """
    has_hooks = _drops_outside(lesson)
    if not _decided(lesson, plan is not None and plan.fits, has_hooks):
        return None
    return _script(lesson.entries, len(lesson.entries), kept, lesson.sized, has_hooks)


def grown(script: Script, lesson: Lesson, places: Sequence[int], kept: Sequence[KeptTensor]) -> Script | None:
    """The script with the calls that the recorder has made in a pass; None if there are none, or it learns none.

    `places`: for each call, the number of the entry before which it ran. `kept`: in that pass.
    """
    if not lesson.entries or len(script.entries) > _GROWS * script.learned:
        return None
    if not _decided(lesson, False, script.has_hooks):
        return None
    entries: list[Entry] = []
    old, begin = script.entries[:-1], 0
    for place, entry in sorted(zip(places, lesson.entries, strict=True), key=lambda one: one[0]):
        entries += old[begin:place]
        begin = place
        if [one.function for one in entries[-_VARIANTS:]] != [entry.function] * _VARIANTS:
            entries.append(entry)
    entries += old[begin:]
    return _script(entries, script.learned, kept, max(lesson.sized, script.sized), script.has_hooks)


def _script(entries: Sequence[Entry], learned: int, kept: Sequence[KeptTensor], sized: int, has_hooks: bool) -> Script:
    consumers: dict[int, int] = {}
    for number, one in enumerate(entries):
        if one.parameter:
            consumers.setdefault(one.parameter, number)
    return Script([*entries, END], learned, kept, has_hooks, sized, consumers)


def _drops_outside(lesson: Lesson) -> bool:
    """Whether the program's autograd functions save dropped tensors, or views of them, outside of calls."""
    saved = [one for one in (reference() for reference in lesson.outside) if one is not None]
    return any([isinstance(_base(one.value).source, (Recipe, Signs)) for one in saved])


def _base(value: Value) -> Value:
    """The value itself, or the one of which it is a view."""
    source = value.source
    return source.inputs[0] if isinstance(source, Recipe) and source.function is view else value


def _is_kept_view(value: Value) -> bool:
    """Whether a value is kept, or a view of one that is."""
    return isinstance(_base(value).source, Kept)


def _decided(lesson: Lesson, fits: bool, has_hooks: bool) -> bool:
    """Write the entries, now that the pass has ended and it is certain what is dropped. False: they cannot be.

    `fits`: see `Plan.fits`.
    """
    try:
        for one in [] if lesson.why_not else lesson.entries:
            _decide(one, fits, has_hooks)
    except _Unlearnable as error:
        lesson.why_not = str(error)
    return not lesson.why_not


def _decide(entry: Entry, fits: bool, has_hooks: bool) -> None:
    """Decide what an entry drops."""
    notes, entry.noted = entry.noted, None
    own = None if notes is None or fits else notes.own()
    makes = [] if fits else [one for one in entry.makes if _is_read(one, own)]
    drops_own = any([one.is_whole or not one.is_inside for one in makes])
    packs = [] if notes is None or fits else [_pack(entry, one, own, drops_own) for one in notes.packs]
    kinds = {source.kind for make in makes for source in make.sources}
    if "unknown" in kinds:
        raise _Unlearnable("an argument of a recipe whose origin is unknown")
    is_inside = any([one.is_inside for one in makes])
    is_special = is_inside or entry.row.again is attention or any([one.draws for one in makes])
    drops = not {*packs} <= {None, ITSELF}
    is_run = bool(makes) or drops
    base = notes.base() if notes is not None and drops_own else None
    is_base_made = base is not None and base is not own and isinstance(base.source, Recipe) and base.consumers
    serves = drops_own and RULES in packs and entry.row.result_serves is not None
    entry.by_rules = entry.is_kept or (bool(makes) and (is_special or serves or bool(is_base_made)))
    entry.reads_packed = "packed" in kinds
    entry.asks_rules = entry.by_rules or RULES in packs
    entry.makes = makes
    entry.packs = packs if is_inside or "packed" in kinds or drops else ()
    if not (makes and entry.compares_consts):
        entry.consts = []
    entry.consts = [(path, one) for path, one in entry.consts if path not in _IGNORED.get(entry.function, ())]
    if wrong := [one for _, one in entry.consts if not is_constant(one)]:
        raise _Unlearnable(f"an argument {type(wrong[0]).__name__}")
    if not (is_inside or (is_run and entry.function in PRODUCTS)):
        entry.layouts = []
    entry.has_hooks = has_hooks
    kept_paths = [*entry.keeps, *(one.what for make in makes for one in make.sources if one.kind == "keep")]
    for maker in {entry.makers[path] for path in kept_paths if path in entry.makers} - {None, True}:
        if not maker.notes_made:
            maker.notes_made, maker.run = True, partial(note_made, maker.run)
    if is_run or entry.only is not None:
        entry.run = partial(as_code, entry)
    else:  # also where nothing is dropped: recipes of calls that differ may read what this one overwrites
        entry.run = write if entry.writes else may_write if entry.function in INPLACE else None
        entry.run = expose if entry.function == GETS_DATA else entry.run
        if entry.options is not None:
            entry.run = None
        elif entry.is_hidden or entry.is_still or entry.is_sized or (entry.is_flat and entry.run is not None):
            entry.run = partial(watched, entry, entry.run)


def _is_read(make: Make, own: Value | None) -> bool:
    """Whether a recipe computes something that is read."""
    if (recipe := make.recipe()) is None:
        return False
    values = [one() for one in recipe.outputs] if make.is_inside else [own]
    return any([one is not None and one.source is recipe and one.consumers for one in values])


def _pack(entry: Entry, noted: _Pack, own: Value | None, drops_own: bool) -> Any:
    """What autograd gets for a saved tensor: see `Entry.packs`."""
    if noted.held == "shape":
        return RULES
    itself = ITSELF if noted.is_given and not noted.is_result else None
    if noted.held is None or (saved := noted.held()) is None:
        return itself
    value, source = saved.value, saved.value.source
    is_served = value is own and not noted.is_result  # the result replaces it
    if noted.copied is not None and not (is_served and isinstance(source, Kept)):
        source, of = _base(value).source, noted.of()
        if isinstance(source, Recipe) and of in source.inputs and _is_kept_view(of):
            entry.keeps.append(noted.copied)
        return RULES
    if isinstance(source, Signs):
        return value.positive
    if is_served:
        entry.is_kept = not drops_own
        return RULES
    if _is_kept_view(value):
        return itself
    if value is own and drops_own:
        return OWN
    if any([one.is_inside and one.recipe() is source for one in entry.makes]):  # kept until the call has ended
        return RULES
    is_derived = noted.is_known or (isinstance(source, Recipe) and source.function is checkpointed_output)
    return FOUND if is_derived else RULES
