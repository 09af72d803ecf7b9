"""The loss's Triton kernels against float64: interpreted on the CPU, compiled with `-m gpu` on a device."""

import pytest
import torch

from keepless import losses, upsampled_cross_entropy
from tests import cubins
from tests.cuda import NEEDS_CUDA
from tests.interpreter import interpreted
from tests.loss_cases import plain, sample, value_and_gradient

pytest.importorskip("triton")
from keepless import loss_kernels  # noqa: E402


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request, monkeypatch) -> str:
    """Where the kernels run; on a CPU in Triton's interpreter, with small blocks."""
    if request.param == "cpu":
        kernels = interpreted(loss_kernels)
        kernels.PIXELS, kernels.CELLS, kernels.CLASSES = 16, 4, 2
        monkeypatch.setattr(losses._Kernels, "module", staticmethod(lambda: kernels))
        monkeypatch.setattr(losses, "_has_kernels", lambda logits: logits.dtype != torch.float64)
    return request.param


@pytest.mark.parametrize(
    "cells, size, chosen",
    [
        pytest.param((2, 5), (9, 19), {"fraction": 0.25}, marks=pytest.mark.slow),
        ((3, 2), (8, 9), {"reduction": "mean", "weight": torch.tensor([0.1, 2.0, 0.5]), "align_corners": True}),
        ((4, 5), (4, 5), {"fraction": 0.25}),
        pytest.param((4, 5), (4, 5), {}, marks=pytest.mark.slow),
        ((7, 6), (3, 4), {}),
    ],
)
def test_kernels_equal_float64(device, cells, size, chosen):
    logits, labels = sample(2, 3, cells, size, dtype=torch.float32)
    weight = {"weight": chosen["weight"].double()} if "weight" in chosen else {}
    expected = value_and_gradient(plain, logits.double(), labels, **chosen | weight)
    there = logits.to(device, memory_format=torch.channels_last)
    found = value_and_gradient(
        upsampled_cross_entropy,
        there,
        labels.to(device),
        **{k: v.to(device) if k == "weight" else v for k, v in chosen.items()},
    )
    assert found[1].stride() == there.stride()
    torch.testing.assert_close([one.cpu().double() for one in found], list(expected), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype, labels_dtype", [(torch.float32, torch.uint8), (torch.bfloat16, torch.int64)])
def test_kernels_compile_for_sm_90_without_spills(monkeypatch, tmp_path, dtype, labels_dtype):
    compiler, launches = cubins.compiler(monkeypatch, tmp_path), []
    for name in ("_losses_kernel", "_gradient_kernel"):
        monkeypatch.setattr(loss_kernels, name, cubins.Recorded(getattr(loss_kernels, name), launches))
    logits = torch.empty(4, 182, 64, 64, dtype=dtype, device="meta")
    labels = torch.empty(4, 512, 512, dtype=labels_dtype, device="meta")
    source = torch.empty(512, dtype=torch.int64, device="meta"), torch.empty(512, device="meta")
    found, normalisers = loss_kernels.losses_and_normalisers(logits, labels, (source, source))
    gradient = torch.empty_like(logits, dtype=torch.float32)
    loss_kernels.write_gradient(gradient, logits, labels, normalisers, found, (source, source))
    assert [kernel.__name__ for kernel, _, _ in launches] == ["_losses_kernel", "_gradient_kernel"]
    for kernel, arguments, constants in launches:
        binary = compiler.compile(kernel, 90, arguments, constants)
        assert binary.spilled == 0 and binary.shared <= 48 << 10
        assert binary.registers <= 128  # 4 programs of 128 threads on each multiprocessor
