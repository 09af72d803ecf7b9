"""Building blocks of the bodies: residual blocks with an injected norm and activation, stages, the classifier."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from keepless.norms.backends.activations import Activation, activate_

# Number of channels -> norm followed by an activation, for (N, C, H, W); with activation="identity" only the norm.
NormAct = Callable[..., nn.Module]


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
        self.bn1 = norm_act(in_channels)
        self.convs = convolutions(
            in_channels, channels, norm_act, stride=stride, dilation=dilation, groups=groups, dropout=dropout
        )
        self.proj_conv = _projection(in_channels, channels[-1], stride)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels[-1], ceil(H / stride), …). ValueError if bn1 wrote over a shortcut."""
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


def convolutions(
    in_channels: int,
    channels: Sequence[int],
    norm_act: NormAct,
    *,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    dropout: float = 0.0,
) -> nn.Sequential:
    """The convolutions of a pre-activation residual function, with norms between them; see `IdentityResidualBlock`."""
    convs = _convolutions(in_channels, channels, strides=(stride, 1), dilation=dilation, groups=groups)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=convs[0])
    for number, conv in enumerate(convs[1:], start=2):
        layers[f"bn{number}"] = norm_act(conv.in_channels)
        if dropout and number == len(convs):
            layers["dropout"] = nn.Dropout2d(dropout)
        layers[f"conv{number}"] = conv
    return nn.Sequential(layers)


def _convolutions(
    in_channels: int, channels: Sequence[int], *, strides: tuple[int, int], dilation: int, groups: int = 1
) -> list[nn.Conv2d]:
    """Two 3x3 convolutions, or a 1x1, 3x3, 1x1 bottleneck. `strides`: of the first and of the second convolution.

    ValueError if there are neither two nor three channels, or the groups do not fit.
    """
    if len(channels) == 2:
        if groups != 1:
            raise ValueError(
                f"groups={groups} with channels={tuple(channels)}: expected three channel values, for a bottleneck; "
                f"two 3x3 convolutions have no groups"
            )
        first, last = channels
        return [
            conv3x3(in_channels, first, stride=strides[0], dilation=dilation),
            conv3x3(first, last, stride=strides[1], dilation=dilation),
        ]
    if len(channels) != 3:
        raise ValueError(f"channels={tuple(channels)}: expected two values (3x3, 3x3) or three (1x1, 3x3, 1x1)")
    first, middle, last = channels
    return [
        nn.Conv2d(in_channels, first, 1, stride=strides[0], bias=False),
        conv3x3(first, middle, stride=strides[1], dilation=dilation, groups=groups),
        nn.Conv2d(middle, last, 1, bias=False),
    ]


def _projection(in_channels: int, out_channels: int, stride: int) -> nn.Conv2d | None:
    """The 1x1 convolution of a shortcut; None if the shortcut is the input itself."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Conv2d(in_channels, out_channels, 1, stride=stride, bias=False)


class ResidualBlock(nn.Module):
    """Post-activation residual block: y = phi(F(x) + shortcut) (He et al., Deep Residual Learning, 2016).

    A norm follows every convolution of F. All but the last are activated by phi; phi follows the sum instead. The
    shortcut is x itself or, if the stride or the number of channels changes, a 1x1 convolution of x and a norm.

    For the backward pass a bottleneck of C, C and 4C channels keeps its three convolution outputs, two activations and
    y with standard norms (12C values per pixel), but only its three norm outputs and y with in-place norms (10C). The
    sum keeps neither operand, so a norm without activation keeps one buffer with every strategy.

    Args:
        in_channels, channels, dilation, groups: as in `IdentityResidualBlock`.
        norm_act: number of channels -> norm followed by phi or, with activation="identity", only the norm. It may
            write over its input. Its norms have the attributes `activation` and `activation_param`.
        stride: of the first 3x3 convolution and of the projection.
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
    ):
        super().__init__()
        strides = (stride, 1) if len(channels) == 2 else (1, stride)
        convs = _convolutions(in_channels, channels, strides=strides, dilation=dilation, groups=groups)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for number, conv in enumerate(convs, start=1):
            layers[f"conv{number}"] = conv
            options = {} if number < len(convs) else {"activation": "identity"}
            layers[f"bn{number}"] = norm_act(conv.out_channels, **options)
        self.convs = nn.Sequential(layers)
        self.proj_conv = _projection(in_channels, channels[-1], stride)
        self.proj_bn = norm_act(channels[-1], activation="identity") if self.proj_conv is not None else None

    @property
    def activation(self) -> Activation:
        """phi, read from the first norm, so that it follows changes of the norms' activation."""
        first: Any = self.convs.bn1
        return Activation(getattr(first, "activation", "identity"), getattr(first, "activation_param", 0.01))

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels[-1], ceil(H / stride), ceil(W / stride))."""
        shortcut = x
        if self.proj_conv is not None and self.proj_bn is not None:
            shortcut = self.proj_bn(self.proj_conv(x))
        y, first = self.convs(x) + shortcut, self.convs.bn1
        if isinstance(first, nn.Sequential):  # PyTorch's norm and phi, of `to_standard`
            return first[1](y)
        return activate_(self.activation, y)  # phi overwrites the sum, a new tensor


def residual_stage(
    block: Callable[..., nn.Module],
    in_channels: int,
    channels: Sequence[int],
    blocks: int,
    *,
    stride: int = 1,
) -> nn.Sequential:
    """Chain `blocks` residual blocks, named block1, block2, …; the first changes stride and channels.

    block: called with in_channels, channels and the keyword stride. ValueError if there are no blocks.
    """
    if blocks < 1:
        raise ValueError(f"structure has a stage of {blocks} blocks: expected at least 1 block per stage")
    stage = nn.Sequential(OrderedDict(block1=block(in_channels, channels, stride=stride)))
    for number in range(2, blocks + 1):
        stage.add_module(f"block{number}", block(channels[-1], channels, stride=1))
    return stage


def conv3x3(in_channels: int, out_channels: int, *, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, 3, stride=stride, padding=dilation, dilation=dilation, groups=groups, bias=False
    )
