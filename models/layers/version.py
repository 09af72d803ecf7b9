"""The version of this package. Importing it raises ImportError if PyTorch is too old, or the package already there."""

import sys

import torch

__version__ = "0.1.0"
OLDEST_TORCH = (2, 6)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    raise ImportError(
        f"keepless needs torch {'.'.join(map(str, OLDEST_TORCH))} or later, and found {torch.__version__}: "
        f"pip install -U torch"
    )

_TWIN = "models.layers" if __package__ == "keepless" else "keepless"
if hasattr(sys.modules.get(_TWIN), "recompute_activations"):
    raise ImportError(
        f"{_TWIN} and {__package__} are the same package, whose classes would exist twice: import it by one name only "
        f"(keepless, where it is installed)"
    )
