"""The functions of the released package `inplace_abn`, with its scale: |weight| + eps."""

import torch
import torch.distributed as dist
from torch import Tensor

from ..norms.backends.activations import Activation, check_activation
from ..norms.bn_act import NormArguments, Strategy, check_momentum, norm_and_activation
from ..norms.synchronisation import check_group, refuse_jointly, synchronised_group

_KEEP_OUTPUT = Strategy(keep="z")


def inplace_abn(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
) -> Tensor:
    """phi((|weight| + eps) * (x - mean) / sqrt(var + eps) + bias), keeping only the output for the backward pass.

    As in the released package, except that x is not overwritten: the output is a new tensor, and as much is kept.

    Args:
        x: (N, C, *spatial), float64, float32, bfloat16 or float16.
        weight, bias: (C,), float32 (float64 for float64 inputs); None: 1 and 0.
        running_mean, running_var: (C,), updated if `training` (with the unbiased variance); None: not tracked.
        training: use the minibatch's statistics instead of the running ones.
        activation: leaky_relu (slope `activation_param`), elu (alpha `activation_param`), identity, sigmoid or tanh.

    ValueError: momentum is not 0 to 1, the activation cannot be inverted, x is not (N, C, *spatial), or there are no
    statistics to use.
    """
    arguments = NormArguments(training, momentum, eps, Activation(activation, activation_param))
    return _normalised(arguments, x, weight, bias, running_mean, running_var)


def inplace_abn_sync(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    activation: str = "leaky_relu",
    activation_param: float = 0.01,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`inplace_abn` with the minibatch statistics of all processes of `group`; None: the default group."""
    check_group(group)
    group = synchronised_group(group) if training else None
    arguments = NormArguments(training, momentum, eps, Activation(activation, activation_param), group)
    return _normalised(arguments, x, weight, bias, running_mean, running_var)


def _normalised(arguments: NormArguments, x: Tensor, *vectors: Tensor | None) -> Tensor:
    check_activation(arguments.activation, invertible=True)
    check_momentum(arguments.momentum)
    weight, bias, running_mean, running_var = vectors
    sizes = {len(each) for each in vectors if each is not None}
    if x.dim() < 2 or sizes - {x.shape[1]}:
        if arguments.group is not None and sizes:
            refuse_jointly(max(sizes), x.device, arguments.group)
        raise ValueError(
            f"inplace_abn got an input of shape {tuple(x.shape)}: expected (N, {max(sizes, default='C')}, …)"
        )
    if not arguments.use_batch_statistics and (running_mean is None or running_var is None):
        raise ValueError("inplace_abn with training=False needs running_mean and running_var")
    if arguments.use_batch_statistics and arguments.group is None and x.numel() <= x.shape[1]:
        raise ValueError(f"inplace_abn got an input of shape {tuple(x.shape)}: expected several values per channel")
    scale = None if weight is None else released_scale(weight, arguments.eps)
    return norm_and_activation(x, scale, bias, running_mean, running_var, arguments, _KEEP_OUTPUT)


def released_scale(weight: Tensor, eps: float) -> Tensor:
    """|weight| + eps. Its gradient at 0 is 1, as in the released package, not 0."""
    return torch.where(weight < 0, -weight, weight) + eps
