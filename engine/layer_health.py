"""How close the norm layers are to where an in-place one loses its input: |gamma| near 0, x_hat recovered wrongly."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from models.layers import InPlaceABN
from models.layers.activations import Activation, invert_activation
from models.layers.backends import backend_for
from models.layers.backends.interface import per_channel
from models.layers.bn_act import floored, is_packed

Extreme = tuple[str, float]  # a layer's name in the network, and its value


@torch.no_grad()
def layer_health(network: nn.Module, images: Tensor, autocast: Callable) -> dict[str, Extreme]:
    """The layers that would fail first, found without changing anything that a training depends on.

    The images pass through the network as in an evaluation: nothing is counted, drawn or exchanged between processes.

    Args:
        network: the bare one, neither compiled nor distributed. Its modules stay in the modes that they are in.
        images: as the network expects them, (N, 3, H, W), on its device; N > 1, as for the training of a norm behind
            a global pooling.
        autocast: makes the context of a forward pass, the training's.

    Returns:
        smallest_gamma: of the norms that learn a scale, |gamma| as training uses it: in-place layers have a floor.
            (The released package adds its eps to the |weight| that is given here.)
        largest_reconstruction_error: of the in-place layers, see `reconstruction_error`.
        Each is missing where the network has no such layers; NaN is more extreme than any number.
    """
    norms = {name: layer for name, layer in network.named_modules() if hasattr(layer, "running_mean")}
    gammas = [(name, training_gamma(layer).abs().min()) for name, layer in norms.items() if layer.weight is not None]
    errors: list[tuple[str, Tensor]] = []
    inplace = {name: layer for name, layer in norms.items() if isinstance(layer, InPlaceABN)}
    if inplace:
        hooks = [layer.register_forward_pre_hook(partial(_measure, errors, name)) for name, layer in inplace.items()]
        modes = [(module, module.training) for module in network.modules()]
        try:
            network.eval()
            with autocast():
                network(images)
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


def corner_crops(image: Tensor, size: int) -> Tensor:
    """The upper left and the lower right `size` x `size` pixels of an image (3, H, W), or all it has: (2, 3, h, w)."""
    return torch.stack([image[:, :size, :size], image[:, -size:, -size:]])


def training_gamma(layer: nn.Module) -> Tensor:
    """The scale (C,) of a norm layer with a weight, while it uses minibatch statistics."""
    return floored(layer.weight, layer.gamma_floor) if isinstance(layer, InPlaceABN) else layer.weight


@torch.no_grad()
def reconstruction_error(layer: InPlaceABN, x: Tensor) -> Tensor:
    """The largest |difference| between x_hat in the forward and in the backward pass of a training step on x, a scalar.

    Forward: x_hat = (x - mean) / sqrt(var + eps), and z = phi(gamma * x_hat + beta) in the dtype of x. Backward:
    x_hat = (phi^-1(z) - beta) / gamma (Algorithm 2), from z alone. Both are formed in float32 (float64 for
    float64 x), as the fused backends do. x_hat has variance 1: the unit is a standard deviation of the layer's input.

    Args:
        x: (N, C, *spatial) with more than one value per channel, not changed. Its statistics are used, those of this
            process alone.
    """
    backend = backend_for(layer.backend, x)
    values = x if is_packed(x) else x.contiguous()
    activation = Activation(layer.activation, layer.activation_param)
    wide = torch.promote_types(x.dtype, torch.float32)
    unused = torch.zeros(2, x.shape[1], dtype=wide, device=x.device)  # running statistics that nobody reads
    gamma = unused[0] + 1 if layer.weight is None else training_gamma(layer)
    beta = unused[0] if layer.bias is None else layer.bias
    z, mean, invstd = backend.forward(values, gamma, beta, *unused.clone(), 0.0, layer.eps, activation)
    mean, invstd, gamma, beta = (per_channel(vector, x) for vector in (mean, invstd, gamma, beta))
    recovered = (invert_activation(activation, z.to(wide), rounded_to=z.dtype) - beta) * gamma.reciprocal()
    return (recovered - (x.to(wide) - mean) * invstd).abs().max()


def _measure(errors: list[tuple[str, Tensor]], name: str, layer: InPlaceABN, args: tuple[Tensor]) -> None:
    errors.append((name, reconstruction_error(layer, args[0])))


def _extreme(choose: Callable, values: list[tuple[str, Tensor]], nan: float) -> Extreme | None:
    """The first of the entries that `choose` (min or max) prefers, where `nan` stands for NaN; None of no entries."""
    if not values:
        return None
    numbers = torch.stack([value.double() for _, value in values]).tolist()
    entries = [(name, number) for (name, _), number in zip(values, numbers, strict=True)]
    return choose(entries, key=lambda entry: nan if math.isnan(entry[1]) else entry[1])
