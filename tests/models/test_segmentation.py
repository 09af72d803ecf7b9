"""Body + head + classifier: logits at the input's size, of heads that read one feature or several."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine.segmentation.inference import Views, predict, windows_along
from keepless import InPlaceABN
from models.bodies import resnext101
from models.forward import Forward
from models.heads import DeepLabV3
from models.recomputation import choose_recomputation
from models.segmentation import SegmentationNetwork, features_read, upsampled
from tests.bodies import small_resnext, small_segmentation

PLAIN = (torch.contiguous_format, nullcontext)


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
            logits = network.train(training)(images)
            assert (logits.main.logits if training else logits).dtype == dtype


def test_a_body_that_classifies_and_no_classes_are_refused():
    with torch.device("meta"):
        body = resnext101(classes=1000)
        with pytest.raises(ValueError, match="1000 classes: build it with classes=0"):
            SegmentationNetwork(body, DeepLabV3(body.out_channels), 19)
        with pytest.raises(ValueError, match="classes=0: expected"):
            SegmentationNetwork(resnext101(), nn.Identity(), 0)


class Pyramid(nn.Module):
    """A head at the cells of stride 4, of three features."""

    reads = (4, -2, -1)

    def __init__(self, in_channels):
        super().__init__()
        self.convs, self.out_channels = nn.ModuleList(nn.Conv2d(channels, 6, 1) for channels in in_channels), 6

    def forward(self, features):
        maps = [conv(feature) for conv, feature in zip(self.convs, features, strict=True)]
        return sum(F.interpolate(feature, maps[0].shape[2:], mode="bilinear") for feature in maps)


def pyramid(reads=Pyramid.reads, **options) -> SegmentationNetwork:
    torch.manual_seed(0)
    body = small_resnext(InPlaceABN, **{"output_stride": 16, **options})
    head = Pyramid([feature.channels for feature in features_read(body, reads, "Pyramid")])
    head.reads = reads
    return SegmentationNetwork(body, head, 4)


def test_a_head_reads_several_features_and_its_logits_have_the_cells_of_the_first():
    """Images are padded for the body, and the logits cut to the image."""
    network = pyramid().double()
    images = torch.randn(2, 3, 36, 41, dtype=torch.float64)
    assert (network.stride, network.grid) == (4, 16)
    outputs = network(images)
    assert outputs.main.logits.shape == (2, 4, 9, 11) and outputs.main[1:] == (4, 1) and outputs.auxiliary == ()
    with torch.no_grad():
        cells = network.eval()(images, cells=True)
        padded = F.pad(images, (0, 7, 0, 12), mode="replicate")
        maps = network.body(padded, ["mod2", "mod4", "mod5"])
        assert torch.equal(cells, network.cls(network.head(maps))[..., :9, :11])
        logits = network(images)
        assert torch.equal(logits, upsampled(cells, (36, 41), 4)) and logits.shape == (2, 4, 36, 41)
        assert network(images, upsampling="stretched").shape == logits.shape
        whole = predict(Forward(network, torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), *PLAIN), images)
    assert torch.equal(whole, logits.argmax(1))


def test_a_feature_that_a_body_lacks_and_a_result_of_other_cells_are_refused_by_name():
    with pytest.raises(ValueError, match=r"Pyramid reads features of stride 32, which ResNet lacks: it has mod2 "):
        pyramid(reads=(32, -1))
    with pytest.raises(ValueError, match="Pyramid reads the feature at place -5 from the end, which ResNet lacks"):
        pyramid(reads=(-5,))
    for wrong in (4, (), (4, 0), (4, "x")):
        with pytest.raises(ValueError, match="Pyramid has reads=.*: expected a tuple of strides above 0, or"):
            pyramid(reads=wrong)
    with pytest.raises(ValueError, match="Identity has out_channels=None: expected the number"):
        SegmentationNetwork(small_resnext(InPlaceABN), nn.Identity(), 4)
    assert pyramid(reads=(-1, -2, 4))(torch.randn(2, 3, 32, 32)).main.stride == 16
    assert (pyramid().unread_feature, pyramid(reads=(4, -2)).unread_feature) == ("", "mod5")
    frozen = pyramid(reads=(4, -2))
    frozen.body.requires_grad_(False)
    assert frozen.unread_feature == ""
    network = pyramid()
    network.head.forward = lambda features: network.head.convs[2](features[2])
    with pytest.raises(ValueError, match="Pyramid has 2x2 cells for images of 32x32 pixels: expected 8x8"):
        network(torch.randn(2, 3, 32, 32))


@pytest.mark.table
@pytest.mark.parametrize("recompute", ["blocks", "sqrt", "activations", "budget"])
def test_a_head_of_several_features_has_the_same_gradients_however_activations_are_saved(recompute):
    images = torch.randn(2, 3, 64, 64)

    def step(recompute: str) -> list[torch.Tensor]:
        network = pyramid()
        choose_recomputation(network, network.body, recompute, budget=360_000)
        for _ in range(3):
            torch.manual_seed(1)
            logits = network(images).main.logits
            (logits * torch.randn_like(logits)).sum().backward()
        return [parameter.grad for parameter in network.parameters()]

    assert all(map(torch.equal, step(recompute), step("none")))


def test_windows_of_a_body_coarser_than_the_logits_begin_at_its_cells():
    network = pyramid().eval()
    forward = Forward(network, torch.zeros(1, 3, 1, 1), torch.ones(1, 3, 1, 1), *PLAIN)
    for cells in (25, 16, 9):
        placed = windows_along(cells, 8, 0.25, step=4)
        total = torch.zeros(cells)
        for start, weights in placed:
            assert start % 4 == 0 and len(weights) == min(8, cells - start)
            total[start : start + 8] += weights
        torch.testing.assert_close(total, torch.ones(cells))
    images = torch.randint(256, (2, 3, 70, 101), dtype=torch.uint8)
    actual = predict(forward, images, Views(window=64), probabilities=True, windows=2)
    assert actual.shape == (2, 4, 70, 101)
    torch.testing.assert_close(actual.sum(1), torch.ones(2, 70, 101))
