"""The strategies that `layers` compares, by their names in the tables, and their inputs."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn

from keepless import ABN, InPlaceABN, recompute_activations, triton_launch
from keepless.norms.backends import BACKENDS, backend_for, check_backend, triton_kernels
from keepless.saved import saved_for_backward
from keepless.torch_internals import TritonBinary
from models.blocks import NormAct
from models.bodies import resnext101
from scripts.evidence.counted import STRATEGIES
from scripts.reports.measuring import LAYOUTS

BLOCKS, HOST = ("bn_act", "bn_act_conv"), ("host", "host_eval")
GROUPS = (*BLOCKS, "network", *HOST)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# (N, C, H, W): 24.5 MiB on the CPU, more than 256 MiB on CUDA even in bfloat16.
LARGE = {"cpu": (8, 64, 112, 112), "cuda": (64, 256, 112, 112)}

NETWORK_IMAGES = (8, 3, 128, 128)

HOST_SIZE = (2, 64, 4, 4)  # 8 KiB: computing takes next to nothing, so that the time is the host's


class Cell(NamedTuple):
    """One input, on which all strategies are measured in turn."""

    group: str  # of GROUPS
    shape: str  # CONV1 … CONV4, LARGE, NETWORK or TINY
    size: tuple[int, int, int, int]  # (N, C, H, W)
    layout: str  # of LAYOUTS
    dtype: str  # of DTYPES
    device: str

    def __str__(self) -> str:
        return f"{self.group} {self.shape} {self.layout} {self.dtype}"

    def tensor(self, size: tuple[int, ...]) -> Tensor:
        values = torch.randn(size, device=self.device, dtype=DTYPES[self.dtype])
        return values.contiguous(memory_format=LAYOUTS[self.layout]) if len(size) == 4 else values

    def block(self, norm_act: NormAct) -> nn.Module:
        """Build the norm alone, the norm and a 1x1 convolution to half the channels, or a small network."""
        block: nn.Module
        if self.group == "network":
            block = resnext101(
                norm_act, classes=10, structure=(2, 2, 1, 1), base_channels=(32, 32, 64), groups=8, stem_channels=32
            )
        else:
            channels = self.size[1]
            layers = [norm_act(channels)]
            if self.group == "bn_act_conv":
                layers.append(nn.Conv2d(channels, channels // 2, 1, bias=False, dtype=DTYPES[self.dtype]))
            block = nn.Sequential(*layers)
            recompute_activations(block, checkpointed_only=True)
        block.train(self.group != "host_eval")
        return block.to(self.device, memory_format=LAYOUTS[self.layout])  # type: ignore[call-overload]  # torch lacks it


class Work(NamedTuple):
    """A block and the tensors of its forward and backward pass; `step` is timed."""

    block: nn.Module
    forward: Callable[[Tensor], Tensor]  # the block, or its compiled form
    x: Tensor  # requires a gradient, except images
    dz: Tensor  # the gradient of the block's output
    overwrites: bool = False  # the block writes over its input, so it is given a copy

    def step(self) -> tuple[Tensor, ...]:
        """Run forward and backward; return the gradients of x and of all parameters. In eval mode, run forward only."""
        if not self.block.training:
            with torch.no_grad():
                return (self.forward(self.x),)
        return self._gradients(self.forward(self.x.clone() if self.overwrites else self.x))

    def owning_step(self) -> tuple[Tensor, ...]:
        """`step` for an x that nothing else holds, as in a network, so it is freed as soon as it is not needed."""
        return self._gradients(self.forward(self.x.clone()))

    def _gradients(self, output: Tensor) -> tuple[Tensor, ...]:
        wanted = [tensor for tensor in (self.x, *self.block.parameters()) if tensor.requires_grad]
        return torch.autograd.grad(output, wanted, self.dz)

    def saved_bytes(self) -> tuple[int, int]:
        """Bytes that autograd keeps, without parameters: of all tensors, and of tensors with at most C values.

        x counts if it is kept, because that keeps it alive; images do not: the caller holds them anyway.
        """
        held = [*self.block.parameters(), *([] if self.x.requires_grad else [self.x])]
        _, saved = saved_for_backward(lambda: self.forward(self.x.clone() if self.overwrites else self.x), held)
        sizes = [tensor.untyped_storage().nbytes() for tensor in saved]
        vector = self.x.shape[1] * torch.float32.itemsize
        return sum(sizes), sum(size for size in sizes if size <= vector)


STANDARD = "standard"
ONE_LAYER = "standard, one layer"
COMPILED = "standard, compiled"
BUDGET = "standard, compiled, budget 0.5"
CHECKPOINTING_B = "checkpointing (b)"
CHECKPOINTING_C = "checkpointing (c)"
INPLACE_1 = "in-place I"
INPLACE_2 = "in-place II"
INPLACE_COMPILED = "in-place II, compiled"
WITHOUT_LAUNCHES = "in-place II, launches left out"
SYNC = "in-place II, sync, alone"
PACKAGE = "released package"
OURS = {  # by their norm
    "checkpoint": CHECKPOINTING_B,
    "checkpoint_xhat": CHECKPOINTING_C,
    "inplace_1": INPLACE_1,
    "inplace": INPLACE_2,
}
COPY = "copy"  # of the input: not a strategy, but the unit of bandwidth, and what the package needs before it


class Strategy(NamedTuple):
    name: str
    norm_act: NormAct
    backend: str = "auto"
    compiled: bool = False  # the whole block or network by torch.compile
    budget: float = 1.0  # share of activations that the compiler may keep, of those it would keep by default
    overwrites: bool = False  # the norm writes over its input


def batch_norm_leaky_relu(channels: int) -> nn.Module:
    """The standard layers in the form that compiles to the fastest code.

    Given an *in-place* activation, TorchInductor 2.12 keeps a mask of the signs as well, in a loop over BN + ACT that
    takes ten times as long on the CPU.
    """
    return nn.Sequential(nn.BatchNorm2d(channels), nn.LeakyReLU(0.01))


def strategies(cell: Cell, uncompiled: str | None, backend: str = "auto") -> tuple[list[Strategy], dict[str, str]]:
    """Choose the strategies of a cell; return them, and {name: reason} for those left out.

    `uncompiled` is the reason to leave out compiled strategies, or None to keep them. `backend` is for our layers.
    """
    ours = [Strategy(name, partial(STRATEGIES[norm][2], backend=backend), backend) for norm, name in OURS.items()]
    if cell.group in HOST:
        standard = [Strategy(STANDARD, batch_norm_leaky_relu, "modules"), Strategy(ONE_LAYER, ABN, backend)]
        if cell.device != "cpu":
            return [*standard, *ours], {}
        return [*standard, *ours, Strategy(WITHOUT_LAUNCHES, partial(InPlaceABN, backend="triton"), "triton")], {}
    known: list[tuple[Strategy, str | None]] = [(each, None) for each in (Strategy(STANDARD, ABN, "eager"), *ours)]
    known.append((Strategy(COMPILED, batch_norm_leaky_relu, compiled=True), uncompiled))
    if cell.group != "bn_act":  # alone, BN + ACT has nothing behind it that would keep z
        known.append((Strategy(BUDGET, batch_norm_leaky_relu, compiled=True, budget=0.5), uncompiled))
    if cell.group == "network":
        known.append((Strategy(INPLACE_COMPILED, InPlaceABN, compiled=True), uncompiled))
    else:
        known.append((Strategy(SYNC, partial(InPlaceABN, sync=True, backend=backend), backend), None))
    if cell.group == "bn_act":
        for each in BACKENDS[1:]:
            reason = (uncompiled if each == "compiled" else None) or _missing(each, cell)
            known.append((Strategy(f"in-place II, {each} backend", partial(InPlaceABN, backend=each), each), reason))
    if cell.group != "network":
        known.append(_released(cell))
    left_out = {strategy.name: reason for strategy, reason in known if reason is not None}
    return [strategy for strategy, reason in known if reason is None], left_out


def _released(cell: Cell) -> tuple[Strategy, str | None]:
    """The released package, and why it cannot run here, or None."""
    reason = None if cell.dtype == "float32" else f"does not compute in {cell.dtype}"
    try:
        from inplace_abn import InPlaceABN as layer
    except ImportError as error:
        layer, reason = None, f"not importable ({error})"
    return Strategy(PACKAGE, layer, "released", overwrites=True), reason


def computing_backend(name: str, cell: Cell) -> str:
    """Name of the backend that our layers use for a cell, e.g. of the choice "auto"."""
    backend = backend_for(name, cell.tensor(cell.size))
    return type(backend).__name__.removesuffix("Backend").lower()


def _missing(backend: str, cell: Cell) -> str | None:
    """Why a backend cannot run here, or None."""
    try:
        check_backend(backend)
        used = computing_backend(backend, cell)
    except ValueError as error:
        return str(error)
    return None if used == backend else f"is not available for this input: {used} takes its place"


@contextmanager
def launches_left_out() -> Iterator[None]:
    """Context in which backend="triton" takes tensors on the CPU, and computes nothing: z and gradients are undefined.

    Kernels count as compiled, and calling a binary returns at once. On a GPU each launch takes the driver's own time
    too, as each of PyTorch's launches does.
    """
    binary = TritonBinary(lambda *arguments: None, function=0, metadata=None, registers=64, shared=0)
    with ExitStack() as patches:
        for owner, name, value in (
            (triton_kernels, "runs_on", lambda x: True),
            (triton_launch, "current_stream", lambda device: 0),
            (triton_launch.Launch, "_load", lambda launch, examples: binary),
            (triton_launch.Launch, "resident", None),
            (torch.cuda, "current_device", lambda: None),  # the index of the CPU's torch.device
        ):
            patches.enter_context(patch.object(owner, name, value))
        yield
