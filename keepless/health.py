"""Numerical health of a network: scales near 0, and errors of reconstructed x_hat."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .inputs import check_module
from .norms.backends import backend_for
from .norms.backends.activations import Activation, invert_activation
from .norms.backends.interface import Affine, Running, per_channel
from .norms.bn_act import is_packed
from .norms.inplace_abn import InPlaceABN

Extreme = tuple[str, float]  # name of the layer in the network, value


@torch.no_grad()
def layer_health(
    network: nn.Module, images: Tensor, forward: Callable[[Tensor], object] | None = None
) -> dict[str, Extreme]:
    """Find the layers closest to numerical failure, without side effects on the training.

    The network runs on the images in eval mode: no statistics change, no random numbers are drawn, and processes do
    not communicate.

    Args:
        network: neither compiled nor distributed. Its modules keep their modes.
        images: (N, 3, H, W), with N > 1 so that a norm after global pooling has a variance.
        forward: calls the network on the images, e.g. under autocast; by default the network itself.

    Returns:
        smallest_gamma: over the norms that learn a scale, `training_gamma` (for the released package, |weight|
            without its eps).
        largest_reconstruction_error: over the in-place layers, see `reconstruction_error`.
        Keys are missing if the network has no such layers. NaN is more extreme than any number.
    """
    check_module(network, "layer_health")
    gammas = [
        (name, training_gamma(layer).abs().min())
        for name, layer in network.named_modules()
        if hasattr(layer, "running_mean") and getattr(layer, "weight", None) is not None
    ]
    errors: list[tuple[str, Tensor]] = []

    def measure(name: str, module: Any, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        x, *_ = (*args, *kwargs.values())
        errors.append((name, reconstruction_error(module, x)))

    hooks = [
        module.register_forward_pre_hook(partial(measure, name), with_kwargs=True)
        for name, module in network.named_modules()
        if isinstance(module, InPlaceABN)
    ]
    if hooks:
        modes = [(module, module.training) for module in network.modules()]
        try:
            network.eval()
            (forward or network)(images)
        finally:
            for hook in hooks:
                hook.remove()
            for module, mode in modes:
                module.training = mode
    extremes = {
        "smallest_gamma": _extreme(min, gammas, nan=-math.inf),
        "largest_reconstruction_error": _extreme(max, errors, nan=math.inf),
    }
    return {name: extreme for name, extreme in extremes.items() if extreme is not None}


def training_gamma(layer: nn.Module) -> Tensor:
    """The scale (C,) that a norm with a weight uses in training; |gamma| of in-place layers has a floor."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    return layer.training_scale(weight) if isinstance(layer, InPlaceABN) else weight


@torch.no_grad()
def reconstruction_error(layer: InPlaceABN, x: Tensor) -> Tensor:
    """Largest |difference| between x_hat in the forward and the backward pass of a training step on x, a scalar.

    Forward: x_hat = (x - mean) / sqrt(var + eps), and z = phi(gamma * x_hat + beta) in the dtype of x. Backward:
    x_hat = (phi^-1(z) - beta) / gamma (Algorithm 2), from z alone. Both are computed in float32 (float64 for
    float64 x), as in the fused backends. x_hat has variance 1, so the unit is one standard deviation of the input.

    Args:
        x: (N, C, *spatial) with more than one value per channel; not changed. Statistics are of this process only.
    """
    backend = backend_for(layer.backend, x)
    values = x if is_packed(x) else x.contiguous()
    activation = Activation(layer.activation, layer.activation_param)
    wide = torch.promote_types(x.dtype, torch.float32)
    channels = partial(torch.full, (x.shape[1],), dtype=wide, device=x.device)
    gamma = channels(1) if layer.weight is None else training_gamma(layer)
    beta: Tensor = channels(0) if layer.bias is None else layer.bias
    unused = Running(channels(0), channels(0))
    z, mean, invstd = backend.forward(values, Affine(gamma, beta, activation), layer.eps, unused)
    mean, invstd, gamma, beta = (per_channel(vector, x) for vector in (mean, invstd, gamma, beta))
    recovered = (invert_activation(activation, z.to(wide), rounded_to=z.dtype) - beta) * gamma.reciprocal()
    return (recovered - (x.to(wide) - mean) * invstd).abs().max()


def _extreme(choose: Callable, values: list[tuple[str, Tensor]], nan: float) -> Extreme | None:
    """The first entry that `choose` (min or max) picks, with NaN ordered as `nan`; None without entries."""
    if not values:
        return None
    numbers = torch.stack([value.double() for _, value in values]).tolist()
    entries = [(name, number) for (name, _), number in zip(values, numbers, strict=True)]
    return choose(entries, key=lambda entry: nan if math.isnan(entry[1]) else entry[1])
