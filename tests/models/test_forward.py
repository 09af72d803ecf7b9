"""Images reach the network normalised, in the run's precision and memory format."""

import pytest
import torch
from torch import nn

from engine import assemble
from tests.runs import run_config


class Recorder(nn.Conv2d):
    def forward(self, x):
        self.seen = x
        return super().forward(x)


@pytest.mark.parametrize(
    "precision, channels_last", [("float32", True), ("float32", False), ("bfloat16", True), ("float16", False)]
)
def test_a_forward_pass_is_normalisation_autocast_and_network_to_the_bit(precision, channels_last):
    torch.manual_seed(0)
    net, pixels = Recorder(3, 5, 3, padding=1), torch.randint(0, 256, (2, 3, 13, 17), dtype=torch.uint8)
    overrides = (f"trainer.precision={precision}", f"trainer.channels_last={channels_last}")
    config = run_config(*overrides, "data.mean=[0.1,0.2,0.4]", "data.std=[0.25,0.5,1]")
    forward = assemble.forward(config, net, torch.device("cpu"))
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
