"""The formulas compiled by TorchInductor; traced into the graph of a network that is compiled itself."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from ..activations import Activation
from .eager import EagerBackend
from .formulas import (
    Settings,
    backward,
    forward,
    forward_,
    input_gradient,
    moments,
    normalise,
    normalise_,
    sums,
    wide_dtype,
    written,
)
from .interface import Backend, Kept, update_running_statistics

CHANNELS_LAST_BLOCK = 2**17  # elements of a block: 512 KiB in float32, of a core's 1 or 2 MiB of second-level cache
# A call of a compiled function takes some 20 microseconds more than one of an operator. Up to these numbers of elements
# for each thread it costs more than it saves: in channels_last, where PyTorch's operators are fast, and contiguous.
FEW_CHANNELS_LAST = 2**18
FEW_CONTIGUOUS = 2**17


class CompiledBackend(Backend):
    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or x.is_contiguous():
            blocks, axis = as_blocks(x)
            return run(moments, Settings(axis), blocks)
        return _channels_last_moments(x, None, None, 0.0)

    def normalise(
        self,
        x: Tensor,
        mean: Tensor,
        invstd: Tensor,
        gamma: Tensor,
        beta: Tensor,
        activation: Activation,
        out: Tensor | None = None,
    ) -> Tensor:
        formula, x = (normalise, x) if out is None else (normalise_, _filled(out, x))
        blocks, axis = as_blocks(x)
        z = run(formula, Settings(axis, activation), blocks, mean, gamma * invstd, beta)
        return from_blocks(z, x) if out is None else out

    def forward(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
        activation: Activation,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling() or x.is_contiguous():
            formula, x = (forward, x) if out is None else (forward_, _filled(out, x))
            blocks, axis = as_blocks(x)
            z, mean, var, invstd = run(formula, Settings(axis, activation, eps), blocks, gamma, beta)
            if running_mean is not None:
                count = x.numel() // x.shape[1]
                update_running_statistics(running_mean, running_var, momentum, mean, var, count)
            return from_blocks(z, x) if out is None else out, mean, invstd
        if x.numel() <= 2 * FEW_CHANNELS_LAST * torch.get_num_threads():
            return EagerBackend().forward(x, gamma, beta, running_mean, running_var, momentum, eps, activation, out)
        mean, var = _channels_last_moments(x, running_mean, running_var, momentum)
        invstd = torch.rsqrt(var + eps)
        return self.normalise(x, mean, invstd, gamma, beta, activation, out), mean, invstd

    def sums(self, kept: Kept, dz: Tensor) -> tuple[Tensor, Tensor]:
        settings, *tensors = _kept_and_dz(kept, dz)
        return run(sums, settings, *tensors)

    def input_gradient(self, kept: Kept, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        settings, *tensors = _kept_and_dz(kept, dz)
        dx = run(input_gradient, settings, mean_dy, mean_dy_x_hat, kept.gamma * kept.invstd, *tensors)
        return from_blocks(dx, kept.values)

    def backward(self, kept: Kept, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        settings, *tensors = _kept_and_dz(kept, dz)
        dx, dgamma, dbeta = run(backward, settings, kept.gamma * kept.invstd, *tensors)
        return from_blocks(dx, kept.values), dgamma, dbeta


def prefers_compiled(x: Tensor) -> bool:
    """Whether the compiled formulas are the fastest backend for an input on the CPU.

    Forward and backward pass of an in-place layer relative to batch normalisation followed by leaky_relu_, float32:
    contiguous, PyTorch's operators (the eager backend) take 1.1 to 1.2 times as long, the compiled formulas about half
    as long, but longer than the operators below some 2^16 elements. In channels_last, the operators take 1.2 to 1.4
    times as long, the formulas about as long; the two meet near 2^18 elements. Threads share the work, not the cost of
    a call, so they meet at more elements with more threads. Compilation takes seconds for the first layer of a process,
    so that the smallest networks are better off without it.
    """
    few = FEW_CONTIGUOUS if x.is_contiguous() else FEW_CHANNELS_LAST
    enough = x.numel() >= few * torch.get_num_threads()
    return enough and x.device.type == "cpu"


@functools.cache
def compiler_available(device_type: str) -> bool:
    """Whether TorchInductor can compile here: on a CPU it needs a C++ compiler. Tries it once per process (seconds)."""
    try:
        with torch.no_grad():
            torch.compile(_probe, dynamic=True, fullgraph=True)(torch.zeros(2, 3, device=device_type))
    except RuntimeError:
        return False
    return True


def check_compiler(device_type: str, asked: str = "backend='compiled'", instead: str = "backend='eager'") -> None:
    """Raise ValueError if TorchInductor cannot compile here, for what was `asked` for; `instead` needs no compiler."""
    if not compiler_available(device_type):
        raise ValueError(
            f"{asked} cannot compile for {device_type} on this machine: install a C++ compiler (g++; CXX names another "
            f"one) and Python's headers, or choose {instead}"
        )


def as_blocks(x: Tensor) -> tuple[Tensor, int]:
    """A packed x (N, C, *spatial) as blocks, which share its memory, and the axis of their pixels.

    (N, C, H*W), or for channels_last the largest of (N, H*W, C) and (N*H, W, C) with blocks that fit in the cache.
    """
    if x.is_contiguous():
        return x.reshape(x.shape[0], x.shape[1], -1), 2
    rows = x.movedim(1, -1)  # (N, *spatial, C)
    image = rows.shape[1:-1].numel()
    size = image if image * rows.shape[-1] <= CHANNELS_LAST_BLOCK else rows.shape[-2]
    return rows.reshape(-1, size, rows.shape[-1]), 1


def from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """The inverse of `as_blocks`, for blocks with the layout of those of `like`."""
    if like.is_contiguous():
        return blocks.view(like.shape)
    return blocks.view(like.movedim(1, -1).shape).movedim(-1, 1)


def run(formula: Callable, settings: Settings, *tensors: Tensor | None):
    """formula(settings, *tensors), compiled."""
    if torch.compiler.is_compiling():
        vectors = iter(written(*(t for t in tensors if t is not None and t.dim() == 1)))
        return formula(settings, *(next(vectors) if t is not None and t.dim() == 1 else t for t in tensors))
    blocks = next(t for t in tensors if t is not None and t.dim() == 3)
    if 1 in blocks.shape[1:]:  # each place of a size of 1 would be compiled anew, for tensors that are mostly small
        compiled = functools.partial(formula, settings)
    else:
        compiled = _compiled(formula, settings, any(t is None for t in tensors), blocks.dtype, blocks.device.type)
    with torch.no_grad():
        # Detached, a view has no base: Dynamo would guard the sizes of that as well.
        return compiled(*(t if t is None else t.detach() for t in tensors))


@functools.cache
def _compiled(formula: Callable, settings: Settings, in_part: bool, dtype: torch.dtype, device_type: str) -> Callable:
    """The formula, compiled for all sizes together, except that one block is a case of its own.

    `in_part`: some of its tensors are None.
    """
    check_compiler(device_type)
    # dynamic=True is for numbers too: plain ones would become inputs of the compiled function.
    axis, slope, eps = (_constant(v) for v in (settings.axis, settings.activation.param, settings.eps))
    name = settings.activation.name

    def traced(*tensors):
        return formula(Settings(axis(), Activation(name, slope()), eps()), *tensors)

    # Dynamo limits the recompilations of a code object, which all functions made here would share.
    own_name = f"{formula.__name__}_{name}_{str(dtype).rpartition('.')[2]}" + "_in_part" * in_part
    traced.__code__ = traced.__code__.replace(co_name=own_name)
    options = {
        "cpp.dynamic_threads": True,  # Inductor's cache on disk would return a single-threaded loop to many threads
        "size_asserts": False,  # Dynamo has guarded the sizes already; asserting them again costs microseconds
    }
    return torch.compile(traced, dynamic=True, fullgraph=True, options=options)


def _constant(value: float) -> Callable[[], float]:
    return torch.compiler.assume_constant_result(lambda: value)


def _probe(x: Tensor) -> Tensor:
    return x + 1


def _channels_last_moments(
    x: Tensor, running_mean: Tensor | None, running_var: Tensor | None, momentum: float
) -> tuple[Tensor, Tensor]:
    """Mean and biased variance by PyTorch's own loop over channels_last, which is faster than a compiled one."""
    if running_mean is None:  # without running statistics it would round the mean and variance to the dtype of x
        running_mean, running_var = x.new_zeros(2, x.shape[1], dtype=wide_dtype(x))
    mean, var = torch.batch_norm_update_stats(x, running_mean, running_var, momentum)
    return mean, var


def _filled(out: Tensor | None, x: Tensor) -> Tensor:
    """`out` with the values of x, if it is given and is not x already."""
    if out is None or out is x:
        return x
    return out.copy_(x)


def _kept_and_dz(
    kept: Kept, dz: Tensor
) -> tuple[Settings, Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The settings and the other arguments of `x_hat_and_dy`."""
    values, axis = as_blocks(kept.values)
    dz = (dz if axis == 2 else dz.movedim(1, -1)).reshape(values.shape).contiguous()
    vectors = (None, None) if kept.is_output else (kept.gamma, kept.beta)
    return Settings(axis, kept.activation), values, dz, kept.offset, kept.factor, *vectors
