"""An optional check that parts of a reversible network compute the same values when the backward pass repeats them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from ..torch_internals import is_capturing

_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}  # restored inputs are rounded
_LOW_PRECISION = 0.3

_enabled = ContextVar("checking_repetitions", default=False)


@contextmanager
def checking_repetitions() -> Iterator[None]:
    """Context for forward passes whose backward passes compare each repeated output of a branch with the first one.

    A branch that draws from its own generator, or reads a list or a global that has changed, computes other values
    the second time, so gradients are wrong. In this context it raises a RuntimeError that names the branch. It costs
    two passes over each output and 24 MiB of temporary memory: use it in the first steps of a run. Because restored
    inputs are rounded, relative differences below 0.001 pass in float32, and below 0.3 in bfloat16, float16 and under
    autocast. Passes captured in a CUDA graph are not compared, because the host would have to wait for their values.
    """
    token = _enabled.set(True)
    try:
        yield
    finally:
        _enabled.reset(token)


class Checksum:
    """The first outputs of some modules, in two numbers each."""

    def __init__(self, modules: Sequence[nn.Module]):
        self.modules = modules
        self.first: list[Tensor] = []
        self.enabled = _enabled.get()

    def remember(self, output: object) -> None:
        """Keep the checksums of the first output."""
        if self.enabled:
            self.first = [_checksum(tensor) for tensor in _tensors(output)]

    def compare(self, output: object) -> None:
        """Raise RuntimeError if a repeated output differs from the first one by more than rounding."""
        if self.enabled and not is_capturing():
            for tensor, first in zip(_tensors(output), self.first, strict=True):
                self._compare_tensor(tensor, first)

    def _compare_tensor(self, tensor: Tensor, first: Tensor) -> None:
        repeated = _checksum(tensor)
        is_low = torch.is_autocast_enabled(tensor.device.type)
        tolerance = _LOW_PRECISION if is_low else _TOLERANCES.get(tensor.dtype, _LOW_PRECISION)
        limit = tolerance * first[1].clamp(min=1e-30)
        is_close = bool((repeated - first).abs().max() <= limit)  # not if it has become NaN
        if not is_close and not torch.isnan(first).any():
            names = ", ".join(type(module).__name__ for module in self.modules)
            raise RuntimeError(
                f"{names} computed other values when the backward pass repeated it, so gradients would be wrong: "
                f"it must not draw from its own generator or NumPy's, or read a list or a global that changes"
            )


def _tensors(output: object) -> list[Tensor]:
    parts = output if isinstance(output, tuple) else (output,)
    return [part for part in parts if isinstance(part, Tensor)]


@torch.no_grad()
def _checksum(tensor: Tensor) -> Tensor:
    """Two numbers: a weighted sum, which changes about as much as the values do, and the norm."""
    sums = torch.zeros(2, dtype=torch.float64, device=tensor.device)
    for number, part in enumerate(_parts(tensor.detach())):
        values = part.flatten().double()
        weights = torch.arange(number, number + values.numel(), dtype=torch.float64, device=values.device).cos_()
        sums += torch.stack([values @ weights, values @ values])
    sums[1].sqrt_()
    return sums


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """Parts of at most 2^20 values, so that copies of them need little memory."""
    if tensor.numel() <= 2**20:
        yield tensor
    else:
        rows = 2**20 * len(tensor) // tensor.numel()
        for part in tensor.split(rows) if rows else tensor:
            yield from _parts(part)
