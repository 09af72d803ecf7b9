"""Signs in one bit each: Triton kernels, interpreted on the CPU or with `-m gpu` on a device, beside operators."""

import re

import pytest
import torch

from keepless.recompute.held import signs
from keepless.recompute.held.signs import pack_signs, positive, positive_or_nan, unpack_signs, unpacking_bytes
from keepless.torch_internals import FakeTensorMode
from tests import cubins
from tests.cuda import NEEDS_CUDA
from tests.interpreter import interpret_language, interpreted

pytest.importorskip("triton")
from keepless.recompute.held import sign_kernels  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request, monkeypatch) -> str:
    """The device on which the kernels run."""
    if request.param == "cpu":
        kernels = interpreted(sign_kernels)
        interpret_language(monkeypatch)
        kernels.BYTES = 4  # several programs
        monkeypatch.setattr(signs, "_kernels", lambda: kernels)
        monkeypatch.setattr(signs, "_kernels_run_on", lambda tensor: tensor.numel() > 0)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("positive_of", [positive, positive_or_nan])
def test_kernels_equal_the_operators_to_the_bit(device, positive_of, dtype):
    """Any order and number of elements, gaps, zeros of both signs, NaN and infinities."""
    x = torch.randn(2, 3, 5, 7, dtype=torch.float64).to(dtype)
    x.view(-1)[:6] = torch.tensor([0.0, -0.0, torch.nan, -torch.nan, torch.inf, -torch.inf])
    for tensor in (x, x.to(memory_format=torch.channels_last), x[:, :, ::2], x[:1, :1, :1, :1], x.transpose(0, 3)):
        tensor = tensor.to(device) if device == "cuda" else tensor
        packed = pack_signs(tensor, positive_of)
        assert packed.dtype == torch.uint8 and packed.shape == (-(-tensor.numel() // 8),)
        ones = unpack_signs(packed, tensor.shape, tensor.stride(), dtype)
        assert torch.equal(ones, positive_of(tensor).to(dtype))
        if tensor.is_contiguous():
            assert ones.is_contiguous() and torch.equal(packed.cpu(), pack_signs_on_cpu(tensor.cpu(), positive_of))
        elif tensor.numel() == x.numel():
            assert ones.stride() == tensor.stride()  # dense: nothing is copied into another order


def pack_signs_on_cpu(tensor, positive_of):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signs, "_kernels_run_on", lambda tensor: False)
        return pack_signs(tensor, positive_of)


def test_a_plan_counts_what_unpacking_takes():
    """The operators take a byte for each value, twice; a kernel takes nothing."""
    assert unpacking_bytes(torch.empty(3, 5)) == 16
    with FakeTensorMode():
        assert unpacking_bytes(torch.empty(3, 5, device="cuda")) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_compile_for_sm_90_without_spills(monkeypatch, tmp_path, dtype):
    """Each reads or writes four or eight neighbours at a time, and nothing but values and signs."""
    compiler, launches = cubins.compiler(monkeypatch, tmp_path), []
    for name in ("_pack_kernel", "_unpack_kernel"):
        monkeypatch.setattr(sign_kernels, name, cubins.Recorded(getattr(sign_kernels, name), launches))
    values = torch.empty(64, 256, 56, 56, dtype=dtype, device="meta")
    packed = torch.empty(values.numel() // 8, dtype=torch.uint8, device="meta")
    sign_kernels.pack(values, packed, True)
    sign_kernels.unpack(packed, values)
    for (kernel, arguments, constants), access in zip(
        launches, (r"ld\.global\S*\.v4", r"st\.global\S*\.v4"), strict=True
    ):
        binary = compiler.compile(kernel, 90, arguments, constants)
        assert binary.spilled == 0 and binary.registers <= 64
        assert re.search(access, binary.ptx)
