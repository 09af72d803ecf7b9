"""Images reach the network normalised, resized if asked, in the run's precision and memory format."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from engine import assemble
from tests.engine.learners import forward_of
from tests.runs import run_config

CPU = torch.device("cpu")


class Recorder(nn.Conv2d):
    """Records its arguments."""

    def forward(self, x, **options):
        self.seen, self.options = x, options
        return super().forward(x)


def network() -> Recorder:
    torch.manual_seed(0)
    return Recorder(3, 5, 3, padding=1)


def images(*size: int, count: int = 2) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8)


@pytest.mark.parametrize(
    "precision, channels_last", [("float32", True), ("float32", False), ("bfloat16", True), ("float16", False)]
)
def test_a_forward_pass_is_normalisation_autocast_and_network_to_the_bit(precision, channels_last):
    net, pixels = network(), images(13, 17)
    overrides = (f"trainer.precision={precision}", f"trainer.channels_last={channels_last}")
    config = run_config(*overrides, "data.mean=[0.1,0.2,0.4]", "data.std=[0.25,0.5,1]")
    forward = assemble.forward(config, net, CPU)
    logits = forward(pixels)

    memory_format = torch.channels_last if channels_last else torch.contiguous_format
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) * 255 for values in ([0.1, 0.2, 0.4], [0.25, 0.5, 1.0]))
    inputs = ((pixels - mean) / std).contiguous(memory_format=memory_format)
    low = precision != "float32"
    with torch.autocast("cpu", getattr(torch, precision) if low else torch.bfloat16, enabled=low):
        expected = net(inputs)
    assert logits.dtype == expected.dtype == getattr(torch, precision)
    assert torch.equal(logits, expected) and logits.stride() == expected.stride()
    assert not torch.is_autocast_enabled("cpu")
    assert torch.equal(logits, forward(pixels.float()))  # as benchmarks draw them; they keep their dtype until then
    logits.float().square().mean().backward()
    assert net.weight.grad.abs().sum() > 0
    for tensor in (net.seen, net.weight):
        assert tensor.is_contiguous(memory_format=memory_format) and tensor.dtype == torch.float32


@pytest.mark.parametrize("antialias", [True, False])
def test_images_are_resized_only_if_that_changes_their_size(antialias):
    """They are resized bilinearly, after normalisation."""
    net = network()
    forward, pixels = forward_of(net), images(12, 20)
    at_own_size = forward(pixels, at=(12, 20))
    assert torch.equal(at_own_size, forward(pixels)) and torch.equal(net.seen, forward.normalised(pixels))
    for size in ((6, 10), (24, 20), (7, 33)):
        logits = forward(pixels, at=size, antialias=antialias)
        resized = F.interpolate(forward.normalised(pixels), size, mode="bilinear", antialias=antialias)
        assert torch.equal(net.seen, resized)
        assert net.seen.is_contiguous(memory_format=torch.channels_last) and logits.shape == (2, 5, *size)
