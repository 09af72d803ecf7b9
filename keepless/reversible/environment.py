"""Everything besides its inputs that a forward pass depends on, restored to repeat the pass."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..torch_internals import is_capturing, without_dispatch_modes
from .state import State

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_RANDOM = (*_DROPOUTS, nn.RReLU)


class Environment:
    """Autocast, random numbers, parameters, modes and buffers at the start of a forward pass.

    `modules` run on `tensors`, and with `preserve_rng_state` draw the same random numbers again. While a CUDA graph is
    captured they must not draw any on the device: modules that do are refused; functions (`F.dropout`) are not noticed.
    """

    def __init__(self, modules: Sequence[nn.Module], tensors: Iterable[Tensor], preserve_rng_state: bool = True):
        parts = [part for module in modules for part in module.modules()]
        own = (one for module in modules for one in (*module.parameters(), *module.buffers()))
        devices = {tensor.device for tensor in (*tensors, *own)}
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
            for kind in {"cpu", *(device.type for device in devices)} - {"meta"}
        ]
        self.cache = torch.is_autocast_cache_enabled()
        self.cuda = [device for device in devices if device.type == "cuda"]
        if self.cuda and is_capturing():  # the state of its generator cannot be read
            self.cuda = []
            if preserve_rng_state:
                _refuse_random(parts)
        self.random = self._random() if preserve_rng_state else None
        self.state = State(parts)

    def forward_pass_ended(self, inverts: bool) -> None:
        """Drop the random state (5 KB) if no numbers were drawn; see also `State.forward_pass_ended`."""
        if self.random is not None and all(map(_equal, self.random, self._random())):
            self.random = None
        self.state.forward_pass_ended(inverts)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Context of a repetition: restores the state of the forward pass, and at the end the current one.

        RuntimeError if a parameter, or a buffer that the forward pass did not change, was modified or replaced since;
        see also `State.restored`.
        """
        self.state.check_constants()
        with ExitStack() as stack:
            for kind, dtype, enabled in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype, enabled, self.cache))
            if self.random is not None:
                stack.enter_context(torch.random.fork_rng(self.cuda))
                torch.set_rng_state(self.random[0])
                for device, state in zip(self.cuda, self.random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            stack.enter_context(self.state.restored())
            yield

    def _random(self) -> list[Tensor]:
        return [torch.get_rng_state(), *map(torch.cuda.get_rng_state, self.cuda)]


def _refuse_random(parts: Iterable[nn.Module]) -> None:
    """RuntimeError if a module draws random numbers."""
    for part in parts:
        if isinstance(part, _RANDOM) and part.training and getattr(part, "p", 1.0) > 0:
            raise RuntimeError(
                f"a CUDA graph captures a reversible module that contains {part}: a captured repetition draws other "
                f"random numbers, so gradients would be wrong; move it out of the branches, or set p=0"
            )


def _equal(state: Tensor, other: Tensor) -> bool:
    with without_dispatch_modes():  # the states are real under fake tensors too
        return torch.equal(state, other)
