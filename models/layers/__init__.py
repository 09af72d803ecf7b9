"""Layers that train in less memory: activated batch normalisation in every strategy of the in-place ABN paper's
Figure 2, and reversible couplings (RevNet, MemCNN).

Imports only torch, and triton if installed, so the folder can be copied into another project.
"""

from .health import Extreme, layer_health
from .norms.abn import ABN
from .norms.checkpointed_abn import CheckpointedABN
from .norms.inplace_abn import InPlaceABN, InPlaceABNSync
from .norms.released import from_released
from .norms.statistics import renew_statistics
from .recompute.network import recompute_activations, recomputing, report, undo
from .reversible.checks import checking_repetitions
from .reversible.couplings import AdditiveCoupling, AffineAdapterNaive, AffineAdapterSigmoid, AffineCoupling
from .reversible.modules import InvertibleModuleWrapper, ReversibleSequence, is_invertible_module, run_reversibly

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
    "checking_repetitions",
    "from_released",
    "is_invertible_module",
    "layer_health",
    "recompute_activations",
    "recomputing",
    "renew_statistics",
    "report",
    "run_reversibly",
    "undo",
]
