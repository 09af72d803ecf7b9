"""Losses of segmentation_models_pytorch, on the labelled pixels of a micro-batch."""

from importlib import import_module

from torch import Tensor, nn

from engine.segmentation.cross_entropy import CrossEntropy
from models.segmentation import upsampled


class LibraryLoss(nn.Module):
    """The loss of a `kind`, such as "dice", in multiclass mode, plus cross-entropy times `with_cross_entropy`.

    Logits are upsampled at once, in float32: with their gradient and the library's own tensors about three full copies.
    Ignored pixels are left out, and a micro-batch without a labelled pixel has the loss 0. ValueError: the library is
    not installed, or its version takes no weights of classes.
    """

    def __init__(
        self, ignore_index: int, weights: Tensor | None, stride: int | None, kind: str, with_cross_entropy: float
    ):
        super().__init__()
        self.ignore_index = ignore_index
        self.stride = stride
        self.share = with_cross_entropy
        try:
            losses = import_module("segmentation_models_pytorch.losses")
        except ImportError as error:
            raise ValueError(
                f"loss=library needs segmentation_models_pytorch ({error}): pip install segmentation-models-pytorch"
            ) from error
        options = {} if weights is None else {"class_weights": weights.tolist()}
        try:
            self.loss = getattr(losses, f"{kind.capitalize()}Loss")("multiclass", **options)
        except TypeError as error:
            raise ValueError(
                f"loss.class_weights with loss.kind={kind}: this segmentation_models_pytorch takes none ({error}): "
                f"update it, or give loss.class_weights=none"
            ) from error
        self.cross_entropy = CrossEntropy(ignore_index, weights, stride=stride) if with_cross_entropy else None

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (N, K, h, w) of any floating dtype, labels (N, H, W) of any integer dtype -> scalar, float32."""
        labelled = labels != self.ignore_index
        scores = upsampled(logits.float(), labels.shape[1:], self.stride)
        if not labelled.any():
            return scores.sum() * 0
        pixels = scores.movedim(1, -1)[labelled].T[None, :, :, None]  # (1, K, labelled pixels, 1)
        loss = self.loss(pixels.contiguous(), labels[labelled].long()[None, :, None])
        return loss if self.cross_entropy is None else loss + self.share * self.cross_entropy(logits, labels)
