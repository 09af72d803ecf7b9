"""Train in less memory: recompute cheap activations of any network, activated batch normalisation in every strategy of
the in-place ABN paper's Figure 2, and reversible couplings (RevNet, MemCNN).

Imports only torch, and triton if installed.
"""

from .version import __version__  # first, because it raises an error if PyTorch is too old

# isort: split
from .conversion.convert import to_inplace, to_standard
from .fit.fit import fit
from .losses import upsampled_cross_entropy
from .norms.abn import ABN
from .norms.checkpointed_abn import CheckpointedABN
from .norms.inplace_abn import InPlaceABN, InPlaceABNSync
from .norms.released_weights import from_released
from .norms.statistics import renew_statistics
from .prepared import (
    recompute_activations,
    recomputing,
    report,
    share_plans,
    undo,
)
from .prove.prove import prove
from .recompute.signatures.plans import plan
from .recompute.step.costs import peak_bytes
from .reversible.checks import checking_repetitions
from .reversible.couplings import (
    AdditiveCoupling,
    AffineAdapterNaive,
    AffineAdapterSigmoid,
    AffineCoupling,
    create_coupling,
)
from .reversible.modules import InvertibleModuleWrapper, ReversibleSequence, is_invertible_module, run_reversibly
from .torch_internals import KeeplessWarning, before_capture

__all__ = [
    "ABN",
    "AdditiveCoupling",
    "AffineAdapterNaive",
    "AffineAdapterSigmoid",
    "AffineCoupling",
    "CheckpointedABN",
    "InPlaceABN",
    "InPlaceABNSync",
    "InvertibleModuleWrapper",
    "KeeplessWarning",
    "ReversibleSequence",
    "__version__",
    "before_capture",
    "checking_repetitions",
    "create_coupling",
    "fit",
    "from_released",
    "is_invertible_module",
    "peak_bytes",
    "plan",
    "prove",
    "recompute_activations",
    "recomputing",
    "renew_statistics",
    "report",
    "run_reversibly",
    "share_plans",
    "to_inplace",
    "to_standard",
    "undo",
    "upsampled_cross_entropy",
]
