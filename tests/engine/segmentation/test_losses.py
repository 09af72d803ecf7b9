"""Losses against their definitions, pixel by pixel."""

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from engine.segmentation.losses import CrossEntropy, inverse_frequencies

IGNORE = 255


def crops(n=3, classes=5, size=(6, 7), ignored=0.3, dtype=torch.float64):
    torch.manual_seed(0)
    logits = torch.randn(n, classes, *size, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, classes, (n, *size))
    labels[torch.rand(n, *size) < ignored] = IGNORE
    return logits, labels.to(torch.uint8)


@pytest.mark.parametrize("fraction, ignored", [(0.01, 0.3), (0.25, 0.0), (0.25, 0.9), (1.0, 0.3)])
def test_bootstrapping_averages_the_hardest_pixels_of_each_crop(fraction, ignored):
    logits, labels = crops(ignored=ignored)
    losses = F.cross_entropy(logits, labels.long(), reduction="none", ignore_index=IGNORE)  # 0 where ignored
    hardest = losses.flatten(1).sort(descending=True).values[:, : math.ceil(fraction * 42)]
    expected = hardest.mean().item()
    loss = CrossEntropy(fraction=fraction)(logits, labels)
    assert loss.item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("loss", [CrossEntropy, partial(CrossEntropy, fraction=0.25)])
@pytest.mark.parametrize("weights, stride", [(None, 8), (torch.linspace(0.5, 2, 5, dtype=torch.float64), None)])
def test_tiles_give_the_loss_and_gradient_of_whole_upsampled_logits(loss, weights, stride):
    logits, _ = crops(size=(5, 6))
    labels = crops(size=(37, 45))[1]
    found = [loss(weights=weights, tiles=tiles, stride=stride)(logits, labels) for tiles in (True, False)]
    torch.testing.assert_close(*found, rtol=1e-13, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits) for value in found), rtol=1e-12, atol=1e-15)


def test_the_number_of_hardest_pixels_is_not_that_of_rounding():
    logits, labels = crops(size=(10, 10), ignored=0.0)
    losses = F.cross_entropy(logits, labels.long(), reduction="none").flatten(1)
    expected = losses.sort(descending=True).values[:, :7].mean().item()  # 0.07 * 100 > 7
    assert CrossEntropy(fraction=0.07)(logits, labels).item() == pytest.approx(expected, abs=1e-12)


def test_bootstrapping_sends_gradients_to_the_hardest_pixels_only():
    logits, labels = crops()
    CrossEntropy(fraction=0.25)(logits, labels).backward()
    touched = (logits.grad != 0).any(dim=1)
    assert touched.flatten(1).sum(dim=1).tolist() == [math.ceil(0.25 * 42)] * 3
    assert not touched[labels == IGNORE].any()


def test_cross_entropy_weights_crops_alike():
    logits, labels = crops(ignored=0.5)
    labels[0, 1:] = IGNORE
    per_crop = [F.cross_entropy(logits[[i]], labels[[i]].long(), ignore_index=IGNORE) for i in range(3)]
    torch.testing.assert_close(CrossEntropy()(logits, labels), sum(per_crop) / 3)


@pytest.mark.parametrize("loss", [CrossEntropy(fraction=0.25), CrossEntropy()])
def test_half_precision_logits_are_summed_in_float32_and_a_crop_without_labels_gives_zero(loss):
    logits, labels = crops(n=2, size=(64, 64), dtype=torch.float32)
    low = logits.detach().bfloat16()
    assert loss(low, labels).dtype == torch.float32
    torch.testing.assert_close(loss(low, labels), loss(low.float(), labels), rtol=0, atol=0)
    labels[:] = IGNORE
    value = loss(logits, labels)
    value.backward()
    assert value.item() == 0 and (logits.grad == 0).all()


def test_weights_multiply_the_losses_of_their_classes_and_are_1_on_average():
    """Frequent classes count less. Over the pixels that were counted, the weights' mean is 1."""
    logits, labels = crops()
    counts = torch.bincount(labels[labels != 255].flatten().long(), minlength=6)
    weights = inverse_frequencies(counts)
    share = counts / counts.sum()
    assert torch.allclose(weights[:5], 1 / (5 * share[:5])) and weights[5] == 0  # the sixth class never occurs
    assert torch.allclose((weights * counts).sum(), counts.sum().float())
    weights = weights[:5]
    plain = F.cross_entropy(logits, labels.long(), ignore_index=255, reduction="none")
    weighted = torch.where(labels == 255, 0, plain * weights.double()[labels.clamp(max=4).long()]).flatten(1)
    labelled = (labels != 255).flatten(1).sum(1)
    assert torch.allclose(CrossEntropy(weights=weights)(logits, labels), (weighted.sum(1) / labelled).mean())
    hardest = weighted.topk(11, dim=1).values.mean()  # a quarter of 42 pixels
    assert torch.allclose(CrossEntropy(weights=weights, fraction=0.25)(logits, labels), hardest)
    assert CrossEntropy(weights=weights)(logits.bfloat16(), labels).dtype == torch.float32
