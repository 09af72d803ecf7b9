"""DenseNet with bottlenecks and compression (Huang et al., 2017), with the names of the in-place ABN release."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keepless import InPlaceABN
from models.blocks import NormAct, conv3x3
from models.bodies.body import Body
from models.bodies.stem import STEM_STRIDES, build_stem, downsampling
from models.initialisation import initialise
from models.recomputation import Block, Tensors, chain, run_blocks

BOTTLENECK = 4  # output channels of a 1x1 convolution, in units of the growth


class DenseModule(nn.Module):
    """Layers that each see the outputs of all layers before them: x_j = F_j([x_0, …, x_j-1]).

    F is a norm and activation, a 1x1 convolution to 4 growth channels, a norm and activation, and a 3x3 convolution to
    `growth` channels. For the backward pass a layer saves its concatenated input, the first convolution's output and
    the activations of both with a standard norm, but only the activations with an in-place norm.

    Args:
        in_channels: C of the input.
        layers: number of layers; each adds `growth` channels.
        norm_act: as in `Body`. It may write over its input: every concatenation is a tensor of its own.
        dilation: of the 3x3 convolutions.
    """

    def __init__(self, in_channels: int, layers: int, *, growth: int, norm_act: NormAct, dilation: int = 1):
        super().__init__()
        self.convs1 = nn.ModuleList()
        self.convs3 = nn.ModuleList()
        middle = BOTTLENECK * growth
        for channels in range(in_channels, in_channels + layers * growth, growth):
            conv1 = nn.Conv2d(channels, middle, 1, bias=False)
            self.convs1.append(nn.Sequential(OrderedDict(bn=norm_act(channels), conv=conv1)))
            conv3 = conv3x3(middle, growth, dilation=dilation)
            self.convs3.append(nn.Sequential(OrderedDict(bn=norm_act(middle), conv=conv3)))
        self.out_channels = in_channels + layers * growth

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, out_channels, H, W): the input and the outputs of all layers."""
        (parts,) = run_blocks(self.layers(), x, "none")
        return torch.cat(parts, dim=1)

    def layers(self, transition: nn.Module | None = None) -> list[Block]:
        """Each layer: [x_0, …, x_j-1] -> [x_0, …, x_j]. The first one begins with a transition, if there is one.

        A checkpointed layer saves only x_j, so a module's bytes grow in proportion to its layers.
        """
        pairs = zip(self.convs1, self.convs3, strict=True)
        return [partial(_run_layer, None if index else transition, *convs) for index, convs in enumerate(pairs)]


class DenseNet(Body):
    """A stem (mod1), dense modules (mod2, mod3, …) with transitions between them (tra2, …), a final norm (bn_out).

    A transition halves the channels and, unless its stage is dilated, the resolution.

    Args (in addition to `Body`):
        norm_act: it may write over its input.
        output_stride: the pooling before a dilated module is left out.
        structure: layers in each of the four dense modules; with the CIFAR stem, three or four. DenseNet-121 has
            (6, 12, 24, 16), -169 (6, 12, 32, 32), -201 (6, 12, 48, 32) and -264 (6, 12, 64, 48).
        growth: channels that each layer adds.
        stem: "3x3" (released), "7x7" or "cifar", see `build_stem`.
        stem_norm: a norm follows the stem's last convolution, as in the paper and torchvision; released: False.
    """

    def __init__(
        self,
        norm_act: NormAct = InPlaceABN,
        classes: int = 0,
        output_stride: int = 32,
        *,
        in_channels: int = 3,
        structure: Sequence[int],
        growth: int = 32,
        stem_channels: int = 64,
        stem: str = "3x3",
        stem_norm: bool = False,
    ):
        super().__init__()
        strides, self.output_stride = downsampling(structure, stem, output_stride)
        self.mod1 = build_stem(stem, stem_channels, norm_act, last_norm=stem_norm, in_channels=in_channels)
        in_channels = stem_channels
        widths = []
        for number, (layers, (stride, dilation)) in enumerate(zip(structure, strides, strict=True), start=2):
            if number > 2:
                self.add_module(f"tra{number - 1}", _transition(in_channels, stride, norm_act))
                in_channels //= 2
            module = DenseModule(in_channels, layers, growth=growth, norm_act=norm_act, dilation=dilation)
            self.add_module(f"mod{number}", module)
            in_channels = module.out_channels
            widths.append(in_channels)
        self.bn_out = norm_act(in_channels)
        self.note_stages(STEM_STRIDES[stem], widths, (stride for stride, _ in strides))
        self.add_classifier(in_channels, classes)
        initialise(self)

    def stage_units(self) -> list[list[Block]]:
        """See `Body.stage_units`."""
        modules = self.stage_modules()
        transitions = [None, *(getattr(self, f"tra{number}") for number in range(2, len(modules) + 1))]
        pairs: Any = zip(transitions, modules, strict=True)
        if self.recompute == "none":
            return [[partial(chain, *(module for module in pair if module is not None))] for pair in pairs]
        return [module.layers(transition) for transition, module in pairs]


def _run_layer(transition: nn.Module | None, convs1: nn.Module, convs3: nn.Module, *parts: Tensor) -> Tensors:
    if transition is not None:
        parts = (transition(torch.cat(parts, dim=1)),)
    return *parts, convs3(convs1(torch.cat(parts, dim=1)))


def _transition(in_channels: int, stride: int, norm_act: NormAct) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict(bn=norm_act(in_channels))
    if stride == 2:
        # The release pools after the convolution. Averaging before it gives the same function for a quarter of the
        # work, and the pooling saves the activation, which an in-place norm saves anyway. It drops the last row and
        # column of odd sizes; ours round up, like every other body.
        layers["pool"] = nn.AvgPool2d(2, ceil_mode=True)
    layers["conv"] = nn.Conv2d(in_channels, in_channels // 2, 1, bias=False)
    return nn.Sequential(layers)


densenet264 = partial(DenseNet, structure=(6, 12, 64, 48))  # 30,714,880 parameters without classifier
