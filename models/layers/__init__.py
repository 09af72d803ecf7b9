"""Layers that train in less memory: activated batch normalisation in every strategy of the in-place ABN paper's
Figure 2, and reversible couplings (RevNet, MemCNN).

Imports only torch, and triton if installed, so the folder can be copied into another project.
"""

from .abn import ABN
from .checkpointed_abn import CheckpointedABN
from .couplings import AdditiveCoupling, AffineAdapterNaive, AffineAdapterSigmoid, AffineCoupling
from .health import Extreme, layer_health
from .inplace_abn import InPlaceABN, InPlaceABNSync
from .recompute_activations import recompute_activations
from .released import from_released
from .reversible import InvertibleModuleWrapper, ReversibleSequence, is_invertible_module, run_reversibly
from .statistics import renew_statistics

__all__ = [
    "ABN",
    "AdditiveCoupling",
    "AffineAdapterNaive",
    "AffineAdapterSigmoid",
    "AffineCoupling",
    "CheckpointedABN",
    "Extreme",
    "InPlaceABN",
    "InPlaceABNSync",
    "InvertibleModuleWrapper",
    "ReversibleSequence",
    "from_released",
    "is_invertible_module",
    "layer_health",
    "recompute_activations",
    "renew_statistics",
    "run_reversibly",
]
