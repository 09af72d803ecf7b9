"""The loss of a training: tiles against whole upsampled logits, and the weights of frequent classes.

tests/keepless/test_losses.py compares the tiled loss with its definition.
"""

from functools import partial

import pytest
import torch

from engine.segmentation.cross_entropy import CrossEntropy, SummedLoss, inverse_frequencies
from models.segmentation import Output, Outputs

IGNORE = 255


@pytest.mark.parametrize("loss", [CrossEntropy, partial(CrossEntropy, fraction=0.25)])
@pytest.mark.parametrize("weights, stride", [(None, 8), (torch.linspace(0.5, 2, 5, dtype=torch.float64), None)])
def test_tiles_give_the_loss_and_gradient_of_whole_upsampled_logits(loss, weights, stride):
    """The first crop has no labelled pixel."""
    logits = torch.randn(3, 5, 5, 6, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 5, (3, 37, 45))
    labels[torch.rand(labels.shape) < 0.3] = labels[0] = IGNORE
    values = [loss(weights=weights, tiles=tiles, stride=stride)(logits, labels.byte()) for tiles in (True, False)]
    torch.testing.assert_close(*values, rtol=1e-13, atol=0)
    torch.testing.assert_close(*(torch.autograd.grad(value, logits) for value in values), rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("loss", [CrossEntropy(tiles=False, fraction=0.25), CrossEntropy(tiles=False)])
def test_whole_logits_of_16_bits_are_summed_in_float32(loss):
    low = torch.randn(2, 5, 64, 64).bfloat16()
    labels = torch.randint(0, 5, (2, 64, 64))
    assert loss(low, labels).dtype == torch.float32
    torch.testing.assert_close(loss(low, labels), loss(low.float(), labels), rtol=0, atol=0)


def test_frequent_classes_count_less_and_pixels_weigh_1_on_average():
    counts = torch.tensor([7, 60, 3, 0, 30])
    weights = inverse_frequencies(counts)
    torch.testing.assert_close(weights, torch.tensor([100 / 28, 100 / 240, 100 / 12, 0, 100 / 120]))
    torch.testing.assert_close((weights * counts).sum(), counts.sum().float())


def test_the_losses_of_all_outputs_are_summed_by_their_weights_each_at_its_stride():
    """Two of a network, one of a stride whose loss was not made before; logits alone are stretched."""
    torch.manual_seed(0)
    labels = torch.randint(0, 5, (2, 31, 40))
    coarse = torch.randn(2, 5, 4, 5)
    fine = torch.randn(2, 5, 8, 10)
    summed = SummedLoss(lambda stride: CrossEntropy(stride=stride), [8])
    outputs = Outputs(Output(coarse, 8), (Output(fine, 4, 0.4),))
    expected = CrossEntropy(stride=8)(coarse, labels) + 0.4 * CrossEntropy(stride=4)(fine, labels)
    assert torch.equal(summed(outputs, labels), expected)
    assert torch.equal(summed(Outputs(outputs.main), labels), CrossEntropy(stride=8)(coarse, labels))
    assert torch.equal(summed(coarse, labels), CrossEntropy()(coarse, labels))
