"""What is measured: shapes of ResNeXt-101's four modules, tensors beyond every cache, a small whole network."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.blocks import NormAct
from models.bodies import resnext101
from models.layers import recompute_activations

GROUPS = ("bn_act", "bn_act_conv", "network")
LAYOUTS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# (N, C, H, W) of one more tensor for BN + ACT: on the CPU 24.5 MiB, on CUDA above 256 MiB also in bfloat16.
LARGE = {"cpu": (8, 64, 112, 112), "cuda": (64, 256, 112, 112)}

NETWORK = {
    "classes": 10,
    "structure": (2, 2, 1, 1),
    "base_channels": (32, 32, 64),
    "groups": 8,
    "stem_channels": 32,
}
NETWORK_IMAGES = (8, 3, 128, 128)


class Cell(NamedTuple):
    """One input, on which all strategies are measured in turns."""

    group: str  # of GROUPS
    shape: str  # CONV1 … CONV4, LARGE or NETWORK
    size: tuple[int, int, int, int]  # (N, C, H, W)
    layout: str  # of LAYOUTS
    dtype: str  # of DTYPES
    device: str

    def __str__(self) -> str:
        return f"{self.group} {self.shape} {self.layout} {self.dtype}"

    def tensor(self, size: tuple[int, ...]) -> Tensor:
        values = torch.randn(size, device=self.device, dtype=DTYPES[self.dtype])
        return values.contiguous(memory_format=LAYOUTS[self.layout]) if len(size) == 4 else values

    def block(self, norm_act: NormAct) -> nn.Module:
        """The norm alone; with the 1x1 convolution to half the channels that follows it; or the network around it."""
        if self.group == "network":
            block = resnext101(norm_act, **NETWORK)
        else:
            channels = self.size[1]
            block = nn.Sequential(norm_act(channels))
            if self.group == "bn_act_conv":
                block.append(nn.Conv2d(channels, channels // 2, 1, bias=False, dtype=DTYPES[self.dtype]))
            recompute_activations(block)
        return block.to(self.device, memory_format=LAYOUTS[self.layout])


def cells(
    device: str,
    groups: list[str],
    layouts: list[str],
    dtypes: list[str],
    batch: int,
    channels: list[int],
    pixels: list[int],
    large: bool,
) -> Iterator[Cell]:
    """All cells of a benchmark.

    CONV1 … CONV4 are what bn1 of an identity block in each module of ResNeXt-101 sees: the module's own number of
    channels, and the side of its maps at 224 pixels.
    """
    shapes = {f"CONV{i + 1}": (batch, c, side, side) for i, (c, side) in enumerate(zip(channels, pixels, strict=True))}
    for group in groups:
        if group == "network":
            yield Cell(group, "NETWORK", NETWORK_IMAGES, "contiguous", "float32", device)
            continue
        for dtype in dtypes:
            for layout in layouts:
                for name, size in shapes.items():
                    yield Cell(group, name, size, layout, dtype, device)
                if group == "bn_act" and large:
                    yield Cell(group, "LARGE", LARGE[device], layout, dtype, device)
