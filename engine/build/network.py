"""Configuration keys -> norms, bodies and networks, and how images pass through them."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from engine import checkpoint
from engine.forward import Forward
from engine.schema import network as schema
from engine.schema.evaluation import TrainedNetwork
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation.inference import Views
from models.bodies.resnext import ResNeXt
from models.bodies.wider_resnet import WiderResNet
from models.heads import DeepLabV3
from models.layers import ABN, CheckpointedABN, InPlaceABN
from models.package import package_abn
from models.segmentation import SegmentationNetwork


def norm_act(config: schema.Norm, group: dist.ProcessGroup | None = None) -> Callable[[int], nn.Module]:
    """number of channels -> norm followed by an activation; synchronised norms span `group`, None all processes.

    Raises:
        ValueError: the released package is chosen and not installed.
    """
    options = dict(
        eps=config.eps,
        momentum=config.momentum,
        activation=config.activation,
        activation_param=config.activation_param,
    )
    if isinstance(config, schema.PackageNorm):
        return partial(package_abn(), **options)
    assert isinstance(config, schema.OurNorm), config
    options.update(learn_scale=config.learn_scale, sync=config.sync, group=group, backend=config.backend)
    if isinstance(config, schema.InPlaceNorm):
        variant = "I" if isinstance(config, schema.InPlaceNorm1) else "II"
        return partial(InPlaceABN, **options, variant=variant, gamma_floor=config.gamma_floor)
    if isinstance(config, (schema.CheckpointNorm, schema.CheckpointXHatNorm)):
        return partial(CheckpointedABN, **options, store="x" if isinstance(config, schema.CheckpointNorm) else "x_hat")
    return partial(ABN, **options)


def body(config: schema.Body, norm: Callable[[int], nn.Module], classes: int = 0) -> nn.Module:
    """Features of images, or logits of `classes`."""
    if isinstance(config, schema.ResNeXtBody):
        return ResNeXt(
            config.structure,
            norm,
            classes=classes,
            output_stride=config.output_stride,
            groups=config.groups,
            base_channels=config.base_channels,
            stem_channels=config.stem_channels,
            stem=config.stem,
        )
    assert isinstance(config, schema.WiderResNetBody), config
    return WiderResNet(
        config.structure,
        config.channels,
        norm,
        classes=classes,
        output_stride=config.output_stride,
        downsampling=config.downsampling,
        dropout=config.dropout,
        stem_channels=config.stem_channels,
    )


def segmentation_network(
    config: SegmentationRun, classes: int, group: dist.ProcessGroup | None = None
) -> SegmentationNetwork:
    """Body, head and classifier, initialised from torch's global generator, on the current default device."""
    norm = norm_act(config.norm, group)
    features = body(config.body, norm)
    head = DeepLabV3(
        features.out_channels,
        config.head.hidden_channels,
        config.head.dilations,
        norm_act=norm,
        pooling_size=config.head.pooling_size,
        out_channels=config.head.out_channels,
    )
    return SegmentationNetwork(features, head, classes)


def forward(config: TrainingRun, network: nn.Module, device: torch.device) -> Forward:
    """Through `network`, moved to `device`, as `config.data` normalises and `config.trainer` computes."""
    memory_format = torch.channels_last if config.trainer.channels_last else torch.contiguous_format
    mean, std = (
        torch.tensor(values, device=device).view(1, 3, 1, 1) * 255 for values in (config.data.mean, config.data.std)
    )
    dtype = getattr(torch, config.trainer.precision)
    low = torch.bfloat16 if dtype == torch.float32 else dtype  # autocast does not know float32, which needs none
    autocast = partial(torch.autocast, device.type, low, enabled=dtype != torch.float32)
    return Forward(network.to(device, memory_format=memory_format), mean, std, memory_format, autocast)


def views(options: TrainedNetwork, base_size: int | None = None) -> Views:
    """What the network sees of each image; `base_size`: pixels of the longest side at scale 1."""
    return Views(base_size, options.window.size, options.window.overlap, tuple(options.tta.scales), options.tta.flip)


def trained_forward(
    config: SegmentationRun, state: dict, path: Path, classes: Sequence[str], averaged: bool, device: torch.device
) -> Forward:
    """Through the network of a checkpoint, in eval mode, as an evaluation uses it.

    Args:
        config: the configuration in the checkpoint, perhaps changed by the command.
        state: content of the checkpoint `path`.
        classes: that the network must have been trained on. `averaged` takes the averaged weights if there are any.

    Raises:
        ValueError: see `checkpoint.load_network`.
    """
    make = partial(segmentation_network, config, len(state["classes"]))
    return forward(config, checkpoint.load_network(make, state, classes, path, averaged).eval(), device)
