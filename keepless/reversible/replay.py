"""Parts of a forward pass whose activations are dropped, and recomputed in the backward pass.

In a `Section` every tensor that autograd would save gets an empty slot. When the backward pass reads the first slot,
the part runs again, in the environment of the first run, and fills all slots. Autograd's graph is unchanged, so hooks,
gradients of parts, and tied, frozen, unused or unregistered parameters work as usual. The `State` of modules is what a
repetition starts from.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from ..norms.inplace_abn import OWN_LAYERS
from ..norms.statistics import BATCH_NORMS, has_running_statistics, with_attributes
from ..saved import Kept, autocast_of, check_version, current_stream, wait_for
from ..torch_internals import FakeTensor, is_capturing, keeps_graph, without_dispatch_modes

Values = tuple[Tensor, ...]

# Norms whose outputs do not depend on their buffers in training.
_KNOWN_NORMS = frozenset([*OWN_LAYERS, *BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])

_PLAIN = (NoneType, bool, int, float, complex, str, bytes, Enum)
_PYTORCHS_ATTRIBUTES = vars(nn.Module()).keys() - {"training"}
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = (*_DROPOUTS, nn.RReLU)
_CHANGED = "a module did something else when the backward pass repeated its forward pass; it must do the same each time"


class _Slot:
    """The place of one saved tensor: empty until the section is repeated."""

    def __init__(self, repeat: Callable[[], None], tensor: Tensor):
        self.repeat = repeat
        self.metadata = _metadata(tensor)
        self.tensor: Tensor | None = None
        self.version = 0
        self.stream: torch.cuda.Stream | None = None  # that filled it

    def fill(self, tensor: Tensor) -> None:
        if _metadata(tensor) != self.metadata:
            raise RuntimeError(f"{_CHANGED}: it saved a tensor {_metadata(tensor)}, but at first {self.metadata}")
        self.tensor = tensor.detach()
        self.version = tensor._version
        self.stream = current_stream(tensor)

    def get(self) -> Tensor:
        """The tensor; an empty slot repeats its section first. RuntimeError if the repetition differed."""
        if self.tensor is None:
            self.repeat()
        tensor = self.tensor
        assert tensor is not None  # a repetition that fills fewer slots raises
        check_version(tensor, self.version)
        wait_for(self.stream, tensor)  # a part that ran on several streams is repeated on the first that reads
        if keeps_graph():
            self.tensor = None  # the next backward pass computes it again
        return tensor


class Section:
    """One part of a forward pass, and everything besides its inputs that it depends on.

    Autograd holds its slots until it has used or freed them. A repetition has the autocast settings, random numbers,
    parameters, modes and buffers of the first run. `modules` run on `tensors`, and with `preserve_rng_state` draw the
    same random numbers again. While a CUDA graph is captured they must not draw any on the device: modules that do are
    refused; functions (`F.dropout`) are not noticed.
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Iterable[Tensor], preserve_rng_state: bool = True):
        self.slots: list[weakref.ref[_Slot]] = []
        parts = [part for module in modules for part in module.modules()]
        module_tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
        devices = {tensor.device for tensor in (*tensors, *module_tensors)}
        self.autocast = {kind: autocast_of(kind) for kind in {"cpu", *(device.type for device in devices)} - {"meta"}}
        self.caches_casts = torch.is_autocast_cache_enabled()
        self.cuda_devices = [device for device in devices if device.type == "cuda"]
        if self.cuda_devices and is_capturing():  # the state of its generator cannot be read
            self.cuda_devices = []
            if preserve_rng_state:
                _refuse_random(parts)
        self.random_states = self._random_states() if preserve_rng_state else None
        self.state = State(parts)

    @contextmanager
    def first_run(self, repeat: Callable[[], None], inverts: bool) -> Iterator[None]:
        """Context of the first run: saved tensors get slots. `repeat` runs the part again, in `repetition`.

        `inverts`: the repetition runs an inverse first, see `State.drop_unchanged`.
        """
        ended = False

        def pack(tensor: Tensor) -> _Slot | Kept:
            if isinstance(tensor, nn.Parameter):
                return Kept(tensor, None)
            slot = _Slot(repeat, tensor)
            self.slots.append(weakref.ref(slot))
            return slot

        def unpack(packed: _Slot | Kept) -> Tensor:
            if not ended:
                raise RuntimeError(
                    "a branch of a reversible module computes gradients in its forward pass, but its activations are "
                    "already dropped: give disable=True to keep them"
                )
            return packed.get()

        try:
            with saved_tensors_hooks(pack, unpack):
                yield
        finally:
            ended = True
        with without_dispatch_modes():  # the states are real under fake tensors too
            if self.random_states is not None and all(map(torch.equal, self.random_states, self._random_states())):
                self.random_states = None  # no numbers were drawn; the state has 5 KB
        self.state.drop_unchanged(inverts)

    @contextmanager
    def repetition(self) -> Iterator[None]:
        """Context of a repetition, in the state of the first run. It fills the slots, if any is still empty.

        RuntimeError if a parameter, or a buffer that the first run did not change, was modified or replaced since, or
        if the saved tensors differ in number or metadata; see also `State.repetition`.
        """
        self.state.check_constants()
        has_empty_slots = self._has_empty_slots()
        with ExitStack() as stack:
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.caches_casts))
            if self.random_states is not None:
                stack.enter_context(torch.random.fork_rng(self.cuda_devices))
                torch.set_rng_state(self.random_states[0])
                for device, state in zip(self.cuda_devices, self.random_states[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            stack.enter_context(self.state.repetition())
            stack.enter_context(self._filling_slots() if has_empty_slots else torch.no_grad())
            yield

    def _has_empty_slots(self) -> bool:
        slots = (reference() for reference in self.slots)
        return any(slot is not None and slot.tensor is None for slot in slots)

    @contextmanager
    def _filling_slots(self) -> Iterator[None]:
        """Context in which saved tensors fill the slots. The graph made here ends with it."""
        references = iter(self.slots)
        ended = False

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                reference = next(references, None)
                if reference is None:
                    raise RuntimeError(f"{_CHANGED}: it saved more tensors than at first")
                slot = reference()
                if slot is not None:
                    slot.fill(tensor)
            return tensor.detach()

        def unpack(tensor: Tensor) -> Tensor:
            if ended:
                raise RuntimeError(
                    "a value that a branch of a reversible module stored elsewhere was differentiated after the branch "
                    "had run again in a backward pass: differentiate only what the module returns"
                )
            return tensor

        try:
            with torch.enable_grad(), saved_tensors_hooks(pack, unpack):
                yield
        finally:
            ended = True
        if next(references, None) is not None:
            raise RuntimeError(f"{_CHANGED}: it saved fewer tensors than at first")

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.cuda_devices)]


def _refuse_random(parts: Iterable[nn.Module]) -> None:
    """Raise RuntimeError if a module draws random numbers in its forward pass."""
    for part in parts:
        if isinstance(part, _RANDOM) and part.training and getattr(part, "p", 1.0) > 0:
            raise RuntimeError(
                f"a CUDA graph captures a reversible module that contains {part}: a captured repetition draws "
                f"other random numbers, so gradients would be wrong; move it out of the branches, or set p=0"
            )


def _metadata(tensor: Tensor) -> tuple:
    return tuple(tensor.shape), tensor.dtype, tensor.device


_constant_buffers = WeakTensorKeyDictionary()  # on devices: a forward pass has left them unchanged


class _ModuleTensor(NamedTuple):
    """A parameter or buffer of a module, with the version that it has before a run."""

    owner: nn.Module
    name: str
    tensor: Tensor | None
    version: int
    start: Tensor | None = None  # copy of its values; None if they have no effect, or are not compared

    def __str__(self) -> str:
        return f"{type(self.owner).__name__}.{self.name}"

    def present(self) -> Tensor | None:
        """The tensor that the module has under this name now."""
        return self.owner._parameters.get(self.name, self.owner._buffers.get(self.name))

    def is_unchanged(self) -> bool:
        """Whether it is the same tensor with the same version and, if there is a copy, with the same values."""
        tensor = self.tensor
        if tensor is None or self.present() is not tensor:
            return self.present() is tensor
        if tensor._version != self.version:
            return False
        if self.start is None or _is_unreadable(tensor) or tensor in _constant_buffers:
            return True
        return torch.equal(tensor, self.start)  # `Tensor.data` writes without a new version

    def note_unchanged(self) -> None:
        """Do not compare the buffer of a device again: reading it waits for the device."""
        tensor = self.tensor
        if tensor is not None and self.start is not None and tensor.device.type != "cpu" and not _is_unreadable(tensor):
            _constant_buffers[tensor] = True


class State:
    """The state of modules before a forward pass: buffers, and attributes that are plain values.

    A repetition starts from copies of it, so it does the same as the forward pass. Modules that write their parameters,
    e.g. to initialise them, are refused.

    RuntimeError: a module is lazy, i.e. learns its sizes in the forward pass.
    """

    def __init__(self, parts: Iterable[nn.Module]):
        self.attributes = {part: _attributes_of(part) for part in parts}
        for part in self.attributes:
            if any(map(is_lazy, (*part.parameters(recurse=False), *part.buffers(recurse=False)))):
                raise _write_error(f"the sizes of {type(part).__name__}")
        self.buffers = [buffer for part in self.attributes for buffer in _buffers_of(part)]
        # Those that a run perhaps writes; FSDP's and other subclasses are not checked.
        self.parameters = [parameter for parameter in self._all_parameters() if type(parameter.tensor) is nn.Parameter]
        self.constants: list[_ModuleTensor] = []  # must not change before the repetition

    def _all_parameters(self) -> list[_ModuleTensor]:
        """All parameters with their present versions."""
        named = [(part, name, tensor) for part in self.attributes for name, tensor in part._parameters.items()]
        return [
            _ModuleTensor(part, name, tensor, tensor._version) for part, name, tensor in named if tensor is not None
        ]

    def drop_unchanged(self, inverts: bool) -> None:
        """Drop the copies of all that the forward pass, which has just ended, has not changed.

        `inverts`: the repetition runs an inverse first.

        RuntimeError: it wrote a parameter; or, with `inverts`, something that a module's inverse may read.
        """
        for parameter in self.parameters:
            is_sharded = type(parameter.present()).__name__ == "DTensor"  # by FSDP, which puts the parameter back
            if not (parameter.is_unchanged() or is_sharded):
                raise _write_error(str(parameter))
        changed_parts = {part for part, before in self.attributes.items() if _differ(before, _attributes_of(part))}
        self.constants = self._all_parameters()
        kept = []
        for buffer in self.buffers:
            if not buffer.is_unchanged():
                kept.append(buffer)
                if buffer.start is not None or buffer.tensor is None:
                    changed_parts.add(buffer.owner)
                continue
            buffer.note_unchanged()
            if buffer.tensor is None or has_running_statistics(buffer.owner):  # which later passes update
                kept.append(buffer)
            else:
                self.constants.append(buffer._replace(start=None))
        self.buffers = kept
        if inverts:
            _check_inverses(changed_parts)
        if all(map(has_running_statistics, changed_parts)):
            self.parameters = []  # only others write some the second time, through `Tensor.data`

    def check_constants(self) -> None:
        """RuntimeError if a parameter, or a buffer that the forward pass did not change, was modified or replaced."""
        for constant in self.constants:
            present = constant.present()
            if present is not None and present is constant.tensor:
                check_version(present, constant.version, str(constant))
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
        watched = [
            parameter._replace(start=parameter.tensor.detach().clone())
            for parameter in self.parameters
            if parameter.tensor is not None
        ]
        attributes: dict[nn.Module, dict[str, Any]] = {}
        for part, plain in self.attributes.items():
            not_plain = {name: value for name, value in vars(part).items() if not _is_plain(name, value)}
            attributes[part] = {**not_plain, **plain, "_buffers": {**part._buffers}}
        copies: dict[int, Tensor] = {}  # a single copy of a tensor that is a buffer of several modules
        for buffer in self.buffers:
            source = buffer.present() if buffer.start is None else buffer.start
            copy = None
            if buffer.tensor is not None and source is not None:
                copy = copies.setdefault(id(buffer.tensor), source.clone())
            attributes[buffer.owner]["_buffers"][buffer.name] = copy
        with with_attributes(attributes):
            yield
        for parameter in watched:
            if not parameter.is_unchanged():
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


def _buffers_of(module: nn.Module) -> list[_ModuleTensor]:
    """The buffers that may change in a forward pass or before it is repeated."""
    # In training their outputs depend only on the minibatch's statistics.
    is_known_norm = type(module) in _KNOWN_NORMS and module.training
    buffers = []
    for name, tensor in module._buffers.items():
        if tensor is None:
            buffers.append(_ModuleTensor(module, name, None, 0))
        else:
            start = None if is_known_norm else tensor.clone()
            buffers.append(_ModuleTensor(module, name, tensor, tensor._version, start))
    return buffers


def _is_unreadable(tensor: Tensor) -> bool:
    """Whether a tensor's values cannot be read: it is fake, or a CUDA graph is captured."""
    return (tensor.is_cuda and is_capturing()) or tensor.is_meta or isinstance(tensor, FakeTensor)
