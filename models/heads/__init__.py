"""Heads: the features of a body -> features that a 1x1 convolution classifies."""

from models.heads.deeplabv3 import DeepLabV3

__all__ = ["DeepLabV3"]
