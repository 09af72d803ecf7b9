"""RevNets, and the pre-activation ResNets that they are compared with (Gomez et al., 2017, section 5 and table 5)."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from models.blocks import NormAct, pooled_classifier, residual_stage
from models.bodies.revnet_units import ResidualUnit, ReversibleUnit, Stem, in_autocast_dtype
from models.bodies.stem import build_stem, downsampling
from models.initialisation import initialise_truncated
from models.layers import InPlaceABN, run_reversibly
from models.recomputation import run_blocks, units_of


class RevNet(nn.Module):
    """A stem (mod1), stages of residual units (mod2, mod3, …) and a final norm (bn_out).

    In a RevNet each half of the channels is updated by a residual function of the other, and the backward pass restores
    every unit's input from its output. Only the images and the last output of every stage are kept.

    Under autocast the residual functions compute in low precision, but the sums that they are added to are in float32:
    their rounding errors would add up in the restored inputs.

    Args:
        norm_act: number of channels -> norm followed by an activation. It may not write over its input.
        classes: above 0 adds global average pooling and a linear classifier (`classifier.fc`).
        output_stride: 32, or 16 or 8 to dilate the last one or two stages instead of striding. The parameters stay the
            same. With the CIFAR stem also 4 or 2.
        structure: units in each of the four stages; with the CIFAR stem, three or four.
        channels: per stage, channels of a unit's convolutions: two values for 3x3, 3x3, three for a bottleneck of 1x1,
            3x3, 1x1. A reversible unit has two residual functions with half as many channels each.
        stem_channels: channels of mod1.
        stem: "7x7" (ImageNet), "3x3" or "cifar", see `build_stem`. A norm follows its last convolution.
        reversible: False for a ResNet: each unit adds one residual function of all channels to its input.
        keep_activations: compute the same as a RevNet, but keep all activations.

    Attributes:
        out_channels: C of the features.
        output_stride: image pixels per feature cell; with the CIFAR stem at most 8, or 4 with three stages.
        classes: as given.
        recompute: how the units of a ResNet are checkpointed, see `recompute_blocks`.

    Raises:
        ValueError: an option has a value not listed above, or a reversible unit has an odd number of channels.
    """

    recompute = "none"

    mod2: nn.Sequential
    mod3: nn.Sequential
    mod4: nn.Sequential
    mod5: nn.Sequential

    def __init__(
        self,
        norm_act: NormAct = InPlaceABN,
        classes: int = 0,
        output_stride: int = 32,
        *,
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
        plan, self.output_stride = downsampling(structure, stem, output_stride)
        self.mod1 = Stem(OrderedDict(build_stem(stem, stem_channels, norm_act, last_norm=True).named_children()))
        in_channels = stem_channels
        unit = ReversibleUnit if reversible else ResidualUnit
        stages = zip(structure, channels, plan, strict=True)
        for number, (units, widths, (stride, dilation)) in enumerate(stages, start=2):
            block = partial(unit, norm_act=norm_act, dilation=dilation)
            first = partial(block, after_stem=True) if number == 2 else block
            stage = residual_stage(block, in_channels, widths, units, stride=stride, first_block=first)
            self.add_module(f"mod{number}", stage)
            in_channels = widths[-1]
        self.bn_out = norm_act(in_channels)
        self.classifier = pooled_classifier(in_channels, classes) if classes else None

        self.stages = len(structure)
        self.reversible = reversible
        self.keep_activations = keep_activations
        self.out_channels = in_channels
        self.classes = classes
        initialise_truncated(self)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) -> features (N, out_channels, ceil(H / output_stride), …), or logits (N, classes)."""
        if self.reversible:
            x = run_reversibly(self.reversible_blocks, images, disable=self.keep_activations)
        else:
            (x,) = run_blocks(units_of(self._stages(), self.recompute), self.mod1(images), self.recompute)
        x = self.bn_out(in_autocast_dtype(x))
        return x if self.classifier is None else self.classifier(x)

    @property
    def reversible_blocks(self) -> list[Any]:
        """The stem and the units, as `run_reversibly` takes them; none in a ResNet."""
        if not self.reversible:
            return []
        units: list[Any] = [unit for stage in self._stages() for unit in stage]
        # A first unit without inverse would keep the stem's output; with the stem, it keeps only the images.
        if units[0].invertible or self.keep_activations or torch.compiler.is_compiling():
            return [(self.mod1,), *units]
        return [(self.mod1, units[0]), *units[1:]]

    def _stages(self) -> list[nn.Sequential]:
        return [getattr(self, f"mod{number}") for number in range(2, self.stages + 2)]


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
