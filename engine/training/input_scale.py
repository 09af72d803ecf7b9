"""Check that training images have the scale that the initial weights were trained on."""

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from datasets import ClassificationDataset, SegmentationDataset
from models.forward import Forward

_IMAGES = 4
_FACTOR = 30.0  # far more than images of other scenes differ; levels of 0 to 255 make 3,000


class _FirstNorm(Exception):
    """Ends a forward pass with the first norm's `running_var`, (C,), and its input, (N, C, *spatial)."""


def ratio_of_scales(forward: Forward, dataset: SegmentationDataset | ClassificationDataset, side: int) -> float | None:
    """The variance of the first norm's input, divided by its `running_var`; None if they differ by less than 30 times.

    Measured on a few training images. Weights for levels of 0 to 255 (Caffe's networks) have the same names and shapes
    as weights for normalised images. `side`: the largest height and width of the images, in pixels.
    """

    def end_at_norm(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        variance = getattr(module, "running_var", None)
        if isinstance(variance, Tensor):
            raise _FirstNorm(variance, inputs[0])

    with torch.no_grad(), register_module_forward_pre_hook(end_at_norm):
        try:
            forward(_images(dataset, side))
            return None
        except _FirstNorm as norm:
            expected, x = norm.args
    measured = x.float().var(dim=[0, *range(2, x.dim())])
    ratio = float((measured / expected.clamp(min=1e-12)).median())  # over channels: some may be dead
    if 1 / _FACTOR < ratio < _FACTOR or bool((expected == 1).all()):  # as it was initialised
        return None
    return ratio


def _images(dataset: SegmentationDataset | ClassificationDataset, side: int) -> Tensor:
    """Centres of a few images of a split, of one size, (n, 3, h, w) in levels of 0 to 255."""
    numbers = np.unique(np.linspace(0, len(dataset) - 1, _IMAGES).astype(int))
    if isinstance(dataset, ClassificationDataset) and dataset.pixels is not None:
        return torch.from_numpy(dataset.pixels_of(numbers))
    read = dataset.read_image if isinstance(dataset, SegmentationDataset) else dataset.image
    images = [read(int(number)) for number in numbers]
    height, width = (min(side, *sides) for sides in zip(*(image.shape[:2] for image in images), strict=True))
    centres = [((image.shape[0] - height) // 2, (image.shape[1] - width) // 2) for image in images]
    crops = [image[y : y + height, x : x + width] for image, (y, x) in zip(images, centres, strict=True)]
    return torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)
