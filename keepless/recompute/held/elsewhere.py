"""Hold what autograd saves outside of the device's memory: in host memory, or on CPUs in files without names."""

import mmap
import os
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...saved import is_ordinary
from ...torch_internals import FakeTensor, Hooks, warn

SMALL = 2**12  # bytes: smaller tensors stay where they are
_ALIGNED = 64  # bytes, as PyTorch's CPU allocator: kernels may round otherwise at other offsets
_FILE_SIZES = 2**20, 2**28  # bytes of the first file, and at most of later ones, unless a tensor is larger
_SHARE = 0.5  # of the free host memory
_MEMORY = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


class Held(NamedTuple):
    """A tensor that is held elsewhere."""

    copy: Tensor  # see `Elsewhere.copy_of`
    shape: torch.Size
    stride: tuple[int, ...]
    device: torch.device

    def get(self) -> Tensor:
        """The tensor, on its device again."""
        return self.copy.to(self.device).as_strided(self.shape, self.stride)


class Elsewhere:
    """Copies of the tensors that autograd saves in one step. Each is freed with the last reference to it.

    Tensors of a device are copied to host memory, at most half of what is free there, and the host waits for each copy.
    Those of the CPU go to files without names in `$TMPDIR`, whose pages the system writes to the disk when it needs the
    memory. If there can be no such file, they are in host memory too, and one warning says so.

    `beyond`: bytes of tensors that stay where they are.
    """

    def __init__(self, beyond: int = 0) -> None:
        self.room = beyond  # bytes of tensors that stay where they are, before others do not
        self.bytes = 0  # in host memory
        self.is_full = False  # a tensor has stayed where it was, because host memory had too little room
        self._file_bytes = 0  # of all files
        self._newest_file = memoryview(b"")
        self._free = 0  # the offset of its first free byte

    @property
    def hooks(self) -> Hooks:
        """Saved-tensor hooks that hold elsewhere what a forward pass has made."""
        return self._pack, _unpack

    def _pack(self, tensor: Tensor) -> "Tensor | Held":
        if tensor.is_leaf and (tensor.requires_grad or isinstance(tensor, nn.Parameter)):
            return tensor
        return self.hold(tensor) or tensor.detach()

    def hold(self, tensor: Tensor) -> Held | None:
        """Copy a tensor; None if it has to stay where it is, such as a small one, or if there is no room."""
        has_values = is_ordinary(tensor) and not (isinstance(tensor, FakeTensor) or tensor.is_meta)
        if not has_values or tensor.nbytes < SMALL or tensor.is_conj() or tensor.is_neg():
            return None
        if tensor.nbytes <= self.room:
            self.room -= tensor.nbytes
            return None
        copy = self.copy_of(tensor)
        return None if copy is None else Held(copy, tensor.shape, tensor.stride(), tensor.device)

    def copy_of(self, tensor: Tensor) -> Tensor | None:
        """A vector with the entries of a tensor's memory, from its first to its last one; None if there is no room."""
        span = 1 + sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])
        with torch.no_grad():
            entries = tensor.detach().as_strided((span,), (1,), tensor.storage_offset())
            if not tensor.is_cpu:
                return entries.cpu() if self._take_room(entries.nbytes) else None
            memory = self._cpu_memory(entries.nbytes, tensor.data_ptr() % _ALIGNED)
            if memory is None:
                return None
            return torch.frombuffer(memory, dtype=torch.uint8).view(entries.dtype).copy_(entries)

    def _cpu_memory(self, size: int, remainder: int) -> memoryview | None:
        """So many bytes at an address with this remainder modulo `_ALIGNED`; None if there is no room for them.

        They are in a file, or if there can be none, in host memory.
        """
        begin = self._free + (remainder - self._free) % _ALIGNED
        if begin + size > len(self._newest_file):
            try:
                self._newest_file = memoryview(self._new_file(remainder + size))
            except OSError as error:
                _say_that_there_is_no_file(error.strerror)
                return memoryview(mmap.mmap(-1, remainder + size))[remainder:] if self._take_room(size) else None
            begin = remainder
        self._free = begin + size
        return self._newest_file[begin : self._free]

    def _new_file(self, size: int) -> mmap.mmap:
        """At least so many bytes of a new file without a name. OSError: the disk is full, for example.

        Files double what there is, because each takes a descriptor.
        """
        first_size, most = _FILE_SIZES
        size = max(size, first_size, min(self._file_bytes, most))
        with tempfile.TemporaryFile(dir=os.environ.get("TMPDIR") or None) as file:
            os.posix_fallocate(file.fileno(), 0, size)  # else a full disk would end the process at a write
            self._file_bytes += size
            return mmap.mmap(file.fileno(), size)

    def close(self) -> None:
        """No more tensors come."""
        self._newest_file = memoryview(b"")

    def _take_room(self, size: int) -> bool:
        """Take so many bytes of host memory; False if that would be more than half of what is free: it is full."""
        if self.bytes + size > _SHARE * (self.bytes + free_host_bytes()):
            self.is_full = True
            return False
        self.bytes += size
        return True


def is_elsewhere(hooks: Hooks | None) -> bool:
    """Whether an `Elsewhere` has set these saved-tensor hooks. Others are the program's."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Elsewhere)


def _unpack(packed: Tensor | Held) -> Tensor:
    return packed.get() if isinstance(packed, Held) else packed


@cache
def _say_that_there_is_no_file(cause: str) -> None:
    warn(
        f"a step that is watched holds what autograd saves in memory, not in a file ({cause}): set TMPDIR to a folder "
        f"on a disk with room for it"
    )


def free_host_bytes() -> int:
    """Bytes of host memory that a process may still take: the machine's, or its container's, shared by its ranks."""
    lines = _MEMORY.read_text().splitlines() if _MEMORY.exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    with suppress(OSError, ValueError):  # there is no limit
        limit = int((_GROUP / "memory.max").read_text())
        free.append(limit - int((_GROUP / "memory.current").read_text()))
    return min(free, default=2**63) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
