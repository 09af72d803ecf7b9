"""Activated batch normalisation, in every strategy of the in-place ABN paper's Figure 2.

Imports only torch, and triton if installed, so the folder can be copied into another project.
"""

from .abn import ABN
from .checkpointed_abn import CheckpointedABN, recompute_activations
from .health import Extreme, layer_health
from .inplace_abn import InPlaceABN, InPlaceABNSync
from .released import from_released
from .statistics import renew_statistics

__all__ = [
    "ABN",
    "CheckpointedABN",
    "Extreme",
    "InPlaceABN",
    "InPlaceABNSync",
    "from_released",
    "layer_health",
    "recompute_activations",
    "renew_statistics",
]
