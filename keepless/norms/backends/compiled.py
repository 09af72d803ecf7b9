"""The formulas, compiled by TorchInductor or inlined in the graph of a compiled network."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor, fx

from ...torch_internals import compile_by_inductor
from . import formulas
from .activations import Activation
from .eager import EagerBackend, moments_by_operator
from .formulas import Settings
from .interface import UNTRACKED, Affine, Backend, BackwardInputs, Running

CHANNELS_LAST_BLOCK = 2**17  # elements of a block: 512 KiB in float32; a core has 1 or 2 MiB of L2 cache
# Calling a compiled function takes about 20 microseconds longer than calling an operator. It pays off from these
# numbers of elements per thread (see `prefers_compiled`; the contiguous one has a margin).
FEW_CHANNELS_LAST = 2**18
FEW_CONTIGUOUS = 2**17

Result = TypeVar("Result")


class CompiledBackend(Backend):
    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_compiling() or x.is_contiguous():
            blocks, axis = as_blocks(x)
            return run_formula(formulas.moments, Settings(axis), blocks)
        return moments_by_operator(x, UNTRACKED)

    def normalise(self, x: Tensor, mean: Tensor, invstd: Tensor, affine: Affine, overwrite: bool = False) -> Tensor:
        blocks, axis = as_blocks(x)
        settings = Settings(axis, affine.activation, overwrites=overwrite)
        z = run_formula(formulas.normalise, settings, blocks, mean, affine.gamma * invstd, affine.beta)
        return x if z is None else from_blocks(z, x)

    def forward(
        self, x: Tensor, affine: Affine, eps: float, running: Running, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        if torch.compiler.is_compiling() or x.is_contiguous():
            blocks, axis = as_blocks(x)
            settings = Settings(axis, affine.activation, eps, overwrites=overwrite)
            z, mean, var, invstd = run_formula(formulas.forward, settings, blocks, affine.gamma, affine.beta)
            running.update(mean, var, x.numel() // x.shape[1])
            return x if z is None else from_blocks(z, x), mean, invstd
        if x.numel() <= 2 * FEW_CHANNELS_LAST * torch.get_num_threads():
            return EagerBackend().forward(x, affine, eps, running, overwrite)
        mean, var = moments_by_operator(x, running)  # faster than a compiled channels_last loop
        invstd = torch.rsqrt(var + eps)
        return self.normalise(x, mean, invstd, affine, overwrite), mean, invstd

    def sums(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
        settings, tensors = _x_hat_arguments(kept, dz)
        return run_formula(formulas.sums, settings, *tensors)

    def input_gradient(self, kept: BackwardInputs, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        settings, tensors = _x_hat_arguments(kept, dz)
        scale = kept.affine.gamma * kept.invstd
        dx = run_formula(formulas.input_gradient, settings, mean_dy, mean_dy_x_hat, scale, *tensors)
        return from_blocks(dx, kept.values)

    def backward(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        settings, tensors = _x_hat_arguments(kept, dz)
        dx, dgamma, dbeta = run_formula(formulas.backward, settings, kept.affine.gamma * kept.invstd, *tensors)
        return from_blocks(dx, kept.values), dgamma, dbeta


def prefers_compiled(x: Tensor) -> bool:
    """Whether the compiled formulas are the fastest backend for an input on the CPU.

    In float32 they take about half as long as the eager backend if x is contiguous, and 0.7 to 0.8 of it otherwise,
    but longer for small inputs. Threads share the work but not the cost of a call, so more threads move the break-even
    point up.
    """
    few = FEW_CONTIGUOUS if x.is_contiguous() else FEW_CHANNELS_LAST
    return x.numel() >= few * torch.get_num_threads() and x.is_cpu


@functools.cache
def compiler_available(device_type: str) -> bool:
    """Whether TorchInductor can compile here: on a CPU it needs a C++ compiler. Tried once per process (seconds).

    It does not try `torch.compile`: once that has failed, all Python code of the process keeps arguments longer.
    """
    try:
        graph = fx.symbolic_trace(lambda x: x + 1)
        x = torch.zeros(2, 3, device=device_type)
        compile_by_inductor(graph, [x])(x)
    except (RuntimeError, OSError, AttributeError):  # no compiler, no disk space, or an unknown PyTorch
        return False
    return True


def check_compiler(device_type: str, setting: str = "backend='compiled'", instead: str = "backend='eager'") -> None:
    """Raise ValueError if TorchInductor cannot compile here. `setting` needs it; the setting `instead` does not."""
    if not compiler_available(device_type):
        raise ValueError(
            f"{setting} cannot compile for {device_type} on this machine: install a C++ compiler (g++, or set CXX) and "
            f"Python's headers, or choose {instead}"
        )


def as_blocks(x: Tensor) -> tuple[Tensor, int]:
    """View a packed x (N, C, *spatial) as blocks; also return the axis of their pixels.

    Contiguous: (N, C, H*W). channels_last: (N, H*W, C) if such blocks fit in the cache, otherwise (N*H, W, C).
    """
    if x.is_contiguous():
        return x.reshape(x.shape[0], x.shape[1], x.shape[2:].numel()), 2
    rows = x.movedim(1, -1)  # (N, *spatial, C)
    image = rows.shape[1:-1].numel()
    size = image if image * rows.shape[-1] <= CHANNELS_LAST_BLOCK else rows.shape[-2]
    return rows.reshape(-1, size, rows.shape[-1]), 1


def from_blocks(blocks: Tensor, like: Tensor) -> Tensor:
    """Inverse of `as_blocks`: blocks in the shape and layout of `like`.

    Detached, because autograd refuses writes over a view that a custom function returns.
    """
    if like.is_contiguous():
        return blocks.view(like.shape).detach()
    return blocks.view(like.movedim(1, -1).shape).movedim(-1, 1).detach()


def run_formula(formula: Callable[..., Result], settings: Settings, *tensors: Tensor) -> Result:
    """Call formula(settings, *tensors): compiled, inlined in a compiled network, or eagerly if blocks have a size of 1.

    Each size of 1 would cost a compilation of its own, mostly for small tensors.
    """
    if torch.compiler.is_compiling():
        return _run_inlined(formula, settings, tensors)
    blocks = next(t for t in tensors if t.dim() == 3)
    run: Callable[..., Result]
    if 1 in blocks.shape[1:]:
        run = functools.partial(formula, settings)
    else:
        run = _compiled(formula, settings, blocks.dtype, blocks.device.type)
    with torch.no_grad():
        # Detached views have no base; Dynamo would guard the base's sizes too.
        return run(*(t.detach() for t in tensors))


def _run_inlined(formula: Callable[..., Result], settings: Settings, tensors: Sequence[Tensor]) -> Result:
    """Call a formula in the graph of a network that is being compiled. It reads its vectors from memory."""
    in_memory = iter(formulas.materialised(*[tensor for tensor in tensors if tensor.dim() == 1]))
    arguments = [next(in_memory) if tensor.dim() == 1 else tensor for tensor in tensors]
    return formula(settings, *arguments)


@functools.cache
def _compiled(
    formula: Callable[..., Result], settings: Settings, dtype: torch.dtype, device_type: str
) -> Callable[..., Result]:
    """Compile a formula once for all sizes, except that a single block is compiled separately."""
    check_compiler(device_type)
    # As strings: with dynamic=True numbers would become inputs of the compiled function.
    axis = str(settings.axis)
    slope = str(settings.activation.param)
    eps = str(settings.eps)
    name = settings.activation.name
    is_output = settings.is_output
    overwrites = settings.overwrites

    def specialised(*tensors: Tensor) -> Result:
        return formula(Settings(int(axis), Activation(name, float(slope)), float(eps), is_output, overwrites), *tensors)

    # Dynamo limits recompilations per code object, and all functions made here would share one.
    code_name = f"{formula.__name__}_{name}_{str(dtype).rpartition('.')[2]}_{is_output}_{overwrites}"
    specialised.__code__ = specialised.__code__.replace(co_name=code_name)
    options: dict[str, str | int | bool | Callable[..., object]] = {
        "cpp.dynamic_threads": True,  # or Inductor's disk cache may return a single-threaded loop
        "size_asserts": False,  # Dynamo already guards the sizes; asserting them again costs microseconds
    }
    return torch.compile(specialised, dynamic=True, fullgraph=True, options=options)


def _x_hat_arguments(kept: BackwardInputs, dz: Tensor) -> tuple[Settings, tuple[Tensor, ...]]:
    """All arguments of `x_hat_and_dy`."""
    assert kept.factor is not None  # it is None only for backends that floor gamma
    values, axis = as_blocks(kept.values)
    dz = (dz if axis == 2 else dz.movedim(1, -1)).reshape(values.shape).contiguous()
    settings = Settings(axis, kept.affine.activation, is_output=kept.is_output)
    return settings, (values, dz, kept.offset, kept.factor, kept.affine.gamma, kept.affine.beta)
