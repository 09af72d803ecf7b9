"""The peak memory of a run, for its records."""

import resource

import torch


def peak_memory_mib(device: torch.device) -> float:
    """Peak in MiB: of the tensors on a CUDA device since `reset_peak_memory`; of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def reset_peak_memory(device: torch.device) -> None:
    """Start a new peak on a CUDA device; the CPU's peak covers the whole life of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
