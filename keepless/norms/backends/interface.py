"""Backend interface: forward and backward pass of BN + activation, in pieces between which ranks can exchange sums.

Tensors with a value per pixel (x, z, dz, dx and the saved tensor) are (N, C, *spatial) and share one dtype and one
packed memory format, contiguous or channels_last. Vectors are (C,). Vectors and arithmetic are float32, or float64 for
float64 tensors. No function records a graph. Functions change no arguments but the running statistics and, with
`overwrite`, x, over which z is written.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .activations import Activation


class Affine(NamedTuple):
    """Scale, shift and activation of the normalised input: z = phi(floored(gamma) * x_hat + beta)."""

    gamma: Tensor  # (C,)
    beta: Tensor  # (C,)
    activation: Activation
    floor: float = 0.0  # smallest |gamma|; 0 where `Backend.floors_gamma` is False

    def with_floored_gamma(self) -> "Affine":
        """The same with gamma floored."""
        return Affine(floored(self.gamma, self.floor), self.beta, self.activation) if self.floor else self


class BackwardInputs(NamedTuple):
    """The tensors that the forward pass saved, and how the backward pass gets x_hat and y from them.

    values v | x_hat = (u - offset) * factor             | y
    x        | u = v, offset = mean, factor = invstd     | gamma * x_hat + beta
    x_hat    | u = v, offset = 0, factor = 1             | gamma * x_hat + beta
    z        | u = phi^-1(v), offset = beta, factor = 1 / gamma | u

    gamma stands for floored(gamma) throughout.
    """

    values: Tensor  # (N, C, *spatial)
    is_output: bool  # values are z
    offset: Tensor  # (C,), as are all below
    factor: Tensor | None  # None: 1 / floored(gamma); never where `Backend.floors_gamma` is False
    affine: Affine
    invstd: Tensor
    recover_x_hat: bool = False  # variant I: form x_hat as a tensor; fused backends ignore this
    output: Tensor | None = None  # z, if values are not z and it was already recomputed; may be ignored

    def with_floored_gamma(self) -> "BackwardInputs":
        """The same with gamma floored, and the factor as a tensor."""
        if self.factor is not None:
            return self
        affine = self.affine.with_floored_gamma()
        return self._replace(factor=affine.gamma.reciprocal(), affine=affine)


class Running(NamedTuple):
    """Running statistics (C,), None if not tracked; and the weight of a new minibatch in them."""

    mean: Tensor | None = None
    var: Tensor | None = None
    momentum: float = 0.0

    def update(self, mean: Tensor, var: Tensor, count: int | Tensor) -> None:
        """running <- (1 - momentum) * running + momentum * new, with the unbiased variance of `count` values."""
        if self.mean is not None and self.var is not None:
            self.mean.lerp_(mean, self.momentum)
            self.var.lerp_(var * (count / (count - 1)), self.momentum)


UNTRACKED = Running()


class Backend:
    """The pieces; `forward` and `backward` combine them for statistics of one process."""

    floors_gamma = False  # whether its kernels floor gamma themselves

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and biased variance per channel, without the cancellation of E[x^2] - E[x]^2."""
        raise NotImplementedError

    def normalise(self, x: Tensor, mean: Tensor, invstd: Tensor, affine: Affine, overwrite: bool = False) -> Tensor:
        """z = phi(gamma * (x - mean) * invstd + beta), in the memory format of x."""
        raise NotImplementedError

    def sums(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
        """sum dL/dy and sum dL/dy * x_hat, which are dL/dbeta and dL/dgamma."""
        raise NotImplementedError

    def input_gradient(self, kept: BackwardInputs, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        """dL/dx = gamma * invstd * (dL/dy - mean_dy - x_hat * mean_dy_x_hat)  (section 3.3)."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, affine: Affine, eps: float, running: Running, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z, mean and invstd of the minibatch; updates the running statistics (with the unbiased variance)."""
        mean, var = self.moments(x)
        running.update(mean, var, x.numel() // x.shape[1])
        invstd = torch.rsqrt(var + eps)
        return self.normalise(x, mean, invstd, affine, overwrite), mean, invstd

    def joint_statistics(
        self, gathered: Tensor, dtype: torch.dtype, eps: float, running: Running
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Mean and invstd (C,) over all ranks, and the number of values per channel () in float64; 0 if below 2.

        `gathered`: (ranks, 2 C + 1), each rank's mean, biased variance and number of values per channel, in float64.
        var = sum_r count_r * (var_r + (mean_r - mean)^2) / count, the parallel variance formula. Updates the running
        statistics. `dtype` is for mean and invstd.
        """
        channels = gathered.shape[1] // 2
        means, variances, counts = gathered.split([channels, channels, 1], dim=1)
        total = F.threshold(counts.sum(), 1.5, 0.0)  # stays on the device
        mean = (counts * means).sum(0) / total
        var = (counts * (variances + (means - mean).square())).sum(0) / total
        mean = mean.to(dtype)
        var = var.to(dtype)
        running.update(mean, var, total)
        return mean, torch.rsqrt(var + eps), total

    def forward_frozen(
        self, x: Tensor, affine: Affine, eps: float, mean: Tensor, var: Tensor, overwrite: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """z, mean and invstd from running statistics. The mean is the running mean itself."""
        invstd = (var + eps).rsqrt_()
        return self.normalise(x, mean, invstd, affine, overwrite), mean, invstd

    def backward(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dL/dx, dL/dgamma, dL/dbeta for minibatch statistics."""
        count = dz.numel() // dz.shape[1]
        dbeta, dgamma = self.sums(kept, dz)
        return self.input_gradient(kept, dz, dbeta / count, dgamma / count), dgamma, dbeta

    def backward_frozen(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dL/dx, dL/dgamma, dL/dbeta for running statistics, which do not depend on x."""
        dbeta, dgamma = self.sums(kept, dz)
        zeros = torch.zeros_like(dbeta)
        return self.input_gradient(kept, dz, zeros, zeros), dgamma, dbeta


class FusedShapes(Backend):
    """Results of fused kernels for fake tensors, so that plans of a step know their memory on a GPU.

    Unlike in `EagerBackend`, a pass allocates only its results, and no intermediate tensors.
    """

    floors_gamma = True

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = x.new_empty((2, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
        return mean, var

    def normalise(self, x: Tensor, mean: Tensor, invstd: Tensor, affine: Affine, overwrite: bool = False) -> Tensor:
        return x if overwrite else torch.empty_like(x)

    def sums(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(kept.affine.beta), torch.empty_like(kept.affine.beta)

    def input_gradient(self, kept: BackwardInputs, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        return torch.empty_like(kept.values)


def floored(gamma: Tensor, floor: float) -> Tensor:
    """copysign(max(|gamma|, floor), gamma), (C,): an invertible scale."""
    return gamma.abs().clamp_(min=floor).copysign_(gamma)


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """(C,) -> (1, C, 1, …), to broadcast over `like` (N, C, *spatial)."""
    return vector.view(1, -1, *(1,) * (like.dim() - 2))
