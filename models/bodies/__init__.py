"""Bodies: images (N, C, H, W) -> features (N, out_channels, H / output_stride, W / output_stride), or class logits."""

from models.bodies.body import Body
from models.bodies.densenet import DenseNet, densenet264
from models.bodies.library import LibraryBody, timm_body, torchvision_body
from models.bodies.resnet import ResNet, ResNeXt, resnet18, resnet34, resnet50, resnet101, resnext101, resnext152
from models.bodies.revnet import (
    RevNet,
    preact_resnet101,
    resnet32_cifar,
    resnet110_cifar,
    resnet164_cifar,
    revnet38_cifar,
    revnet104,
    revnet110_cifar,
    revnet164_cifar,
)
from models.bodies.wider_resnet import WiderResNet, wider_resnet38, wider_resnet38_a2
