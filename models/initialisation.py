"""Weight initialisation for training from scratch, as in the releases of in-place ABN and RevNet."""

import math

import torch
from torch import nn

_WITHIN_TWO = math.erf(math.sqrt(2))  # probability of a normal number within two standard deviations


def initialise(network: nn.Module) -> None:
    """Initialise the convolutions and linear layers of a network in place, on any device (including meta).

    Convolutions: Xavier normal, var = gain^2 * 2 / (fan_in + fan_out), gain^2 = 2 / (1 + 0.01^2) as for a leaky ReLU of
    slope 0.01. Linear layers: Xavier uniform with gain 0.1. Biases: 0. Norms are skipped: their constructors set a
    scale of 1 and a shift of 0.

    The gain does not depend on the activation, because almost every convolution feeds a norm, which removes the scale.
    Random numbers come from torch's global generator, so a seed fixes the weights.
    """
    for module in _convolutions_and_linear(network):
        _zero_bias(module)
        if isinstance(module, nn.Conv2d):
            nn.init.xavier_normal_(module.weight, math.sqrt(2 / (1 + 0.01**2)))
        else:
            nn.init.xavier_uniform_(module.weight, 0.1)


def initialise_truncated(network: nn.Module) -> None:
    """Initialise the convolutions and linear layers of a network in place, as RevNet's release does.

    Convolutions: normal with var = 2 / (kernel area * output channels), truncated at two standard deviations. Linear
    layers: uniform with var = 1 / fan_in. Biases: 0. Random numbers come from torch's global generator.
    """
    for module in _convolutions_and_linear(network):
        _zero_bias(module)
        if isinstance(module, nn.Conv2d):
            std = math.sqrt(2 / (module.kernel_size[0] * module.kernel_size[1] * module.out_channels))
            # By the inverse distribution function: torch's own version redraws outliers, so it must read values.
            nn.init.uniform_(module.weight, -_WITHIN_TWO, _WITHIN_TWO)
            with torch.no_grad():
                module.weight.erfinv_().mul_(math.sqrt(2) * std)
        else:
            bound = math.sqrt(3 / module.in_features)
            nn.init.uniform_(module.weight, -bound, bound)


def _convolutions_and_linear(network: nn.Module) -> list[nn.Conv2d | nn.Linear]:
    return [module for module in network.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]


def _zero_bias(module: nn.Conv2d | nn.Linear) -> None:
    if module.bias is not None:
        nn.init.zeros_(module.bias)
