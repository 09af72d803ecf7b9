"""The reference: PyTorch's own operators, on every device and dtype they run on."""

import torch
from torch import Tensor

from ..activations import Activation, activate_, activation_backward, invert_activation
from .interface import Backend, Kept, per_channel


class EagerBackend(Backend):
    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        # Without running statistics to update, the operator would round the results to the dtype of x.
        unused = torch.zeros(2, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        mean, var = torch.batch_norm_update_stats(x, *unused, 0.0)
        return mean, var

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
        # Batch normalisation in eval mode reads a variance; eps is already in invstd.
        var = invstd.square().reciprocal()
        y, _, _ = torch.native_batch_norm(x, gamma, beta, mean, var, False, 0.0, 0.0, out=_buffers(out, 0, gamma))
        return activate_(activation, y)

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
        y, mean, invstd = torch.native_batch_norm(
            x, gamma, beta, running_mean, running_var, True, momentum, eps, out=_buffers(out, x.shape[1], gamma)
        )
        return activate_(activation, y), mean, invstd

    def forward_frozen(
        self,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        eps: float,
        activation: Activation,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        y, _, _ = torch.native_batch_norm(
            x, gamma, beta, running_mean, running_var, False, 0.0, eps, out=_buffers(out, 0, gamma)
        )
        return activate_(activation, y), running_mean.clone(), torch.rsqrt(running_var + eps)

    def sums(self, kept: Kept, dz: Tensor) -> tuple[Tensor, Tensor]:
        x_hat, dy = _x_hat_and_dy(kept, dz)
        others = [d for d in range(dz.dim()) if d != 1]
        return dy.sum(others), (dy * x_hat).sum(others)

    def input_gradient(self, kept: Kept, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        x_hat, dy = _x_hat_and_dy(kept, dz)
        dx = dy - per_channel(mean_dy, dy) - x_hat * per_channel(mean_dy_x_hat, dy)
        return dx.mul_(per_channel(kept.gamma * kept.invstd, dy)).to(dz.dtype)

    def backward(self, kept: Kept, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """PyTorch's backward of batch normalisation, told that its input is u and its statistics offset and factor.

        Its x_hat = (u - offset) * factor is then ours, and with it its sums. Its factor in front of dL/dx is
        weight * factor, which is to be gamma * invstd.
        """
        u, dy = _u_and_dy(kept, dz)
        offset, factor = kept.offset, kept.factor
        if kept.recover_x_hat:  # variant I
            u = (u - per_channel(offset, u)).mul_(per_channel(factor, u)).to(dy.dtype)
            offset, factor = torch.zeros_like(offset), torch.ones_like(factor)
        return torch.ops.aten.native_batch_norm_backward(
            dy, u, kept.gamma * kept.invstd / factor, None, None, offset, factor, True, 0.0, [True, True, True]
        )


def _buffers(out: Tensor | None, channels: int, like: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """The three outputs of native_batch_norm: z, and `channels` values of mean and of invstd."""
    return None if out is None else (out, like.new_empty(channels), like.new_empty(channels))


def _u_and_dy(kept: Kept, dz: Tensor) -> tuple[Tensor, Tensor]:
    """u of `Kept` and dL/dy (Algorithm 2, lines 2 and 3), in the dtype of dz."""
    if kept.is_output:
        z, u = kept.values, invert_activation(kept.activation, kept.values)
    else:
        u, z = kept.values, kept.output
        if z is None:
            z = EagerBackend().normalise(u, kept.offset, kept.factor, kept.gamma, kept.beta, kept.activation)
    return u, activation_backward(kept.activation, z, dz)


def _x_hat_and_dy(kept: Kept, dz: Tensor) -> tuple[Tensor, Tensor]:
    """x_hat and dL/dy, in the dtype of the vectors."""
    u, dy = _u_and_dy(kept, dz)
    x_hat = (u - per_channel(kept.offset, u)) * per_channel(kept.factor, u)
    return x_hat, dy.to(x_hat.dtype)
