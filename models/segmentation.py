"""A segmentation network: body, head and a classifier per feature cell."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.initialisation import initialise

EXACT, STRETCHED = UPSAMPLINGS = ("exact", "stretched")


class SegmentationNetwork(nn.Module):
    """images -> body -> head -> `cls`, a 1x1 convolution with bias -> logits (section 4.2 of the paper).

    A cell of features covers exactly `body.output_stride` pixels along each side. Images whose sides are no multiples
    are padded on the right and below, and the logits are cut to the image. In training the logits stay at the network's
    resolution: losses interpolate them, a tile at a time.

    Args:
        body: (N, C, H, W) -> features, e.g. from `models.bodies` with classes=0. `output_stride`: H over their height.
        head: the body's features -> features with `head.out_channels` channels.
        classes: number of classes, not counting the ignored label.

    ValueError: the body ends in a classifier, or classes is below 1.
    """

    def __init__(self, body: nn.Module, head: nn.Module, classes: int):
        super().__init__()
        if getattr(body, "classes", 0):
            raise ValueError(f"the body classifies whole images into {body.classes} classes: build it with classes=0")
        if classes < 1:
            raise ValueError(f"classes={classes}: expected the number of classes to segment, at least 1")
        self.body = body
        self.head = head
        assert isinstance(head.out_channels, int)
        self.cls = nn.Conv2d(head.out_channels, classes, 1)
        self.classes = classes
        initialise(self.cls)

    @property
    def stride(self) -> int:
        """Pixels that a cell covers along each side."""
        assert isinstance(self.body.output_stride, int), self.body.output_stride
        return self.body.output_stride

    def forward(self, images: Tensor, upsampling: str = EXACT, cells: bool = False) -> Tensor:
        """Normalised images (N, C, H, W) -> logits, before any softmax.

        In training (N, classes, ceil(H / stride), ceil(W / stride)), one per cell. In eval mode (N, classes, H, W), at
        least in float32, interpolated bilinearly between the centres of the cells.

        Args:
            upsampling: "stretched", for comparisons with the released inference: nothing is padded, and the cells are
                stretched to the image.
            cells: in eval mode too, the logits of the cells, at least in float32.
        """
        stride = None if upsampling == STRETCHED else self.stride
        logits = self.cls(self.head(self.body(images if stride is None else _padded(images, stride))))
        if self.training:
            return logits
        if logits.dtype.itemsize < 4:
            logits = logits.float()  # in 16 bits, interpolated logits of two classes are often equal
        return logits if cells else upsampled(logits, images.shape[2:], stride)


def upsampled(logits: Tensor, size: Sequence[int], stride: int | None) -> Tensor:
    """Logits of cells (N, K, h, w) -> of pixels (N, K, *size), bilinearly; a cell covers `stride` pixels along a side.

    stride=None: the cells are stretched to `size`.
    """
    if stride is None:
        return F.interpolate(logits, size, mode="bilinear", align_corners=False)
    covered = [cells * stride for cells in logits.shape[2:]]
    return F.interpolate(logits, covered, mode="bilinear", align_corners=False)[..., : size[0], : size[1]]


def _padded(images: Tensor, stride: int) -> Tensor:
    """Images (N, C, H, W) up to multiples of `stride`: their last rows and columns are repeated.

    Zeros score the same within the noise of a training (docs/results/camvid.md, "Images of any size"). Without padding,
    networks that pad like TensorFlow shift: their padding depends on the size.
    """
    height, width = images.shape[2:]
    below, right = -height % stride, -width % stride
    if torch.compiler.is_exporting():  # a program for all sizes cannot ask whether there is a remainder
        padded = F.pad(images, (0, stride - 1, 0, stride - 1), mode="replicate")
        return padded[..., : height + below, : width + right]
    if not below and not right:
        return images
    last = images.is_contiguous(memory_format=torch.channels_last)
    padded = F.pad(images, (0, right, 0, below), mode="replicate")  # on CUDA never in channels_last
    return padded.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
