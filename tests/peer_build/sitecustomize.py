"""Runs first in the Python processes of `make peer` that build the released package.

It compiles CUDA sources if PyTorch was built with CUDA, which takes the toolkit. Without a GPU it need not.
"""

import torch

torch.has_cuda = torch.cuda.is_available()
