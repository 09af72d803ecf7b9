"""Body + head + classifier: logits at the input's size."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.bodies import resnext101
from models.heads import DeepLabV3
from models.segmentation import SegmentationNetwork
from tests.bodies import small_segmentation


@pytest.mark.parametrize("upsampling", ["exact", "stretched"])
def test_logits_are_interpolated_between_the_cells(upsampling):
    """A cell covers 8 pixels along each side, and the last one reaches beyond the image; or all are stretched to it."""
    torch.manual_seed(0)
    network = small_segmentation().double().eval().to(memory_format=torch.channels_last)
    assert not network.cls.bias.any()
    network.cls.bias.data.uniform_()
    height, width = 33, 41
    images = torch.randn(2, 3, height, width, dtype=torch.float64).to(memory_format=torch.channels_last)
    padded = F.pad(images, (0, 7, 0, 7), mode="replicate") if upsampling == "exact" else images
    with torch.no_grad():
        cells = network.cls(network.head(network.body(padded)))
        logits = network(images, upsampling)
        assert torch.equal(network(images, upsampling, cells=True), cells)
    assert cells.shape == (2, 4, 5, 6) and logits.shape == (2, 4, height, width)
    assert logits.stride(1) == 1  # channels last
    # Pixel i lies at cell (i + 0.5) / stride - 0.5, clamped at the border: bilinear, pixel centres aligned.
    stride_y, stride_x = (8, 8) if upsampling == "exact" else (height / 5, width / 6)
    rows = ((torch.arange(height, dtype=torch.float64) + 0.5) / stride_y - 0.5).clamp(0, 4)
    columns = ((torch.arange(width, dtype=torch.float64) + 0.5) / stride_x - 0.5).clamp(0, 5)
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
