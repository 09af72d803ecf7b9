"""ResNeXt with pre-activation bottlenecks (in-place ABN paper, sections 4.1 and 4.2), with the names of its release."""

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from keepless import InPlaceABN
from models.blocks import IdentityResidualBlock, NormAct, residual_stage
from models.bodies.body import Body
from models.bodies.stem import build_stem, downsampling
from models.initialisation import initialise


class ResNeXt(Body):
    """A stem (mod1), stages of grouped bottlenecks (mod2, mod3, …) and a final norm (bn_out).

    Every second or fourth cell of a dilated network has the strided network's features.

    Args (in addition to `Body`):
        structure: blocks in each of the four stages; with the CIFAR stem, three or four.
        groups: cardinality of the 3x3 convolutions; divides their channels.
        base_channels: channels of the three convolutions in mod2's bottlenecks; doubled in each later stage.
        stem: "3x3" (released), "7x7" or "cifar", see `build_stem`. No norm follows its last convolution.
    """

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

        strides, self.output_stride = downsampling(structure, stem, output_stride)
        self.stages = len(structure)
        self.mod1 = build_stem(stem, stem_channels, norm_act, last_norm=False)
        in_channels = stem_channels
        for index, (blocks, (stride, dilation)) in enumerate(zip(structure, strides, strict=True)):
            block = partial(IdentityResidualBlock, norm_act=norm_act, dilation=dilation, groups=groups)
            channels = [c * 2**index for c in base_channels]
            self.add_module(f"mod{index + 2}", residual_stage(block, in_channels, channels, blocks, stride=stride))
            in_channels = channels[-1]
        self.bn_out = norm_act(in_channels)
        self.add_classifier(in_channels, classes)
        initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) -> features (N, out_channels, ceil(H / output_stride), …), or logits (N, classes)."""
        x = self.run_stages(images)  # the stem has stride 4, or 1 with CIFAR's
        return self.classified(self.bn_out(x))


# The paper does not say which stem it used. The released checkpoints have the 3x3 one, hence the default.

resnext101 = partial(ResNeXt, structure=(3, 4, 23, 3))  # 40,853,312 parameters without classifier
resnext152 = partial(ResNeXt, structure=(3, 8, 36, 3))  # 56,110,912
