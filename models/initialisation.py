"""Weight initialisation as in the in-place ABN release, for training from scratch."""

import math

from torch import nn


def initialise(network: nn.Module, negative_slope: float = 0.01) -> None:
    """Initialise the convolutions and linear layers of a network in place, on any device (including meta).

    Convolutions: Xavier normal, var = gain^2 * 2 / (fan_in + fan_out), gain^2 = 2 / (1 + negative_slope^2) as for a
    leaky ReLU. Linear layers: Xavier uniform with gain 0.1. Biases: 0. Norms are skipped: their constructors set a
    scale of 1 and a shift of 0.

    The gain does not depend on the activation, because almost every convolution feeds a norm, which removes the scale.
    Random numbers come from torch's global generator, so a seed fixes the weights.
    """
    gain = math.sqrt(2 / (1 + negative_slope**2))
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.xavier_normal_(module.weight, gain)
        elif isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, 0.1)
        else:
            continue
        if module.bias is not None:
            nn.init.zeros_(module.bias)
