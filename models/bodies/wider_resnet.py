"""WideResNet-38 and its A2 variant (Wu et al., Wider or Deeper, 2016), with the names of the in-place ABN release."""

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from torch import nn

from keepless import InPlaceABN
from models.blocks import Convolutions, IdentityResidualBlock, NormAct, residual_stage
from models.bodies.body import Body
from models.bodies.stem import dilate_strides
from models.initialisation import initialise
from models.pooling import MaxPool2d
from models.recomputation import Block, chain, units_of

WRN38_STRUCTURE = (3, 3, 6, 3, 1, 1)
WRN38_CHANNELS = ((128, 128), (256, 256), (512, 512), (512, 1024), (512, 1024, 2048), (1024, 2048, 4096))
NO_DROPOUT = (0.0,) * 6


class WiderResNet(Body):
    """A convolution of stride 1 (mod1), six stages of identity residual blocks (mod2 … mod7), a final norm (bn_out).

    Args (in addition to `Body`):
        output_stride: 32, 16 or 8 with strided convolutions; 32 with max-pooling.
        structure: blocks in each of the six stages.
        channels: per stage, channels of a block's convolutions: two values for 3x3, 3x3, three for a bottleneck.
        downsampling: "pool" (plain): max-pooling before mod2 … mod6. "stride" (A2): max-pooling before mod2 and mod3,
            a strided first convolution in mod4, mod5 and mod6. Parameter names and shapes are the same, so ImageNet
            weights of the plain network load into A2.
        dropout: per stage, the probability of dropping a channel before a block's last convolution.

    At output stride 8 every 3x3 convolution of A2 has dilation 2 in mod5 and dilation 4 in mod6 and mod7, as in the
    release. This does not reproduce the strided network's features: mod5 starts with a 3x3 convolution, which is
    strided but not dilated there. Output stride 16 is exact.
    """

    def __init__(
        self,
        norm_act: NormAct = InPlaceABN,
        classes: int = 0,
        output_stride: int = 32,
        *,
        in_channels: int = 3,
        structure: Sequence[int] = WRN38_STRUCTURE,
        channels: Sequence[Sequence[int]] = WRN38_CHANNELS,
        downsampling: str = "pool",
        dropout: Sequence[float] = NO_DROPOUT,
        stem_channels: int = 64,
    ):
        super().__init__()
        for name, values in (("structure", structure), ("channels", channels), ("dropout", dropout)):
            if len(values) != 6:
                raise ValueError(f"{name}={tuple(values)}: expected six values, for mod2 … mod7")
        pooled_stages, strides = _downsampling(downsampling, output_stride)
        self.output_stride = output_stride
        self.mod1 = nn.Sequential(OrderedDict(conv1=nn.Conv2d(in_channels, stem_channels, 3, padding=1, bias=False)))
        in_channels = stem_channels
        stages = zip(structure, channels, strides, dropout, strict=True)
        for number, (blocks, stage_channels, (stride, dilation), probability) in enumerate(stages, start=2):
            if number in pooled_stages:
                self.add_module(f"pool{number}", MaxPool2d(3, stride=2, padding=1))
            convs = Convolutions(in_channels, stage_channels, stride, dilation, dropout=probability)
            stage = residual_stage(partial(IdentityResidualBlock, norm_act=norm_act), convs, blocks)
            self.add_module(f"mod{number}", stage)
            in_channels = stage_channels[-1]
        self.bn_out = norm_act(in_channels)
        pairs = enumerate(strides, start=2)
        stage_strides = (2 if number in pooled_stages else stride for number, (stride, _) in pairs)
        self.note_stages(1, (widths[-1] for widths in channels), stage_strides)
        self.add_classifier(in_channels, classes)
        initialise(self)

    def stage_units(self) -> list[list[Block]]:
        """See `Body.stage_units`."""
        stages: list[list[Block]] = []
        for number, stage in enumerate(self.stage_modules(), start=2):
            first_unit, *later_units = units_of(stage, self.recompute)
            pool = getattr(self, f"pool{number}", None)
            stages.append([first_unit if pool is None else partial(chain, pool, first_unit), *later_units])
        return stages


def _downsampling(downsampling: str, output_stride: int) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    """Numbers of the stages preceded by max-pooling, and the (stride, dilation) of mod2 … mod7."""
    if downsampling == "stride":
        return (2, 3), dilate_strides((1, 1, 2, 2, 2, 1), stem_stride=4, output_stride=output_stride)
    if downsampling != "pool":
        raise ValueError(f"downsampling={downsampling!r}: expected 'pool' (plain) or 'stride' (A2)")
    if output_stride != 32:
        raise ValueError(
            f"output_stride={output_stride} with downsampling='pool': expected 32, because dilation cannot replace "
            f"max-pooling; for 8 and 16 use wider_resnet38_a2, which loads the same weights"
        )
    return (2, 3, 4, 5, 6), [(1, 1)] * 6


# 105,070,912 parameters without classifier, for classification.
wider_resnet38 = partial(WiderResNet, downsampling="pool")
# The same parameters, for segmentation.
wider_resnet38_a2 = partial(WiderResNet, downsampling="stride", dropout=(0.0, 0.0, 0.0, 0.0, 0.3, 0.5))
