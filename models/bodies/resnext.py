"""ResNeXt with pre-activation bottlenecks (in-place ABN paper, sections 4.1 and 4.2), with the names of its release."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor, nn

from models.blocks import IdentityResidualBlock, NormAct, pooled_classifier, residual_stage
from models.bodies.stem import build_stem, downsampling
from models.initialisation import initialise
from models.layers import InPlaceABN
from models.recomputation import run_blocks, units_of


class ResNeXt(nn.Module):
    """A stem (mod1), stages of grouped bottlenecks (mod2, mod3, …) and a final norm (bn_out).

    Args:
        norm_act: number of channels -> norm followed by an activation.
        classes: above 0 adds global average pooling and a linear classifier (`classifier.fc`).
        output_stride: 32, or 16 or 8 to dilate the last one or two stages instead of striding. The parameters stay the
            same, and every second or fourth cell of the dilated network has the strided network's features. With the
            CIFAR stem also 4 or 2.
        structure: blocks in each of the four stages; with the CIFAR stem, three or four.
        groups: cardinality of the 3x3 convolutions.
        base_channels: channels of the three convolutions in mod2's bottlenecks; doubled in each later stage.
        stem_channels: channels of mod1.
        stem: "3x3" (released), "7x7" or "cifar", see `build_stem`. No norm follows its last convolution.

    Attributes:
        out_channels: C of the features.
        output_stride: image pixels per feature cell; with the CIFAR stem at most 8, or 4 with three stages.
        classes: as given.
        recompute: how the blocks are checkpointed, see `recompute_blocks`.

    Raises:
        ValueError: an option has a value not listed above, or groups do not divide the channels.
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
        groups: int = 64,
        base_channels: Sequence[int] = (128, 128, 256),
        stem_channels: int = 64,
        stem: str = "3x3",
    ):
        super().__init__()
        if len(base_channels) != 3:
            raise ValueError(f"base_channels={tuple(base_channels)}: expected three, for the bottleneck's convolutions")

        plan, self.output_stride = downsampling(structure, stem, output_stride)
        self.mod1 = build_stem(stem, stem_channels, norm_act, last_norm=False)
        in_channels = stem_channels
        for index, (blocks, (stride, dilation)) in enumerate(zip(structure, plan, strict=True)):
            block = partial(IdentityResidualBlock, norm_act=norm_act, dilation=dilation, groups=groups)
            channels = [c * 2**index for c in base_channels]
            self.add_module(f"mod{index + 2}", residual_stage(block, in_channels, channels, blocks, stride=stride))
            in_channels = channels[-1]
        self.bn_out = norm_act(in_channels)
        self.classifier = pooled_classifier(in_channels, classes) if classes else None

        self.stages = len(structure)
        self.out_channels = in_channels
        self.classes = classes
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) -> features (N, out_channels, ceil(H / output_stride), …), or logits (N, classes)."""
        blocks = units_of((getattr(self, f"mod{number}") for number in range(2, self.stages + 2)), self.recompute)
        (x,) = run_blocks(blocks, self.mod1(images), self.recompute)  # the stem has stride 4, or 1 with CIFAR's
        x = self.bn_out(x)
        return x if self.classifier is None else self.classifier(x)


# The paper does not say which stem it used. The released checkpoints have the 3x3 one, hence the default.

resnext101 = partial(ResNeXt, structure=(3, 4, 23, 3))  # 40,853,312 parameters without classifier
resnext152 = partial(ResNeXt, structure=(3, 8, 36, 3))  # 56,110,912
