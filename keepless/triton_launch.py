"""Launch Triton kernels by their binaries: some microseconds of Python, where Triton's own launch takes about 25."""

from typing import Any

import torch
from torch import Tensor

from .torch_internals import TritonBinary, current_stream, load_triton_kernel

REGISTERS = 65536  # of a multiprocessor, since compute capability 7.0


class Launch:
    """A kernel prepared for one device and fixed types of its arguments.

    Triton's own launch looks at the types and values of all arguments, every time. A prepared one only looks at the
    alignment of pointers; if one is not a multiple of 16 bytes, Triton launches.

    Args:
        kernel: its parameters are tensors, then floats, then sizes, then compile-time constants.
        device: without a CUDA device (in Triton's interpreter), Triton launches.
        programs: the grid.
        types: of the tensors; None stands for an absent one. Each call must give tensors of these dtypes.
        floats: the number of floats.
        sizes: the integers.
        constants: the compile-time constants, in order.
        options: how to compile, e.g. `num_warps`.
    """

    def __init__(
        self,
        kernel: Any,
        device: torch.device,
        programs: int,
        types: tuple[torch.dtype | None, ...],
        floats: int,
        sizes: tuple[int, ...],
        constants: dict[str, Any],
        options: dict[str, Any],
    ):
        self.kernel, self.device, self.programs = kernel, device, programs
        self.sizes, self.constants, self.options = sizes, constants, options
        self._rest = (*sizes, *constants.values())
        self.binary = self._load([*types, *[0.5] * floats, *sizes])

    def _load(self, examples: list[Any]) -> TritonBinary | None:
        if self.device.type != "cuda":
            return None
        with torch.cuda.device(self.device):
            return load_triton_kernel(self.kernel, self.programs, examples, self.constants | self.options)

    def __call__(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()) -> None:
        """Launch the kernel on the device's current stream."""
        pointers, bits = [], 0
        for tensor in tensors:
            pointer = 0 if tensor is None else tensor.data_ptr()
            bits |= pointer
            pointers.append(pointer)
        if self.binary is None or bits & 15:
            self._launch_by_triton(tensors, floats)
        elif self.device.index == torch.cuda.current_device():
            self._run(self.binary, pointers, floats)
        else:
            with torch.cuda.device(self.device):
                self._run(self.binary, pointers, floats)

    def _run(self, binary: TritonBinary, pointers: list[int], floats: tuple[float, ...]) -> None:
        run, function, metadata, _, _ = binary
        stream = current_stream(self.device.index)
        run(self.programs, 1, 1, stream, function, metadata, None, None, None, *pointers, *floats, *self._rest)

    def _launch_by_triton(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...]) -> None:
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            self.kernel[self.programs,](*tensors, *floats, *self.sizes, **self.constants, **self.options)

    @property
    def resident(self) -> int | None:
        """Programs that a multiprocessor holds at the same time; None if unknown.

        Registers are allocated to warps by 256, which is 8 per thread; each program takes 1 KB of shared memory more.
        """
        if self.binary is None:
            return None
        limits = torch.cuda.get_device_properties(self.device)
        threads = 32 * self.options["num_warps"]
        by_registers = REGISTERS // (threads * -(-self.binary.registers // 8) * 8)
        by_shared = limits.shared_memory_per_multiprocessor // (self.binary.shared + 1024)
        return max(1, min(by_registers, by_shared, limits.max_threads_per_multi_processor // threads))
