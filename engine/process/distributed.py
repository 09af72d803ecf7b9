"""The processes of a run: one per device under torchrun or submitit, otherwise just this one."""

import os
import re
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from engine.process.console import logger

T = TypeVar("T")
# {variable with the number of processes: one that each of them has too}. Not SLURM_NTASKS: salloc and sbatch set it for
# a single process.
_OTHER_LAUNCHERS = {
    "WORLD_SIZE": None,
    "SLURM_STEP_NUM_TASKS": "SLURM_PROCID",
    "OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK",
    "PMI_SIZE": "PMI_RANK",
}
JOBS_HERE = "JOBS_HERE"  # a variable: how many jobs of a sweep share this machine; below 0 as joblib counts
DRIVER = Path("/proc/driver/nvidia/version")
CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")  # of a container: its processor time in a period, such as "200000 100000"


@dataclass(frozen=True)
class World:
    """This process, `rank` of `size`, and its device."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def first(self) -> bool:
        """Whether this is the process that writes the run's files."""
        return self.rank == 0

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum over all ranks, in place. Every rank must call it."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: T) -> list[T]:
        """The (picklable) values of all ranks, in order. Every rank must call it."""
        if self.size == 1:
            return [value]
        values = [value for _ in range(self.size)]
        dist.all_gather_object(values, value)
        return values

    def check_equal(self, value: dict[str, object], advice: str) -> None:
        """Raise ValueError with `advice` on every rank unless the (picklable) values of all ranks are equal."""
        values = self.gather(value)
        differing = sorted(
            key for key in set().union(*values) if any(other.get(key) != value.get(key) for other in values)
        )
        if differing:
            texts = (", ".join(f"{key}={other.get(key)}" for key in differing) for other in values)
            differences = "; ".join(f"process {rank} has {text}" for rank, text in enumerate(texts))
            raise ValueError(f"the processes of this run differ: {differences}; {advice}")

    @contextmanager
    def first_goes_ahead(self) -> Iterator[bool]:
        """Context that makes all ranks wait at its end for rank 0, however long; yields whether this is rank 0.

        If rank 0 fails, the others fail too.
        """
        if self.size == 1:
            yield True
            return
        # Its connections make the others fail at once if rank 0 dies.
        patient_group: Any = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        yield self.first
        dist.barrier(patient_group)
        dist.destroy_process_group(patient_group)

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Copy rank 0's tensors to all ranks, in place. Every rank must call it."""
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor.detach(), src=0)


def data_parallel(network: nn.Module, device: torch.device, fixed_buckets: bool = False) -> DistributedDataParallel:
    """The network on `device`, with gradients averaged over ranks but buffers not shared (`World.share`).

    `fixed_buckets`: gradients are summed in the same order in all steps. Otherwise DDP rebuilds its buckets after the
    first step; over three or more ranks, a resumed run would then round differently. (A sum of two has one order.)
    """
    is_renamed = "forward_sync_buffers" in signature(DistributedDataParallel).parameters  # since PyTorch 2.13
    no_exchange: dict[str, Any] = {"forward_sync_buffers" if is_renamed else "broadcast_buffers": False}
    keeps_buckets = fixed_buckets and dist.get_world_size() > 2
    if keeps_buckets:  # find_unused_parameters keeps DDP's buckets, and would warn that no parameter is unused
        warnings.filterwarnings("ignore", "find_unused_parameters=True was specified in DDP constructor")
    return DistributedDataParallel(
        network,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=keeps_buckets,
        **no_exchange,
    )


def launcher() -> str:
    """What started several processes for this run, "torchrun" or "submitit"; "" if nothing did."""
    if not dist.is_available():
        return ""
    if dist.is_torchelastic_launched():
        return "torchrun"
    # Of a task of submitit engine/process/start.py has set WORLD_SIZE.
    return "submitit" if "SUBMITIT_EXECUTOR" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1" else ""


def cores_per_rank() -> int:
    """How many processor cores each process of this run may use here, within what a scheduler or container allows."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"]) if launcher() else 1
    cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # no such file, or no limit: "max 100000"
        time_us, period_us = map(int, CPU_LIMIT.read_text().split())
        cores = min(cores, -(-time_us // period_us))
    jobs = int(os.environ.get(JOBS_HERE, 1))
    if jobs <= 0:  # -1: as many as there are cores
        jobs = max(1, cores + 1 + jobs)
    return max(1, cores // (ranks * jobs))


def world_size() -> int:
    """How many processes this run has. ValueError: another launcher than torchrun or submitit has started several."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    if launcher():
        return int(os.environ["WORLD_SIZE"])
    for name, rank in _OTHER_LAUNCHERS.items():
        if os.environ.get(name, "1") != "1" and (rank is None or rank in os.environ):
            raise ValueError(
                f"{name}={os.environ[name]}, but torchrun did not start this process, which would train alone: use "
                f"torchrun --nproc-per-node (under Slurm scripts/slurm.sbatch, or srun --ntasks-per-node=1 torchrun), "
                f"or unset {name} if the process is meant to be alone"
            )
    return 1


@contextmanager
def joined(device: str, timeout_seconds: float, keys: str = "") -> Iterator[World]:
    """Join the process group and yield this process's world. An initialised process group is used as it is.

    Args:
        device: "auto", "cpu" or "cuda"; each of several processes takes its own CUDA device.
        timeout_seconds: how long a process waits for another before it fails.
        keys: prefix of a training's configuration keys device and timeout_seconds, for error messages. Empty: this is
            an evaluation.

    Raises:
        ValueError: see `world_size`; or "cuda" without a CUDA device, or with fewer devices than processes on this
            machine.
        ConnectionError: another process ended, or did not respond within the timeout.
    """
    local_rank = int(os.environ.get("LOCAL_RANK", 0)) if launcher() else 0
    own_device = device_of(device, local_rank, f"{keys}device")
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    is_first_group = bool(launcher()) and not dist.is_initialized()
    try:
        if is_first_group:
            _join_first_group(own_device, timedelta(seconds=timeout_seconds))
        rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
        yield World(rank, world_size(), own_device)
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo/" not in str(error):  # the path of gloo's source
            raise
        limit = f"{keys}timeout_seconds={timeout_seconds:g}" if keys else f"{timeout_seconds:g} seconds"
        raise ConnectionError(
            f"process {os.environ.get('RANK', 0)} of the run lost another process, or waited for it longer than "
            f"{limit} ({str(error).strip().splitlines()[0]}). See the message of the process that failed first; start "
            f"all of them again" + (" with resume=auto" if keys else "")
        ) from error
    if is_first_group:  # not after an error: other processes may be gone; the rest notice that this one ends
        dist.destroy_process_group()


def _join_first_group(device: torch.device, timeout: timedelta) -> None:
    """Join the process group of all ranks, from the variables that the launcher has set."""
    # Gloo beside NCCL: flags and objects in CPU memory need not wait for the device.
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
    if launcher() == "torchrun" and os.environ["GROUP_WORLD_SIZE"] == "1":
        # On a single machine (static rendezvous) torchrun keeps this store when it restarts the processes: without a
        # prefix they could read addresses of the previous attempt.
        store = dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


@cache
def warn_of_driver() -> None:
    """Warn, once, if a PyTorch for CUDA finds no device although there is a driver."""
    if torch.version.cuda is not None and DRIVER.is_file():
        version = re.search(r"\d+\.\d+(\.\d+)*", DRIVER.read_text())
        driver = version[0] if version else "of an unknown version"
        logger.warning(
            f"PyTorch is built for CUDA {torch.version.cuda}, and finds no device: this runs on the CPU. The driver is "
            f"{driver}: update it, install a PyTorch for it, or look at CUDA_VISIBLE_DEVICES; device=cpu is silent"
        )


def device_of(name: str, local_rank: int = 0, key: str = "device") -> torch.device:
    """The device of a process from "auto", "cpu" or "cuda". ValueError: see `joined`; names `key`."""
    if name == "cpu":
        return torch.device("cpu")
    if name == "auto" and not torch.cuda.is_available():
        warn_of_driver()
        return torch.device("cpu")
    device_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not device_count:
        raise ValueError(f"{key}={name}, but PyTorch sees no CUDA device: give {key}=cpu, or check the driver")
    if local_rank >= device_count:
        launcher_name = launcher() or "torchrun"
        option = "hydra.launcher.tasks_per_node=" if launcher_name == "submitit" else "--nproc-per-node "
        raise ValueError(
            f"{launcher_name} started more processes on this machine than it has CUDA devices ({device_count}): give "
            f"{option}{device_count}, or {key}=cpu"
        )
    return torch.device("cuda", local_rank)
