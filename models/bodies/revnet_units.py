"""Units of RevNets, and of the pre-activation ResNets that they are compared with (Gomez et al., 2017)."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from keepless import AdditiveCoupling
from models.blocks import Convolutions, NormAct, preactivated


class ReversibleUnit(AdditiveCoupling):
    """y1 = short(x1) + F(x2); y2 = short(x2) + G(y1), with the channels in two halves (section 3.2).

    A unit that changes the resolution or number of channels cannot be inverted, because its shortcuts cannot. Only F
    strides. `convs` count all channels; F and G have half of them.
    """

    couples_in_half_steps = True

    def __init__(self, convs: Convolutions, norm_act: NormAct):
        in_channels, channels, *_ = convs
        if any(value % 2 for value in (in_channels, *channels)):
            raise ValueError(
                f"channels={tuple(channels)} after {in_channels} channels: a reversible unit halves them, so expected "
                f"even numbers"
            )
        half = convs._replace(in_channels=in_channels // 2, channels=[value // 2 for value in channels])
        second = ResidualFunction(half._replace(in_channels=half.channels[-1], stride=1), norm_act)
        super().__init__(ResidualFunction(half, norm_act), second)
        self.short1, self.short2 = shortcut(half), shortcut(half)

    @property
    def invertible(self) -> bool:  # type: ignore[override]
        return isinstance(self.short1, nn.Identity)

    def couple(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        """(N, in_channels / 2, H, W) twice -> (N, channels[-1] / 2, ceil(H / stride), …) twice."""
        y1 = self.short1(x1).to(x1.dtype) + self.Fm(x2)
        return y1, self.short2(x2).to(x2.dtype) + self.Gm(y1)


class ResidualUnit(nn.Module):
    """y = short(x) + F(x), with the shortcut and F as in a RevNet."""

    def __init__(self, convs: Convolutions, norm_act: NormAct):
        super().__init__()
        self.Fm = ResidualFunction(convs, norm_act)
        self.short = shortcut(convs)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels[-1], ceil(H / stride), ceil(W / stride))."""
        return self.short(x).to(x.dtype) + self.Fm(x)


class ResidualFunction(nn.Sequential):
    """F: norm and activation (bn1) before every convolution. Arguments as in `IdentityResidualBlock`."""

    def __init__(self, convs: Convolutions, norm_act: NormAct):
        layers: OrderedDict[str, nn.Module] = OrderedDict(bn1=norm_act(convs.in_channels))
        super().__init__(layers | dict(preactivated(convs, norm_act).named_children()))

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, channels[-1], ceil(H / stride), ceil(W / stride))."""
        return super().forward(in_autocast_dtype(x))


class Stem(nn.Sequential):
    """A stem whose output is at least float32, also under autocast: the first of the sums that units add to."""

    def forward(self, images: Tensor) -> Tensor:
        x = super().forward(images)
        return x.to(torch.promote_types(x.dtype, torch.float32))


def in_autocast_dtype(x: Tensor) -> Tensor:
    """Convert x to the dtype of autocast, if it is enabled: a norm then keeps its activations in low precision too."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def shortcut(convs: Convolutions) -> nn.Module:
    """Identity if nothing changes; otherwise a 1x1 convolution in a bottleneck.

    Two 3x3 convolutions have a shortcut without parameters: it average-pools by the stride and adds channels of zeros,
    half of them on each side (section 5.1). ValueError: they have fewer channels than the input.
    """
    is_bottleneck = len(convs.channels) == 3
    if is_bottleneck:
        projection = convs.projection()
        return nn.Identity() if projection is None else projection
    added_count = convs.channels[-1] - convs.in_channels
    if convs.stride == 1 and added_count == 0:
        return nn.Identity()
    if added_count < 0:
        raise ValueError(f"a stage has {-added_count} channels less than the one before: expected at least as many")
    before = added_count // 2
    # Pads the last three dimensions, the last one first: no columns, no rows, and channels before and behind.
    zeros = nn.ConstantPad3d((0, 0, 0, 0, before, added_count - before), 0.0)
    if convs.stride == 1:
        return zeros
    return nn.Sequential(nn.AvgPool2d(convs.stride, ceil_mode=True), zeros)
