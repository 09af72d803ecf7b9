"""Bodies: images (N, 3, H, W) -> features (N, out_channels, H / output_stride, W / output_stride), or class logits."""

from models.bodies.densenet import DenseNet, densenet264
from models.bodies.resnet import ResNet, resnet34, resnet50, resnet101
from models.bodies.resnext import ResNeXt, resnext101, resnext152
from models.bodies.wider_resnet import WiderResNet, wider_resnet38, wider_resnet38_a2

Body = DenseNet | ResNet | ResNeXt | WiderResNet

__all__ = [
    "Body",
    "DenseNet",
    "ResNeXt",
    "ResNet",
    "WiderResNet",
    "densenet264",
    "resnet101",
    "resnet34",
    "resnet50",
    "resnext101",
    "resnext152",
    "wider_resnet38",
    "wider_resnet38_a2",
]
