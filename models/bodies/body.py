"""Base class of bodies: features, an optional classifier, and stages that may be checkpointed."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor, nn

from models.recomputation import Block, run_blocks, units_of


class Feature(NamedTuple):
    """What a body can give: the output of one of its parts."""

    name: str  # of the part
    channels: int
    stride: int  # pixels that a cell covers along each side


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
        recompute: how the blocks are checkpointed, see `recompute_blocks`.
        feature_info: what `forward` can give, in the order of computing: the output of every stage, mod2, …. The last
            is the body's result, after the final norm. A subclass with a `forward` of its own has that one alone, and
            so has one with `maps` that does not call `note_stages`.

    Constructors raise ValueError if an option has a value that their documentation does not list.
    """

    recompute = "none"
    output_stride: int
    mod1: nn.Module
    _feature_info: tuple[Feature, ...] = ()

    def add_classifier(self, in_channels: int, classes: int) -> None:
        """Register `classifier`, which is None for `classes` = 0."""
        self.classifier = None
        if classes:
            layers = OrderedDict[str, nn.Module](avg_pool=nn.AdaptiveAvgPool2d(1), flatten=nn.Flatten())
            self.classifier = nn.Sequential(layers | {"fc": nn.Linear(in_channels, classes)})  # -> (N, classes)
        self.out_channels = in_channels
        self.classes = classes

    @property
    def feature_info(self) -> tuple[Feature, ...]:
        """See the attributes. ValueError: a subclass has no stages, and neither `maps` nor `forward`."""
        body = type(self)
        if not self._feature_info and body.forward is Body.forward and body.maps is Body.maps:
            raise ValueError(
                f"{body.__name__} has neither forward() nor maps(), and notes no stages: see note_stages()"
            )
        return self._feature_info or (Feature("last", self.out_channels, self.output_stride),)

    def note_stages(self, stem_stride: int, channels: Iterable[int], strides: Iterable[int]) -> None:
        """Set `feature_info` from the channels and the stride of each stage, mod2, …"""
        _, *feature_strides = accumulate(strides, mul, initial=stem_stride)
        names = (f"mod{number}" for number in range(2, len(feature_strides) + 2))
        self._feature_info = tuple(map(Feature, names, channels, feature_strides))

    def forward(self, images: Tensor, features: Sequence[str] | None = None) -> Tensor | tuple[Tensor, ...]:
        """(N, in_channels, H, W) -> features (N, out_channels, ceil(H / output_stride), …), or logits (N, classes).

        `features`: names of `self.feature_info`; the result is then a tuple of them, in this order, without classifier.
        Parts after the last of them do not run. ValueError: there is no such feature.
        """
        if features is None:
            (last,) = self.maps(images, [len(self.feature_info)])
            return self.classified(last)
        names = [feature.name for feature in self.feature_info]
        if not features or {*features} - {*names}:
            raise ValueError(f"features={tuple(features)}: {type(self).__name__} has {', '.join(names)}")
        ends = sorted({names.index(name) + 1 for name in features})
        maps = dict(zip(ends, self.maps(images, ends), strict=True))
        return tuple(maps[names.index(name) + 1] for name in features)

    def maps(self, images: Tensor, ends: Sequence[int]) -> list[Tensor]:
        """The features with these numbers, counted from 1, ascending: of the stages, up to the last of `ends`.

        Only the first stage holds the stem's output. The last stage's result is `normed`.
        """
        stages = self.stage_units()
        units = [unit for stage in stages for unit in stage]
        unit_ends = [sum(map(len, stages[:end])) for end in ends]
        results = run_blocks(units, self.mod1(images), self.recompute, unit_ends)
        maps = [parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in results]
        del results
        if ends[-1] == len(stages):
            maps[-1] = self.normed(maps[-1])
        return maps

    def stage_units(self) -> list[list[Block]]:
        """The units of each stage, see `units_of`. Several results of a unit are concatenated where a stage ends."""
        return [units_of(stage, self.recompute) for stage in self.stage_modules()]

    def classified(self, features: Tensor) -> Tensor:
        """Features (N, out_channels, ceil(H / output_stride), …), or their logits (N, classes)."""
        return features if self.classifier is None else self.classifier(features)

    def stage_modules(self) -> list[nn.Sequential]:
        """mod2, mod3, …"""
        return [getattr(self, stage.name) for stage in self._feature_info]

    def normed(self, x: Tensor) -> Tensor:
        """The last stage's output after the final norm `bn_out`, if there is one."""
        norm = getattr(self, "bn_out", None)
        return x if norm is None else norm(x)
