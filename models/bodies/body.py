"""Base class of bodies: features, an optional classifier, and stages that may be checkpointed."""

from collections import OrderedDict

from torch import Tensor, nn

from models.recomputation import run_blocks, units_of


class Body(nn.Module):
    """Base class of bodies: a stem (mod1) and stages (mod2, mod3, …).

    Arguments of every body:
        norm_act: number of channels -> norm followed by an activation.
        classes: above 0 adds global average pooling and a linear classifier (`classifier.fc`).
        output_stride: 32, or 16 or 8 to dilate the last one or two stages instead of striding. The parameters stay the
            same. With the CIFAR stem also 4 or 2.
        stem_channels: channels of mod1.
        in_channels: of the images, three by default.

    Attributes:
        out_channels: C of the features.
        output_stride: image pixels per feature cell; with the CIFAR stem at most 8, or 4 with three stages.
        classes: as given.
        stages: their number.
        recompute: how the blocks are checkpointed, see `recompute_blocks`.

    Constructors raise ValueError if an option has a value that their documentation does not list.
    """

    recompute = "none"
    output_stride: int
    stages: int
    mod1: nn.Module

    def add_classifier(self, in_channels: int, classes: int) -> None:
        """Register `classifier`, which is None for `classes` = 0."""
        self.classifier = None
        if classes:
            layers = {
                "avg_pool": nn.AdaptiveAvgPool2d(1),
                "flatten": nn.Flatten(),
                "fc": nn.Linear(in_channels, classes),
            }
            self.classifier = nn.Sequential(OrderedDict(layers))  # (N, C, H, W) -> (N, classes)
        self.out_channels = in_channels
        self.classes = classes

    def classified(self, features: Tensor) -> Tensor:
        """Features (N, out_channels, ceil(H / output_stride), …), or their logits (N, classes)."""
        return features if self.classifier is None else self.classifier(features)

    def stage_modules(self) -> list[nn.Sequential]:
        """mod2, mod3, …"""
        return [getattr(self, f"mod{number}") for number in range(2, self.stages + 2)]

    def run_stages(self, images: Tensor) -> Tensor:
        """Run the stem and the blocks of all stages. Only the first stage holds the stem's output."""
        (x,) = run_blocks(units_of(self.stage_modules(), self.recompute), self.mod1(images), self.recompute)
        return x
