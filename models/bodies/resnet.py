"""ResNet (He et al., 2016), and the in-place ABN paper's ResNeXt (sections 4.1 and 4.2), with the release's names."""

from collections.abc import Sequence
from functools import partial

from keepless import InPlaceABN
from models.blocks import Convolutions, IdentityResidualBlock, NormAct, ResidualBlock, residual_stage
from models.bodies.body import Body
from models.bodies.stem import STEM_STRIDES, build_stem, downsampling
from models.initialisation import initialise


class ResNet(Body):
    """A stem (mod1), stages of residual blocks (mod2, mod3, …) and, with `preactivation`, a final norm (bn_out).

    Without it, this is the function of torchvision's ResNets, whose stride is also on the 3x3 convolution, if norms are
    ABN with relu.

    Args (in addition to `Body`):
        norm_act: without `preactivation` see `ResidualBlock`.
        output_stride: stages are dilated from their first block on, as in the release. With `preactivation` every
            second or fourth cell has the strided network's features. Otherwise features differ a little, because the
            strided 3x3 convolution of a stage is not dilated.
        structure: blocks in each of the four stages; with the CIFAR stem, three or four.
        base_channels: channels of the convolutions in mod2's blocks, doubled in each later stage: two values (3x3, 3x3)
            or three (1x1, 3x3, 1x1).
        groups: of the 3x3 convolution of a bottleneck (cardinality); divides its channels.
        stem: "7x7", "3x3" or "cifar", see `build_stem`. A norm follows each of its convolutions, except, with
            `preactivation`, the last.
        preactivation: blocks are `IdentityResidualBlock`s instead of `ResidualBlock`s.
    """

    def __init__(
        self,
        norm_act: NormAct = InPlaceABN,
        classes: int = 0,
        output_stride: int = 32,
        *,
        in_channels: int = 3,
        structure: Sequence[int],
        base_channels: Sequence[int] = (64, 64, 256),
        groups: int = 1,
        stem_channels: int = 64,
        stem: str = "7x7",
        preactivation: bool = False,
    ):
        super().__init__()
        strides, self.output_stride = downsampling(structure, stem, output_stride)
        self.mod1 = build_stem(stem, stem_channels, norm_act, last_norm=not preactivation, in_channels=in_channels)
        widths = [stem_channels]
        block = partial(IdentityResidualBlock if preactivation else ResidualBlock, norm_act=norm_act)
        for index, (blocks, (stride, dilation)) in enumerate(zip(structure, strides, strict=True)):
            convs = Convolutions(widths[-1], [c * 2**index for c in base_channels], stride, dilation, groups)
            self.add_module(f"mod{index + 2}", residual_stage(block, convs, blocks))
            widths.append(convs.channels[-1])
        self.bn_out = norm_act(widths[-1]) if preactivation else None
        self.note_stages(STEM_STRIDES[stem], widths[1:], (stride for stride, _ in strides))
        self.add_classifier(widths[-1], classes)
        initialise(self)


resnet18 = partial(ResNet, structure=(2, 2, 2, 2), base_channels=(64, 64))  # 11,176,512 parameters without classifier
resnet34 = partial(ResNet, structure=(3, 4, 6, 3), base_channels=(64, 64))  # 21,284,672
resnet50 = partial(ResNet, structure=(3, 4, 6, 3))  # 23,508,032
resnet101 = partial(ResNet, structure=(3, 4, 23, 3))  # 42,500,160

# The paper does not say which stem its ResNeXts used. The released checkpoints have the 3x3 one, hence the default.
ResNeXt = partial(ResNet, groups=64, base_channels=(128, 128, 256), stem="3x3", preactivation=True)
resnext101 = partial(ResNeXt, structure=(3, 4, 23, 3))  # 40,853,312 parameters without classifier
resnext152 = partial(ResNeXt, structure=(3, 8, 36, 3))  # 56,110,912
