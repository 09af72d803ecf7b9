"""A head of FCNs (Long et al., 2015), as PSPNet trains with an auxiliary one (Zhao et al., 2017)."""

from collections import OrderedDict
from collections.abc import Sequence

from torch import Tensor, nn

from keepless import InPlaceABN
from models.blocks import NormAct, conv3x3
from models.initialisation import initialise


class FCN(nn.Module):
    """A 3x3 convolution to a quarter of the channels, a norm and activation, and a classifier of each cell.

    As `auxiliary` of another head it reads the last feature but one, in training only.

    Args:
        in_channels: of the one feature that it reads.
        classes: number of classes.
        norm_act: number of channels -> norm followed by an activation. It may write over its input.
        loss_weight: of its loss, beside the main one.
    """

    reads = (-2,)

    def __init__(
        self, in_channels: Sequence[int], classes: int, norm_act: NormAct = InPlaceABN, *, loss_weight: float = 0.4
    ):
        super().__init__()
        self.loss_weight = loss_weight
        (channels,) = in_channels
        hidden = max(1, channels // 4)
        self.convs = nn.Sequential(OrderedDict(conv=conv3x3(channels, hidden), bn=norm_act(hidden)))
        self.classifier = nn.Conv2d(hidden, classes, 1)
        initialise(self)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """[(N, in_channels, H, W)] -> logits (N, classes, H, W)."""
        (x,) = features
        return self.classifier(self.convs(x))
