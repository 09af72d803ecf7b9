"""A segmentation network: body, head and a classifier per feature cell."""

import torch.nn.functional as F
from torch import Tensor, nn

from models.initialisation import initialise


class SegmentationNetwork(nn.Module):
    """images -> body -> head -> `cls`, a 1x1 convolution with bias -> logits (section 4.2 of the paper).

    In training the logits stay at the network's resolution: losses interpolate them, a tile at a time.

    Args:
        body: (N, 3, H, W) -> features, e.g. from `models.bodies` with classes=0.
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

    def forward(self, images: Tensor, size: tuple[int, int] | None = None) -> Tensor:
        """Normalised images (N, 3, H, W) -> logits, before any softmax.

        In training (N, classes, H / output_stride, W / output_stride). In eval mode (N, classes, *size), at least in
        float32, interpolated bilinearly between the centres of the feature cells. `size`: (height, width) in eval mode;
        None: the images'.
        """
        logits = self.cls(self.head(self.body(images)))
        if self.training:
            return logits
        if logits.dtype.itemsize < 4:
            logits = logits.float()  # in 16 bits, interpolated logits of two classes are often equal
        return F.interpolate(logits, size=size or images.shape[2:], mode="bilinear", align_corners=False)
