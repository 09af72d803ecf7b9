"""Everything that a forward pass depends on beside its inputs, restored to repeat the pass."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..norms.inplace_abn import OWN_LAYERS
from ..norms.statistics import BATCH_NORMS, has_running_statistics
from ..saved import check_version
from ..torch_internals import address, without_dispatch_modes

# Norms whose outputs do not depend on their buffers in training.
_KNOWN_NORMS = frozenset([*OWN_LAYERS, *BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d])

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = (*_DROPOUTS, nn.RReLU)


class _Buffer(NamedTuple):
    """A buffer that a repetition must not change.

    `start`: a copy of its values in the repetition, at first those before the forward pass; None if they have no
    effect. `end`: a copy of those after it; None if no inverse reads them.
    """

    owner: nn.Module
    name: str
    values: Tensor
    version: int
    start: Tensor | None
    end: Tensor | None = None

    def is_same(self) -> bool:
        return self.owner._buffers[self.name] is self.values and self.values._version == self.version

    def is_constant(self) -> bool:
        """Whether the forward pass left it alone, and later ones will too: they move running statistics."""
        return self.is_same() and not has_running_statistics(self.owner)

    def is_flag(self) -> bool:
        """Whether it says that something has happened, such as an initialisation."""
        return self.values.numel() == 1 and self.values.dtype in (torch.bool, torch.uint8)

    def ended(self, initialised: bool) -> "_Buffer":
        """The same after the forward pass, in which its module may have `initialised` itself."""
        end = self.owner._buffers[self.name]
        if self.start is None or end is None:
            return self
        return self._replace(start=end.clone() if initialised else self.start, end=end.clone())


class Environment:
    """Autocast, random numbers, parameters, modes and buffers at the start of a forward pass.

    `modules` run on `tensors`, and draw the same random numbers again with `preserve_rng_state`. While a CUDA graph is
    captured they may draw none on the device: modules that do are refused, but not their functions (`F.dropout`).
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Iterable[Tensor], preserve_rng_state: bool = True):
        devices = {tensor.device for tensor in tensors}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)} - {"meta"}
        ]
        self.cache = torch.is_autocast_cache_enabled()
        parts = [part for module in modules for part in module.modules()]
        self.cuda = [device for device in devices if device.type == "cuda"]
        if self.cuda and torch.cuda.is_current_stream_capturing():  # a graph has no state of a generator to read
            self.cuda = []
            if preserve_rng_state:
                _refuse_random(parts)
        self.random = self._random() if preserve_rng_state else None
        self.modes = [(part, part.training) for part in parts]
        self.lazy = [part for part in parts if any(is_lazy(one) for one in part._buffers.values() if one is not None)]
        self.buffers = [buffer for part in parts for buffer in _buffers(part)]
        copied = any(buffer.start is not None for buffer in self.buffers)
        self.before = {part: _written_once(part) for part in parts} if copied else {}
        self.versions = {entry[:2]: entry[3] for part in parts for entry in _parameters(part)}
        self.rewritten: list[tuple[nn.Module, str]] = []  # parameters that the repetition writes too
        self.constants: list[tuple[nn.Module, str, Tensor, int]] = []  # which may not change before the repetition

    def forward_pass_ended(self) -> None:
        """See which parameters and buffers the repetition gets: a module may have initialised itself.

        Drop the random state (5 KB) if no numbers were drawn, and the copies of unchanged buffers.
        """
        if self.random is not None and all(map(_equal, self.random, self._random())):
            self.random = None
        self.buffers += [buffer for part in self.lazy for buffer in _buffers(part)]
        self.constants = [entry for part, _ in self.modes for entry in _parameters(part)]
        self.rewritten = [entry[:2] for entry in self.constants if self.versions.get(entry[:2], entry[3]) != entry[3]]
        self.constants += [buffer[:4] for buffer in self.buffers if buffer.is_constant()]
        changed = [buffer for buffer in self.buffers if not buffer.is_constant()]
        initialised = self._initialised(changed) if self.before and changed else set()
        self.buffers = [buffer.ended(buffer.owner in initialised) for buffer in changed]
        self.before, self.versions = {}, {}

    def _initialised(self, changed: list[_Buffer]) -> set[nn.Module]:
        """The modules that initialised themselves, as ActNorm does with its first minibatch.

        Their buffers say so, and a repetition may not do it again. They, or modules inside, have written parameters; or
        they, or modules around them, have turned a flag, which is a buffer or an attribute.
        """
        after = {part: _written_once(part) for part in self.before}
        written = {part for part, (parameters, _) in self.before.items() if _differ(parameters, after[part][0])}
        flagged = {part for part, (_, flags) in self.before.items() if _differ(flags, after[part][1])}
        flagged |= {buffer.owner for buffer in changed if buffer.is_flag() and not buffer.is_same()}
        around = {part for part in self.before if not written.isdisjoint(part.modules())}
        return around.union(*(part.modules() for part in flagged))

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context of a repetition: the state of the forward pass, and at the end the present one again.

        RuntimeError if a parameter, or a buffer that the forward pass left alone, was modified or replaced since.
        """
        self._check_constants()
        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
            if self.random is not None:
                stack.enter_context(torch.random.fork_rng(self.cuda))
                torch.set_rng_state(self.random[0])
                for device, state in zip(self.cuda, self.random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            changed = [(part, part.training) for part, mode in self.modes if part.training != mode]
            stack.callback(_set_modes, changed)
            _set_modes([(part, not mode) for part, mode in changed])
            stack.enter_context(_swapped(self.buffers))
            for part, name in self.rewritten:
                parameter = part._parameters[name]
                assert parameter is not None
                stack.callback(part._parameters.__setitem__, name, parameter)
                part._parameters[name] = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
            yield

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Context of an inverse, inside `restored`: the forward pass has left the buffers that the inverse reads."""
        own = [one for one in self.buffers if one.end is not None and callable(getattr(one.owner, "inverse", None))]
        with _swapped([one._replace(start=one.end) for one in own]):
            yield

    def _check_constants(self) -> None:
        for part, name, tensor, version in self.constants:
            present = part._parameters.get(name, part._buffers.get(name))
            if present is tensor:
                check_version(tensor, version, f"{type(part).__name__}.{name}")
            elif "DTensor" not in (type(present).__name__, type(tensor).__name__):  # FSDP's shards
                raise RuntimeError(
                    f"{type(part).__name__}.{name} of a reversible module is another tensor than in the forward "
                    f"pass (as after torch.func.functional_call): keep it until the backward pass has ended"
                )

    def _random(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.cuda)]


@contextmanager
def statistics_kept(*modules: nn.Module) -> Iterator[None]:
    """Context in which forward passes of some modules do not change the running statistics of their norms."""
    parts = [part for module in modules for part in module.modules()]
    norms = [part for part in parts if part.training and has_running_statistics(part)]
    with _swapped([buffer for norm in norms for buffer in _buffers(norm)]):
        yield


def _parameters(module: nn.Module) -> list[tuple[nn.Module, str, Tensor, int]]:
    """A module's own parameters, with their names and versions. Not uninitialised ones."""
    found = [(name, one) for name, one in module._parameters.items() if one is not None and not is_lazy(one)]
    return [(module, name, parameter, parameter._version) for name, parameter in found]


def _written_once(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """What an initialisation writes: the module's own parameters, told apart as states of them, and its flags."""
    parameters = {
        name: (id(parameter), version, address(parameter.untyped_storage()))
        for _, name, parameter, version in _parameters(module)
        if type(parameter).__name__ != "DTensor"
    }
    flags = {name: value for name, value in vars(module).items() if value is None or isinstance(value, bool)}
    return parameters, flags


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether an entry of both has changed."""
    return any(name in after and after[name] is not value and after[name] != value for name, value in before.items())


def _buffers(module: nn.Module) -> list[_Buffer]:
    """The buffers that a forward pass may change, or that may change before it is repeated. Not uninitialised ones."""
    found = [(name, values) for name, values in module._buffers.items() if values is not None and not is_lazy(values)]
    if type(module) in _KNOWN_NORMS and module.training:  # the minibatch's statistics count
        return [_Buffer(module, name, values, values._version, None) for name, values in found]
    return [_Buffer(module, name, values, values._version, values.clone()) for name, values in found]


@contextmanager
def _swapped(buffers: Sequence[_Buffer]) -> Iterator[None]:
    """Context in which copies of their first values replace buffers."""
    present = [buffer.owner._buffers[buffer.name] for buffer in buffers]
    copies: dict[int, Tensor] = {}  # one of a tensor that is a buffer of several modules
    try:
        for buffer, values in zip(buffers, present, strict=True):
            start = values if buffer.start is None else buffer.start
            if start is not None:
                start = copies.setdefault(id(buffer.values), start.clone())
            buffer.owner._buffers[buffer.name] = start
        yield
    finally:
        for buffer, values in reversed(list(zip(buffers, present, strict=True))):
            buffer.owner._buffers[buffer.name] = values


def _refuse_random(parts: Iterable[nn.Module]) -> None:
    """RuntimeError if a module draws random numbers."""
    for part in parts:
        if isinstance(part, _RANDOM) and part.training and getattr(part, "p", 1.0) > 0:
            raise RuntimeError(
                f"a CUDA graph captures a reversible module that contains {part}: a captured repetition draws other "
                f"random numbers, and its gradients would be wrong; move it out of the branches, or set p=0"
            )


def _set_modes(modes: Iterable[tuple[nn.Module, bool]]) -> None:
    for module, mode in modes:
        module.training = mode


def _equal(state: Tensor, other: Tensor) -> bool:
    with without_dispatch_modes():  # the states are real under fake tensors too
        return torch.equal(state, other)
