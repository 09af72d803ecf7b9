"""The state of modules before a forward pass, from which its repetition starts: buffers and attributes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ..norms.inplace_abn import OWN_LAYERS
from ..norms.statistics import BATCH_NORMS, has_running_statistics, with_attributes
from ..saved import check_version
from ..torch_internals import FakeTensor, is_capturing

Values = tuple[Tensor, ...]

# Norms whose outputs do not depend on their buffers in training.
_KNOWN_NORMS = frozenset([*OWN_LAYERS, *BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, Enum)
_PYTORCHS_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}

_left_alone = WeakTensorKeyDictionary()  # buffers on devices that a forward pass has left unchanged


class _Buffer(NamedTuple):
    """A buffer that a repetition must not change. `start`: copy of its initial values; None if they have no effect."""

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


class State:
    """The state of modules before a forward pass: buffers, and attributes that are plain values.

    A repetition starts from copies of it, so it does the same as the forward pass. Modules that write their parameters,
    e.g. to initialise them, are refused.

    RuntimeError: a module is lazy, i.e. learns its sizes in the forward pass.
    """

    def __init__(self, parts: Iterable[nn.Module]):
        self.attributes = {part: _attributes(part) for part in parts}
        for part in self.attributes:
            if any(is_lazy(one) for one in (*part._parameters.values(), *part._buffers.values()) if one is not None):
                raise _initialises(f"the sizes of {type(part).__name__}")
        self.buffers = [buffer for part in self.attributes for buffer in _buffers(part)]
        # FSDP's and other subclasses are not checked.
        self.parameters = [entry for entry in self._versions() if type(entry[2]) is nn.Parameter]
        self.constants: list[tuple[nn.Module, str, Tensor, int]] = []  # must not change before the repetition
        self.watched: list[tuple[nn.Module, str, Tensor]] = []  # parameters perhaps written through `Tensor.data`

    def _versions(self) -> list[tuple[nn.Module, str, Tensor, int]]:
        """Module, name, parameter and its version, of all parameters."""
        named = ((part, *entry) for part in self.attributes for entry in part._parameters.items())
        return [(part, name, one, one._version) for part, name, one in named if one is not None]

    def forward_pass_ended(self, inverts: bool) -> None:
        """Find out what the forward pass has changed, and drop the copies of everything else.

        `inverts`: the repetition runs an inverse first.

        RuntimeError: it wrote a parameter; or, with `inverts`, something that a module's inverse may read.
        """
        for part, name, parameter, version in self.parameters:
            present = part._parameters.get(name)
            is_gone = present is not parameter and type(present).__name__ != "DTensor"  # of FSDP, which puts it back
            if is_gone or (present is parameter and parameter._version != version):
                raise _initialises(f"{type(part).__name__}.{name}")
        changed = {part for part, before in self.attributes.items() if _differ(before, _attributes(part))}
        moved = {one[:2]: one for one in self.buffers if not one.is_same()}
        changed |= {one.owner for one in moved.values() if one.start is not None or one.values is None}
        for part in changed if inverts else ():
            if callable(getattr(part, "inverse", None)):
                raise RuntimeError(
                    f"{type(part).__name__} of a reversible module changes its buffers or attributes in its forward "
                    f"pass, so its inverse may not restore the input: if it only initialises them, run one forward "
                    f"pass under torch.no_grad() before the first step, or else give keep_input=True or disable=True"
                )
        if any(not has_running_statistics(part) for part in changed):
            self.watched = [(part, name, parameter) for part, name, parameter, _ in self.parameters]
        self.parameters = []
        self.constants = self._versions()
        kept = []
        for one in self.buffers:  # later passes update running statistics
            if one.values is None or one[:2] in moved or has_running_statistics(one.owner):
                kept.append(one)
            else:
                self.constants.append((one.owner, one.name, one.values, one.version))
        self.buffers = kept

    def check_constants(self) -> None:
        """RuntimeError if a parameter, or a buffer that the forward pass did not change, was modified or replaced."""
        for part, name, tensor, version in self.constants:
            present = part._parameters.get(name, part._buffers.get(name))
            if present is tensor:
                check_version(tensor, version, f"{type(part).__name__}.{name}")
            elif "DTensor" not in (type(present).__name__, type(tensor).__name__):  # FSDP's shards
                raise RuntimeError(
                    f"{type(part).__name__}.{name} of a reversible module is not the same tensor as in the forward "
                    f"pass (as after torch.func.functional_call): keep it until the backward pass has ended"
                )

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context of a repetition, on copies of this state; afterwards the modules are restored.

        RuntimeError if it writes a parameter.
        """
        before = [parameter.detach().clone() for _, _, parameter in self.watched]
        attributes: dict[nn.Module, dict[str, Any]] = {}
        for part, plain in self.attributes.items():
            others = {name: value for name, value in vars(part).items() if not _is_own(name, value)}
            attributes[part] = {**others, **plain, "_buffers": {**part._buffers}}
        copies: dict[int, Tensor] = {}  # a single copy of a tensor that is a buffer of several modules
        for one in self.buffers:
            start = one.owner._buffers[one.name] if one.start is None and one.values is not None else one.start
            if start is not None:
                start = copies.setdefault(id(one.values), start.clone())
            attributes[one.owner]["_buffers"][one.name] = start
        with with_attributes(attributes):
            yield
        for (part, name, parameter), values in zip(self.watched, before, strict=True):
            if part._parameters.get(name) is not parameter or not (
                is_unknown(parameter) or torch.equal(parameter, values)
            ):
                raise _initialises(f"{type(part).__name__}.{name}")


def _initialises(name: str) -> RuntimeError:
    return RuntimeError(
        f"the forward pass of a reversible module writes {name}, so the backward pass cannot repeat it: to initialise "
        f"the module, run one forward pass under torch.no_grad() before the first step; keep averages in buffers; or "
        f"give disable=True"
    )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """A module's plain values."""
    return {name: value for name, value in vars(module).items() if _is_own(name, value)}


def _is_own(name: str, value: object) -> bool:
    """Whether an attribute is plain: no container, and no tensor with a graph, which is a result and needs memory."""
    is_plain = isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not value.requires_grad)
    return is_plain and name not in _PYTORCHS_ATTRIBUTES


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    if before.keys() != after.keys():
        return True
    pairs = [(value, after[name]) for name, value in before.items() if value is not after[name]]
    return any(isinstance(a, Tensor) or isinstance(b, Tensor) or a != b for a, b in pairs)


def _are_same(values: Tensor, start: Tensor) -> bool:
    """Whether values equal those before the forward pass; versions do not tell, as `Tensor.data` writes without one.

    Reading from a device waits for it, so there a buffer counts as constant once a forward pass has not changed it.
    """
    if is_unknown(values) or values in _left_alone:
        return True
    same = torch.equal(values, start)
    if same and values.device.type != "cpu":
        _left_alone[values] = True
    return same


def _buffers(module: nn.Module) -> list[_Buffer]:
    """The initialised buffers that may change in a forward pass or before it is repeated."""
    known = type(module) in _KNOWN_NORMS and module.training  # outputs depend only on the minibatch's statistics
    return [
        _Buffer(module, name, values, 0, None)
        if values is None
        else _Buffer(module, name, values, values._version, None if known else values.clone())
        for name, values in module._buffers.items()
        if values is None or not is_lazy(values)
    ]


def is_unknown(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be read: it is fake, or a CUDA graph is captured."""
    return (tensor.is_cuda and is_capturing()) or tensor.is_meta or isinstance(tensor, FakeTensor)
