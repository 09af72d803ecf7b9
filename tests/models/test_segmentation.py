"""Body + head + classifier: logits at the input's size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.bodies import resnext101
from models.heads import DeepLabV3
from models.segmentation import SegmentationNetwork
from tests.bodies import small_segmentation


@pytest.mark.parametrize("size", [None, (50, 31)])
def test_logits_are_interpolated_between_the_cells(size):
    torch.manual_seed(0)
    network = small_segmentation().double().eval().to(memory_format=torch.channels_last)
    assert not network.cls.bias.any()
    network.cls.bias.data.uniform_()
    images = torch.randn(2, 3, 33, 41, dtype=torch.float64).to(memory_format=torch.channels_last)
    with torch.no_grad():
        cells = network.cls(network.head(network.body(images)))
        logits = network(images, size=size)
    height, width = size or (33, 41)
    assert cells.shape == (2, 4, 5, 6) and logits.shape == (2, 4, height, width)
    assert logits.is_contiguous(memory_format=torch.channels_last) and not logits.is_contiguous()
    # Pixel i lies at cell (i + 0.5) * cells / pixels - 0.5, clamped at the border: bilinear, pixel centres aligned.
    rows = ((torch.arange(height, dtype=torch.float64) + 0.5) * 5 / height - 0.5).clamp(0, 4)
    columns = ((torch.arange(width, dtype=torch.float64) + 0.5) * 6 / width - 0.5).clamp(0, 5)
    grid_y, grid_x = torch.meshgrid(rows / 4 * 2 - 1, columns / 5 * 2 - 1, indexing="ij")
    grid = torch.stack([grid_x, grid_y], dim=-1).expand(2, -1, -1, -1)
    expected = F.grid_sample(cells, grid, mode="bilinear", align_corners=True)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_logits_of_16_bits_are_interpolated_in_float32_outside_training():
    network = small_segmentation()
    images = torch.randn(2, 3, 33, 41)
    for training, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            assert network.train(training)(images).dtype == dtype


def test_a_body_that_classifies_and_no_classes_are_refused():
    with torch.device("meta"):
        body = resnext101(classes=1000)
        with pytest.raises(ValueError, match="1000 classes: build it with classes=0"):
            SegmentationNetwork(body, DeepLabV3(body.out_channels), 19)
        with pytest.raises(ValueError, match="classes=0: expected"):
            SegmentationNetwork(resnext101(), nn.Identity(), 0)
