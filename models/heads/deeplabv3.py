"""The DeepLabV3 head (Chen et al., 2017) as in section 4.2 of the in-place ABN paper, with the names of its release."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import InPlaceABN
from models.blocks import NormAct, conv3x3
from models.initialisation import initialise


class DeepLabV3(nn.Module):
    """Parallel dilated convolutions and a globally pooled feature, each normalised, reduced to `out_channels`.

    The paper stacks 4 x 256 convolution outputs and 256 pooled features and reduces the 1280 with one 1x1 convolution.
    Here that convolution is split into `red_conv` for the maps and `pool_red_conv` for the pooled features, whose
    results are added: the same function, without expanding the pooled features to a map.

    Args:
        in_channels: C of the body's features.
        hidden_channels: channels of each parallel convolution and of the pooled branch.
        dilations: of the 3x3 convolutions beside the 1x1 one; (12, 24, 36) is meant for output stride 8.
        norm_act: number of channels -> norm followed by an activation. It may write over its input.
        pooling_size: in eval mode, pool in a window of this (height, width), in feature cells, instead of globally.
            With the training crop's size / output stride, whole images are pooled like crops. None always pools
            globally, as in training.
        out_channels: channels of the result.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_channels: int = 256,
        dilations: Sequence[int] = (12, 24, 36),
        norm_act: NormAct = InPlaceABN,
        pooling_size: Sequence[int] | None = None,
        *,
        out_channels: int = 256,
    ):
        super().__init__()
        self.pooling_size = None if pooling_size is None else tuple(pooling_size)
        self.out_channels = out_channels

        self.map_convs = nn.ModuleList([nn.Conv2d(in_channels, hidden_channels, 1, bias=False)])
        self.map_convs.extend(conv3x3(in_channels, hidden_channels, dilation=dilation) for dilation in dilations)
        map_channels = hidden_channels * len(self.map_convs)
        self.map_bn = norm_act(map_channels)
        self.global_pooling_conv = nn.Conv2d(in_channels, hidden_channels, 1, bias=False)
        self.global_pooling_bn = norm_act(hidden_channels)
        self.red_conv = nn.Conv2d(map_channels, out_channels, 1, bias=False)
        self.pool_red_conv = nn.Conv2d(hidden_channels, out_channels, 1, bias=False)
        self.red_bn = norm_act(out_channels)
        initialise(self)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, H, W) -> (N, out_channels, H, W).

        ValueError for a single crop in training, unless norms are synchronised over several processes: the pooled
        branch has one value per channel and crop, for a norm.
        """
        maps = torch.cat([conv(x) for conv in self.map_convs], dim=1)  # (N, 4 * hidden, H, W)
        reduced = self.red_conv(self.map_bn(maps))  # (N, out, H, W)
        if self.training or self.pooling_size is None:
            pooled = self._pooled_branch(x.mean((2, 3), keepdim=True))  # (N, out, 1, 1), broadcast by the sum
        else:
            pooled = self._sliding_branch(x, self.pooling_size)  # (N, out, H, W)
        return self.red_bn(reduced + pooled)

    def _pooled_branch(self, pooled: Tensor) -> Tensor:
        return self.pool_red_conv(self.global_pooling_bn(self.global_pooling_conv(pooled)))

    def _sliding_branch(self, x: Tensor, window: Sequence[int]) -> Tensor:
        """Pool in a window around each cell, shifted to stay inside the map."""
        height, width = (min(side, size) for side, size in zip(window, x.shape[2:], strict=True))
        # The mean over a window is a mean of means: h + w additions per cell instead of h * w.
        pooled = F.avg_pool2d(x, (height, 1), stride=1)  # (N, C, H - h + 1, W)
        pooled = F.avg_pool2d(pooled, (1, width), stride=1)  # (N, C, H - h + 1, W - w + 1)
        # In eval mode the branch works on each cell alone, so border cells can be repeated at the end.
        pooled = self._pooled_branch(pooled)
        top, left = (height - 1) // 2, (width - 1) // 2
        padding = (left, width - 1 - left, top, height - 1 - top)
        # CPU autocast pads in float32, which must not spread to later layers.
        return F.pad(pooled, padding, mode="replicate").to(pooled.dtype)  # (N, out, H, W)
