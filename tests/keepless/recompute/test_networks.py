"""Networks of torchvision keep a share of their bytes, with the same gradients: narrow ones, and slowly whole ones."""

import copy
from functools import partial

import pytest
import torch
import torchvision
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import Bottleneck

from keepless import recompute_activations
from keepless.saved import kept_bytes
from tests.keepless.recompute.test_uses import assert_same, gradients, loss_of

networks = torchvision.models
SQUEEZED = partial(InvertedResidualConfig, 16, 3, 32, 16, True)
# {network: (how to make it, kept bytes in training, relative to the plain network)}
NARROW = {
    "resnet": (lambda: networks.ResNet(Bottleneck, [1, 1, 1, 1], num_classes=5, width_per_group=8), 0.63),
    "densenet": (lambda: networks.DenseNet(8, (2, 2), 16, num_classes=5), 0.40),
    "mobilenet_v2": (lambda: networks.MobileNetV2(5, 0.25, [[1, 16, 1, 1], [6, 24, 2, 2], [6, 32, 1, 2]]), 0.40),
    "mobilenet_v3": (lambda: networks.MobileNetV3([SQUEEZED("HS", 2, 1, 1.0), SQUEEZED("RE", 1, 1, 1.0)], 32, 5), 0.37),
    "efficientnet": (lambda: networks.EfficientNet([MBConvConfig(4, 3, 2, 16, 24, 2, 1, 1)], 0.2, num_classes=5), 0.33),
    "shufflenet": (lambda: networks.ShuffleNetV2([2, 2, 2], [8, 16, 32, 64, 64], 5), 0.48),
    "swin": (lambda: networks.SwinTransformer([4, 4], 16, [1, 2], [1, 2], [7, 7], num_classes=5), 0.75),
}
WHOLE = {
    "resnet50": 0.60,
    "densenet121": 0.25,
    "mobilenet_v2": 0.37,
    "efficientnet_b0": 0.34,
    "regnet_y_400mf": 0.52,
    "shufflenet_v2_x1_0": 0.50,
    "mobilenet_v3_large": 0.48,
    "swin_t": 0.73,
}
CASES = [pytest.param(make, share, id=name) for name, (make, share) in NARROW.items()]
for name, share in WHOLE.items():
    CASES.append(pytest.param(getattr(networks, name), share, id=name + " whole", marks=pytest.mark.slow))


@pytest.mark.parametrize("make, share", CASES)
def test_networks_keep_a_share_of_their_bytes(make, share):
    torch.manual_seed(0)
    plain, images = make().double(), torch.randn(2, 3, 64, 64, dtype=torch.float64)
    prepared = recompute_activations(copy.deepcopy(plain))
    kept = [kept_bytes(network, lambda n=network: loss_of(n, images), [images]) for network in (prepared, plain)]
    assert round(kept[0] / kept[1], 2) <= share
    for training in (True, False):
        assert_same(gradients(prepared.train(training), images), gradients(plain.train(training), images))
    assert all(map(torch.equal, prepared.buffers(), plain.buffers()))
