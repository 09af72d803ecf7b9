"""Batch normalisation with an activation, in every strategy of the in-place ABN paper's Figure 2.

`keepless` exports the layers. Here are parts for networks around them: an `Activation` is a function by its name (one
of ACTIVATIONS) and parameter, `check_activation` refuses wrong ones, and `activate_` applies one in place. BACKENDS are
the values of a layer's `backend`. A `ConversionReport` is what conversions give to `report`. In `statistics_kept`,
forward passes leave running statistics as they are.
"""

from .backends import BACKENDS
from .backends.activations import ACTIVATIONS, Activation, activate_, check_activation
from .conversion_report import ConversionReport
from .statistics import statistics_kept

__all__ = [
    "ACTIVATIONS",
    "BACKENDS",
    "Activation",
    "ConversionReport",
    "activate_",
    "check_activation",
    "statistics_kept",
]
