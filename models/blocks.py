"""Building blocks of the bodies: residual blocks with an injected norm and activation, stages, the classifier."""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from torch import Tensor, nn

NormAct = Callable[[int], nn.Module]  # number of channels -> norm followed by an activation, for (N, C, H, W)


class IdentityResidualBlock(nn.Module):
    """Pre-activation residual block: z = phi(BN(x)); y = F(z) + shortcut (He et al., Identity Mappings, 2016).

    The shortcut is x itself or, if the stride or the number of channels changes, a 1x1 convolution of z without a norm
    of its own. This is the block of the in-place ABN paper's Figure 1. For the backward pass a bottleneck keeps x, the
    two inner convolution outputs and three activations with a standard norm, but only the activations with an in-place
    norm.

    Args:
        in_channels: C of the input.
        channels: two values make two 3x3 convolutions; three make a 1x1, 3x3, 1x1 bottleneck.
        norm_act: number of channels -> norm followed by an activation. It may write over its input, except as bn1 of a
            block whose shortcut is x; the forward pass then raises.
        stride: of the first convolution, a 1x1 in a bottleneck, and of the projection.
        dilation: of every 3x3 convolution.
        groups: of the 3x3 convolution of a bottleneck (ResNeXt's cardinality).
        dropout: probability of dropping a channel of the last convolution's input; 0 adds no layer.
    """

    def __init__(
        self,
        in_channels: int,
        channels: Sequence[int],
        *,
        norm_act: NormAct,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        dropout: float = 0.0,
    ):
        super().__init__()
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        if len(channels) == 2:
            if groups != 1:
                raise ValueError(
                    f"groups={groups} with channels={tuple(channels)}: expected three channel values, for "
                    f"a bottleneck; two 3x3 convolutions have no groups"
                )
            first, last = channels
            layers["conv1"] = _conv3x3(in_channels, first, stride=stride, dilation=dilation)
            layers["bn2"] = norm_act(first)
            if dropout:
                layers["dropout"] = nn.Dropout2d(dropout)
            layers["conv2"] = _conv3x3(first, last, dilation=dilation)
        elif len(channels) == 3:
            first, middle, last = channels
            if first % groups or middle % groups:
                raise ValueError(
                    f"groups={groups} does not divide the channels {first} and {middle} of a bottleneck's "
                    f"3x3 convolution: choose a divisor of both, or other channels"
                )
            layers["conv1"] = nn.Conv2d(in_channels, first, 1, stride=stride, bias=False)
            layers["bn2"] = norm_act(first)
            layers["conv2"] = _conv3x3(first, middle, dilation=dilation, groups=groups)
            layers["bn3"] = norm_act(middle)
            if dropout:
                layers["dropout"] = nn.Dropout2d(dropout)
            layers["conv3"] = nn.Conv2d(middle, last, 1, bias=False)
        else:
            raise ValueError(f"channels={tuple(channels)}: expected two values (3x3, 3x3) or three (1x1, 3x3, 1x1)")

        self.bn1 = norm_act(in_channels)
        self.convs = nn.Sequential(layers)
        needs_projection = stride != 1 or in_channels != last
        self.proj_conv = nn.Conv2d(in_channels, last, 1, stride=stride, bias=False) if needs_projection else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels[-1], ceil(H / stride), ceil(W / stride)).

        Raises:
            ValueError: bn1 wrote over x although x is the shortcut.
        """
        activated = self.bn1(x)
        if self.proj_conv is not None:
            return self.convs(activated) + self.proj_conv(activated)
        # An addition saves neither operand, so autograd's version check would miss an overwritten shortcut.
        if activated is x:
            raise ValueError(
                f"{type(self.bn1).__name__} wrote over the input of a residual block, which is also the shortcut: "
                f"inject a norm that writes to a new buffer (overwrite_input=False); it saves as much memory"
            )
        return self.convs(activated) + x


def identity_stage(
    in_channels: int,
    channels: Sequence[int],
    blocks: int,
    *,
    norm_act: NormAct,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Chain `blocks` identity residual blocks, named block1, block2, …; the first changes stride and channels."""
    if blocks < 1:
        raise ValueError(f"structure has a stage of {blocks} blocks: expected at least 1 block per stage")
    stage = nn.Sequential()
    for index in range(blocks):
        stage.add_module(
            f"block{index + 1}",
            IdentityResidualBlock(
                in_channels if index == 0 else channels[-1],
                channels,
                norm_act=norm_act,
                stride=stride if index == 0 else 1,
                dilation=dilation,
                groups=groups,
                dropout=dropout,
            ),
        )
    return stage


def dilate_strides(strides: Sequence[int], *, stem_stride: int, output_stride: int) -> list[tuple[int, int]]:
    """The (stride, dilation) of each stage for a network that stops downsampling at `output_stride`.

    Once the output stride is reached, further strides multiply the dilation instead, starting with the first block of
    their stage. At output stride 8, strides (1, 2, 2, 2) after a stem of stride 4 become dilations (1, 1, 2, 4).

    Raises:
        ValueError: output_stride is not 8, 16 or 32.
    """
    if output_stride not in (8, 16, 32):
        raise ValueError(f"output_stride={output_stride}: expected 8 (segmentation), 16 or 32 (classification)")
    plan = []
    reached, dilation = stem_stride, 1
    for stride in strides:
        if reached < output_stride:
            reached *= stride
            plan.append((stride, dilation))
        else:
            dilation *= stride
            plan.append((1, dilation))
    return plan


def pooled_classifier(in_channels: int, classes: int) -> nn.Sequential:
    """Global average pooling and a linear layer `fc`: (N, in_channels, H, W) -> logits (N, classes)."""
    return nn.Sequential(
        OrderedDict(
            avg_pool=nn.AdaptiveAvgPool2d(1),
            flatten=nn.Flatten(),  # (N, C, 1, 1) -> (N, C)
            fc=nn.Linear(in_channels, classes),
        )
    )


def _conv3x3(in_channels: int, out_channels: int, *, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, 3, stride=stride, padding=dilation, dilation=dilation, groups=groups, bias=False
    )
