"""The state of modules before a forward pass, from which its repetition starts: buffers, attributes, parameters."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ..norms.inplace_abn import OWN_LAYERS
from ..norms.statistics import BATCH_NORMS, has_running_statistics
from ..saved import check_version
from ..torch_internals import FakeTensor

Values = tuple[Tensor, ...]

# Norms whose outputs do not depend on their buffers in training.
_KNOWN_NORMS = frozenset([*OWN_LAYERS, *BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, Enum)
_PYTORCHS_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}

_left_alone = WeakTensorKeyDictionary()  # buffers on devices that a forward pass did not change


class _Buffer(NamedTuple):
    """A buffer that a repetition must not change. `start`: a copy of its first values; None if they have no effect."""

    owner: nn.Module
    name: str
    values: Tensor | None
    version: int
    start: Tensor | None

    def is_same(self) -> bool:
        present = self.owner._buffers[self.name]
        if present is not self.values or (present is not None and present._version != self.version):
            return False
        return present is None or self.start is None or _are_same(present, self.start)


class _Parameter(NamedTuple):
    """A parameter, where it was before the forward pass."""

    owner: nn.Module
    name: str
    values: nn.Parameter
    version: int

    @property
    def present(self) -> Tensor | None:
        return self.owner._parameters.get(self.name)

    def is_same(self) -> bool:
        """Whether the forward pass did not replace it. FSDP does, and puts it back."""
        return self.present is self.values or type(self.present).__name__ == "DTensor"


class State:
    """The state of modules before a forward pass: buffers, parameters, and attributes that are plain values.

    Only what a forward pass writes into the memory of a parameter is lost. There a repetition starts from the values
    that were written, which is right if it writes them again, as an initialisation does; `restored` sees that.
    """

    def __init__(self, parts: Iterable[nn.Module], low_precision: bool = False):
        self.close = 0.1 if low_precision else 1e-3  # differences of values computed from restored inputs
        self.equal = 0.02 if low_precision else 1e-5
        self.attributes = {part: _attributes(part) for part in parts}
        self.buffers = [buffer for part in self.attributes for buffer in _buffers(part)]
        self.parameters = [one for part in self.attributes for one in _parameters(part)]
        self.lazy = {part for part in self.attributes if any(map(is_lazy, _tensors(part)))}
        self.constants: list[tuple[nn.Module, str, Tensor, int]] = []  # which may not change before the repetition
        self.written: list[_Parameter] = []  # by the forward pass, as far as versions tell
        self.end: State | None = None  # the state after the forward pass, if an inverse may read it

    def forward_pass_ended(self) -> None:
        """See what the forward pass has changed, and drop the copies of the rest."""
        for part in self.lazy:  # what it learned from the first minibatch, it knows in the repetition
            self.attributes[part] = _attributes(part)
        self.buffers = [one for one in self.buffers if one.owner not in self.lazy]
        self.buffers += [buffer for part in self.lazy for buffer in _buffers(part)]
        changed = {part for part, before in self.attributes.items() if _differ(before, _attributes(part))}
        moved = {one[:2]: one for one in self.buffers if not one.is_same()}
        changed |= {one.owner for one in moved.values() if one.start is not None or one.values is None}
        with_inverse = [part for part in changed if callable(getattr(part, "inverse", None))]
        self.end = State(with_inverse) if with_inverse else None
        self.written = [one for one in self.parameters if one.is_same() and one.values._version != one.version]
        replaced = [one for one in self.parameters if not one.is_same()]
        if not (self.written or replaced or any(not has_running_statistics(part) for part in changed)):
            self.parameters = []  # nothing was initialised, and the repetition writes none
        self.constants = [
            (part, name, parameter, parameter._version)
            for part in self.attributes
            for name, parameter in part._parameters.items()
            if parameter is not None
        ]
        kept = []
        for one in self.buffers:  # later passes move running statistics
            if one.values is None or one[:2] in moved or has_running_statistics(one.owner):
                kept.append(one)
            else:
                self.constants.append((one.owner, one.name, one.values, one.version))
        self.buffers = kept

    def check_constants(self) -> None:
        """RuntimeError if a parameter, or a buffer that the forward pass left alone, was modified or replaced since."""
        for part, name, tensor, version in self.constants:
            present = part._parameters.get(name, part._buffers.get(name))
            if present is tensor:
                check_version(tensor, version, f"{type(part).__name__}.{name}")
            elif "DTensor" not in (type(present).__name__, type(tensor).__name__):  # FSDP's shards
                raise RuntimeError(
                    f"{type(part).__name__}.{name} of a reversible module is another tensor than in the forward "
                    f"pass (as after torch.func.functional_call): keep it until the backward pass has ended"
                )

    @contextmanager
    def restored(self, tolerance: float | None = None) -> Iterator[None]:
        """Context of a repetition, on copies of this state; afterwards the modules are as they were.

        RuntimeError if it writes other values into parameters than the forward pass did: they depend on earlier ones.
        `tolerance`: for these values, by default one for the rounding of restored inputs.
        """
        tolerance = self.close if tolerance is None else tolerance
        written = [one.present for one in self.parameters]
        with self.copied():
            yield
            for one, values in zip(self.parameters, written, strict=True):
                repeated = one.present
                if repeated is None or values is None or is_unknown(repeated):
                    continue
                if not torch.equal(repeated, values) and not _difference([repeated], [values], 1e-2) <= tolerance:
                    raise _not_repeatable(f"{type(one.owner).__name__}.{one.name}", "from its earlier values")

    def ended(self) -> AbstractContextManager[None]:
        """Context of an inverse, inside `restored`: modules with an inverse are as the forward pass has left them."""
        return nullcontext() if self.end is None else self.end.copied()

    def check_written(self, again: Values, outputs: Values) -> None:
        """RuntimeError if a repetition with the same inputs has not returned the outputs of the forward pass again."""
        if not _difference(again, outputs) <= self.equal:
            names = ", ".join(f"{type(one.owner).__name__}.{one.name}" for one in self.written)
            raise _not_repeatable(names, "after it has used the earlier values")

    def choose_end(self, inverse: Callable[[Values], Values], inputs: Values, outputs: Values) -> None:
        """See whether the inverse, inside `restored`, reads what the forward pass has left or what was there before.

        RuntimeError if it restores the inputs from neither.
        """
        with self.ended():
            difference = _difference(inverse(outputs), inputs)
        if not difference <= self.equal:
            before = _difference(inverse(outputs), inputs)
            if not difference <= before:
                self.end, difference = None, before
        if not difference <= 10 * self.close:
            raise RuntimeError(
                "the inverse of a reversible module does not restore its input, neither with the buffers and "
                "attributes before its forward pass nor with those after it: give disable=True"
            )

    @contextmanager
    def copied(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(_attributes_swapped(self.attributes))
            stack.enter_context(_buffers_swapped(self.buffers))
            stack.enter_context(_parameters_swapped(self.parameters))
            yield


def _not_repeatable(name: str, why: str) -> RuntimeError:
    return RuntimeError(
        f"the forward pass of a reversible module writes {name} {why}, so the backward pass cannot repeat it: write "
        f"what the input alone gives, and before it is used, keep averages in buffers, or give disable=True"
    )


@contextmanager
def statistics_kept(*modules: nn.Module) -> Iterator[None]:
    """Context in which forward passes of some modules do not change the running statistics of their norms."""
    parts = [part for module in modules for part in module.modules()]
    norms = [part for part in parts if part.training and has_running_statistics(part)]
    with _buffers_swapped([buffer for norm in norms for buffer in _buffers(norm)]):
        yield


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's plain values."""
    own = vars(module)
    return {name: own[name] for name in own.keys() - _PYTORCHS_ATTRIBUTES if _is_plain(own[name])}


def _is_plain(value: object) -> bool:
    """Not containers, and not tensors with a graph, which are results and need memory."""
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not value.requires_grad)


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before.keys() != after.keys():
        return True
    pairs = [(value, after[name]) for name, value in before.items() if value is not after[name]]
    return any(isinstance(a, Tensor) or isinstance(b, Tensor) or a != b for a, b in pairs)


def _are_same(values: Tensor, start: Tensor) -> bool:
    """Whether values are those before the forward pass: `Tensor.data` writes them without a new version.

    Reading from a device waits for it, so there a buffer counts as constant once a forward pass has left it alone.
    """
    if is_unknown(values) or values in _left_alone:
        return True
    same = torch.equal(values, start)
    if same and values.device.type != "cpu":
        _left_alone[values] = True
    return same


def _tensors(module: nn.Module) -> list[Tensor]:
    return [one for one in (*module._parameters.values(), *module._buffers.values()) if one is not None]


def _buffers(module: nn.Module) -> list[_Buffer]:
    """The buffers that a forward pass may change, or that may change before it is repeated. Not uninitialised ones."""
    known = type(module) in _KNOWN_NORMS and module.training  # the minibatch's statistics count
    return [
        _Buffer(module, name, values, 0, None)
        if values is None
        else _Buffer(module, name, values, values._version, None if known else values.clone())
        for name, values in module._buffers.items()
        if values is None or not is_lazy(values)
    ]


def _parameters(module: nn.Module) -> list[_Parameter]:
    """The parameters that a repetition might write. Not those of FSDP and other subclasses."""
    parameters = module._parameters.items()
    return [_Parameter(module, name, one, one._version) for name, one in parameters if type(one) is nn.Parameter]


@contextmanager
def _attributes_swapped(attributes: dict[nn.Module, dict[str, Any]]) -> Iterator[None]:
    """Context in which modules have these plain values. Afterwards all their attributes are what they were."""
    present = {part: dict(vars(part)) for part in attributes}
    try:
        for part, values in attributes.items():
            for name in present[part].keys() - values.keys() - _PYTORCHS_ATTRIBUTES:
                if _is_plain(present[part][name]):
                    delattr(part, name)
            vars(part).update(values)
        yield
    finally:
        for part, before in present.items():
            for name in vars(part).keys() - before.keys():
                delattr(part, name)
            vars(part).update(before)


@contextmanager
def _buffers_swapped(buffers: Sequence[_Buffer]) -> Iterator[None]:
    """Context in which copies of their first values replace buffers."""
    present = [buffer.owner._buffers[buffer.name] for buffer in buffers]
    copies: dict[int, Tensor] = {}  # one of a tensor that is a buffer of several modules
    try:
        for buffer, values in zip(buffers, present, strict=True):
            start = values if buffer.start is None and buffer.values is not None else buffer.start
            if start is not None:
                start = copies.setdefault(id(buffer.values), start.clone())
            buffer.owner._buffers[buffer.name] = start
        yield
    finally:
        for buffer, values in reversed(list(zip(buffers, present, strict=True))):
            buffer.owner._buffers[buffer.name] = values


@contextmanager
def _parameters_swapped(parameters: Sequence[_Parameter]) -> Iterator[None]:
    """Context in which copies replace parameters: of those that were there, with their present values."""
    present = [one.present for one in parameters]
    copies: dict[int, nn.Parameter] = {}
    try:
        for one in parameters:
            copy = copies.get(id(one.values))
            if copy is None:
                copy = nn.Parameter(one.values.detach().clone(), one.values.requires_grad)
            one.owner._parameters[one.name] = copies.setdefault(id(one.values), copy)
        yield
    finally:
        for one, values in reversed(list(zip(parameters, present, strict=True))):
            one.owner._parameters[one.name] = values  # type: ignore[assignment]


@torch.no_grad()
def _difference(found: Sequence[Tensor], expected: Sequence[Tensor], floor: float = 0.0) -> float:
    """The largest difference relative to the largest value, but at least `floor`; 0 where values are not finite."""
    largest = 0.0
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:
            return float("inf")
        if b.numel() and (scale := b.abs().max().item()) < float("inf"):  # not NaN
            difference = (a.double() - b.double()).abs().max().item() / max(scale, floor, 1e-30)
            largest = max(largest, float("inf") if difference != difference else difference)
    return largest


def is_unknown(tensor: Tensor) -> bool:
    """Whether its values cannot be read: it is fake, or a CUDA graph is captured."""
    capturing = tensor.is_cuda and torch.cuda.is_current_stream_capturing()
    return capturing or tensor.is_meta or isinstance(tensor, FakeTensor)
