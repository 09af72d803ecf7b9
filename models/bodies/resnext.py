"""ResNeXt with pre-activation bottlenecks (in-place ABN paper, sections 4.1 and 4.2), with the names of its release."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from models.blocks import NormAct, dilate_strides, identity_stage, pooled_classifier
from models.initialisation import initialise
from models.layers import InPlaceABN, recompute_activations


class ResNeXt(nn.Module):
    """A stem of stride 4 (mod1), four stages of grouped bottlenecks (mod2 … mod5) and a final norm (bn_out).

    Args:
        structure: blocks in each of the four stages.
        norm_act: number of channels -> norm followed by an activation.
        classes: above 0 adds global average pooling and a linear classifier (`classifier.fc`).
        output_stride: 32, or 16 or 8 to dilate the last one or two stages instead of striding. The parameters stay the
            same, and every second or fourth cell of the dilated network has the strided network's features.
        groups: cardinality of the 3x3 convolutions.
        base_channels: channels of the three convolutions in mod2's bottlenecks; doubled in each later stage.
        stem_channels: channels of mod1.
        stem: "3x3" (three 3x3 convolutions, two norms) or "7x7" (one convolution, no norm).

    Attributes:
        out_channels: C of the features.
        output_stride: image pixels per feature cell.
        classes: as given.

    Raises:
        ValueError: an option has a value not listed above, or groups do not divide the channels.
    """

    mod2: nn.Sequential
    mod3: nn.Sequential
    mod4: nn.Sequential
    mod5: nn.Sequential

    def __init__(
        self,
        structure: Sequence[int],
        norm_act: NormAct = InPlaceABN,
        classes: int = 0,
        output_stride: int = 32,
        *,
        groups: int = 64,
        base_channels: Sequence[int] = (128, 128, 256),
        stem_channels: int = 64,
        stem: str = "3x3",
    ):
        super().__init__()
        if len(structure) != 4:
            raise ValueError(f"structure={tuple(structure)}: expected four numbers of blocks, one per stage")
        if len(base_channels) != 3:
            raise ValueError(f"base_channels={tuple(base_channels)}: expected three, for the bottleneck's convolutions")

        self.mod1 = _stem(stem, stem_channels, norm_act)
        in_channels = stem_channels
        plan = dilate_strides((1, 2, 2, 2), stem_stride=4, output_stride=output_stride)
        for index, (blocks, (stride, dilation)) in enumerate(zip(structure, plan, strict=True)):
            channels = [c * 2**index for c in base_channels]
            stage = identity_stage(
                in_channels, channels, blocks, norm_act=norm_act, stride=stride, dilation=dilation, groups=groups
            )
            self.add_module(f"mod{index + 2}", stage)
            in_channels = channels[-1]
        self.bn_out = norm_act(in_channels)
        self.classifier = pooled_classifier(in_channels, classes) if classes else None

        self.out_channels = in_channels
        self.output_stride = output_stride
        self.classes = classes
        initialise(self)
        recompute_activations(self)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) -> features (N, out_channels, ceil(H / output_stride), …), or logits (N, classes)."""
        x = self.mod1(images)  # stride 4
        x = self.mod2(x)
        x = self.mod3(x)  # stride 8
        x = self.mod4(x)
        x = self.mod5(x)
        x = self.bn_out(x)
        return x if self.classifier is None else self.classifier(x)


def _stem(stem: str, channels: int, norm_act: NormAct) -> nn.Sequential:
    pool = nn.MaxPool2d(3, stride=2, padding=1)
    if stem == "7x7":
        conv1 = nn.Conv2d(3, channels, 7, stride=2, padding=3, bias=False)
        return nn.Sequential(OrderedDict(conv1=conv1, pool=pool))
    if stem == "3x3":
        # No norm follows conv3: mod2's first block starts with one.
        return nn.Sequential(
            OrderedDict(
                conv1=nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=False),
                bn1=norm_act(channels),
                conv2=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                bn2=norm_act(channels),
                conv3=nn.Conv2d(channels, channels, 3, padding=1, bias=False),
                pool=pool,
            )
        )
    raise ValueError(f"stem={stem!r}: expected '3x3' or '7x7'")


# The paper does not say which stem it used. The released checkpoints have the 3x3 one, hence the default.


def resnext101(
    norm_act: NormAct = InPlaceABN,
    classes: int = 0,
    output_stride: int = 32,
    *,
    structure: Sequence[int] = (3, 4, 23, 3),
    groups: int = 64,
    base_channels: Sequence[int] = (128, 128, 256),
    stem_channels: int = 64,
    stem: str = "3x3",
) -> ResNeXt:
    """ResNeXt-101, 64 groups: 40,853,312 parameters without the classifier; see `ResNeXt`."""
    return ResNeXt(
        structure,
        norm_act,
        classes,
        output_stride,
        groups=groups,
        base_channels=base_channels,
        stem_channels=stem_channels,
        stem=stem,
    )


def resnext152(
    norm_act: NormAct = InPlaceABN,
    classes: int = 0,
    output_stride: int = 32,
    *,
    structure: Sequence[int] = (3, 8, 36, 3),
    groups: int = 64,
    base_channels: Sequence[int] = (128, 128, 256),
    stem_channels: int = 64,
    stem: str = "3x3",
) -> ResNeXt:
    """ResNeXt-152, 64 groups: 56,110,912 parameters without the classifier; see `ResNeXt`."""
    return ResNeXt(
        structure,
        norm_act,
        classes,
        output_stride,
        groups=groups,
        base_channels=base_channels,
        stem_channels=stem_channels,
        stem=stem,
    )
