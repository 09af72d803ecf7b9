"""The entries of a learned step, one for each call.

An entry is an inline cache, as in a just-in-time compiler: a function, guards, and code. A pass asks the next entry: is
it this function, and do the guards hold? If so, its code makes the call, and notes what is dropped, as the rules
decided when the call was learned. If not, the rules decide again, for this call alone. Both write the same values into
the same registry: shapes, dtypes and strides are those of the pass's own tensors, and a tensor that a recipe reads is
found by its identity and version. So what recipes compute is right whatever the program does.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...torch_internals import address
from ..held.signs import Positive
from ..held.values import How, Recipe
from ..table.functions import Row
from .report import KeptTensor

Path = Any  # to an argument: its position, its name, or (position of a list, position in it)

_NUMBERS = (bool, int, float, complex)
CONSTANTS = (*_NUMBERS, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, slice)


def is_constant(one: Any) -> bool:
    """Whether an argument can be compared: numbers, strings, functions and the like, and lists and tuples of these."""
    return all([isinstance(part, CONSTANTS) or callable(part) for part in parts(one)])


def parts(one: Any) -> list[Any]:
    """The parts of an argument: of a list, and of tuples in it."""
    listed = one if isinstance(one, (list, tuple)) else (one,)
    return [inner for part in listed for inner in (part if isinstance(part, tuple) else (part,))]


def same(learned: Any, given: Any) -> bool:
    """Whether a constant argument is the learned one."""
    return learned is given or (type(learned) is type(given) and learned == given and repr(learned) == repr(given))


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """What decides how PyTorch computes a product, or a call that saves tensors inside: not the size."""
    aligned = tensor.storage_offset() * tensor.itemsize % 16 == 0
    return tensor.dtype, tensor.dim(), tensor.is_contiguous(), aligned


def argument_code(path: Path) -> str:
    """The argument with a path as code, after `unpacking`."""
    if type(path) is tuple:
        return f"{argument_code(path[0])}[{path[1]}]"
    return f"arg_{path}" if type(path) is int else f"kwargs[{path!r}]"


def unpacking(count: int, otherwise: str) -> list[str]:
    """Code that names each of so many positional arguments. `otherwise`: code for another number of arguments."""
    names = "".join([f"arg_{number}, " for number in range(count)])
    return ["try:", f"    {names or '() '}= args", "except ValueError:", f"    {otherwise}"]


def tensors_by_path(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Tensor]]:
    """The tensors among the arguments, and in lists of these, with their paths."""
    given: list[tuple[Path, Any]] = [*enumerate(args), *kwargs.items()]
    for path, one in given:
        if isinstance(one, Tensor):
            yield path, one
        elif isinstance(one, (list, tuple)):
            yield from (((path, i), part) for i, part in enumerate(one) if isinstance(part, Tensor))


def constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """The other arguments, with their paths."""
    given: list[tuple[Path, Any]] = [*enumerate(args), *kwargs.items()]
    for path, one in given:
        if isinstance(one, (list, tuple)) and not isinstance(one, torch.Size):
            if not any([isinstance(part, Tensor) for part in one]):
                yield path, [*one] if type(one) is list else one  # the program may change its list
            else:
                yield from (((path, i), part) for i, part in enumerate(one) if not isinstance(part, Tensor))
        elif not isinstance(one, Tensor):
            yield path, one


WITHOUT_GRADIENT = "made without a gradient"


def origin(known: Any, tensor: Tensor) -> Any:
    """Why recipes may keep an argument as it is, and not a copy. `known`: the registry of the pass.

    "leaf": it is trained; "made": this pass has made it; "input": of the network; otherwise it is this very object.
    """
    if tensor.is_leaf and tensor.requires_grad:
        return "leaf"
    if known.is_made(tensor) or known.has_made(tensor):
        return "made" if tensor.requires_grad else WITHOUT_GRADIENT
    is_input = not tensor.is_nested and address(tensor.untyped_storage()) in known.outside
    return "input" if is_input else id(tensor)


def differs_in_origin(tensor: str, learned: str, origin: Any) -> list[str]:
    """Code that compares the origin of a tensor, both given as code, with the learned one."""
    if origin == "leaf":
        return [f"not {tensor}.is_leaf", f"not {tensor}.requires_grad"]
    if origin == "made":
        return [f"{tensor}.grad_fn is None", f"node_number({tensor}.grad_fn) < known.start"]
    return [f"origin(known, {tensor}) != {learned}"]


class Source(NamedTuple):
    """Where an entry finds an argument of a recipe.

    "constant"; "given": an argument of the present call, no tensor; "found": the value of an argument; "keep": the
    same, or if it has none, the tensor itself; "kept": the tensor itself, which stays anyway, such as a parameter;
    "copy": a copy of it; "shape"; "in a copy": the value that the first argument had before the call wrote over it;
    "saved": what the result's node has saved under a name; "packed": the saved tensor with a number.
    """

    kind: str
    what: Any = None  # the constant, path, name or number
    learned: Any = None  # the given argument when the call was learned


class Make:
    """How to compute what an entry drops: its result, or what the call saves inside, or both."""

    def __init__(self, recipe: Recipe, function: Callable[..., Any], sources: list[Source], draws: bool):
        self.recipe = weakref.ref(recipe)  # the one that was learned
        self.function, self.sources, self.draws = function, sources, draws
        self.how: How = recipe.how
        # How many tensors it computes, saved inside the call or its result; 0: the result alone
        self.outputs = len(recipe.outputs)
        self.is_whole = False  # it computes both

    @property
    def is_inside(self) -> bool:
        return self.outputs > 0


ITSELF, OWN, FOUND, RULES = "itself", "own", "found", "rules"  # see `Entry.packs`


class Entry:
    """A call of a learned step."""

    def __init__(self, function: Callable[..., Any] | None, row: Row):
        self.function = function  # None: after the last call
        self.row = row
        self.parameter = 0  # the id of the first that the call reads: programs cannot swap tensors with weak references
        self.asks = False  # it only asks for an attribute, and may come and go
        self.writes = False  # it may write over a tensor
        # The code: `run(follows, function, types, args, kwargs)`. None: the call only runs.
        self.run: Callable[..., Any] | None = None
        # The guards
        self.only: tuple[Any, ...] | None = None  # the arguments of a call that switches gradients
        self.names: tuple[str, ...] = ()  # of keyword arguments
        self.count = -1  # of positional arguments; -1: not learned
        self.consts: list[tuple[Path, Any]] = []  # arguments that must not change
        self.compares_consts = True
        self.layouts: list[tuple[Path, bool, Any]] = []  # tensors: whether they need gradients; see `layout`
        self.alike: list[tuple[Path, Path]] = []  # arguments that must be the same tensor
        self.counts: list[tuple[Path, int]] = []  # lengths of lists of tensors
        self.origins: dict[Path, Any] = {}  # of tensors: see `origin`
        self.makers: dict[Path, Any] = {}  # of those without a gradient: the entries that make them
        self.stream = -1  # index of the CUDA device; -1 for others
        # What is dropped
        self.makes: list[Make] = []
        # What autograd holds for each saved tensor. "itself": this argument. None: the tensor too, detached, as the
        # call's own result would keep itself alive. "own": the value of the result. "found": the value that the tensor
        # has. "rules": what they decide. A function: its sign mask. Empty: the call runs without hooks.
        self.packs: Sequence[None | str | Positive] = ()
        self.keeps: list[Path] = []  # arguments that are kept, because saved copies are computed from them
        self.written = False  # the result is the first argument
        self.is_kept = False  # the result is kept in place of a saved argument
        self.by_rules = False  # `Following.concluded` notes what it drops, as the recorder does
        self.has_hooks = False  # there are hooks around the whole pass
        self.reads_packed = False  # recipes read what autograd holds for saved tensors
        self.asks_rules = False  # `by_rules`, or rules decide about a saved tensor
        # What makes a call that drops nothing worth another look: see `watched` in code.py
        self.is_flat = False  # its result has no gradient
        self.is_hidden = False  # other hooks, or modes that may change results, are around it
        self.is_still = False  # it draws nothing, as a dropout with p=0
        self.options: dict[str, Any] | None = None  # its keyword arguments then, if it has one argument besides
        self.is_sized = False  # the size of its result depends on values, and there is a budget
        self.notes_made = False  # a recipe keeps its result, which has no gradient
        # While it is learned: see `_Notes` in learning.py
        self.noted: Any = None


class Script(NamedTuple):
    """The entries of a learned step."""

    entries: list[Entry]
    learned: int  # number of entries that come from the recorded pass
    kept: Sequence[KeptTensor]
    has_hooks: bool  # around the whole pass, because dropped tensors are saved outside of calls
    sized: int  # bytes of results whose size depends on values
    consumers: dict[int, int]  # by id of a parameter: the first entry that reads it (another does no harm)


END = Entry(None, Row())  # after the last call
