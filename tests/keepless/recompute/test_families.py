"""Networks of torchvision and timm keep a share of their bytes, with the same results."""

from functools import partial

import pytest
import torch
import torchvision
from torch import nn
from torchvision.models.efficientnet import MBConvConfig
from torchvision.models.mobilenetv3 import InvertedResidualConfig
from torchvision.models.resnet import Bottleneck

from keepless.saved import kept_bytes
from tests.keepless.recompute.ahead import pair

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
# NAME or NAME:PIXELS, if it takes no images of 64 pixels.
FAMILIES = """
    bat_resnext26ts:256 botnet26t_256:256 cait_xxs24_224 coat_tiny convformer_s18 convit_tiny convnext_atto
    convnextv2_atto cpubone_nano cs3darknet_s csatv2:256 darknet17 dla46_c ecaresnet26t edgenext_xx_small
    efficientformerv2_s0 efficientnet_b0 efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim
    eva02_tiny_patch14_224:56 fasternet_t0 fastvit_t8 ghostnet_050 ghostnetv2_100 gmlp_ti16_224 halonet26t:256
    hardcorenas_a hgnetv2_b0 hrnet_w18_small inception_next_atto iformer_t lambda_resnet26t lcnetv2_base
    legacy_seresnet18 levit_128s:224 mambaout_femto mixnet_s mobilenetv3_small_050 mobilenetv4_conv_small
    mobilevit_xxs mobilevitv2_050 nest_tiny nf_regnet_b0 pit_ti_224:224 poolformer_s12 pvt_v2_b0 regnety_002
    regnetz_005 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_14w_8s resmlp_12_224 resnest14d resnetv2_18
    rexnet_100 shvit_s1:224 skresnet18 starnet_s050 swiftformer_xs swinv2_tiny_window8_256 test_coatnet test_maxvit
    test_nfnet test_resnet test_vit test_vit_relpos tiny_vit_5m_224:224 tnt_s_patch16_224 tresnet_m twins_svt_small
    visformer_tiny vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224
""".split()


def of_timm(name: str, pixels: int) -> nn.Module:
    """A network of timm. Weights that start at zero would make all gradients before them zero, so they are random."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    try:
        network = timm.create_model(name, num_classes=5, img_size=pixels)
    except TypeError:  # it takes images of any size
        network = timm.create_model(name, num_classes=5)
    with torch.no_grad():
        for parameter in network.parameters():
            if not parameter.any():
                parameter.normal_(std=0.02)
    return network


CASES = [pytest.param(make, 64, share, id=name) for name, (make, share) in NARROW.items()]
for family in FAMILIES:
    name, _, pixels = family.partition(":")
    size = int(pixels or 64)
    CASES.append(pytest.param(partial(of_timm, name, size), size, 1.0, id=name, marks=[pytest.mark.slow]))


@pytest.mark.table
@pytest.mark.parametrize("make, pixels, share", CASES)
def test_families(make, pixels, share):
    torch.manual_seed(0)
    (plain, prepared), kept, results = pair(make().double()), [], []
    images = torch.randn(2, 3, pixels, pixels, dtype=torch.float64)
    for network in (prepared, plain):

        def loss_of(network: nn.Module = network) -> torch.Tensor:
            torch.manual_seed(1)
            return network(images).square().mean()

        kept.append(kept_bytes(network, loss_of, [images]))
        parameters = list(network.parameters())
        loss = loss_of()
        results.append([loss, *torch.autograd.grad(loss, parameters, materialize_grads=True)])
        loss = loss_of(network.eval())
        results[-1] += [loss, *torch.autograd.grad(loss, parameters, materialize_grads=True), *network.buffers()]
    assert kept[0] < kept[1] and round(kept[0] / kept[1], 2) <= share
    largest = max(expected.abs().max().item() for expected in results[1])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12 * max(1.0, largest))
