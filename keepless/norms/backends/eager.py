"""The reference backend: PyTorch's own operators, on every device and dtype that they support."""

import torch
from torch import Tensor

from ...torch_internals import FakeTensor
from .activations import activate_, activation_backward, invert_activation
from .interface import UNTRACKED, Affine, Backend, BackwardInputs, Running, per_channel


class EagerBackend(Backend):
    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return moments_by_operator(x, UNTRACKED)

    def normalise(self, x: Tensor, mean: Tensor, invstd: Tensor, affine: Affine, overwrite: bool = False) -> Tensor:
        # In eval mode the operator takes a variance. Scaling gamma instead, as it does itself, changes no bit.
        scaled = affine._replace(gamma=affine.gamma * invstd)
        z, _, _ = _batch_norm(x, scaled, Running(mean, torch.ones_like(mean)), False, 0.0, overwrite)
        return z

    def forward(
        self, x: Tensor, affine: Affine, eps: float, running: Running, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        return _batch_norm(x, affine, running, True, eps, overwrite)

    def forward_frozen(
        self, x: Tensor, affine: Affine, eps: float, mean: Tensor, var: Tensor, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        z, _, _ = _batch_norm(x, affine, Running(mean, var), False, eps, overwrite)
        return z, mean, (var + eps).rsqrt_()

    def sums(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
        x_hat, dy = _x_hat_and_dy(kept, dz)
        dims = [dim for dim in range(dz.dim()) if dim != 1]
        return dy.sum(dims), (dy * x_hat).sum(dims)

    def input_gradient(self, kept: BackwardInputs, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        x_hat, dy = _x_hat_and_dy(kept, dz)
        dx = dy - per_channel(mean_dy, dy) - x_hat * per_channel(mean_dy_x_hat, dy)
        return dx.mul_(per_channel(kept.affine.gamma * kept.invstd, dy)).to(dz.dtype)

    def backward(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """PyTorch's batch normalisation backward, with u as the input, offset as the mean and factor as invstd.

        Its x_hat = (u - offset) * factor, and hence its sums, are then ours. It scales dL/dx by weight * factor, so it
        gets weight = gamma * invstd / factor.
        """
        u, dy = _u_and_dy(kept, dz)
        offset = kept.offset
        factor = _factor(kept)
        if kept.recover_x_hat:  # variant I
            u = (u - per_channel(offset, u)).mul_(per_channel(factor, u)).to(dy.dtype)
            offset = torch.zeros_like(offset)
            factor = torch.ones_like(factor)
        weight = kept.affine.gamma if factor is kept.invstd else (kept.affine.gamma * kept.invstd).div_(factor)
        return torch.ops.aten.native_batch_norm_backward.default(
            dy, u, weight, None, None, offset, factor, True, 0.0, [True, True, True]
        )

    def backward_frozen(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """PyTorch's backward, with u as the input, offset as the running mean and a variance of 1.

        Its dL/dgamma lacks the factor, and it scales dL/dx only by the weight.
        """
        u, dy = _u_and_dy(kept, dz)
        weight = kept.affine.gamma * kept.invstd
        ones = torch.ones_like(kept.affine.gamma)
        none = weight.new_empty(0)  # what the operator itself saves in eval mode; channels_last on CUDA needs tensors
        dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward.default(
            dy, u, weight, kept.offset, ones, none, none, False, 0.0, [True, True, True]
        )
        return dx, dgamma.mul_(_factor(kept)), dbeta


def moments_by_operator(x: Tensor, running: Running) -> tuple[Tensor, Tensor]:
    """Mean and biased variance by PyTorch's own operator, which updates the running statistics too."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    if isinstance(x, FakeTensor):  # the operator below has no fake kernel, so the real one would be launched
        mean, var = x.new_empty(2, x.shape[1], dtype=dtype)
        return mean, var
    if running.mean is None:  # without running statistics it would round its results to the dtype of x
        running = Running(*x.new_zeros(2, x.shape[1], dtype=dtype))
    mean, var = torch.batch_norm_update_stats(x, *running)
    return mean, var


def normalised(x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Batch normalisation with the statistics of the forward pass, in any layout. x: (N, C, ...), the others (C,)."""
    if isinstance(x, FakeTensor):  # the operator below has no fake kernel, so the real one would be launched
        return torch.empty_like(x)
    if x.is_cuda:
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, 0.0)
    ones = torch.ones_like(mean)  # in eval mode the operator takes a variance
    formats = torch.channels_last, torch.channels_last_3d
    # Its kernel scales the weight like this.
    if x.is_contiguous() or any(x.is_contiguous(memory_format=memory_format) for memory_format in formats):
        scale = invstd if weight is None else weight * invstd
        return torch.native_batch_norm(x, scale, bias, mean, ones, False, 0.0, 0.0)[0]
    y = torch.native_batch_norm(x.to(invstd.dtype), invstd, None, mean, ones, False, 0.0, 0.0)[0]
    y = y if weight is None else y.mul_(per_channel(weight, y))  # rounded as PyTorch's kernel for other layouts
    return y if bias is None else y.add_(per_channel(bias, y))


def _batch_norm(
    x: Tensor, affine: Affine, running: Running, training: bool, eps: float, overwrite: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """z by PyTorch's own operator, with the minibatch's mean and invstd if `training`.

    `overwrite`: z is written over x.
    """
    gamma, beta, activation, _ = affine
    statistic_count = x.shape[1] if training else 0  # in eval mode the operator returns no statistics
    buffers = (x, gamma.new_empty(statistic_count), gamma.new_empty(statistic_count)) if overwrite else None
    y, mean, invstd = torch.native_batch_norm(
        x, gamma, beta, running.mean, running.var, training, running.momentum, eps, out=buffers
    )
    return activate_(activation, y), mean, invstd


def _u_and_dy(kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
    """u of `BackwardInputs` and dL/dy (Algorithm 2, lines 2 and 3), in the dtype of dz."""
    if kept.is_output:
        z = kept.values
        u = invert_activation(kept.affine.activation, z)
    elif kept.output is not None:
        z = kept.output
        u = kept.values
    else:
        u = kept.values
        z = EagerBackend().normalise(u, kept.offset, _factor(kept), kept.affine)
    return u, activation_backward(kept.affine.activation, z, dz)


def _x_hat_and_dy(kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
    """x_hat and dL/dy, in the dtype of the vectors."""
    u, dy = _u_and_dy(kept, dz)
    x_hat = (u - per_channel(kept.offset, u)) * per_channel(_factor(kept), u)
    return x_hat, dy.to(x_hat.dtype)


def _factor(kept: BackwardInputs) -> Tensor:
    assert kept.factor is not None  # it is None only for backends that floor gamma
    return kept.factor
