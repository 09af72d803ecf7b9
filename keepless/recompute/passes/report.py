"""Report the tensors that a forward pass saves for its backward pass, by operation, consumer and module."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...saved import PLAIN, Kept
from ...torch_internals import address, calling_module
from ..held.signs import Signs


class Line(NamedTuple):
    """Saved tensors of one kind."""

    bytes: int
    tensors: int
    made_by: str  # the operation that made them, or a tensor subclass; "input" if the network did not make them
    kept_for: str  # the function that reads them
    module: str  # the module that calls this function; "" outside of the network's modules
    why: str = ""  # why they are saved


class Report(NamedTuple):
    """The tensors that the last forward pass saved, largest first. Vectors and parameters are left out."""

    lines: list[Line]

    @property
    def bytes(self) -> int:
        return sum(line.bytes for line in self.lines)

    def __repr__(self) -> str:  # what notebooks and print show
        rows = [(f"{line.bytes:,}", str(line.tensors), *line[2:]) for line in self.lines]
        titles = ("bytes", "tensors", "made by", "kept for", "module", "why" if any(row[-1] for row in rows) else "")
        rows = [titles, *rows, (f"{self.bytes:,}", "", "total", "", "", "")]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        texts = [[cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows]
        return "\n".join("  ".join(cells).rstrip() for cells in texts)


class KeptTensor(NamedTuple):
    """A tensor that was kept."""

    bytes: int
    made_by: str
    kept_for: str
    module: weakref.ref[nn.Module] | None  # the one that called this function
    why: str = ""


class Log:
    """The values of a forward pass whose tensors were kept at first."""

    def __init__(self) -> None:
        self.values: list[tuple[weakref.ref[Any], int, KeptTensor]] = []  # with the addresses of their storages
        self.subclasses: list[tuple[weakref.ref[Kept], KeptTensor]] = []  # tensors without values
        self.function: Callable[..., Any] | None = None  # the one that is running
        self.is_on = True
        self.reasons: dict[int, tuple[weakref.ref[Tensor], str]] = {}  # why results of calls are kept, by their ids

    def explain(self, result: Tensor, value: Any, why: str) -> None:
        """Note why the result of a call is kept, if it is. `value`: its value, if it has one already."""
        self.reasons[id(result)] = weakref.ref(result), why
        if value is not None:
            value.why = why

    def why_kept(self, tensor: Tensor) -> str:
        """Why the result of a call is kept; "" if no reason is noted."""
        reference, why = self.reasons.get(id(tensor), (None, ""))
        return why if reference is not None and reference() is tensor else ""

    def note(self, value: Any, tensor: Tensor) -> None:
        """Note a value that is kept at first. `tensor`: its tensor."""
        node = tensor.grad_fn
        if not self.is_on or isinstance(tensor._base, nn.Parameter):
            return
        if node is None and (tensor.dim() < 2 or isinstance(tensor, nn.Parameter)):
            return
        storage = tensor.untyped_storage()
        made_by = "input" if node is None else type(node).__name__.partition("Backward")[0]
        reader = getattr(self.function, "__name__", "")
        line = KeptTensor(storage.nbytes(), made_by, reader, calling_module())
        self.values.append((weakref.ref(value), address(storage), line))

    def note_subclass(self, kept: Kept, tensor: Tensor) -> None:
        """Note a kept tensor that has no value, if it is a tensor subclass."""
        if self.is_on and type(tensor) not in PLAIN and not tensor.is_nested:
            size = tensor.numel() * tensor.itemsize
            reader = getattr(self.function, "__name__", "")
            line = KeptTensor(size, type(tensor).__name__, reader, calling_module(), "a subclass of tensors")
            self.subclasses.append((weakref.ref(kept), line))

    def take_kept_tensors(self, why_planned: Callable[[Any], str] | None = None) -> list[KeptTensor]:
        """Empty the log at the end of the forward pass, and return the tensors that are kept then, one per storage.

        `why_planned`: why a plan keeps a value. Without a plan, the rules have noted why they do.
        """
        lines: dict[int | Signs, KeptTensor] = {}
        for reference, storage, line in self.values:
            value = reference()
            if value is None or value.is_unread or not isinstance(value.source, (Kept, Signs)):
                continue
            key: int | Signs = storage
            if isinstance(value.source, Signs):  # the tensor is freed, and others may have got its address
                key = value.source
                line = line._replace(bytes=key.bytes, kept_for=f"signs for {line.kept_for}")
            if why_planned is not None:
                why = why_planned(value)
            elif line.made_by == "input":
                why = "made without a gradient"
            else:
                why = value.why or "no rule repeats it"
            lines.setdefault(key, line._replace(why=why))
        subclasses = [line for reference, line in self.subclasses if reference() is not None]
        self.values = []
        self.subclasses = []
        self.reasons = {}
        return [*lines.values(), *subclasses]


def summary(kept: Iterable[KeptTensor], network: nn.Module) -> Report:
    """One line for each kind of tensor."""
    names = {id(module): name for name, module in network.named_modules()}
    sizes_by_kind: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for tensor in kept:
        module = None if tensor.module is None else tensor.module()
        name = names.get(id(module), "")
        sizes_by_kind[tensor.made_by, tensor.kept_for, name, tensor.why].append(tensor.bytes)
    lines = [Line(sum(sizes), len(sizes), *kind) for kind, sizes in sizes_by_kind.items()]
    return Report(sorted(lines, reverse=True))
