"""The memory of a device, and the part of it that a step's tensors cannot use."""

# The largest with which every row of the in-place ABN paper's Table 3 still fits its devices of 12 GB; not measured.
CONTEXT = "0.5GiB"  # of CUDA, cuDNN and cuBLAS, outside PyTorch's allocator
WORKSPACE = "0.7GiB"  # of convolutions, chosen by cuDNN's benchmark
FRAGMENTATION = 0.05  # share of the rest that stays unused
