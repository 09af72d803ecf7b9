"""The notes of a recorded forward pass, for a script: what each call has saved, and which recipes its results got."""

import weakref
from collections.abc import Callable, Container, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...inputs import tensors_in
from ...saved import Kept, ShapeOnly, is_ordinary
from ...torch_internals import address
from ..held.values import Call, Overwriting, Saved, Value
from ..table.functions import Row

Path = Any  # of an argument: its position, its name, or (position of a list, position in it)


_NUMBERS = (bool, int, float, complex)
_CONSTANTS = (*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, slice)


def is_constant(one: Any) -> bool:
    """Whether an argument, or each in a list, can be compared: numbers, names, functions, and tuples of these."""
    return all([isinstance(part, _CONSTANTS) or callable(part) for part in _parts(one)])


def _parts(one: Any) -> list[Any]:
    parts = one if isinstance(one, (list, tuple)) else (one,)
    return [inner for part in parts for inner in (part if isinstance(part, tuple) else (part,))]


def same(learned: Any, given: Any) -> bool:
    """Whether a constant argument is the learned one."""
    return learned is given or (type(learned) is type(given) and learned == given and repr(learned) == repr(given))


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """On what the way of a product depends, or of a call that saves tensors inside: not the size."""
    aligned = tensor.storage_offset() * tensor.itemsize % 16 == 0
    return tensor.dtype, tensor.dim(), tensor.is_contiguous(), aligned


def at(path: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The argument with a path. IndexError, KeyError or TypeError if there is none."""
    if type(path) is int:
        return args[path]
    return kwargs[path] if type(path) is str else args[path[0]][path[1]]


def argument_code(path: Path) -> str:
    """The argument with a path as code, after `unpacking`."""
    if type(path) is tuple:
        return f"arg_{path[0]}[{path[1]}]"
    return f"arg_{path}" if type(path) is int else f"kwargs[{path!r}]"


def unpacking(count: int, otherwise: str) -> list[str]:
    """Code that names each of so many positional arguments. `otherwise`: code for another number of arguments."""
    names = "".join([f"arg_{number}, " for number in range(count)])
    return ["try:", f"    {names or '() '}= args", "except ValueError:", f"    {otherwise}"]


class _Step(NamedTuple):
    """A call inside an opened function, as code."""

    entry: int  # its entry, as an offset from the opened function's entry
    args: str
    kwargs: str
    read: list[str]  # names of tensors
    made: list[str]  # the same
    several: bool  # the call returns a tuple or list


class Opening:
    """The calls that a function of PyTorch's makes, if it is written in Python, such as attention.

    Unless it calls a function of the program, only the form of its arguments decides which calls it makes. So if they
    have this form again, the calls can be made without the code around them.
    """

    def __init__(self, number: int, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.number = number  # of the function's entry in the lesson; other numbers are counted from it
        self.steps: list[_Step] = []
        self.end = 0  # of the entry after the last call
        self.result = ""  # as code
        self.values: dict[str, Any] = {}  # functions and constants in the code
        self.count, self.names = len(args), tuple(kwargs)
        self.consts = list(_constants(args, kwargs))
        self._tensors: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # with their names, by id
        # Of each tensor among the arguments: its path, the path of the first that is the same, and its form.
        self.given: list[tuple[Any, ...]] = []
        paths: dict[int, Path] = {}
        for path, one in _tensors(args, kwargs):
            if id(one) not in paths:
                self._name(one, f"given_{len(paths)}")
            first = paths.setdefault(id(one), path)
            self.given.append((path, first, one.shape, one.dtype, one.stride(), one.device, one.requires_grad))
        self.first = [*paths.values()]  # paths of `given_0`, `given_1`, …
        several = [one for one in (*args, *kwargs.values()) if isinstance(one, (list, tuple))]
        are_alike = all([len({isinstance(part, Tensor) for part in one}) < 2 for one in several])
        # A list may change, and a function of the program may do something else next time.
        parts = [part for _, one in self.consts for part in ([one] if isinstance(one, list) else _parts(one))]
        may_change = not all([isinstance(part, _CONSTANTS) for part in parts])
        # False: it does more than make tensors by calls, or it has arguments that `tensors` cannot compare
        self.is_known = are_alike and not may_change and len(self.given) == len(tensors_in((args, kwargs)))

    def _name(self, tensor: Tensor, name: str) -> str:
        self._tensors[id(tensor)] = weakref.ref(tensor), name
        return name

    def _code(self, one: Any, read: list[str]) -> str:
        """An argument as code; the names of its tensors are added to `read`."""
        if isinstance(one, Tensor):
            reference, name = self._tensors.get(id(one), (None, ""))
            self.is_known = self.is_known and reference is not None and reference() is one
            read.append(name)
        elif type(one) in (list, tuple):
            inner = "".join([f"{self._code(part, read)}, " for part in one])
            name = f"({inner})" if type(one) is tuple else f"[{inner}]"
        else:
            self.is_known = self.is_known and not tensors_in(one)
            name = f"value_{len(self.values)}"
            self.values[name] = one
        return name

    def add(self, entry: int, taught: "Taught", args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call inside has returned."""
        if taught.asks and not isinstance(result, Tensor):
            return  # the answer follows from the arguments, and so does what the function makes of it
        several = isinstance(result, (list, tuple)) and all([isinstance(one, Tensor) for one in result])
        entry -= self.number
        if taught.opened or not (several or isinstance(result, Tensor)):
            self.is_known = False
            return
        read: list[str] = []
        given = "".join([f"{self._code(one, read)}, " for one in args])
        named = "".join([f"{name!r}: {self._code(one, read)}, " for name, one in kwargs.items()])
        made = [self._name(one, f"made_{entry}_{number}") for number, one in enumerate(result if several else [result])]
        self.values[f"call_{entry}"] = taught.function
        self.steps.append(_Step(entry, f"({given})", f"{{{named}}}", read, made, several))

    def ends(self, entry: int, result: Any) -> None:
        """The function has returned. `entry`: the number of the next one in the lesson."""
        self.end, self._left = entry - self.number, list[str]()
        self.result = self._code(result, self._left)
        self._tensors.clear()

    def _compared(self, space: dict[str, Any]) -> list[str]:
        """Code that compares the arguments and names the tensors among them. Adds objects that it names to `space`."""
        conditions = ["tuple(kwargs) != names"]
        for path, one in self.consts:
            space[name := f"const_{len(space)}"], now = one, argument_code(path)
            conditions.append(f"({now} is not {name} and not same({name}, {now}))")
        for path, first, *forms in self.given:
            space[name := f"form_{len(space)}"], now = forms, argument_code(path)
            of = f"{now}.shape, {now}.dtype, {now}.stride(), {now}.device, {now}.requires_grad"
            conditions += [f"not isinstance({now}, Tensor)", f"[{of}] != {name}"]
            conditions += [] if path == first else [f"{now} is not {argument_code(first)}"]
        ids = ", ".join([f"id({argument_code(path)})" for path in self.first])
        conditions.append(f"len({{{ids}}}) != {len(self.first)}")
        lines = unpacking(self.count, "return NotImplemented")
        lines += [f"if {' or '.join(conditions)}:", "    return NotImplemented"]
        return [*lines, *[f"given_{number} = {argument_code(path)}" for number, path in enumerate(self.first)]]

    def compiled(self, followed: Container[int]) -> Callable[..., Any]:
        """A function that makes the calls: `run(follows, args, kwargs)`.

        It returns NotImplemented if the function may make other calls with these arguments.

        `followed`: numbers in the lesson of entries that are no mere calls, which `follows.inside` makes.
        """
        lines, needed = [f"    return {self.result}"], {*self._left}
        for step in reversed(self.steps):
            done = {*step.read, *step.made} - needed  # tensors are freed as early as in the function itself, or earlier
            lines += [f"    del {', '.join(sorted(done))}"] if done else []
            call = f"call_{step.entry}(*{step.args}, **{step.kwargs})"
            if self.number + step.entry in followed:
                call = f"follows.inside({step.entry}, {step.args}, {step.kwargs})"
            made = f"[{', '.join(step.made)}]" if step.several else step.made[0]
            lines.append(f"    {made} = {call}")
            needed |= {*step.read}
        space = self.values | {"Tensor": Tensor, "same": same, "names": self.names}
        code = ["def run(follows, args, kwargs):", *[f"    {line}" for line in self._compared(space)], *reversed(lines)]
        exec("\n".join(code), space)
        run: Callable[..., Any] = space["run"]
        return run


class CopyOf(NamedTuple):
    """An argument of which a call saves a copy."""

    path: Path
    value: weakref.ref[Value] | None
    is_base: bool  # the call saves a view of the copy


class Source:
    """An argument of a recipe."""

    def __init__(self, kind: str, what: Any = None, is_copy: bool = False, is_elsewhere: bool = False):
        self.kind, self.what = kind, what
        self.is_copy = is_copy  # the recipe reads a copy of an argument
        self.is_elsewhere = is_elsewhere  # it reads a copy that autograd saves, so the argument may be overwritten


class Taught:
    """A call of the pass. It refers to tensors and values only weakly."""

    def __init__(self, function: Callable[..., Any]):
        self.function = function
        self.row: Row | None = None
        self.opened = self.asks = self.written = self.given = self.writes = False
        self.only: tuple[Any, ...] | None = None
        # What autograd holds for each saved tensor; the storage's address; whether it is the result; the argument of
        # which it, or the base of which it is a view, is a copy.
        self.packs: list[tuple[Any, int, bool, CopyOf | None]] = []
        self.recipes: list[tuple[Any, list[Source], bool, Any]] = []
        self.consts: list[tuple[Path, Any]] = []
        self.names: tuple[str, ...] = ()
        self.count = 0
        self.layouts: list[tuple[Path, bool, Any]] = []  # tensors among the arguments: whether they need gradients
        self.alike: list[tuple[Path, Path]] = []  # arguments that are the same tensor
        self.counts: list[tuple[Path, int]] = []  # lengths of lists with tensors
        self.own: Any = None
        self.base: Any = None
        self.stream = -1
        self.parameter: weakref.ref[nn.Parameter] | None = None  # the first that it reads
        self.opening: Opening | None = None  # of an opened function, if a script can repeat its calls


class Lesson:
    """The notes of a forward pass."""

    def __init__(self) -> None:
        self.taught: list[Taught] = []
        self.outside: list[Any] = []  # what autograd holds for tensors saved outside calls
        self.why_not = ""  # a reason why there can be no script
        self.opening: Opening | None = None  # of the opened function that is running

    def begins(self, function: Callable[..., Any]) -> Taught:
        self.taught.append(Taught(function))
        return self.taught[-1]

    def overwrites(self, write: Overwriting) -> None:
        """The running call has written over kept tensors."""
        if write.memory.is_saved or write.memory.earlier is not None:
            self.why_not = "memory of saved tensors that is overwritten"

    def ends(self, call: Call, result: Any, find: Callable[[Tensor], Value | None]) -> None:
        """A call has run with our hooks. `find`: finds the value of a tensor."""
        taught = self.taught[-1]
        if not (call.packed or call.recipes):
            return
        taught.row = call.row
        paths = {id(tensor): path for path, tensor in reversed(list(_tensors(call.args, call.kwargs)))}
        for tensor, saved in call.packed:
            what = weakref.ref(saved) if isinstance(saved, Saved) else "shape" if type(saved) is ShapeOnly else None
            storage = address(tensor.untyped_storage()) if is_ordinary(tensor) else 0
            is_base = id(tensor) not in call.copied
            argument = call.copied.get(id(tensor._base if is_base else tensor))
            copy_of = None
            if argument is not None and tensor is not result:
                copy_of = CopyOf(paths[id(argument)], _reference(find(argument)), is_base)
            taught.packs.append((what, storage, tensor is result, copy_of))
        if isinstance(result, Tensor) and is_ordinary(result):
            taught.written = bool(call.args) and result is call.args[0]
            if result.is_cuda:
                taught.stream = result.device.index
            taught.own = _reference(find(result))
            if result._base is not None:
                taught.base = _reference(find(result._base))
        taught.names, taught.count = tuple(call.kwargs), len(call.args)
        for path, one in _tensors(call.args, call.kwargs):
            has_layout = is_ordinary(one) and not isinstance(one, nn.Parameter)
            taught.layouts.append((path, one.requires_grad, layout(one) if has_layout else None))
        taught.consts = list(_constants(call.args, call.kwargs))
        tensors = [(path, paths[id(one)]) for path, one in _tensors(call.args, call.kwargs)]
        taught.alike = [(path, first) for path, first in tensors if path != first]
        lists = {path[0] for path, _ in tensors if type(path) is tuple}
        taught.counts = [(number, len(call.args[number])) for number in sorted(lists)]
        taught.given = bool(call.recipes)
        for recipe, again in call.recipes:
            sources = [_source(argument, call, paths) for argument in again.arguments]
            function: Any = again.function
            if again.draws:
                function = function.args[0]  # without the present random state
            is_same = not isinstance(function, partial) and len(sources) == len(call.arguments)
            if is_same:  # the call with its own arguments
                for number, (argument, one) in enumerate(zip(again.arguments, call.arguments, strict=True)):
                    if argument is one or (isinstance(one, list) and argument == tuple(one)):
                        sources[number] = Source("given", [*range(len(call.args)), *call.kwargs][number])
            taught.recipes.append((weakref.ref(recipe), sources, again.draws, function))
            taught.given = taught.given and is_same and all([one.kind in ("arg", "given") for one in sources])


def _reference(value: Any) -> Any:
    return None if value is None else weakref.ref(value)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    for number, one in enumerate(args):
        if isinstance(one, Tensor):
            yield number, one
        elif isinstance(one, (list, tuple)):
            yield from (((number, i), part) for i, part in enumerate(one) if isinstance(part, Tensor))
    yield from ((name, one) for name, one in kwargs.items() if isinstance(one, Tensor))


def _constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    given: list[tuple[Path, Any]] = [*enumerate(args), *kwargs.items()]
    for path, one in given:
        if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
            if not any([isinstance(part, Tensor) for part in one]):
                yield path, [*one] if type(one) is list else one  # the program may change its list
            elif type(path) is int:
                yield from (((path, i), part) for i, part in enumerate(one) if not isinstance(part, Tensor))
        elif not isinstance(one, Tensor):
            yield path, one


def _source(argument: Any, call: Call, paths: dict[int, Path]) -> Source:
    """Where a script finds an argument of a recipe."""
    if isinstance(argument, ShapeOnly):
        tensor = next(tensor for tensor, found in call.found if found is argument)
        return Source("shape", paths[id(tensor)])
    if isinstance(argument, (Value, Kept)):
        names = [one for one, found in call.found if found is argument and isinstance(one, str)]
        for tensor, found in call.found:
            if found is argument and isinstance(tensor, Tensor) and id(tensor) in paths:
                if not (isinstance(argument, Value) and isinstance(argument.source, Kept)):
                    return Source("arg", paths[id(tensor)])
                is_elsewhere = argument.storage not in (0, address(tensor.untyped_storage()))
                return Source("arg", paths[id(tensor)], not argument.storage, is_elsewhere)
        numbers = [n for n, (_, one) in enumerate(call.packed) if getattr(one, "value", one) is argument]
        return Source("saved", (numbers[0] if numbers else None, names[0] if names else None))
    if isinstance(argument, Tensor):
        return Source("unknown")
    return Source("const", argument)
