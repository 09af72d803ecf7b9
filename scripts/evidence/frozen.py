"""Networks with frozen parts, as in fine-tuning: convolutions and norms in eval mode without trained parameters."""

import torchvision
from torch import Tensor, nn
from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
from torchvision.models.resnet import Bottleneck


def frozen(network: nn.Module) -> nn.Module:
    return network.eval().requires_grad_(False)


def convolutions() -> nn.Module:
    """Six frozen convolutions with ReLU after one that learns."""
    layers = [layer for _ in range(6) for layer in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), frozen(nn.Sequential(*layers)))


def resnet50() -> nn.Module:
    """A frozen ResNet-50 between a stem and a head that learn, as for images of other channels."""
    network = frozen(torchvision.models.resnet50())
    network.conv1.requires_grad_(True)
    network.fc.requires_grad_(True)
    return network


class _Adapted(nn.Module):
    """A frozen block, and two narrow convolutions that learn to correct its result."""

    def __init__(self, block: nn.Module):
        super().__init__()
        assert isinstance(block, Bottleneck)
        channels = block.conv3.out_channels
        self.block = block
        self.adapter = nn.Sequential(
            nn.Conv2d(channels, channels // 16, 1), nn.ReLU(), nn.Conv2d(channels // 16, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.block(x)
        return y + self.adapter(y)


def resnet50_adapters() -> nn.Module:
    """A frozen ResNet-50 with an adapter after each block."""
    network = frozen(torchvision.models.resnet50())
    for name in ("layer1", "layer2", "layer3", "layer4"):
        stage = network.get_submodule(name)
        setattr(network, name, nn.Sequential(*(_Adapted(block) for block in stage.children())))
    network.fc.requires_grad_(True)
    return network


def fpn_resnet50() -> nn.Module:
    """The feature pyramid of a detector in fine-tuning: all norms are frozen, and the stem and the first stage."""
    network = resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=nn.BatchNorm2d, trainable_layers=3)
    for norm in filter(lambda module: isinstance(module, nn.BatchNorm2d), network.modules()):
        frozen(norm)
    return network


NETWORKS = {build.__name__: build for build in (convolutions, resnet50, resnet50_adapters, fpn_resnet50)}
