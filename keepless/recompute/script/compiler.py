"""Make a script of the notes of a recorded forward pass, when it has ended and it is certain what is kept."""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...inputs import tensors_in
from ...saved import Kept, laid_out, view
from ...torch_internals import address, saved_as
from ..held.signs import Signs
from ..held.values import Recipe, Value, saved_value
from ..recorder.known_values import checkpointed_output
from ..recorder.lesson import CopyOf, Lesson, Source, Taught, is_constant
from ..recorder.plan import Plan
from ..recorder.recipes import Rerun, random_state
from ..recorder.report import KeptTensor
from ..table.functions import PRODUCTS, Row
from ..table.rules import INPLACE, ByName, attention, by_present_backends
from . import handles
from .script import END, MAY_WRITE, OWN, UNREAD, WRITES, Act, Conditions, Entry, Make, Script, Slot, Take

_GROWS = 4  # a script grows to so many times the entries of the recorded pass
_VARIANTS = 4  # entries in a row for calls of one function that differ in their arguments
_IGNORED = {F.batch_norm: (6, "momentum"), F.instance_norm: (6, "momentum")}  # constants that no recipe reads


class _Unlearnable(Exception):
    """A step has something that no script can do."""


def script_of(lesson: Lesson, kept: Sequence[KeptTensor], plan: Plan | None = None) -> Script | None:
    """The script of a pass that has just ended; None if there can be none: see `lesson.why_not`.

    `kept`: of its recording. `plan`: that it has followed.
    """
    outside = [one.value for one in (reference() for reference in lesson.outside) if one is not None]
    if lesson.why_not:
        return None
    compiler = _Compiler(lesson.taught, outside)
    try:
        entries = compiler.entries(plan is not None and plan.fits)
    except _Unlearnable as error:
        lesson.why_not = str(error)
        return None
    return _script(entries, len(entries), kept, plan, compiler.has_hooks)


def grown(script: Script, lesson: Lesson, places: Sequence[int], kept: Sequence[KeptTensor]) -> Script | None:
    """The script with the calls that the recorder has made in a pass; None if there are none, or it learns none.

    `places`: of each call, the number of the entry before which it has come. `kept`: in that pass.
    """
    old = [_without_opening(one, number, places) for number, one in enumerate(script.entries[:-1])]
    if not lesson.taught or lesson.why_not or len(old) >= _GROWS * script.learned:
        return None
    try:
        new = _Compiler(lesson.taught, [], script.has_hooks).entries()
    except _Unlearnable:
        return None
    entries: list[Entry] = []
    begin = 0
    for place, entry in sorted(zip(places, new, strict=True), key=lambda one: one[0]):
        entries += old[begin:place]
        begin = place
        if [one.function for one in entries[-_VARIANTS:]] != [entry.function] * _VARIANTS:
            entries.append(entry)
    entries += old[begin:]
    return _script(entries, script.learned, kept, script.plan, script.has_hooks)


def _without_opening(entry: Entry, number: int, places: Sequence[int]) -> Entry:
    """An entry that does not make the calls of an opened function by itself, if others come between these calls."""
    if entry.opening is None or not any([number < place < number + entry.opening.end for place in places]):
        return entry
    return entry._replace(opening=None, run=None)


def _script(
    entries: Sequence[Entry], learned: int, kept: Sequence[KeptTensor], plan: Plan | None, has_hooks: bool
) -> Script:
    readers: dict[int, tuple[Any, int]] = {}
    for number, one in enumerate(entries):
        if one.parameter is not None and (parameter := one.parameter()) is not None:
            readers.setdefault(id(parameter), (one.parameter, number))
    functions = [one.function or one.opened for one in entries]
    return Script([*entries, END], functions, learned, kept, plan, has_hooks, readers)


class _Compiler:
    """Makes a script of the notes, at the end of their pass, when it is certain what is kept."""

    def __init__(self, taught: list[Taught], outside: list[Value], has_hooks: bool = False):
        self.taught = taught
        # Dropped values that autograd functions of the program save, outside of calls, or whose views they save
        self.outside = [value for value in map(_base, outside) if isinstance(value.source, (Recipe, Signs))]
        self.has_hooks = has_hooks or bool(self.outside)
        self.seen: set[Value] = set()  # what an earlier entry makes
        self.inside: dict[Value, int] = {}  # what the present call saves inside and an entry makes: its number there

    def entries(self, fits: bool = False) -> list[Entry]:
        """An entry for each call. `fits`: the plain network is within the budget."""
        entries = []
        for one in self.taught:
            function, opened = (None, one.function) if one.opened else (one.function, None)
            act = None if fits else self._act(one)
            if act is None and not fits:
                act = WRITES if one.writes else MAY_WRITE if one.function in INPLACE else None
            if one.only is not None:
                act = Act(function, Row())
                act.only = one.only
            entries.append(Entry(function, act, opened, one.parameter, asks=one.asks))
        if not self.seen.issuperset(self.outside):
            raise _Unlearnable("a tensor saved outside calls")
        followed = {number for number, entry in enumerate(entries) if entry.act is not None}
        for number, one in enumerate(self.taught):
            if one.opening is not None:
                run = one.opening.compiled(followed)
                entries[number] = entries[number]._replace(opening=one.opening, run=run)
        return entries

    def _act(self, taught: Taught) -> Act | None:
        if taught.row is None:
            return None
        act = Act(taught.function, taught.row)
        act.names, act.count, act.alike, act.counts = taught.names, taught.count, taught.alike, taught.counts
        own = None if taught.own is None else taught.own()
        made = self._make_all(taught, act, own)
        packs = [self._pack(taught, act, one, own, made) for one in taught.packs]
        if any(one is not None for one in packs) or act.packed or any(make.rerun for make in act.makes):
            act.packs = packs
        if act.packs is None and not act.makes:
            return None
        hooked = act.packs is not None or self.has_hooks
        act.saved = [(saved_as(name, not hooked and name != "other"), position) for name, position in act.saved]
        self.seen |= made
        if taught.base is not None and (base := taught.base()) is not None and own is not None:
            is_new = isinstance(base.source, Recipe) and base.readers and base not in self.seen
            if base is not own and is_new and own in made:
                if base.source.function is not Tensor.view or base.source.inputs != [own]:
                    raise _Unlearnable("a base that is computed in an unknown way")
                act.base = _conditions(base)
                self.seen.add(base)
        is_alone = len(act.makes) == 1 and act.conditions is not None and not (act.is_kept or act.base or act.packed)
        gives = any(pack is not None and pack.make is handles.served for pack in packs)
        if is_alone and not (gives or act.makes[0].rerun or act.makes[0].prepared):
            act.simple = act.makes[0].function
        act.guards, act.written, act.stream = taught.writes, taught.written, taught.stream
        return act

    def _make_all(self, taught: Taught, act: Act, own: Value | None) -> set[Value]:
        """Add how to compute what a call drops. Returns that."""
        made: set[Value] = set()
        self.inside = {}
        for reference, sources, draws, function in taught.recipes:
            recipe = reference()
            if recipe is None:
                continue
            outputs = [one() for one in recipe.outputs] if recipe.outputs else [own]
            outputs = [one if one is not None and one.source is recipe and one.readers else None for one in outputs]
            if not any(outputs):
                continue
            begin = len(act.blank)
            self._add_arguments(taught, act, recipe, sources)
            numbers = [UNREAD if one is None else OWN if one is own else self._number(one) for one in outputs]
            act.makes.append(self._make(taught, act, recipe, begin, draws, function, numbers))
            act.autocast, act.device = recipe.autocast, recipe.device
            made.update(filter(None, outputs))
            if own is not None and own in outputs:
                act.conditions = _conditions(own)
        makes = act.makes
        if makes and not (taught.given and not any(make.rerun for make in makes)):
            ignored = _IGNORED.get(taught.function, ())
            act.consts = [(path, one) for path, one in taught.consts if path not in ignored]
            for _, one in act.consts:
                if not is_constant(one):
                    raise _Unlearnable(f"an argument {type(one).__name__}")
        if any(make.rerun for make in makes) or taught.function in PRODUCTS:
            act.layouts = taught.layouts
        return made

    def _number(self, value: Value) -> int:
        """The number of what a call saves inside."""
        return self.inside.setdefault(value, len(self.inside))

    def _add_arguments(self, taught: Taught, act: Act, recipe: Recipe, sources: list[Source]) -> None:
        """Add where the arguments of a recipe are found."""
        for source, argument in zip(sources, recipe.arguments, strict=True):
            position = len(act.blank)
            act.blank.append(source.what if source.kind == "const" else None)
            copies: list[int] = []  # that the call saves before it overwrites the argument, as SiLU does
            copy = _kept_copy(argument) or argument
            if taught.written and source.what == 0 and isinstance(getattr(copy, "source", None), Kept):
                packs = [saved for saved, *_ in taught.packs]
                copies = [n for n, one in enumerate(packs) if callable(one) and saved_value(one()) is copy]
            if source.kind == "arg" and copies:
                act.packed.append((copies[0], position, True))
            elif source.kind == "arg":
                act.takes.append((source.what, self._take(argument, source, taught), position))
            elif source.kind == "shape":
                act.takes.append((source.what, Take(handles.shape_of, is_noted=False), position))
            elif source.kind == "given":
                learned = next(one for path, one in taught.consts if path == source.what)
                act.given.append((source.what, position, learned))
            elif source.kind == "saved":
                number, name = source.what
                is_dropped = isinstance(argument, Value) and not isinstance(argument.source, Kept)
                if name is not None and not is_dropped:
                    act.saved.append((name, position))
                elif number is not None:
                    act.packed.append((number, position, False))
                else:
                    raise _Unlearnable("an argument of a recipe whose origin is unknown")
            elif source.kind != "const":
                raise _Unlearnable("an argument of a recipe whose origin is unknown")

    def _make(
        self,
        taught: Taught,
        act: Act,
        recipe: Recipe,
        begin: int,
        draws: bool,
        function: Any,
        numbers: list[int],
    ) -> Make:
        """How a recipe is computed, whose arguments begin at this position."""
        rerun, spare = recipe.function if isinstance(recipe.function, Rerun) else None, None
        if rerun is None and recipe.can_overwrite and not draws and self._is_spare(recipe.arguments[0], act, begin):
            spare = torch.relu_ if function is F.relu else partial(function, inplace=True)
        if rerun is None and function is F.relu and len(recipe.arguments) == 1:
            function = torch.relu
        is_attention = taught.row is not None and taught.row.again is attention
        prepared = partial(_prepared, function, is_attention, draws) if is_attention or draws else None
        return Make(function, begin, len(act.blank), numbers, rerun, prepared, spare)

    def _is_spare(self, argument: Any, act: Act, position: int) -> bool:
        """Whether a recipe may compute its result over the argument at this position."""
        if not isinstance(argument, Value) or argument.readers != 1:
            return False
        if (position, None) not in [(place, take.make) for _, take, place in act.takes]:  # an earlier entry makes it
            return False
        return isinstance(argument.source, Recipe) and argument.source.fresh and not argument.source.outputs

    def _take(self, argument: Any, source: Source, taught: Taught) -> Take:
        """How an entry finds a handle for an argument of a call."""
        if isinstance(argument, Kept):
            return Take(handles.keep, is_noted=False)
        is_written = taught.written and source.what == 0
        if source.is_copy and not is_written:
            return Take(handles.copy, is_noted=False)
        if source.is_elsewhere and not is_written:
            return Take(handles.keep)
        return self._handle(argument, is_written)

    def _handle(
        self, value: Value, is_written: bool = False, copy_of: CopyOf | None = None, inside: Collection[Value] = ()
    ) -> Take:
        """How the handle of a value is found.

        `copy_of`: the argument of which it is a copy, or a view of a copy. `inside`: what its call makes.
        """
        source = value.source
        if isinstance(source, Kept):
            if is_written and value.storage:
                raise _Unlearnable("a kept tensor that is overwritten")
            return Take(handles.keep)
        if isinstance(source, Signs):
            raise _Unlearnable("signs that a recipe reads")
        is_of_script = getattr(source.function, "__func__", None) is Slot.look  # see `Interpreter.find`
        if is_of_script or value in self.seen:
            return Take()
        if source.function is view:
            base = source.arguments[0]
            if isinstance(base.source, Kept) and copy_of is None:
                if not base.storage:
                    raise _Unlearnable("a view of a kept tensor that is overwritten")
                return Take(handles.keep)
            of = Take()
            if base in inside:
                of = self._inside(base)
            elif base not in self.seen:
                if copy_of is None:
                    raise _Unlearnable("a view of an unknown base")
                of = self._copied(base, copy_of)
            self.seen.add(value)
            return Take(partial(handles.view_of, of=of, conditions=_conditions(value)))
        if source.function is checkpointed_output:
            self.seen.add(value)
            return Take(partial(handles.norm, conditions=_conditions(value)))
        if _kept_copy(value) is not None:
            return Take(handles.keep)
        raise _Unlearnable(f"a value that {source.function} computes")

    def _inside(self, value: Value) -> Take:
        return Take(partial(handles.inside, conditions=_conditions(value), number=self._number(value)))

    def _pack(self, taught: Taught, act: Act, pack: Any, own: Value | None, made: set[Value]) -> Take | None:
        """What autograd gets for a saved tensor. None: the tensor itself. `made`: what the entry makes."""
        reference, storage, is_result, copy_of = pack
        if reference is None:
            return None
        if reference == "shape":
            return Take(handles.shape, is_noted=False)
        saved = reference()
        if saved is None:
            return None
        value: Value = saved.value
        source = value.source
        if isinstance(source, Signs):
            assert value.positive is not None
            make = partial(handles.signs, positive=value.positive, readers=value.readers)
            return Take(make, is_noted=False)
        if value is own and not is_result:  # the result will do in its place
            if value not in made:
                act.conditions, act.is_kept = Conditions(1), True
                self.seen.add(value)
            return Take(handles.served, is_noted=False)
        if copy_of is not None and not copy_of.is_base and value not in made:
            return self._copied(value, copy_of)
        if isinstance(source, Kept):
            if address(source.packed.untyped_storage()) != storage:
                raise _Unlearnable("a tensor that is kept in a copy")
            return None
        if value in made:
            return Take(handles.own_result) if is_result else self._inside(value)
        if value not in self.seen and source.function is Tensor.to and taught.row is not None and taught.row.narrow:
            self.seen.add(value)
            return Take(partial(handles.narrowed, conditions=_conditions(value)))
        if source.function in (Tensor.to, Tensor.reshape) and value not in self.seen:
            raise _Unlearnable("a copy of an argument")
        take = self._handle(value, copy_of=copy_of, inside=self.inside)
        return None if take.make is handles.keep else take  # a view of a kept tensor

    def _copied(self, value: Value, copy_of: CopyOf) -> Take:
        """A copy of an argument, perhaps cast, in another shape or with other strides."""
        source, path, of = value.source, copy_of.path, None if copy_of.value is None else copy_of.value()
        is_made = isinstance(source, Recipe) and source.function in (Tensor.to, Tensor.reshape, laid_out)
        if not isinstance(source, Recipe) or not is_made or value is of:
            if of is None or _kept_copy(of) is not value:
                return Take(partial(handles.kept_in_copy, path=path), is_noted=False)
            return Take(partial(handles.kept_in_copy, path=path, conditions=_conditions(of)))
        if value in self.seen:
            return Take()
        taken = self._handle(source.arguments[0])
        self.seen.add(value)
        conditions = _conditions(value)
        copied = partial(handles.copy_of, path=path, of=taken, function=source.function, conditions=conditions)
        return Take(copied)


def _conditions(value: Value) -> Conditions:
    """The conditions under which a recipe computes a value."""
    source = value.source
    assert isinstance(source, Recipe)
    return Conditions(value.readers, source.autocast, source.device, source.fresh and not source.outputs)


def _kept_copy(value: Any) -> Value | None:
    """The copy in which a value is kept, if the copy has other strides: see `KnownValues.kept_in_copy`."""
    source = getattr(value, "source", None)
    if not isinstance(source, Recipe) or source.function is not laid_out:
        return None
    return source.inputs[0] if isinstance(source.inputs[0].source, Kept) else None


def _base(value: Value) -> Value:
    """The value itself, or the one of which it is a view."""
    source = value.source
    return source.inputs[0] if isinstance(source, Recipe) and source.function is view else value


def _prepared(function: Any, is_attention: bool, draws: bool, given: Any) -> Callable[..., Any]:
    """The function of a recipe, before a call with these arguments: with the present backends and random numbers."""
    if is_attention:
        named = getattr(function, "__self__", None)
        function = by_present_backends(F.scaled_dot_product_attention)
        function = named._replace(function=function).call if isinstance(named, ByName) else function
    if draws:
        state = random_state(tensors_in(given)[0])
        assert state is not None
        function = partial(state.call, function)
    return function
