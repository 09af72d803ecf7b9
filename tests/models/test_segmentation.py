"""Body + head + classifier: published parameter counts, logits at the input's size, gradients."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from models.bodies import resnext101, resnext152, wider_resnet38_a2
from models.heads import DeepLabV3
from models.layers import ABN, InPlaceABN
from models.segmentation import SegmentationNetwork
from tests.bodies import small_segmentation


@pytest.mark.parametrize(
    "build, classes, expected",
    [
        (resnext101, 19, 56_393_299),
        (resnext101, 91, 56_411_803),
        (resnext152, 19, 71_650_899),
        (wider_resnet38_a2, 19, 135_815_251),
        (wider_resnet38_a2, 91, 135_833_755),
        (wider_resnet38_a2, 65, 135_827_073),
    ],
)
def test_parameter_counts_and_logits_of_the_papers_networks(build, classes, expected):
    with torch.device("meta"):
        body = build(output_stride=8)
        network = SegmentationNetwork(body, DeepLabV3(body.out_channels), classes)
        assert sum(p.numel() for p in network.parameters()) == expected
        assert network(torch.empty(2, 3, 65, 97)).shape == (2, classes, 65, 97)


@pytest.mark.parametrize("size", [None, (50, 31)])
def test_logits_are_those_of_the_cells_interpolated_to_the_asked_size(size):
    torch.manual_seed(0)
    network = small_segmentation().double().eval()
    images = torch.randn(2, 3, 33, 41, dtype=torch.float64)
    with torch.no_grad():
        cells = network.cls(network.head(network.body(images)))
        assert cells.shape == (2, 4, 5, 6)
        logits = network(images, size=size)
    height, width = size or (33, 41)
    assert logits.shape == (2, 4, height, width)
    # Pixel i lies at cell (i + 0.5) * cells / pixels - 0.5, clamped at the border: bilinear, pixel centres aligned.
    rows = ((torch.arange(height, dtype=torch.float64) + 0.5) * 5 / height - 0.5).clamp(0, 4)
    columns = ((torch.arange(width, dtype=torch.float64) + 0.5) * 6 / width - 0.5).clamp(0, 5)
    grid_y, grid_x = torch.meshgrid(rows / 4 * 2 - 1, columns / 5 * 2 - 1, indexing="ij")
    grid = torch.stack([grid_x, grid_y], dim=-1).expand(2, -1, -1, -1)
    expected = F.grid_sample(cells, grid, mode="bilinear", align_corners=True)
    torch.testing.assert_close(logits, expected, rtol=1e-10, atol=1e-10)


def test_every_parameter_gets_a_gradient_and_in_place_norms_the_same_one():
    images = torch.randn(3, 3, 48, 48, dtype=torch.float64)
    labels = torch.randint(4, (3, 48, 48))

    def step(norm_act) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        network = small_segmentation(norm_act).double()
        assert not network.cls.bias.any()
        logits = network(images)
        F.cross_entropy(logits, labels).backward()
        return {"logits": logits, **{name: parameter.grad for name, parameter in network.named_parameters()}}

    expected = step(ABN)
    for name, values in expected.items():
        assert values.isfinite().all() and values.abs().max() > 1e-8, name
    for norm_act in (InPlaceABN, partial(InPlaceABN, variant="I")):
        torch.testing.assert_close(step(norm_act), expected, rtol=1e-7, atol=1e-9)


def test_channels_last_reaches_the_logits():
    network = small_segmentation().to(memory_format=torch.channels_last)
    logits = network(torch.randn(2, 3, 48, 64).to(memory_format=torch.channels_last))
    assert logits.is_contiguous(memory_format=torch.channels_last) and not logits.is_contiguous()


def test_a_body_that_classifies_and_no_classes_are_refused():
    with torch.device("meta"):
        body = resnext101(classes=1000)
        with pytest.raises(ValueError, match="1000 classes: build it with classes=0"):
            SegmentationNetwork(body, DeepLabV3(body.out_channels), 19)
        with pytest.raises(ValueError, match="classes=0: expected"):
            SegmentationNetwork(resnext101(), nn.Identity(), 0)
