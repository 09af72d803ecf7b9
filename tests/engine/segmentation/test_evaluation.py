"""What an evaluation in a training measures beside its scores."""

import torch

from engine.segmentation.evaluation import corner_crops


def test_the_crops_are_within_the_image():
    image = torch.arange(3 * 6 * 9).view(3, 6, 9)
    first, second = corner_crops(image, 4)
    assert torch.equal(first, image[:, :4, :4]) and torch.equal(second, image[:, 2:, 5:])
    assert torch.equal(corner_crops(image, 7)[1], image[:, :, 2:])
