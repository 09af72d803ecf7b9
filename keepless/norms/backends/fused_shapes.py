"""The allocations of fused kernels, for fake tensors, so that plans of a step know their memory on a GPU."""

import torch
from torch import Tensor

from .interface import Affine, Backend, BackwardInputs


class FusedShapes(Backend):
    """Results without values. Unlike in `EagerBackend`, a pass allocates only these, and no intermediate tensors."""

    floors = True

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = x.new_empty((2, x.shape[1]), dtype=torch.promote_types(x.dtype, torch.float32))
        return mean, var

    def normalise(self, x: Tensor, mean: Tensor, invstd: Tensor, affine: Affine, overwrite: bool = False) -> Tensor:
        return x if overwrite else torch.empty_like(x)

    def sums(self, kept: BackwardInputs, dz: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(kept.beta), torch.empty_like(kept.beta)

    def input_gradient(self, kept: BackwardInputs, dz: Tensor, mean_dy: Tensor, mean_dy_x_hat: Tensor) -> Tensor:
        return torch.empty_like(kept.values)
