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

_constant_buffers = WeakTensorKeyDictionary()  # on devices: a forward pass has left them unchanged


class _Buffer(NamedTuple):
    """A buffer that a repetition must not change. `start`: copy of its initial values; None if they have no effect."""

    owner: nn.Module
    name: str
    values: Tensor | None
    version: int
    start: Tensor | None

    def is_unchanged(self) -> bool:
        values = self.owner._buffers[self.name]
        if values is not self.values or (values is not None and values._version != self.version):
            return False
        if values is None or self.start is None or is_unreadable(values) or values in _constant_buffers:
            return True
        return torch.equal(values, self.start)  # `Tensor.data` writes without a new version

    def note_unchanged(self) -> None:
        """Do not compare the buffer of a device again: reading it waits for the device."""
        if self.start is not None and self.values is not None and self.values.device.type != "cpu":
            if not is_unreadable(self.values):
                _constant_buffers[self.values] = True


class _Constant(NamedTuple):
    """A parameter or buffer of a module, with the version that it must keep."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"


class State:
    """The state of modules before a forward pass: buffers, and attributes that are plain values.

    A repetition starts from copies of it, so it does the same as the forward pass. Modules that write their parameters,
    e.g. to initialise them, are refused.

    RuntimeError: a module is lazy, i.e. learns its sizes in the forward pass.
    """

    def __init__(self, parts: Iterable[nn.Module]):
        self.attributes = {part: _attributes_of(part) for part in parts}
        for part in self.attributes:
            tensors = (*part._parameters.values(), *part._buffers.values())
            if any(is_lazy(tensor) for tensor in tensors if tensor is not None):
                raise _write_error(f"the sizes of {type(part).__name__}")
        self.buffers = [buffer for part in self.attributes for buffer in _buffers_of(part)]
        # FSDP's and other subclasses are not checked.
        self.parameters = [constant for constant in self._all_parameters() if type(constant.tensor) is nn.Parameter]
        self.constants: list[_Constant] = []  # must not change before the repetition
        self.watched: list[_Constant] = []  # parameters perhaps written through `Tensor.data`

    def _all_parameters(self) -> list[_Constant]:
        """All parameters with their present versions."""
        named = [(part, name, tensor) for part in self.attributes for name, tensor in part._parameters.items()]
        return [_Constant(part, name, tensor, tensor._version) for part, name, tensor in named if tensor is not None]

    def drop_unchanged(self, inverts: bool) -> None:
        """Drop the copies of all that the forward pass, which has just ended, has not changed.

        `inverts`: the repetition runs an inverse first.

        RuntimeError: it wrote a parameter; or, with `inverts`, something that a module's inverse may read.
        """
        self._check_parameters()
        changed_parts = {part for part, before in self.attributes.items() if _differ(before, _attributes_of(part))}
        changed_buffers = {(buffer.owner, buffer.name): buffer for buffer in self.buffers if not buffer.is_unchanged()}
        for buffer in changed_buffers.values():
            if buffer.start is not None or buffer.values is None:
                changed_parts.add(buffer.owner)
        if inverts:
            _check_inverses(changed_parts)
        if any(not has_running_statistics(part) for part in changed_parts):
            self.watched = self.parameters
        self.parameters = []
        self.constants = self._all_parameters()
        kept = []
        for buffer in self.buffers:
            is_changed = (buffer.owner, buffer.name) in changed_buffers
            if not is_changed:
                buffer.note_unchanged()
            if is_changed or buffer.values is None or has_running_statistics(buffer.owner):  # which later passes update
                kept.append(buffer)
            elif buffer.values is not None:
                self.constants.append(_Constant(buffer.owner, buffer.name, buffer.values, buffer.version))
        self.buffers = kept

    def _check_parameters(self) -> None:
        """RuntimeError if the forward pass wrote a parameter, or replaced it."""
        for parameter in self.parameters:
            present = parameter.owner._parameters.get(parameter.name)
            if present is parameter.tensor:
                is_written = parameter.tensor._version != parameter.version
            else:
                is_written = type(present).__name__ != "DTensor"  # of FSDP, which puts the parameter back
            if is_written:
                raise _write_error(str(parameter))

    def check_constants(self) -> None:
        """RuntimeError if a parameter, or a buffer that the forward pass did not change, was modified or replaced."""
        for constant in self.constants:
            owner = constant.owner
            present = owner._parameters.get(constant.name, owner._buffers.get(constant.name))
            if present is constant.tensor:
                check_version(constant.tensor, constant.version, str(constant))
            elif "DTensor" not in (type(present).__name__, type(constant.tensor).__name__):  # FSDP's shards
                raise RuntimeError(
                    f"{constant} of a reversible module is not the same tensor as in the forward "
                    f"pass (as after torch.func.functional_call): keep it until the backward pass has ended"
                )

    @contextmanager
    def repetition(self) -> Iterator[None]:
        """Context of a repetition, on copies of this state; afterwards the modules are restored.

        RuntimeError if it writes a parameter.
        """
        copies_of_watched = [parameter.tensor.detach().clone() for parameter in self.watched]
        attributes: dict[nn.Module, dict[str, Any]] = {}
        for part, plain in self.attributes.items():
            not_plain = {name: value for name, value in vars(part).items() if not _is_plain(name, value)}
            attributes[part] = {**not_plain, **plain, "_buffers": {**part._buffers}}
        copies: dict[int, Tensor] = {}  # a single copy of a tensor that is a buffer of several modules
        for buffer in self.buffers:
            start = buffer.start
            if start is None and buffer.values is not None:
                start = buffer.owner._buffers[buffer.name]
            if start is not None:
                start = copies.setdefault(id(buffer.values), start.clone())
            attributes[buffer.owner]["_buffers"][buffer.name] = start
        with with_attributes(attributes):
            yield
        for parameter, values in zip(self.watched, copies_of_watched, strict=True):
            is_same = parameter.owner._parameters.get(parameter.name) is parameter.tensor
            if not is_same or not (is_unreadable(parameter.tensor) or torch.equal(parameter.tensor, values)):
                raise _write_error(str(parameter))


def _check_inverses(changed_parts: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if a module has an inverse, which may read what the forward pass has changed."""
    for part in changed_parts:
        if callable(getattr(part, "inverse", None)):
            raise RuntimeError(
                f"{type(part).__name__} of a reversible module changes its buffers or attributes in its forward "
                f"pass, so its inverse may not restore the input: if it only initialises them, run one forward "
                f"pass under torch.no_grad() before the first step, or else give keep_input=True or disable=True"
            )


def _write_error(name: str) -> RuntimeError:
    return RuntimeError(
        f"the forward pass of a reversible module writes {name}, so the backward pass cannot repeat it: to initialise "
        f"the module, run one forward pass under torch.no_grad() before the first step; keep averages in buffers; or "
        f"give disable=True"
    )


def _attributes_of(module: nn.Module) -> dict[str, Any]:
    """A module's plain values."""
    return {name: value for name, value in vars(module).items() if _is_plain(name, value)}


def _is_plain(name: str, value: object) -> bool:
    """Whether an attribute is plain: no container, and no tensor with a graph, which is a result and needs memory."""
    if name in _PYTORCHS_ATTRIBUTES:
        return False
    return isinstance(value, _PLAIN) or (isinstance(value, Tensor) and not value.requires_grad)


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether plain values have changed. A tensor has if it is another object."""
    if before.keys() != after.keys():
        return True
    pairs = [(value, after[name]) for name, value in before.items() if value is not after[name]]
    return any(isinstance(a, Tensor) or isinstance(b, Tensor) or a != b for a, b in pairs)


def _buffers_of(module: nn.Module) -> list[_Buffer]:
    """The initialised buffers that may change in a forward pass or before it is repeated."""
    # In training their outputs depend only on the minibatch's statistics.
    is_known_norm = type(module) in _KNOWN_NORMS and module.training
    buffers = []
    for name, values in module._buffers.items():
        if values is None:
            buffers.append(_Buffer(module, name, None, 0, None))
        elif not is_lazy(values):
            start = None if is_known_norm else values.clone()
            buffers.append(_Buffer(module, name, values, values._version, start))
    return buffers


def is_unreadable(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be read: it is fake, or a CUDA graph is captured."""
    return (tensor.is_cuda and is_capturing()) or tensor.is_meta or isinstance(tensor, FakeTensor)
