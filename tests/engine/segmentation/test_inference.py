"""Windows and views: when they equal the whole image, what is averaged, and how much memory they take."""

import math
from dataclasses import replace

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from datasets.transforms import scale_size
from engine.schema.segmentation import SegmentationRun
from engine.segmentation import inference
from engine.segmentation.inference import Views, predict, windows_along
from keepless import ABN
from keepless.recompute.step.costs import peak_bytes
from models.heads import DeepLabV3
from models.segmentation import SegmentationNetwork
from tests.engine.learners import forward_of

STRIDE = 4  # of `SmallBody`


class SmallBody(nn.Module):
    output_stride = STRIDE
    out_channels = 16

    def __init__(self):
        super().__init__()
        self.convolutions = nn.Sequential(
            *(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.ReLU()),
            nn.Conv2d(16, 16, 3, padding=1),
        )

    def forward(self, images):
        return self.convolutions(images)


def without_head(body: nn.Module, classes: int = 5) -> SegmentationNetwork:
    """Each cell sees a part of the image only, which DeepLabV3's pooling over a window would change."""
    head = nn.Identity()
    head.out_channels = body.out_channels
    network = SegmentationNetwork(body, head, classes)
    nn.init.normal_(network.cls.weight)  # otherwise one class wins everywhere
    return network


def small_network() -> SegmentationNetwork:
    torch.manual_seed(0)
    return without_head(SmallBody())


def test_an_image_that_needs_too_much_memory_is_named(monkeypatch):
    network = small_network()
    monkeypatch.setattr(network, "forward", lambda *_, **__: torch.empty(2**60, dtype=torch.uint8))
    for views in ({}, {"window": 16}):
        with pytest.raises(MemoryError, match="while an image of 32x48 pixels was evaluated.*window.size=1024"):
            predicted(network, pictures(32, 48), **views)
    with pytest.raises(MemoryError, match="while 3 images of 32x48 pixels were evaluated"):
        predicted(network, pictures(32, 48, count=3))


def pictures(height: int, width: int, count: int = 1) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 256, (count, 3, height, width), dtype=torch.uint8)


def predicted(network, images, base_size: int | None = None, precision: str = "float32", **views) -> torch.Tensor:
    forward = replace(forward_of(network, precision), memory_advice=SegmentationRun.evaluation_memory_advice)
    return predict(forward, images, Views(base_size, **views))


class Brightest(nn.Module):
    def forward(self, x):
        self.seen = x
        return x


@pytest.mark.parametrize("size, base_size", [((60, 90), 34), ((61, 47), 23), ((97, 33), 66), ((31, 40), 77)])
def test_antialiased_images_are_seen_as_pillow_resizes_them(size, base_size):
    """Pillow computes with 8-bit pixels and so rounds once more between the two axes. Enlarging needs no smoothing."""
    images = pictures(*size)
    network = Brightest()
    forward = forward_of(network, mean=0.0, std=1.0)
    seen = []
    for antialias in (True, False):
        predict(forward, images, Views(base_size, antialias))
        seen.append(network.seen[0] * 255)
    height, width = scale_size(size, base_size / max(size))
    pillow = Image.fromarray(images[0].permute(1, 2, 0).numpy()).resize((width, height), Image.Resampling.BILINEAR)
    assert (seen[0] - torch.tensor(np.array(pillow)).permute(2, 0, 1)).abs().max() <= 1.01
    difference = (seen[0] - seen[1]).abs().max()
    assert difference < 1e-3 if base_size > max(size) else difference > 5


def test_whole_images_are_seen_at_the_base_size_and_predicted_at_their_own():
    """Images are resized as OpenCV does without antialiasing, and predictions take their nearest pixel."""
    images = torch.randint(0, 256, (1, 3, 36, 60), dtype=torch.uint8)
    network = Brightest()
    forward = forward_of(network, mean=0.0, std=1.0)
    predictions = predict(forward, images, Views(base_size=20, antialias=False))
    resized = torch.from_numpy(cv2.resize(images[0].permute(1, 2, 0).numpy(), (20, 12))).permute(2, 0, 1)
    assert (network.seen[0] * 255 - resized).abs().max() <= 1
    assert predictions.shape == (1, 36, 60) and predictions.dtype == torch.uint8
    assert torch.equal(predictions, network.seen.argmax(dim=1).repeat_interleave(3, 1).repeat_interleave(3, 2).byte())
    at_full_size = predict(forward, images)
    assert torch.equal(at_full_size, images.float().argmax(dim=1).to(torch.uint8))


@pytest.mark.parametrize("base_size, window", [(None, None), (64, 64), (None, 96)])
def test_an_image_that_fits_the_window_is_predicted_at_once(window, base_size):
    """The network's own logits decide, to the bit: an average in float32 would have fewer ties."""
    torch.manual_seed(0)
    network = SegmentationNetwork(SmallBody(), DeepLabV3(16, 8, (2,), ABN, out_channels=8), classes=5)
    images = pictures(61, 64) if base_size is None else pictures(90, 128)
    predictions = predicted(network, images, base_size, "bfloat16", window=window)
    inputs = (images - 127.5) / 63.75
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        inputs = inputs if base_size is None else F.interpolate(inputs, (45, 64), mode="bilinear", antialias=True)
        expected = network(inputs.contiguous(memory_format=torch.channels_last)).argmax(dim=1).byte()
    expected = F.interpolate(expected[None], images.shape[-2:], mode="nearest-exact")[0]
    assert torch.equal(predictions, expected)


@pytest.mark.parametrize("size", [(61, 64), (64, 43), (5, 9)])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_many_scores_are_made_a_few_rows_at_a_time_to_the_bit(size, precision, monkeypatch):
    """Three rows of cells at a time, then all of them. The last cells reach beyond the image."""
    network = small_network()
    images = pictures(*size, count=2)
    results = []
    for most, at_once in ((2**26, 0), (0, 2 * 5 * 3 * 4 * 64), (0, 2**26)):
        monkeypatch.setattr(inference, "_MOST_SCORES", most)
        monkeypatch.setattr(inference, "_SCORES_AT_ONCE", at_once)
        forward = forward_of(network, precision)
        results.append([predict(forward, images), predict(forward, images, probabilities=True)])
    for parts in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], parts, strict=True))


def test_a_large_image_needs_no_logits_of_all_its_pixels():
    """2048x1024 pixels, 65 classes: logits of 520 MiB."""
    network = without_head(SmallBody(), classes=65)
    images = pictures(1024, 2048)
    assert peak_bytes(lambda: predicted(network, images), "cpu") < 280 * 2**20


@given(cells=st.integers(1, 200), window=st.integers(1, 64), overlap=st.floats(0, 0.99))
def test_windows_cover_every_cell_with_weights_that_sum_to_one(cells, window, overlap):
    (first, before), (second, after) = windows_along(cells=13, window=8, overlap=0.375)  # a linear cross-fade
    assert (first, second) == (0, 5) and torch.equal(after, before.flip(0))
    torch.testing.assert_close(before, torch.tensor([1, 1, 1, 1, 1, 0.75, 0.5, 0.25]))
    windows = windows_along(cells, window, overlap)
    total = torch.zeros(cells)
    for start, weights in windows:
        assert 0 <= start <= cells - len(weights) and len(weights) == min(window, cells) and (weights > 0).all()
        total[start : start + len(weights)] += weights
    torch.testing.assert_close(total, torch.ones(cells), rtol=0, atol=1e-6)
    starts = [start for start, _ in windows]
    least = math.floor(min(window, cells) * overlap - 1e-9)
    apart = [after - before for before, after in zip(starts, starts[1:], strict=False)]
    assert all(0 < step <= max(1, min(window, cells) - least) for step in apart)


@given(
    height=st.integers(1, 70),
    width=st.integers(1, 70),
    window=st.sampled_from([8, 20, 64]),
    overlap=st.floats(0, 0.7),  # more would take thousands of windows; their weights are tested above
    base_size=st.none() | st.integers(10, 70),
    scales=st.sampled_from([(1.0,), (0.7, 1.2)]),
)
@settings(max_examples=40)
def test_every_pixel_of_any_size_is_predicted(height, width, window, overlap, base_size, scales):
    """The cells of this network are independent, so tiles can differ from the whole image only where they blend."""
    body = nn.AvgPool2d(1)
    body.out_channels, body.output_stride = 3, 1
    network = without_head(body, classes=3)
    with torch.no_grad():
        network.cls.weight.copy_(torch.eye(3)[..., None, None])
        network.cls.bias.copy_(torch.tensor([0, 0.0371, 0.1137]))  # no ties half way between two pixels
    images = torch.zeros(1, 3, height, width, dtype=torch.uint8)
    rows = torch.arange(height)[:, None] * 5
    columns = torch.arange(width)
    images[0].scatter_(0, ((rows + columns) // 40 % 3)[None], 255)  # class by class in oblique stripes
    predictions = predicted(network, images, base_size, window=window, overlap=overlap, scales=scales)
    whole = predicted(network, images, base_size, scales=scales)
    assert predictions.shape == (1, height, width)
    assert torch.equal(predictions, whole)


def upsampled(network: nn.Module, seen: torch.Tensor, size: tuple[int, int], upsampling: str) -> torch.Tensor:
    """Logits at `size` of an image seen at another size: a cell covers `STRIDE` pixels of what is seen."""
    cells = network(seen, upsampling, cells=True)
    places = []
    for side, pixels, count in zip(size, seen.shape[2:], cells.shape[2:], strict=True):
        covered = STRIDE * count if upsampling == "exact" else pixels
        place = ((torch.arange(side) + 0.5) * pixels / side * count / covered - 0.5).clamp(0, count - 1)
        places.append(place / max(1, count - 1) * 2 - 1)
    grid = torch.stack(torch.meshgrid(*places, indexing="ij")[::-1], dim=-1)
    return F.grid_sample(cells, grid[None], mode="bilinear", align_corners=True)


@pytest.mark.parametrize(
    "flip, antialias, base_size, window, upsampling",
    [
        (False, True, None, None, "exact"),
        (True, True, 128, 64, "exact"),
        (True, False, None, 64, "stretched"),
        (True, False, 128, None, "exact"),
    ],
)
def test_views_are_averaged_after_the_softmax(flip, antialias, base_size, window, upsampling):
    """Views are scales of the base size, mirrored and mirrored back; windows of a view see what it sees."""
    network = small_network()
    images = pictures(77, 110)
    scales = (0.7, 1.0, 1.2) if window is None else (0.3, 0.5)  # of which every one fits the window
    options = dict(scales=scales, flip=flip, antialias=antialias, upsampling=upsampling)
    predictions = predicted(network, images, base_size, **options, window=window)

    normalised = (images / 255 - 0.5) / 0.25
    factor = 1 if base_size is None else base_size / 110
    size = scale_size((77, 110), factor)
    probabilities = []
    with torch.inference_mode():
        for scale in scales:
            seen_size = scale_size((77, 110), scale * factor)
            seen = F.interpolate(normalised, seen_size, mode="bilinear", antialias=antialias)
            probabilities.append(upsampled(network, seen, size, upsampling).softmax(1))
            if flip:
                mirrored = upsampled(network, seen.flip(3), size, upsampling).flip(3)
                probabilities.append(mirrored.softmax(1))
    expected = torch.stack(probabilities).mean(0).argmax(1)[:, None].float()
    expected = F.interpolate(expected, (77, 110), mode="nearest-exact")[:, 0].byte()
    assert (predictions == expected).float().mean() > 0.999  # but for near ties
    assert (predictions != predicted(network, images, base_size)).float().mean() > 0.01


@pytest.mark.parametrize("size", [(76, 73), (73, 121), (121, 76)])
@pytest.mark.parametrize(
    "views",
    [{}, {"window": 32}, {"flip": True}, {"scales": (0.7, 1.3)}, {"window": 64, "scales": (1.5,), "flip": True}],
)
def test_pixels_are_where_the_cells_saw_them(size, views):
    """A ramp of columns, and one of rows, come back as they are, except from cells that the image does not fill."""
    ramps = [torch.arange(side, dtype=torch.uint8) for side in size]
    image = torch.stack([ramps[1].expand(size), ramps[0][:, None].expand(size), torch.zeros(size, dtype=torch.uint8)])
    body = nn.AvgPool2d(8)
    body.out_channels, body.output_stride = 3, 8
    network = without_head(body, classes=3)
    with torch.no_grad():
        network.cls.weight.copy_(0.05 * torch.eye(3)[..., None, None])
    forward = forward_of(network, mean=0.0, std=1 / 255)
    logs = predict(forward, image[None], Views(**views), probabilities=True)[0].double().log()
    positions = (logs[:2] - logs[2]) / 0.05  # the third class has no logit
    middle = (..., slice(16, -16), slice(16, -16))
    torch.testing.assert_close(positions[middle], image[:2].double()[middle], rtol=0, atol=0.02)


@pytest.mark.parametrize("views, factor", [({}, None), ({"scales": (0.7, 1.0, 1.2), "flip": True}, 0.9)])
def test_memory_is_of_a_window_and_not_of_the_image(views, factor, monkeypatch):
    """Neither logits nor probabilities of all pixels exist at once, with one view or six."""
    monkeypatch.setattr("engine.segmentation.inference._SCORES_AT_ONCE", 2**14)
    network = small_network()
    images = pictures(800, 100)
    size = factor and int(800 * factor)
    of_windows, of_whole = (
        peak_bytes(lambda window=window: predicted(network, images, size, window=window, **views), "cpu")
        for window in (64, None)
    )
    assert of_windows < 0.3 * of_whole


@pytest.mark.parametrize("base_size", [None, 17, 61])
@pytest.mark.parametrize("views", [{}, {"window": 16}, {"flip": True, "scales": (1.0, 0.7)}])
def test_probabilities_are_passed_on_in_rows_as_they_are_returned(views, base_size, monkeypatch):
    """Every pixel of the image once, also where predictions are resized; the predictions stay."""
    network = small_network()
    images = pictures(30, 43, count=2)
    parts = []
    expected = predicted(network, images, base_size, **views)
    forward = forward_of(network, channels_last=False)
    seen = Views(base_size=base_size, **views)
    monkeypatch.setattr(inference, "_MOST_SCORES", 100)
    monkeypatch.setattr(inference, "_SCORES_AT_ONCE", 1000)
    whole = predict(forward, images, seen, probabilities=True)
    predictions = predict(forward, images, seen, on_probabilities=lambda *part: parts.append(part))
    assert torch.equal(predictions, expected)
    rows = [row for _, part in parts for row in range(part.start, part.stop)]
    assert len(parts) > 2 and rows == [*range(30)]
    assert torch.equal(torch.cat([part for part, _ in parts], dim=2), whole)
