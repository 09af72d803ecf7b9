"""Peak memory of training."""

import resource

import torch


def peak_memory_mib(device: torch.device) -> float:
    """MiB at the peak: of tensors on a CUDA device since `reset_peak_memory`; of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak where the device can; the CPU's peak is that of the process's whole life."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
