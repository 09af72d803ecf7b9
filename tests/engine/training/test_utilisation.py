"""Model FLOPs utilisation: operations of a step, counted by hand, and the peaks of devices."""

import pytest
from torch import nn

from engine.training.utilisation import peak_flops, training_flops
from keepless import InPlaceABN
from tests.engine.learners import forward_of


def test_the_operations_of_a_step_are_those_of_its_convolutions():
    """A multiplication and an addition per weight and output pixel, forward and twice that backward."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), InPlaceABN(8), nn.Conv2d(8, 4, 1, stride=2))
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    by_hand = 2 * (3 * 8 * 9 * 16 * 16 + 8 * 4 * 8 * 8)
    assert training_flops(forward_of(network), crop=(16, 16)) == 3 * by_hand
    assert network.training and all(tensor.equal(before[name]) for name, tensor in network.state_dict().items())


@pytest.mark.parametrize(
    "device, precision, tf32, peak",
    [
        ("NVIDIA A100-SXM4-80GB", "bfloat16", False, 312e12),
        ("NVIDIA A100-SXM4-80GB", "float32", True, 156e12),
        ("NVIDIA A100-SXM4-80GB", "float32", False, 19.5e12),
        ("NVIDIA H100 PCIe", "float16", True, 756e12),
        ("NVIDIA H100 80GB HBM3", "float16", True, 989e12),
        ("NVIDIA RTX A1000 Laptop GPU", "bfloat16", False, None),
        ("cpu", "float32", False, None),
    ],
)
def test_peaks_are_of_the_device_and_its_precision(device, precision, tf32, peak):
    assert peak_flops(device, precision, tf32) == peak
