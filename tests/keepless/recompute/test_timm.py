"""Networks of timm, one of each family: the same outputs and gradients as the plain network, and no more bytes."""

import copy

import pytest
import torch
from torch import nn

from keepless import recompute_activations
from keepless.saved import kept_bytes
from tests.keepless.recompute.test_uses import loss_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of timm and its own imports

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


def build(name: str, pixels: int) -> nn.Module:
    """In float64. What starts from zeros is random: behind zeros, all gradients would be zero."""
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
    return network.double()


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family):
    name, _, pixels = family.partition(":")
    size = int(pixels or 64)
    plain, images = build(name, size), torch.randn(2, 3, size, size, dtype=torch.float64)
    prepared = recompute_activations(copy.deepcopy(plain))
    kept, results = [], []
    for network in (prepared, plain):
        kept.append(kept_bytes(network, lambda n=network: loss_of(n, images), [images]))
        loss = loss_of(network, images)
        results.append((loss, torch.autograd.grad(loss, list(network.parameters()), materialize_grads=True)))
    (ours, gradients), (theirs, expected) = results
    assert kept[0] < kept[1] and torch.equal(ours, theirs)
    largest = max(gradient.abs().max().item() for gradient in expected)
    assert max((a - b).abs().max().item() for a, b in zip(gradients, expected, strict=True)) <= 1e-12 * largest
    assert all(torch.equal(a, b) for a, b in zip(prepared.buffers(), plain.buffers(), strict=True))
