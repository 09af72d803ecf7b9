"""The peak memory of a run."""

import resource

import torch


def peak_memory_mib(device: torch.device) -> float:
    """Peak in MiB: on CUDA, of the device's tensors since `reset_peak_memory`; on the CPU, of the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10  # KiB on Linux


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of a CUDA device; the CPU's always covers the whole life of the process."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
