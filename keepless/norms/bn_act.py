"""BN + activation as one autograd node. Strategies differ in which tensors it saves for backward."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from ..torch_internals import changing_mode, node_class
from .backends import backend_for
from .backends.activations import Activation, activate_
from .backends.eager import EagerBackend
from .backends.interface import Affine, Backend, BackwardInputs, Running, floored
from .synchronisation import check_total, gathered_moments, joint_sums


class Strategy(NamedTuple):
    """How a layer computes, and which tensor it saves for backward."""

    keep: Literal["x", "x_hat", "z"]
    recover_x_hat: bool = False  # variant I: form x_hat for every value
    recompute_output: bool = False  # later operations need not save z, see `recompute_activations`
    gamma_floor: float = 0.0  # smallest |gamma| with minibatch statistics
    overwrite_input: bool = False
    backend: str = "auto"


class NormArguments(NamedTuple):
    """The arguments that are not tensors: in one tuple, because autograd functions spend time on each argument."""

    use_batch_statistics: bool
    momentum: float
    eps: float
    activation: Activation
    group: dist.ProcessGroup | None = None  # ranks that share minibatch statistics


class BatchNormActivation(torch.autograd.Function):
    """z = phi(gamma * (x - mean) / sqrt(var + eps) + beta)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,  # (N, C, *spatial)
        weight: Tensor | None,  # (C,), as are the other vectors
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        arguments: NormArguments,
        strategy: Strategy,
    ) -> Tensor:
        """Algorithm 1: y, sigma <- BN(x); z <- phi(y); save the tensors of the strategy."""
        use_batch_statistics = arguments.use_batch_statistics
        backend = backend_for(strategy.backend, x)
        # Kernels assume contiguous vectors; weights may be views (e.g. from a hypernetwork).
        gamma = weight.contiguous() if weight is not None else x.new_ones(x.shape[1], dtype=statistics_dtype(x))
        beta = bias.contiguous() if bias is not None else x.new_zeros(x.shape[1], dtype=statistics_dtype(x))
        values = x if is_packed(x) else x.contiguous()
        overwrite = strategy.overwrite_input and values is x
        # To save x_hat, compute it first: batch normalisation without scale, shift or activation.
        affine = Affine(gamma, beta, arguments.activation, strategy.gamma_floor if use_batch_statistics else 0.0)
        if not backend.floors_gamma:
            affine = affine.with_floored_gamma()
        if strategy.keep == "x_hat":
            first = Affine(torch.ones_like(gamma), torch.zeros_like(beta), Activation("identity"))
        else:
            first = affine

        running = Running(running_mean, running_var, arguments.momentum)
        z, mean, invstd, ctx.count = _normalised(backend, values, first, running, arguments, overwrite)
        if strategy.recompute_output and dist.is_available() and dist.is_initialized():
            # FSDP frees its gathered parameters after each use, perhaps before z is recomputed from them.
            gamma = gamma.clone()
            beta = beta.clone()
        if strategy.keep == "x_hat":
            x_hat = z
            z = backend.normalise(x_hat, first.beta, first.gamma, affine)  # a mean of 0, an invstd of 1
            ctx.save_for_backward(x_hat, gamma, beta, invstd)
        elif strategy.keep == "x":
            # A copy, because the running mean may change before the backward pass.
            ctx.save_for_backward(values, gamma, beta, invstd, mean if use_batch_statistics else mean.clone())
        else:
            if strategy.overwrite_input:
                z = z if overwrite else x.copy_(z)
                ctx.mark_dirty(z)
            ctx.save_for_backward(z, gamma, beta, invstd)
        # `kept`: the backward inputs with z, from its recomputation until this node's backward pass.
        ctx.arguments = arguments
        ctx.strategy = strategy
        ctx.kept = None
        if strategy.recompute_output and not torch.compiler.is_compiling() and not z.is_inference():
            ctx.output_version = changing_mode() or z._version  # a mode: z is not computed again
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        """Algorithm 2: dL/dy <- phi_backward(z, dL/dz); y <- phi^-1(z); the gradients of x, gamma and beta."""
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Raised now: not every second backward pass would reach an error placed in the gradient's own graph.
            raise RuntimeError(
                "create_graph=True: in-place, checkpointed, synchronised and fused norms have no second derivative; "
                "use ABN with backend='eager' and sync=False, or keepless.to_standard(network)"
            )
        kept = ctx.kept or backward_inputs_of(ctx)
        ctx.kept = None
        backend = backend_for(ctx.strategy.backend, kept.values)
        kept = kept if backend.floors_gamma else kept.with_floored_gamma()
        dz = dz.contiguous() if is_misread(dz) else dz
        if not dz.numel():  # PyTorch's kernels divide by the number of values
            dx = torch.empty_like(kept.values)
            dgamma = torch.zeros_like(kept.affine.gamma)
            dbeta = torch.zeros_like(kept.affine.beta)
            if ctx.arguments.group is not None:
                joint_sums((dbeta, dgamma), ctx.arguments.group)  # the other ranks need this one
        elif not ctx.arguments.use_batch_statistics:
            dx, dgamma, dbeta = backend.backward_frozen(kept, dz)
        elif ctx.arguments.group is None:
            dx, dgamma, dbeta = backend.backward(kept, dz)
        else:
            dbeta, dgamma = backend.sums(kept, dz)
            sum_dy, sum_dy_x_hat = joint_sums((dbeta, dgamma), ctx.arguments.group)
            dx = backend.input_gradient(kept, dz, sum_dy / ctx.count, sum_dy_x_hat / ctx.count)
        needs_gradient = ctx.needs_input_grad
        return dx, dgamma if needs_gradient[1] else None, dbeta if needs_gradient[2] else None, None, None, None, None


def _normalised(
    backend: Backend, x: Tensor, affine: Affine, running: Running, arguments: NormArguments, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """z, with its mean and invstd (C,); and if ranks share statistics, their values per channel () in all."""
    eps = arguments.eps
    group = arguments.group
    if not arguments.use_batch_statistics:
        assert running.mean is not None and running.var is not None
        return *backend.forward_frozen(x, affine, eps, running.mean, running.var, overwrite), None
    if group is None:
        return *backend.forward(x, affine, eps, running, overwrite), None
    count = x.numel() // x.shape[1]
    dtype = affine.beta.dtype
    moments = backend.moments(x) if count > 1 else _moments_of_one(x, dtype)
    mean, invstd, total = backend.joint_statistics(gathered_moments(*moments, count, group), dtype, eps, running)
    check_total(total)
    return backend.normalise(x, mean, invstd, affine, overwrite), mean, invstd, total


def _moments_of_one(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`Backend.moments` of an input with one value per channel, which is the mean, or with none."""
    mean = x.sum([dim for dim in range(x.dim()) if dim != 1], dtype=dtype)
    return mean, torch.zeros_like(mean)


def norm_and_activation(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    arguments: NormArguments,
    strategy: Strategy,
) -> Tensor:
    """Compute z by our node, or by PyTorch's operators if these save as little.

    Function modes, such as recordings, see a node as one call, unless it exchanges statistics or writes over x.
    RuntimeError if it writes over an x that autograd does not allow to change.
    """
    tensors = (x, weight, bias, running_mean, running_var)
    if arguments.group is None and _runs_by_pytorch(x, arguments, strategy):
        if arguments.use_batch_statistics and strategy.gamma_floor and weight is not None:
            weight = weight + (floored(weight, strategy.gamma_floor) - weight).detach()  # dL/dweight = dL/dgamma
        x = x.contiguous() if is_misread(x) else x
        training, momentum, eps, activation, _ = arguments
        y = F.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)
        return activate_(activation, y)
    if has_torch_function_unary(x) and arguments.group is None and not strategy.overwrite_input:
        return handle_torch_function(norm_and_activation, (x,), *tensors, arguments, strategy)
    if not strategy.overwrite_input or torch.compiler.is_compiling():
        return BatchNormActivation.apply(*tensors, arguments, strategy)
    try:
        return BatchNormActivation.apply(*tensors, arguments, strategy)
    except RuntimeError as error:
        message = str(error).lower().replace("-", "")
        if "inplace" not in message and "writtento" not in message:
            raise
        raise RuntimeError(
            f"overwrite_input=True cannot write over this input: leave it out in layers whose input is a leaf, a part "
            f"made by chunk, split or unbind, expanded, or made in inference mode. {error}"
        ) from error


def _runs_by_pytorch(x: Tensor, arguments: NormArguments, strategy: Strategy) -> bool:
    """Whether PyTorch's batch normalisation and activation run: they save as little, or our node is not possible."""
    is_eager = strategy.backend in ("auto", "eager")
    if not x.numel() or (strategy.keep == "x" and not strategy.recompute_output and is_eager):
        return True
    # A recorded graph cannot hold our node: gradients would be lost, and the sizes by which kernels read x fixed.
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return True
    if arguments.use_batch_statistics or torch.is_grad_enabled() or strategy.overwrite_input:
        return False
    return not torch.compiler.is_compiling() and isinstance(backend_for(strategy.backend, x), EagerBackend)


def _saved_tensors(node: Any) -> tuple[Tensor, ...]:
    if torch.compiler.is_compiling():
        return node.saved_tensors
    try:
        return node.saved_tensors
    except RuntimeError as error:
        if node.strategy.keep != "z" or "modified by an inplace operation" not in str(error):
            raise
        raise RuntimeError(
            f"an in-place layer needs its output in the backward pass, but it was overwritten: write `out = out + x` "
            f"instead of `out += x`, and use inplace=False in the layers after it. {error}"
        ) from error


def is_node(value: object) -> TypeGuard[Any]:
    """Whether a value is a `BatchNormActivation` node."""
    return isinstance(value, node_class(BatchNormActivation))


def backward_inputs_of(node: Any, saved: Sequence[Tensor] | None = None) -> BackwardInputs:
    """What backends take for the backward pass of a node that has saved tensors. `saved`: see `recompute_output`."""
    values, gamma, beta, invstd, *rest = _saved_tensors(node) if saved is None else saved
    if not is_packed(values):  # z, written over an x with gaps
        values = values.contiguous()
    strategy = node.strategy
    offset = beta
    factor: Tensor | None = None
    floor = 0.0
    if strategy.keep == "x":
        (offset,) = rest  # the mean
        factor = invstd
    elif strategy.keep == "x_hat":
        offset = torch.zeros_like(beta)
        factor = torch.ones_like(gamma)
    elif node.arguments.use_batch_statistics:
        floor = strategy.gamma_floor
    else:
        # With running statistics gamma is the raw weight, which may be too small to divide by.
        factor = floored(gamma, strategy.gamma_floor).reciprocal()
    affine = Affine(gamma, beta, node.arguments.activation, floor)
    return BackwardInputs(values, strategy.keep == "z", offset, factor, affine, invstd, strategy.recover_x_hat)


def recompute_output(node: Any, saved: Sequence[Tensor] | None = None) -> Tensor:
    """Recompute z from a node that saved x or x_hat, once for all operations that need it.

    `saved`: the tensors that the node had saved, if its backward pass has freed them.
    """
    kept = node.kept or backward_inputs_of(node, saved)
    if kept.output is not None:
        return kept.output
    backend = backend_for(node.strategy.backend, kept.values)
    assert kept.factor is not None  # only strategies that keep z have none
    z = backend.normalise(kept.values, kept.offset, kept.factor, kept.affine)
    if saved is None:
        node.kept = kept._replace(output=z)
    return z


def statistics_dtype(x: Tensor) -> torch.dtype:
    """The dtype of parameters and statistics for an input."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def is_packed(x: Tensor) -> bool:
    """Whether x is contiguous or channels_last without gaps, the layouts that backends support."""
    return x.is_contiguous() or (_is_channels_last(x) and not is_misread(x))


def is_misread(x: Tensor) -> bool:
    """Whether PyTorch's batch normalisation treats x as channels_last, but dL/dz as contiguous.

    PyTorch's gradients are then wrong. It chooses the layout of dL/dz by all strides of x, although the stride of a
    dimension of size 1 does not matter: e.g. strides (C, 1, 1, C) for the shape (1, C, 1, W).
    """
    if 1 not in x.shape or x.is_contiguous() or not _is_channels_last(x):
        return False
    inner_to_outer = (1, *range(x.dim() - 1, 1, -1), 0)
    pairs = zip(inner_to_outer, inner_to_outer[1:], strict=False)
    return any(x.stride(outer) < x.stride(inner) * x.shape[inner] for inner, outer in pairs)


def _is_channels_last(x: Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()])
