"""Triton kernels compiled for sm_80 or sm_90, without a device."""

import re
import subprocess
from collections import namedtuple
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

PROCESSORS = {80: 108, 90: 132}  # A100, H100
SHARED_MEMORY = {80: 164 << 10, 90: 228 << 10}  # bytes of a multiprocessor, of which each program takes 1 KB more

TYPES = {
    **{torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64"},
    **{torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8"},
}

Binary = namedtuple("Binary", "registers spilled shared ptx")  # spilled: bytes a thread; shared: bytes a program


class Compiler:
    """Compiles launches with the same specialisation as on a device, and each specialisation once."""

    def __init__(self, folder):
        self.folder = folder
        self.binaries: dict[str, Binary] = {}

    def compile(self, kernel, architecture: int, arguments: Sequence, constants: dict, **options) -> Binary:
        """`arguments`: tensors, None and numbers, as given to a launch."""
        import triton

        signature, constexprs, attributes = {}, {}, {}
        names = kernel.arg_names[: len(arguments)]
        values = dict(zip(names, arguments, strict=True)) | constants
        assert {*values} == {*kernel.arg_names}
        for i, name in enumerate(kernel.arg_names):
            value = values[name]
            specialise = not kernel.params[i].do_not_specialize
            if name in constants or value is None or (isinstance(value, int) and value == 1 and specialise):
                signature[name], constexprs[(i,)] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                is_tensor = isinstance(value, Tensor)
                signature[name] = TYPES[value.dtype] if is_tensor else "i32" if abs(value) < 2**31 else "i64"
                if is_tensor or (value % 16 == 0 and specialise):
                    attributes[(i,)] = [["tt.divisibility", 16]]
        key = str((kernel.__name__, architecture, signature, constexprs, attributes, options))
        if key not in self.binaries:
            source = triton.compiler.ASTSource(kernel, signature, constexprs, attributes)
            target = triton.backends.compiler.GPUTarget("cuda", architecture, 32)
            compiled = triton.compile(source, target=target, options=options)
            usage = self.usage(compiled.asm["cubin"])
            self.binaries[key] = Binary(*usage, compiled.metadata.shared, compiled.asm["ptx"])
        return self.binaries[key]

    def usage(self, cubin: bytes) -> tuple[int, int]:
        """Registers per thread, and bytes of its stack, which holds only spilled registers."""
        import triton

        path = self.folder / "kernel.cubin"
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", path]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
        return int(registers), int(stack)


def compiler(monkeypatch: pytest.MonkeyPatch, folder) -> Compiler:
    """A compiler with a cache of its own; skips the test where one of NVIDIA's tools is missing."""
    triton = pytest.importorskip("triton")
    try:
        assert triton.knobs.nvidia.ptxas.path and triton.knobs.nvidia.cuobjdump.path
        interprets = triton.knobs.runtime.interpret
    except (RuntimeError, AttributeError) as error:
        pytest.skip(str(error))  # which tool is missing, or that Triton is older than 3.4
    if interprets:
        pytest.skip("TRITON_INTERPRET is set")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder / "cache"))
    return Compiler(folder)


class Recorded:
    """Replaces a kernel, and notes its launches, for any grid."""

    def __init__(self, kernel, launches: list):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid) -> Callable:
        return lambda *arguments, **constants: self.launches.append((self.kernel, arguments, constants))
