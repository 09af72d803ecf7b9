"""The notes of a recorded forward pass, for a script: what each call has saved, and which recipes its results got."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...saved import Kept, ShapeOnly, is_ordinary, view
from ...torch_internals import address
from ..held.values import Call, Recipe, Saved, Value
from ..table.functions import Row

Path = Any  # of an argument: its position, its name, or (its position, the one in a list)


class Form(NamedTuple):
    """What the result of a recipe looks like, and how often it is read in a backward pass."""

    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: str
    autocast: tuple[bool, torch.dtype | None]  # during the forward pass
    readers: int
    reads: Sequence[int] = ()  # positions of the recipe's arguments that are `Slot`s or `Keep`s
    alias: int = -1  # position of the argument in whose memory the forward tensor is; -1 if it has its own

    def is_of(self, tensor: Tensor) -> bool:
        return tensor.shape == self.shape and tensor.dtype is self.dtype and tensor.stride() == self.stride


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
        self.calls, self.total = -1, 0
        # What autograd holds for each saved tensor; the storage's address; the argument that it is; whether it is the
        # result; the argument of which it is a copy.
        self.packs: list[tuple[Any, int, Path | None, bool, Path | None]] = []
        self.recipes: list[tuple[Any, list[Source], bool, Any]] = []
        self.consts: list[tuple[Path, Any]] = []
        self.names: tuple[str, ...] = ()
        self.count = 0
        self.grads: list[tuple[Path, bool]] = []  # which arguments need gradients
        self.own: Any = None
        self.base: Any = None
        self.form: Form | None = None
        self.base_form: Form | None = None
        self.stream = -1
        self.alias: Path | None = None  # argument in whose memory the result is


class Lesson:
    """The notes of a forward pass."""

    def __init__(self) -> None:
        self.taught: list[Taught] = []
        self.outside: list[Any] = []  # what autograd holds for tensors saved outside calls
        self.why_not = ""  # a reason why there can be no script

    def begins(self, function: Callable[..., Any]) -> Taught:
        self.taught.append(Taught(function))
        return self.taught[-1]

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
            path, copy_of = paths.get(id(tensor)), None
            if path is None and tensor is not result and isinstance(saved, Saved):
                values = ((one, find(one)) for one in call.arguments if isinstance(one, Tensor))
                copied = [one for one, value in values if value is not None and value in _origins(saved.value)]
                if call.before is not None and call.before is saved.value:
                    copied = [call.args[0]]
                copy_of = paths[id(copied[0])] if copied else None
            if isinstance(saved, Saved) and saved.reads_signs and tensor._base is not None:
                self.why_not = "signs of a view"
            taught.packs.append((what, storage, path, tensor is result, copy_of))
        if isinstance(result, Tensor) and is_ordinary(result):
            taught.form = _form(result)
            taught.written = bool(call.args) and result is call.args[0]
            if result.is_cuda:
                taught.stream = result.device.index
            storage = address(result.untyped_storage())
            given = [(path, one) for path, one in _tensors(call.args, call.kwargs) if is_ordinary(one)]
            sharing = [path for path, one in given if address(one.untyped_storage()) == storage]
            taught.alias = sharing[0] if sharing else None
            if result.is_complex():
                self.why_not = "complex numbers"
            taught.own = _reference(find(result))
            if result._base is not None:
                taught.base, taught.base_form = _reference(find(result._base)), _form(result._base)
        taught.names, taught.count = tuple(call.kwargs), len(call.args)
        taught.grads = [(path, tensor.requires_grad) for path, tensor in _tensors(call.args, call.kwargs)]
        taught.consts = list(_constants(call.args, call.kwargs))
        for recipe, again in call.recipes:
            sources = [_source(argument, call, paths) for argument in again.arguments]
            function: Any = again.function
            if again.draws:
                function = function.args[0]  # without the present random state
            taught.recipes.append((weakref.ref(recipe), sources, again.draws, function))
            taught.given = not isinstance(function, partial) and all([one.kind != "const" for one in sources])


def _reference(value: Any) -> Any:
    return None if value is None else weakref.ref(value)


def _origins(value: Value) -> list[Value]:
    """The value, and the one that it or its base is cast or reshaped from."""
    source = value.source
    if isinstance(source, Recipe) and source.function is view:
        source = source.inputs[0].source
    is_copy = isinstance(source, Recipe) and source.function in (Tensor.to, Tensor.reshape)
    return [value, source.inputs[0]] if isinstance(source, Recipe) and is_copy else [value]


def _form(tensor: Tensor) -> Form:
    return Form(tensor.shape, tensor.dtype, tensor.stride(), tensor.device.type, (False, None), 0)


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
                yield path, one
        elif not isinstance(one, Tensor):
            yield path, one


def _source(argument: Any, call: Call, paths: dict[int, Path]) -> Source:
    """Where a script finds an argument of a recipe."""
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
    for path, one in [*enumerate(call.args), *call.kwargs.items()]:
        if one is argument or (isinstance(one, list) and isinstance(argument, tuple) and tuple(one) == argument):
            return Source("given", path)
    return Source("const", argument)
