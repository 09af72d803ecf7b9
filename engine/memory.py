"""Peak memory of this process."""

import resource

import torch


def peak_memory_mib(device: torch.device) -> float:
    """MiB at the peak: allocated by tensors on a CUDA device, resident in the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux
