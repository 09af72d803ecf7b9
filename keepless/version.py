"""The version of this package. Importing it raises ImportError if PyTorch is too old."""

import torch

__version__ = "0.1.0"
OLDEST_TORCH = (2, 11)

if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
    raise ImportError(
        f"keepless needs torch {'.'.join(map(str, OLDEST_TORCH))} or later, and found {torch.__version__}: "
        f"pip install -U torch"
    )
