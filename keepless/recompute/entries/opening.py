"""The calls that functions of PyTorch's make which are written in Python, such as attention, as code of their own."""

import weakref
from collections.abc import Callable, Container
from typing import Any, NamedTuple

from torch import Tensor

from ...inputs import tensors_in
from .entry import CONSTANTS, Entry, Path, argument_code, constants, parts, same, tensors_by_path, unpacking


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
        self.consts = list(constants(args, kwargs))
        self._tensors: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # with their names, by id
        # Of each tensor among the arguments: its path, the path of the first that is the same, and its form.
        self.given: list[tuple[Any, ...]] = []
        paths: dict[int, Path] = {}
        for path, one in tensors_by_path(args, kwargs):
            if id(one) not in paths:
                self._name(one, f"given_{len(paths)}")
            first = paths.setdefault(id(one), path)
            self.given.append((path, first, one.shape, one.dtype, one.stride(), one.device, one.requires_grad))
        self.first = [*paths.values()]  # paths of `given_0`, `given_1`, …
        several = [one for one in (*args, *kwargs.values()) if isinstance(one, (list, tuple))]
        are_alike = all([len({isinstance(part, Tensor) for part in one}) < 2 for one in several])
        # A list may change, and a function of the program may do something else next time.
        given = [part for _, one in self.consts for part in ([one] if isinstance(one, list) else parts(one))]
        may_change = not all([isinstance(part, CONSTANTS) for part in given])
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

    def add(self, number: int, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A call inside has returned."""
        if entry.asks and not isinstance(result, Tensor):
            return  # the answer follows from the arguments, and so does what the function makes of it
        several = isinstance(result, (list, tuple)) and all([isinstance(one, Tensor) for one in result])
        number -= self.number
        if entry.opened is not None or not (several or isinstance(result, Tensor)):
            self.is_known = False
            return
        read: list[str] = []
        given = "".join([f"{self._code(one, read)}, " for one in args])
        named = "".join([f"{name!r}: {self._code(one, read)}, " for name, one in kwargs.items()])
        made = [self._name(one, f"made_{number}_{n}") for n, one in enumerate(result if several else [result])]
        self.values[f"call_{number}"] = entry.function
        self.steps.append(_Step(number, f"({given})", f"{{{named}}}", read, made, several))

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
                call = f"follows.inner_call({step.entry}, {step.args}, {step.kwargs})"
            made = f"[{', '.join(step.made)}]" if step.several else step.made[0]
            lines.append(f"    {made} = {call}")
            needed |= {*step.read}
        space = self.values | {"Tensor": Tensor, "same": same, "names": self.names}
        code = ["def run(follows, args, kwargs):", *[f"    {line}" for line in self._compared(space)], *reversed(lines)]
        exec("\n".join(code), space)
        run: Callable[..., Any] = space["run"]
        return run
