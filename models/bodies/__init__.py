"""Bodies: images (N, 3, H, W) -> features (N, out_channels, H / output_stride, W / output_stride), or class logits."""

from models.bodies.resnext import ResNeXt, resnext101, resnext152
from models.bodies.wider_resnet import WiderResNet, wider_resnet38, wider_resnet38_a2

__all__ = ["ResNeXt", "WiderResNet", "resnext101", "resnext152", "wider_resnet38", "wider_resnet38_a2"]
