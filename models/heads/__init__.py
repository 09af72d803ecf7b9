"""Heads: features of a body -> features for a 1x1 convolution to classify."""

from models.heads.deeplabv3 import DeepLabV3
from models.heads.fcn import FCN

__all__ = ["FCN", "DeepLabV3"]
