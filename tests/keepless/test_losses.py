"""`upsampled_cross_entropy` against interpolation and cross-entropy as they are defined, and without their memory."""

import math
from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from keepless import losses, upsampled_cross_entropy
from keepless.recompute.step.costs import peak_bytes
from keepless.torch_internals import FakeTensorMode
from tests.cuda import NEEDS_CUDA

IGNORE = 255


def plain(logits, labels, *, weight=None, fraction=None, reduction="crops", align_corners=False, stride=None) -> Tensor:
    """The loss by its definition: a sort finds the largest losses, with ties in the order of the pixels."""
    (height, width), cells = labels.shape[1:], logits.shape[2:]
    covered = (height, width) if stride is None else (cells[0] * stride, cells[1] * stride)
    upsampled = F.interpolate(logits, covered, mode="bilinear", align_corners=align_corners)[..., :height, :width]
    pixels = F.cross_entropy(upsampled, labels.long(), weight, ignore_index=IGNORE, reduction="none").flatten(1)
    if fraction is not None:
        k = math.ceil(round(fraction * pixels.shape[1], 6))
        return pixels.sort(dim=1, descending=True, stable=True).values[:, :k].mean()
    if reduction == "mean":
        return F.cross_entropy(upsampled, labels.long(), weight, ignore_index=IGNORE)
    return (pixels.sum(1) / (labels != IGNORE).flatten(1).sum(1).clamp(min=1)).mean()


def value_and_gradient(loss, logits: Tensor, labels: Tensor, **options) -> tuple[Tensor, Tensor]:
    logits = logits.detach().requires_grad_()
    value = loss(logits, labels, **options)
    (gradient,) = torch.autograd.grad(value, logits)
    return value.detach(), gradient


def sample(
    n=2, classes=5, cells=(4, 5), size=(29, 33), ignored=0.2, dtype=torch.float64, seed=0
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, classes, *cells, dtype=torch.float64, generator=generator).to(dtype)
    labels = torch.randint(classes, (n, *size), generator=generator)
    labels[torch.rand(n, *size, generator=generator) < ignored] = IGNORE
    return logits, labels.to(torch.uint8)


@st.composite
def options(draw) -> dict:
    fraction = draw(st.sampled_from([None, 0.01, 0.25, 1.0]))
    reduction = "crops" if fraction is not None else draw(st.sampled_from(["crops", "mean"]))
    return {"fraction": fraction, "reduction": reduction, "align_corners": draw(st.booleans())}


def as_plain(logits: Tensor, labels: Tensor, rows: int, **options) -> tuple[Tensor, Tensor]:
    """Compute the loss in tiles of `rows` rows, and check value and gradient against the definition.

    The mean of nothing is NaN in both.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(losses._TILE_BYTES, "cpu", logits.itemsize * rows * logits.shape[1] * labels.shape[2])
        results = value_and_gradient(upsampled_cross_entropy, logits, labels, **options)
    expected = value_and_gradient(plain, logits, labels, **options)
    torch.testing.assert_close(results, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    return results


@settings(max_examples=60, deadline=None)
@given(
    options(),
    st.tuples(st.integers(1, 3), st.integers(1, 6)),
    st.tuples(st.integers(1, 7), st.integers(1, 7)),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.integers(1, 8),
    st.booleans(),
)
def test_the_loss_equals_interpolation_and_cross_entropy(chosen, numbers, cells, size, ignored, rows, weighted):
    (n, classes), rng = numbers, torch.Generator().manual_seed(rows)
    logits, labels = sample(n, classes, cells, size, ignored, seed=rows)
    weight = torch.rand(classes, dtype=torch.float64, generator=rng) + 0.1 if weighted else None
    as_plain(logits, labels, rows, weight=weight, **chosen)


@settings(max_examples=30, deadline=None)
@given(options(), st.tuples(st.integers(1, 6), st.integers(1, 6)), st.integers(1, 9), st.integers(1, 8), st.data())
def test_with_a_stride_the_last_cells_reach_beyond_the_labels(chosen, cells, stride, rows, data):
    size = tuple(cell * stride - data.draw(st.integers(0, stride - 1)) for cell in cells)
    logits, labels = sample(2, 3, cells, size, seed=rows)
    results = as_plain(logits, labels, rows, stride=stride, **chosen)
    if size == tuple(cell * stride for cell in cells):
        whole = as_plain(logits, labels, rows, **chosen)
        torch.testing.assert_close(results, whole, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("fraction", [None, 0.25])
@pytest.mark.parametrize("scale", [1, 30])
def test_float32_is_no_farther_from_float64_than_the_plain_way(fraction, scale):
    errors = []
    for seed in range(5):
        logits, labels = sample(2, 19, (16, 16), (128, 128), dtype=torch.float32, seed=seed)
        exact = value_and_gradient(plain, scale * logits.double(), labels, fraction=fraction)[1]
        ways = [partial(value_and_gradient, way) for way in (upsampled_cross_entropy, plain)]
        errors.append([(way(scale * logits, labels, fraction=fraction)[1] - exact).norm() for way in ways])
    error, plain_error = torch.tensor(errors).median(0).values
    assert error <= plain_error


def test_the_number_of_hardest_pixels_does_not_depend_on_rounding():
    """0.07 * 100 is a little above 7."""
    value, shares = losses.mean_of_largest(torch.arange(100.0)[None], 0.07)
    assert value == 96 and shares[0].nonzero().flatten().tolist() == [*range(93, 100)]


def test_tied_pixels_get_the_gradient_in_their_order_whatever_the_tiles_are():
    """Equal logits everywhere: all pixels tie."""
    logits, labels = torch.zeros(2, 3, 4, 4, dtype=torch.float64), torch.zeros(2, 32, 32, dtype=torch.uint8)
    for rows in (1, 5, 32):
        results = as_plain(logits, labels, rows, fraction=0.3)
    assert results[1][:, :, 2:].abs().sum() == 0  # rows of the last cells come too late


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_logits_are_interpolated_in_float32_also_under_autocast(dtype):
    logits, labels = sample(dtype=dtype)
    expected = value_and_gradient(upsampled_cross_entropy, logits.float(), labels)
    with torch.autocast("cpu", torch.bfloat16):
        value, gradient = value_and_gradient(upsampled_cross_entropy, logits, labels)
    assert value.dtype == torch.float32 and torch.equal(value, expected[0])
    assert torch.equal(gradient, expected[1].to(dtype))


def test_on_cuda_its_products_are_in_full_float32_and_the_settings_are_put_back():
    """Each switch for TF32 is tried. PyTorch raises an error if it reads one that disagrees with another."""
    matmul, mkldnn = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul

    def settings() -> list[str]:
        values = [matmul.fp32_precision, mkldnn.fp32_precision]
        for read in (torch.get_float32_matmul_precision, lambda: str(matmul.allow_tf32)):
            try:
                values.append(read())
            except RuntimeError:
                values.append("refused")
        return values

    for switch, value in [
        (matmul.__setattr__, ("allow_tf32", True)),
        (torch.set_float32_matmul_precision, ("high",)),
        (torch.set_float32_matmul_precision, ("medium",)),
        (matmul.__setattr__, ("fp32_precision", "tf32")),
    ]:
        try:
            switch(*value)
            before = settings()
            with losses._full_precision("cuda"):
                assert matmul.fp32_precision == "ieee" and not matmul.allow_tf32
            assert settings() == before and before[0] == "tf32"
        finally:
            torch.set_float32_matmul_precision("highest")
            matmul.fp32_precision = mkldnn.fp32_precision = "none"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("chosen", [{"fraction": 0.25}, {"reduction": "mean", "align_corners": True}, {}])
def test_on_a_device_the_loss_equals_float64_on_the_cpu(chosen, tf32, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    logits, labels = sample(2, 3, (4, 5), (9, 19), dtype=torch.float32)
    expected = value_and_gradient(plain, logits.double(), labels, **chosen)
    results = value_and_gradient(upsampled_cross_entropy, logits.to(device), labels.to(device), **chosen)
    torch.testing.assert_close([tensor.cpu().double() for tensor in results], list(expected), rtol=1e-5, atol=1e-6)


def test_channels_last_logits_give_a_gradient_in_their_format():
    logits, labels = sample()
    expected = value_and_gradient(upsampled_cross_entropy, logits, labels)
    channels_last = logits.contiguous(memory_format=torch.channels_last)
    results = value_and_gradient(upsampled_cross_entropy, channels_last, labels)
    assert results[1].stride() == channels_last.stride()
    torch.testing.assert_close(results, expected, rtol=0, atol=0)


def test_memory_is_limited_by_tiles():
    """182 classes: the plain way makes three copies of 91 MiB."""
    logits, labels = sample(2, 182, (32, 32), (256, 256), dtype=torch.float32)
    peak = peak_bytes(lambda: value_and_gradient(upsampled_cross_entropy, logits, labels, fraction=0.25), "cpu")
    assert peak < 3 * 2 * 182 * 256 * 256 * 4 / 40


def test_a_compiled_program_calls_the_loss():
    logits, labels = sample(dtype=torch.float32)

    def step(logits: Tensor) -> Tensor:
        return upsampled_cross_entropy(2 * logits, labels, fraction=0.25)

    results = value_and_gradient(lambda x, _: torch.compile(step, backend="aot_eager")(x), logits, labels)
    torch.testing.assert_close(results, value_and_gradient(lambda x, _: step(x), logits, labels))


def test_fake_tensors_pass():
    with FakeTensorMode():
        logits = torch.empty(2, 19, 32, 32, requires_grad=True)
        upsampled_cross_entropy(logits, torch.empty(2, 256, 256, dtype=torch.uint8), fraction=0.25).backward()
    assert logits.grad.shape == logits.shape


def test_a_function_mode_sees_one_call():
    class Seen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(function)
            return function(*args, **(kwargs or {}))

    seen, (logits, labels) = [], sample()
    with Seen():
        upsampled_cross_entropy(logits, labels)
    assert seen == [upsampled_cross_entropy]


def test_an_error_that_is_not_of_labels_passes(monkeypatch):
    monkeypatch.setattr(losses._Loss, "apply", Mock(side_effect=RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="^out of memory$"):
        upsampled_cross_entropy(*sample())


def test_wrong_arguments_are_refused():
    logits, labels = sample()
    for wrong, message in (
        ({"reduction": "sum"}, "reduction='sum': expected 'crops' or 'mean'"),
        ({"fraction": 0.0}, "fraction=0.0: expected a share"),
        ({"fraction": 0.5, "reduction": "mean"}, "fraction with reduction='mean'"),
        ({"weight": torch.ones(5, requires_grad=True)}, "with a gradient: expected"),
        ({"stride": 4}, r"\(2, 5, 4, 5\) and labels of shape \(2, 29, 33\) with stride=4: expected 8x9 cells"),
        ({"stride": 0}, "stride=0: expected a number of pixels per cell, such as 8"),
    ):
        with pytest.raises(ValueError, match=message):
            upsampled_cross_entropy(logits, labels, **wrong)
    with pytest.raises(ValueError, match="expected \\(N, K, h, w\\) and \\(N, H, W\\)"):
        upsampled_cross_entropy(logits[0], labels)
    with pytest.raises(ValueError, match="expected floats and integers"):
        upsampled_cross_entropy(logits, labels.float())
    for weight in (None, torch.ones(5, dtype=logits.dtype)):
        for wrong in (9, -100, -1):
            expected = f"labels hold {wrong}: expected classes from 0 to 4, or ignore_index=255; .*ignore_index={wrong}"
            with pytest.raises(IndexError, match=expected):
                upsampled_cross_entropy(logits, labels.long().where(labels != 1, wrong), weight=weight)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_second_derivative_is_refused(compiled):
    run = torch.compile(upsampled_cross_entropy, backend="eager") if compiled else upsampled_cross_entropy
    logits, labels = sample()
    logits.requires_grad_()
    with pytest.raises(RuntimeError, match="has no second derivative"):
        torch.autograd.grad(run(logits, labels), logits, create_graph=True)
