"""In-place activated batch normalisation, variants I and II: strategies (d) and (e) of the paper's Figure 2."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .abn import ABN
from .activations import activate_, activation_backward, invert_activation

VARIANTS = ("I", "II")


class InPlaceABN(ABN):
    """`ABN` that keeps only its output z (and O(C) values) for the backward pass.

    The backward pass inverts the activation and works on y = phi^-1(z): variant I recovers x_hat = (y - beta) / gamma
    for every value, variant II folds that inversion into per-channel constants. A convolution that follows keeps z
    anyway, so the layer itself costs no memory.

    z is written to a new buffer and the input is left as it was: whatever precedes the layer does not keep its output,
    so this saves exactly as many bytes as overwriting x does, without its aliasing.

    While minibatch statistics are used, the scale is gamma = copysign(max(|weight|, gamma_floor), weight) with
    dL/dweight = dL/dgamma, so that it can be inverted and a weight of zero can recover. With running statistics the
    layer is exactly batch normalisation with the raw weight, followed by the activation; only dL/dweight of channels
    with |weight| < gamma_floor is then scaled down, by |weight| / gamma_floor.

    Args beyond those of `ABN`:
        variant: "I" or "II"; equal results, II needs one pass less.
        gamma_floor: smallest |gamma| in training.
        overwrite_input: write z over x, which saves one transient buffer in the forward pass. For a block that owns x,
            directly after a convolution: like every in-place operation of PyTorch it changes x for all later readers,
            and the backward pass raises if an earlier operation had kept x. Of an x whose memory is neither contiguous
            nor channels_last the buffer is made all the same. PyTorch refuses a leaf that requires a gradient, or a
            view made by `chunk` or `split`, after it was overwritten.
    """

    invertible_activation = True

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        activation: str = "leaky_relu",
        activation_param: float = 0.01,
        variant: str = "II",
        learn_scale: bool = True,
        gamma_floor: float = 1e-5,
        overwrite_input: bool = False,
    ):
        super().__init__(
            num_features,
            eps,
            momentum,
            affine,
            track_running_stats,
            activation,
            activation_param,
            learn_scale=learn_scale,
        )
        if variant not in VARIANTS:
            raise ValueError(f"variant={variant!r}: expected 'I' or 'II'")
        if gamma_floor <= 0:
            raise ValueError(f"gamma_floor={gamma_floor}: expected a number above 0, gamma is divided by")
        self.variant = variant
        self.gamma_floor = gamma_floor
        self.overwrite_input = overwrite_input

    def forward(self, x: Tensor) -> Tensor:
        """As `ABN.forward`, with the same errors."""
        self.check_input(x)
        running_mean, running_var, momentum = self.update_plan()
        return _InPlaceABNFunction.apply(
            x,
            self.weight,
            self.bias,
            running_mean,
            running_var,
            self.uses_batch_statistics,
            momentum,
            self.eps,
            self.activation,
            self.activation_param,
            self.variant,
            self.gamma_floor,
            self.overwrite_input,
        )

    def extra_repr(self) -> str:
        return super().extra_repr() + f", variant={self.variant}"


def floored(weight: Tensor, gamma_floor: float) -> Tensor:
    """copysign(max(|weight|, gamma_floor), weight), (C,): a scale that can be inverted."""
    return torch.copysign(weight.abs().clamp(min=gamma_floor), weight)


def _is_packed(x: Tensor) -> bool:
    """Whether PyTorch's batch normalisation reads x where it is; of other layouts it makes a copy while it writes."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.is_contiguous() or (x.dim() in formats and x.is_contiguous(memory_format=formats[x.dim()]))


class _InPlaceABNFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (N, C, *spatial)
        weight: Tensor | None,  # (C,), as are the other vectors
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        use_batch_statistics: bool,
        momentum: float,
        eps: float,
        activation: str,
        activation_param: float,
        variant: str,
        gamma_floor: float,
        overwrite_input: bool,
    ) -> Tensor:
        """Algorithm 1: y, sigma <- BN(x); z <- phi(y); keep z and sigma."""
        statistics_dtype = torch.promote_types(x.dtype, torch.float32)
        channels = x.shape[1]
        gamma = weight if weight is not None else x.new_ones(channels, dtype=statistics_dtype)
        beta = bias if bias is not None else x.new_zeros(channels, dtype=statistics_dtype)
        if use_batch_statistics:
            gamma = floored(gamma, gamma_floor)

        buffers = None
        if overwrite_input and _is_packed(x):
            vectors = (channels if use_batch_statistics else 0,)
            buffers = (x, *(x.new_empty(vectors, dtype=statistics_dtype) for _ in range(2)))
        y, _, invstd = torch.native_batch_norm(
            x, gamma, beta, running_mean, running_var, use_batch_statistics, momentum, eps, out=buffers
        )
        if not use_batch_statistics:
            invstd = torch.rsqrt(running_var + eps)
        z = activate_(activation, activation_param, y)
        if overwrite_input:
            z = z if buffers is not None else x.copy_(z)
            ctx.mark_dirty(z)

        ctx.save_for_backward(z, gamma, beta, invstd)
        ctx.use_batch_statistics = use_batch_statistics
        ctx.eps = eps
        ctx.activation, ctx.activation_param = activation, activation_param
        ctx.variant = variant
        ctx.gamma_floor = gamma_floor
        return z

    @staticmethod
    @once_differentiable
    def backward(ctx, dz: Tensor):
        """Algorithm 2: dL/dy <- phi_backward(z, dL/dz); y <- phi^-1(z); the gradients of x, gamma and beta."""
        z, gamma, beta, invstd = ctx.saved_tensors
        dy = activation_backward(ctx.activation, ctx.activation_param, z, dz)
        y = invert_activation(ctx.activation, ctx.activation_param, z)
        wanted = ctx.needs_input_grad[:3]
        if not ctx.use_batch_statistics:
            gradients = _frozen_backward(y, dy, gamma, beta, invstd, ctx.gamma_floor, wanted)
        elif ctx.variant == "I":
            gradients = _batch_backward_1(y, dy, gamma, beta, invstd, ctx.eps, wanted)
        else:
            gradients = _batch_backward_2(y, dy, gamma, beta, invstd, ctx.eps, wanted)
        return *gradients, *(None,) * 10


def _batch_backward_1(y, dy, gamma, beta, invstd, eps, wanted):
    """BN*: x_hat = (y - beta) / gamma, then the gradients of section 3.3 as functions of x_hat.

    PyTorch's backward of batch normalisation computes them when told that its input has mean 0 and deviation 1.
    """
    x_hat = (y - per_channel(beta, y)).div_(per_channel(gamma, y)).to(y.dtype)
    zeros, ones = torch.zeros_like(gamma), torch.ones_like(gamma)
    return torch.ops.aten.native_batch_norm_backward(
        dy, x_hat, gamma * invstd, None, None, zeros, ones, True, eps, wanted
    )


def _batch_backward_2(y, dy, gamma, beta, invstd, eps, wanted):
    """BN-dagger: the gradients of section 3.3 as functions of y.

    PyTorch's backward of batch normalisation computes them when told that its input y has mean beta and deviation
    gamma, since (y - beta) / gamma = x_hat; its factor in front of dL/dx is then weight / gamma, which is to be
    gamma * invstd.
    """
    return torch.ops.aten.native_batch_norm_backward(
        dy, y, gamma * gamma * invstd, None, None, beta, gamma.reciprocal(), True, eps, wanted
    )


def _frozen_backward(y, dy, gamma, beta, invstd, gamma_floor, wanted):
    """Gradients with fixed statistics: dL/dx = dL/dy * gamma * invstd, dL/dgamma = sum dL/dy (y - beta) / gamma."""
    dx = dgamma = dbeta = None
    if wanted[0]:
        dx = (dy * per_channel(gamma * invstd, dy)).to(dy.dtype)
    if wanted[1] or wanted[2]:
        others = [d for d in range(y.dim()) if d != 1]
        dbeta = dy.sum(others, dtype=gamma.dtype)
    if wanted[1]:
        dgamma = ((dy * y).sum(others, dtype=gamma.dtype) - beta * dbeta) / floored(gamma, gamma_floor)
    return dx, dgamma, dbeta if wanted[2] else None


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, …), to broadcast over `like` (N, C, *spatial)."""
    return vector.view(1, -1, *(1,) * (like.dim() - 2))
