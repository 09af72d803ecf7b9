"""The paper's equations as plain functions, which TorchInductor fuses into one loop over the pixels per pass.

Tensors come as *blocks*: (blocks, C, pixels), or (blocks, pixels, C) for channels_last. Sums run over each block, then
over all blocks, which uses the cache and rounds less than one long sum. Arithmetic is float32, or float64 for
float64 tensors.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .activations import Activation, activate_, activation_backward, invert_activation


class Settings(NamedTuple):
    """Compile-time constants."""

    axis: int  # pixels of a block: 2, or 1 for channels_last
    activation: Activation = Activation("identity")
    eps: float = 0.0
    is_output: bool = False  # in the backward pass: values are z
    overwrites: bool = False  # in the forward pass: z is written over x


def moments(settings: Settings, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, (C,).

    The variance is the mean of the blocks' variances plus the variance of their means: nothing cancels.
    """
    x = _wide(x)
    means = x.mean(settings.axis, keepdim=True)
    variances = (x - means).square().mean(settings.axis)  # (blocks, C)
    means = means.squeeze(settings.axis)
    mean = means.mean(0)
    return mean, variances.mean(0) + (means - mean).square().mean(0)


def normalise(settings: Settings, x: Tensor, mean: Tensor, scale: Tensor, beta: Tensor) -> Tensor | None:
    """z = phi(scale * (x - mean) + beta), where scale = gamma * invstd; None if it is written over x."""
    mean, scale, beta = _per_channel(settings, mean, scale, beta)
    z = activate_(settings.activation, scale * (_wide(x) - mean) + beta).to(x.dtype)
    if not settings.overwrites:
        return z
    x.copy_(z)
    return None


def forward(settings: Settings, x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
    """z, or None if it is written over x; mean, biased variance and invstd."""
    mean, var = moments(settings, x)
    invstd = torch.rsqrt(var + settings.eps)
    centre, scale = materialised(mean, gamma * invstd)
    return normalise(settings, x, centre, scale, beta), mean, var, invstd


def x_hat_and_dy(
    settings: Settings, values: Tensor, dz: Tensor, offset: Tensor, factor: Tensor, gamma: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """x_hat and dL/dy (Algorithm 2, lines 2 and 3) from `BackwardInputs`."""
    dtype = values.dtype
    values = _wide(values)
    dz = _wide(dz)
    offset, factor = _per_channel(settings, offset, factor)
    if settings.is_output:
        z = values
        u = invert_activation(settings.activation, values, rounded_to=dtype)
        x_hat = (u - offset) * factor
    else:
        gamma, beta = _per_channel(settings, gamma, beta)
        x_hat = (values - offset) * factor
        z = activate_(settings.activation, gamma * x_hat + beta)
    return x_hat, activation_backward(settings.activation, z, dz)


# The formulas below take the arguments of `x_hat_and_dy` as `kept`.


def sums(settings: Settings, *kept: Any) -> tuple[Tensor, Tensor]:
    """sum dL/dy and sum dL/dy * x_hat."""
    x_hat, dy = x_hat_and_dy(settings, *kept)
    return dy.sum(settings.axis).sum(0), (dy * x_hat).sum(settings.axis).sum(0)


def input_gradient(settings: Settings, mean_dy: Tensor, mean_dy_x_hat: Tensor, scale: Tensor, *kept: Any) -> Tensor:
    """dL/dx = scale * (dL/dy - mean_dy - x_hat * mean_dy_x_hat), where scale = gamma * invstd  (section 3.3)."""
    x_hat, dy = x_hat_and_dy(settings, *kept)
    mean_dy, mean_dy_x_hat, scale = _per_channel(settings, mean_dy, mean_dy_x_hat, scale)
    values, *_ = kept
    return (scale * (dy - mean_dy - x_hat * mean_dy_x_hat)).to(values.dtype)


def backward(settings: Settings, scale: Tensor, *kept: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dL/dx, dL/dgamma and dL/dbeta."""
    dbeta, dgamma = sums(settings, *kept)
    values, *_ = kept
    count = values.shape[0] * values.shape[settings.axis]
    mean_dy, mean_dy_x_hat = materialised(dbeta / count, dgamma / count)
    return input_gradient(settings, mean_dy, mean_dy_x_hat, scale, *kept), dgamma, dbeta


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _per_channel(settings: Settings, *vectors: Tensor) -> tuple[Tensor, ...]:
    """(C,) -> (C, 1) if blocks are (C, pixels), to broadcast over them."""
    return tuple(v.unsqueeze(1) for v in vectors) if settings.axis == 2 else vectors


def materialised(*vectors: Tensor) -> tuple[Tensor, ...]:
    """Make the compiler write vectors (C,) to memory before a loop over the pixels, by stacking them.

    Otherwise it would recompute them for every pixel, with their divisions and square roots.
    """
    return torch.stack(vectors).unbind() if vectors else ()
