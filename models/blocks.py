"""Building blocks of the bodies: residual blocks with an injected norm and activation, stages, the classifier."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from keepless.norms import Activation, activate_

# Number of channels -> norm followed by an activation, for (N, C, H, W); with activation="identity" only the norm.
NormAct = Callable[..., nn.Module]


class Convolutions(NamedTuple):
    """The convolutions of a residual function."""

    in_channels: int  # C of the input
    channels: Sequence[int]  # two values make two 3x3 convolutions; three make a 1x1, 3x3, 1x1 bottleneck
    stride: int = 1
    dilation: int = 1  # of every 3x3 convolution
    groups: int = 1  # of the 3x3 convolution of a bottleneck (ResNeXt's cardinality)
    dropout: float = 0.0  # probability of dropping a channel of the last convolution's input; 0 adds no layer

    def build(self, *strides: int) -> list[nn.Conv2d]:
        """Build the layers. `strides`: of the first convolution and of the second.

        ValueError if there are neither two nor three channels, or the groups do not fit.
        """
        channels = tuple(self.channels)
        if len(channels) not in (2, 3):
            raise ValueError(f"channels={channels}: expected two values (3x3, 3x3) or three (1x1, 3x3, 1x1)")
        if len(channels) == 2 and self.groups != 1:
            raise ValueError(
                f"groups={self.groups} with channels={channels}: expected three channel values, for a bottleneck; "
                f"two 3x3 convolutions have no groups"
            )
        layers: list[nn.Conv2d] = []
        widths = zip((self.in_channels, *channels), channels, (*strides, 1), strict=False)
        for number, (in_width, out_width, stride) in enumerate(widths):
            if len(channels) == 2 or number == 1:
                conv = conv3x3(in_width, out_width, stride=stride, dilation=self.dilation, groups=self.groups)
            else:
                conv = nn.Conv2d(in_width, out_width, 1, stride=stride, bias=False)
            layers.append(conv)
        return layers

    def projection(self) -> nn.Conv2d | None:
        """The 1x1 convolution of a shortcut; None if the shortcut is the input itself."""
        if self.stride == 1 and self.in_channels == self.channels[-1]:
            return None
        return nn.Conv2d(self.in_channels, self.channels[-1], 1, stride=self.stride, bias=False)


class IdentityResidualBlock(nn.Module):
    """Pre-activation residual block: z = phi(BN(x)); y = F(z) + shortcut (He et al., Identity Mappings, 2016).

    The shortcut is x itself or, if the stride or the number of channels changes, a 1x1 convolution of z without a norm
    of its own. This is the block of the in-place ABN paper's Figure 1. For the backward pass a bottleneck saves x, the
    two inner convolution outputs and three activations with a standard norm, but only the activations with an in-place
    norm.

    Args:
        convs: the first convolution, a 1x1 in a bottleneck, and the projection stride.
        norm_act: number of channels -> norm followed by an activation. It may write over its input, except as bn1 of a
            block whose shortcut is x; the forward pass then raises.
    """

    def __init__(self, convs: Convolutions, norm_act: NormAct):
        super().__init__()
        self.bn1 = norm_act(convs.in_channels)
        self.convs = preactivated(convs, norm_act)
        self.proj_conv = convs.projection()

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


def preactivated(convs: Convolutions, norm_act: NormAct) -> nn.Sequential:
    """The convolutions of a pre-activation residual function, with norms between them; see `IdentityResidualBlock`."""
    first_conv, *later_convs = convs.build(convs.stride, 1)
    layers: OrderedDict[str, nn.Module] = OrderedDict(conv1=first_conv)
    for number, conv in enumerate(later_convs, start=2):
        layers[f"bn{number}"] = norm_act(conv.in_channels)
        if convs.dropout and conv is later_convs[-1]:
            layers["dropout"] = nn.Dropout2d(convs.dropout)
        layers[f"conv{number}"] = conv
    return nn.Sequential(layers)


class ResidualBlock(nn.Module):
    """Post-activation residual block: y = phi(F(x) + shortcut) (He et al., Deep Residual Learning, 2016).

    A norm follows every convolution of F. All but the last are activated by phi; phi follows the sum instead. The
    shortcut is x itself or, if the stride or the number of channels changes, a 1x1 convolution of x and a norm.

    For the backward pass a bottleneck of C, C and 4C channels saves its three convolution outputs, two activations and
    y with standard norms (12C values per pixel), but only its three norm outputs and y with in-place norms (10C). The
    sum saves neither operand, so a norm without activation saves one buffer with every strategy.

    Args:
        convs: the first 3x3 convolution and the projection stride; there is no dropout.
        norm_act: number of channels -> norm followed by phi or, with activation="identity", only the norm. It may
            write over its input. Its norms have the attributes `activation` and `activation_param`.
    """

    def __init__(self, convs: Convolutions, norm_act: NormAct):
        super().__init__()
        conv_layers = convs.build(convs.stride, 1) if len(convs.channels) == 2 else convs.build(1, convs.stride)
        layers: OrderedDict[str, nn.Module] = OrderedDict()
        for number, conv in enumerate(conv_layers, start=1):
            layers[f"conv{number}"] = conv
            options = {} if number < len(conv_layers) else {"activation": "identity"}
            layers[f"bn{number}"] = norm_act(conv.out_channels, **options)
        self.convs = nn.Sequential(layers)
        self.proj_conv = convs.projection()
        self.proj_bn = norm_act(convs.channels[-1], activation="identity") if self.proj_conv is not None else None

    @property
    def activation(self) -> Activation:
        """phi, read from the first norm, so that it follows changes of the norms' activation."""
        norm: Any = self.convs.bn1
        return Activation(getattr(norm, "activation", "identity"), getattr(norm, "activation_param", 0.01))

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels[-1], ceil(H / stride), ceil(W / stride))."""
        shortcut = x
        if self.proj_conv is not None and self.proj_bn is not None:
            shortcut = self.proj_bn(self.proj_conv(x))
        y = self.convs(x) + shortcut
        first_norm = self.convs.bn1
        if isinstance(first_norm, nn.Sequential):  # PyTorch's norm and phi, of `to_standard`
            return first_norm[1](y)
        return activate_(self.activation, y)  # phi overwrites the sum, a new tensor


def residual_stage(block: Callable[[Convolutions], nn.Module], first: Convolutions, blocks: int) -> nn.Sequential:
    """Chain `blocks` residual blocks, named block1, block2, …; the `first` changes stride and channels.

    ValueError if there are no blocks.
    """
    if blocks < 1:
        raise ValueError(f"structure has a stage of {blocks} blocks: expected at least 1 block per stage")
    stage = nn.Sequential(OrderedDict(block1=block(first)))
    for number in range(2, blocks + 1):
        stage.add_module(f"block{number}", block(first._replace(in_channels=first.channels[-1], stride=1)))
    return stage


def conv3x3(in_channels: int, out_channels: int, *, stride: int = 1, dilation: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(
        in_channels, out_channels, 3, stride=stride, padding=dilation, dilation=dilation, groups=groups, bias=False
    )
