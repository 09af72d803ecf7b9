"""The stem (mod1) of bodies, and the strides and dilations of the stages after it."""

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from models.blocks import NormAct, conv3x3
from models.pooling import MaxPool2d

STEM_STRIDES = {"3x3": 4, "7x7": 4, "cifar": 1}


def build_stem(kind: str, channels: int, norm_act: NormAct, *, last_norm: bool, in_channels: int) -> nn.Sequential:
    """Build mod1: (N, in_channels, H, W) -> (N, channels, ceil(H / stride), …), with the stride in STEM_STRIDES.

    Args:
        kind: "3x3" (three 3x3 convolutions and max-pooling), "7x7" (one convolution and max-pooling) or "cifar" (one
            3x3 convolution, for images of 32 pixels).
        last_norm: add a norm and activation after the last convolution too; pre-activation stages start with theirs.
        in_channels: of the images.
    """
    if kind == "3x3":
        convs = [conv3x3(in_channels, channels, stride=2), conv3x3(channels, channels), conv3x3(channels, channels)]
    elif kind == "7x7":
        convs = [nn.Conv2d(in_channels, channels, 7, stride=2, padding=3, bias=False)]
    else:
        assert kind == "cifar", kind  # `downsampling` has checked it
        convs = [conv3x3(in_channels, channels)]
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, conv in enumerate(convs, start=1):
        layers[f"conv{number}"] = conv
        if number < len(convs) or last_norm:
            layers[f"bn{number}"] = norm_act(channels)
    if STEM_STRIDES[kind] == 4:
        layers["pool"] = MaxPool2d(3, stride=2, padding=1)
    return nn.Sequential(layers)


def downsampling(structure: Sequence[int], kind: str, output_stride: int) -> tuple[list[tuple[int, int]], int]:
    """The (stride, dilation) of each stage after a stem, and the network's output stride.

    The stages have strides 1, 2, 2, 2 and stop downsampling at `output_stride`. After the CIFAR stem, four stages reach
    8 and three reach 4, so a larger `output_stride` changes nothing there.

    ValueError if the stem is not known, the number of stages does not fit it, or see `dilate_strides`.
    """
    if kind not in STEM_STRIDES:
        raise ValueError(f"stem={kind!r}: expected '3x3' or '7x7', or 'cifar' for images of 32 pixels")
    if len(structure) != 4 and not (len(structure) == 3 and kind == "cifar"):
        raise ValueError(
            f"structure={tuple(structure)}: expected four numbers of blocks, one per stage (with stem='cifar' three or "
            f"four), but stem={kind!r}"
        )
    stem_stride = STEM_STRIDES[kind]
    stages = dilate_strides((1, 2, 2, 2)[: len(structure)], stem_stride=stem_stride, output_stride=output_stride)
    return stages, stem_stride * math.prod(stride for stride, _ in stages)


def dilate_strides(strides: Sequence[int], *, stem_stride: int, output_stride: int) -> list[tuple[int, int]]:
    """The (stride, dilation) of each stage for a network that stops downsampling at `output_stride`.

    Once the output stride is reached, further strides multiply the dilation instead, starting with the first block of
    their stage. At output stride 8, strides (1, 2, 2, 2) after a stem of stride 4 become dilations (1, 1, 2, 4).

    ValueError if output_stride is not a power of two from twice the stem's stride to 32.
    """
    allowed = [stride for stride in (2, 4, 8, 16, 32) if stride >= 2 * stem_stride]
    if output_stride not in allowed:
        raise ValueError(
            f"output_stride={output_stride}: expected {', '.join(map(str, allowed[:-1]))} or {allowed[-1]} after a "
            f"stem of stride {stem_stride}; 8 is usual for segmentation, 32 for classification"
        )
    stages = []
    reached_stride = stem_stride
    dilation = 1
    for stride in strides:
        if reached_stride < output_stride:
            reached_stride *= stride
            stages.append((stride, dilation))
        else:
            dilation *= stride
            stages.append((1, dilation))
    return stages
