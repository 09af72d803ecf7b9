"""Activation functions as an in-place layer needs them (paper, section 3.3).

Each activation phi is three maps: z = phi(y), written over y; dL/dy from dL/dz and the *output* z; and y = phi^-1(z).
`param` is the slope of leaky_relu for negative inputs and the alpha of elu; the others ignore it.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

INVERTIBLE_ACTIVATIONS = ("leaky_relu", "elu", "identity")
ACTIVATIONS = (*INVERTIBLE_ACTIVATIONS, "relu")


def check_activation(name: str, param: float, invertible: bool) -> None:
    """Raise ValueError for an activation that does not exist or, with `invertible`, cannot be inverted."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is not known; choose one of {', '.join(ACTIVATIONS)}")
    if invertible and name not in INVERTIBLE_ACTIVATIONS:
        raise ValueError(
            f"activation={name!r} maps all negative inputs to one value, so an in-place layer cannot recover them; "
            f"use activation='leaky_relu' (slope 0.01 stands in for relu in the paper) or the standard ABN layer"
        )
    if name == "elu" and param <= 0:
        raise ValueError(f"activation_param={param} is not a valid alpha for elu: expected a number above 0")
    if name == "leaky_relu" and invertible and param <= 0:
        raise ValueError(f"activation_param={param} makes leaky_relu not invertible: expected a slope above 0")


def activate_(name: str, param: float, y: Tensor) -> Tensor:
    """z = phi(y), in the memory of y. Any shape and floating dtype."""
    if name == "leaky_relu":
        return F.leaky_relu(y, negative_slope=param, inplace=True)
    if name == "elu":
        return F.elu(y, alpha=param, inplace=True)
    if name == "relu":
        return F.relu(y, inplace=True)
    assert name == "identity", name
    return y


def activation_backward(name: str, param: float, z: Tensor, dz: Tensor) -> Tensor:
    """dL/dy from dL/dz and z = phi(y) (Algorithm 2, line 2). Same shape and dtype as z; `dz` itself for identity."""
    if name == "leaky_relu":
        return torch.ops.aten.leaky_relu_backward(dz, z, param, True)  # True: z is phi's result
    if name == "elu":
        return torch.ops.aten.elu_backward(dz, param, 1.0, 1.0, True, z)
    assert name == "identity", name
    return dz


def invert_activation(name: str, param: float, z: Tensor) -> Tensor:
    """y = phi^-1(z) (Algorithm 2, line 3). Same shape and dtype as z; `z` itself for identity.

    elu saturates at -alpha: where rounding has reached it, y is the smallest value that the dtype still tells apart,
    log(eps) (-15.9 in float32), instead of -infinity. The gradient there is zero to rounding, so y need only be finite.
    """
    if name == "leaky_relu":
        return F.leaky_relu(z, negative_slope=1.0 / param)  # the inverse of a leaky ReLU is one with the inverse slope
    if name == "elu":
        return torch.where(z > 0, z, torch.log1p((z / param).clamp(min=torch.finfo(z.dtype).eps - 1)))
    assert name == "identity", name
    return z
