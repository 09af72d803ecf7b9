"""Activation functions for in-place layers (paper, section 3.3).

Each activation phi is three maps: z = phi(y), written over y; dL/dy from dL/dz and the *output* z; and y = phi^-1(z).

Three of them saturate: elu towards -alpha, sigmoid towards 0 and 1, tanh towards -1 and 1. Once z has rounded to an
asymptote, y is lost: the inverse then uses the nearest value that the dtype can distinguish from the asymptote, which
keeps y finite. dL/dy is zero to rounding there, so a finite y is all that is needed.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...inputs import is_number

INVERTIBLE_ACTIVATIONS = ("leaky_relu", "elu", "identity", "sigmoid", "tanh")
ACTIVATIONS = (*INVERTIBLE_ACTIVATIONS, "relu")


class Activation(NamedTuple):
    """An activation function, by its name in ACTIVATIONS.

    `param` is the slope of leaky_relu for negative inputs and the alpha of elu; the others ignore it.
    """

    name: str
    param: float = 0.01


def check_activation(activation: Activation, invertible: bool) -> None:
    """Raise ValueError if an activation does not exist or, with `invertible`, cannot be inverted."""
    name, param = activation
    if name not in ACTIVATIONS:
        choices = ", ".join(INVERTIBLE_ACTIVATIONS if invertible else ACTIVATIONS)
        hint = "; 'none' of older versions of inplace_abn is 'identity'" if name in ("none", None) else ""
        raise ValueError(f"activation={name!r} is not known; choose one of {choices}{hint}")
    if invertible and name not in INVERTIBLE_ACTIVATIONS:
        raise ValueError(
            f"activation={name!r} maps all negative inputs to one value, so an in-place layer cannot recover them; "
            f"use activation='leaky_relu' (slope 0.01 stands in for relu in the paper), or a standard or checkpointed "
            f"layer"
        )
    if not (torch.compiler.is_compiling() or is_number(param)):
        raise ValueError(f"activation_param={param!r}: expected a number")
    # Written so that NaN fails.
    if name == "elu" and not 0 < param < math.inf:
        raise ValueError(f"activation_param={param} is not a valid alpha for elu: expected a number above 0")
    if name == "leaky_relu" and invertible and not 0 < param < math.inf:
        raise ValueError(f"activation_param={param} makes leaky_relu not invertible: expected a slope above 0")
    if name == "leaky_relu" and not 0 <= param < math.inf:
        raise ValueError(f"activation_param={param} is not a valid slope for leaky_relu: expected 0 or more")


def activate_(activation: Activation, y: Tensor) -> Tensor:
    """z = phi(y), written over y. Any shape and floating dtype."""
    name, param = activation
    # A compiler manages memory itself; for an in-place operation TorchInductor would also keep a mask of the signs.
    inplace = not torch.compiler.is_compiling()
    if name == "leaky_relu":
        return F.leaky_relu(y, negative_slope=param, inplace=inplace)
    if name == "elu":
        return F.elu(y, alpha=param, inplace=inplace)
    if name == "relu":
        return F.relu(y, inplace=inplace)
    if name == "sigmoid":
        return y.sigmoid_()
    if name == "tanh":
        return y.tanh_()
    check_activation(activation, invertible=False)  # it may have been set after construction
    return y


def activation_backward(activation: Activation, z: Tensor, dz: Tensor) -> Tensor:
    """dL/dy from dL/dz and z = phi(y) (Algorithm 2, line 2). Same shape and dtype as z; `dz` itself for identity."""
    name, param = activation
    aten = torch.ops.aten
    if name == "leaky_relu":
        return aten.leaky_relu_backward.default(dz, z, param, True)  # True: z is the output
    if name == "elu":
        return aten.elu_backward.default(dz, param, 1.0, 1.0, True, z)
    if name == "relu":
        return aten.threshold_backward.default(dz, z, 0)
    if name == "sigmoid":
        return aten.sigmoid_backward.default(dz, z)
    if name == "tanh":
        return aten.tanh_backward.default(dz, z)
    assert name == "identity", name
    return dz


def invert_activation(activation: Activation, z: Tensor, rounded_to: torch.dtype | None = None) -> Tensor:
    """y = phi^-1(z) (Algorithm 2, line 3). Same shape and dtype as z; `z` itself for identity.

    `rounded_to`: dtype that z was rounded to and may have saturated in; by default its own.
    """
    name, param = activation
    gap = torch.finfo(rounded_to or z.dtype).eps / 2  # between 1 and the next smaller value
    if name == "leaky_relu":
        return F.leaky_relu(z, negative_slope=1.0 / param)  # a leaky ReLU with the inverse slope
    if name == "elu":
        return torch.where(z > 0, z, torch.log1p((z / param).clamp(min=gap - 1)))
    if name == "sigmoid":
        return torch.logit(z.clamp(gap**2, 1 - gap))  # keeps digits near 0, where dL/dy = z dL/dz
    if name == "tanh":
        return torch.atanh(z.clamp(gap - 1, 1 - gap))
    assert name == "identity", name
    return z
