"""RevNets, and the pre-activation ResNets that they are compared with (Gomez et al., 2017, section 5 and table 5)."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from keepless import InPlaceABN, run_reversibly
from models.blocks import Convolutions, NormAct, residual_stage
from models.bodies.body import Body
from models.bodies.revnet_units import ResidualUnit, ReversibleUnit, Stem, in_autocast_dtype
from models.bodies.stem import STEM_STRIDES, build_stem, downsampling
from models.initialisation import initialise_truncated


class RevNet(Body):
    """A stem (mod1), stages of residual units (mod2, mod3, …) and a final norm (bn_out).

    In a RevNet each half of the channels is updated by a residual function of the other, and the backward pass restores
    every unit's input from its output. Only the images and the last output of every stage are saved.

    Under autocast the residual functions compute in low precision, but the sums that they are added to are in float32:
    their rounding errors would add up in the restored inputs.

    Args (in addition to `Body`):
        norm_act: it may not write over its input.
        structure: units in each of the four stages; with the CIFAR stem, three or four.
        channels: per stage, channels of a unit's convolutions: two values for 3x3, 3x3, three for a bottleneck of 1x1,
            3x3, 1x1. They must be even for a reversible unit: its two residual functions have half of them each.
        stem: "7x7" (ImageNet), "3x3" or "cifar", see `build_stem`. A norm follows its last convolution.
        reversible: False: a ResNet, where each unit adds one residual function of all channels to its input.
        keep_activations: compute the same as a RevNet, but keep all activations.
    """

    def __init__(
        self,
        norm_act: NormAct = InPlaceABN,
        classes: int = 0,
        output_stride: int = 32,
        *,
        in_channels: int = 3,
        structure: Sequence[int],
        channels: Sequence[Sequence[int]],
        stem_channels: int,
        stem: str = "cifar",
        reversible: bool = True,
        keep_activations: bool = False,
    ):
        super().__init__()
        if len(channels) != len(structure):
            raise ValueError(
                f"channels={tuple(map(tuple, channels))}: expected one entry per stage, and "
                f"structure={tuple(structure)} has {len(structure)}"
            )
        strides, self.output_stride = downsampling(structure, stem, output_stride)
        self.reversible = reversible
        self.keep_activations = keep_activations
        stem_layers = build_stem(stem, stem_channels, norm_act, last_norm=True, in_channels=in_channels)
        self.mod1 = Stem(OrderedDict(stem_layers.named_children()))
        in_channels = stem_channels
        unit = partial(ReversibleUnit if reversible else ResidualUnit, norm_act=norm_act)
        stages = zip(structure, channels, strides, strict=True)
        for number, (units, widths, (stride, dilation)) in enumerate(stages, start=2):
            first = Convolutions(in_channels, widths, stride, dilation)
            self.add_module(f"mod{number}", residual_stage(unit, first, units))
            in_channels = widths[-1]
        del self.get_submodule("mod2.block1.Fm").bn1  # the stem ends in a norm and activation
        self.bn_out = norm_act(in_channels)
        self.note_stages(STEM_STRIDES[stem], (widths[-1] for widths in channels), (stride for stride, _ in strides))
        self.add_classifier(in_channels, classes)
        initialise_truncated(self)

    def maps(self, images: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """See `Body.maps`."""
        if not self.reversible:
            return super().maps(images, ends)
        blocks = self._reversible_blocks()
        x = images
        maps = []
        begin = 0
        for number in ends:
            # Blocks after the stages up to this one. The chain goes on from what was returned, which it does not free.
            end = len(blocks) - sum(map(len, self.stage_modules()[number:]))
            x = run_reversibly(blocks[begin:end], x, disable=self.keep_activations)
            maps.append(x)
            begin = end
        if ends[-1] == len(self.feature_info):
            maps[-1] = self.normed(maps[-1])
        return maps

    def normed(self, x: Tensor) -> Tensor:
        """See `Body.normed`."""
        return self.bn_out(in_autocast_dtype(x))

    def _reversible_blocks(self) -> list[Any]:
        """The stem and the units of a RevNet, as `run_reversibly` takes them."""
        units: list[Any] = [unit for stage in self.stage_modules() for unit in stage]
        # A first unit without inverse would save the stem's output; with the stem, it saves only the images.
        if units[0].invertible or self.keep_activations or torch.compiler.is_compiling():
            return [self.mod1, *units]
        return [nn.Sequential(self.mod1, units[0]), *units[1:]]


def _basic(*widths: int) -> list[tuple[int, int]]:
    return [(width, width) for width in widths]


def _bottleneck(*widths: int) -> list[tuple[int, int, int]]:
    return [(width, width, 4 * width) for width in widths]


_residual = partial(RevNet, stem_channels=16, reversible=False)
_coupled = partial(RevNet, stem_channels=32)

# Parameters with CIFAR-10's classifier and with CIFAR-100's.
resnet32_cifar = partial(_residual, structure=(5, 5, 5), channels=_basic(16, 32, 64))  # 464,154 and 470,004
resnet110_cifar = partial(_residual, structure=(18, 18, 18), channels=_basic(16, 32, 64))  # 1,727,962 and 1,733,812
resnet164_cifar = partial(_residual, structure=(18, 18, 18), channels=_bottleneck(16, 32, 64))  # 1,703,258, 1,726,388
revnet38_cifar = partial(_coupled, structure=(3, 3, 3), channels=_basic(32, 64, 112))  # 464,890 and 475,060
revnet110_cifar = partial(_coupled, structure=(9, 9, 9), channels=_basic(32, 64, 128))  # 1,729,194 and 1,740,804
revnet164_cifar = partial(_coupled, structure=(9, 9, 9), channels=_bottleneck(32, 64, 128))  # 1,748,778 and 1,794,948

# Parameters with ImageNet's classifier.
preact_resnet101 = partial(  # 44,541,480
    RevNet,
    structure=(3, 4, 23, 3),
    channels=_bottleneck(64, 128, 256, 512),
    stem_channels=64,
    stem="7x7",
    reversible=False,
)
revnet104 = partial(  # 45,428,072
    RevNet, structure=(2, 2, 11, 2), channels=_bottleneck(128, 256, 512, 832), stem_channels=128, stem="7x7"
)
