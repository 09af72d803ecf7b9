"""Parts of a forward pass whose activations are dropped, and recomputed in the backward pass.

In a `Section` every tensor that autograd would save gets an empty slot. When the backward pass reads the first slot,
the part runs again, in the environment of the first run, and fills all slots. Autograd's graph is unchanged, so hooks,
gradients of parts, and tied, frozen, unused or unregistered parameters work as usual.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from ..saved import Kept, autocast_as, autocast_of, check_version, current_stream, wait_for
from ..torch_internals import is_capturing, keeps_graph, without_dispatch_modes
from .state import State

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
        if tensor is None:
            raise RuntimeError(f"{_CHANGED}: it saved fewer tensors than at first")
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
        self.autocast = {kind: autocast_of(kind) for kind in {"cpu", *(device.type for device in devices)}}
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
        if the saved tensors differ in number or metadata.
        """
        self.state.check_constants()
        has_empty_slots = self._has_empty_slots()
        with ExitStack() as stack:
            for kind, autocast in self.autocast.items():
                stack.enter_context(autocast_as(autocast, kind))
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
        """Context in which saved tensors fill the slots."""
        references = iter(self.slots)

        def pack(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                reference = next(references, None)
                if reference is None:
                    raise RuntimeError(f"{_CHANGED}: it saved more tensors than at first")
                slot = reference()
                if slot is not None:
                    slot.fill(tensor)
            return tensor.detach()

        with torch.enable_grad(), saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
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
