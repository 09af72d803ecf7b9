"""Configuration keys -> segmentation network, loss and views."""

import torch
from torch import nn

from datasets.class_index import ClassIndex
from engine.assemble.network import body, norm_act, options_of
from engine.schema.data import SegmentationData
from engine.schema.evaluation import TrainedNetwork
from engine.schema.segmentation import BootstrappedLoss, Loss, SegmentationRun
from engine.segmentation.inference import Views
from engine.segmentation.losses import CrossEntropy, inverse_frequencies
from models.freezing import freeze
from models.heads import DeepLabV3
from models.recomputation import choose_recomputation
from models.segmentation import SegmentationNetwork


def segmentation_network(config: SegmentationRun, classes: int) -> SegmentationNetwork:
    """Build body, head and classifier, initialised from torch's global generator, on the current default device."""
    norm = norm_act(config.norm, eager=config.trainer.smoke)
    features = body(config.body, norm, own_momentum=config.norm.momentum is None)
    head = DeepLabV3(features.out_channels, norm_act=norm, **options_of(config.head, "name"))
    network = SegmentationNetwork(features, head, classes)
    freeze(network, config.head_modules, config.body.frozen, config.body.frozen_norms)
    choose_recomputation(network, features, config.trainer.recompute, config.memory.activation_bytes())
    return network


def loss(
    config: Loss, ignore_index: int, index: ClassIndex | None = None, *, network: nn.Module | None = None
) -> nn.Module:
    """Build the loss: logits (N, K, h, w), labels (N, H, W) -> scalar.

    Args:
        index: of the training split, for class weights; None: equal weights.
        network: the network to train, which says how many pixels a cell covers; None: sizes of crops are multiples.
    """
    weights = None
    if index is not None and config.class_weights == "frequency":
        weights = inverse_frequencies(torch.from_numpy(index.counts.sum(axis=0)))
    fraction = config.fraction if isinstance(config, BootstrappedLoss) else None
    stride = network.stride if isinstance(network, SegmentationNetwork) else None
    return CrossEntropy(ignore_index, weights, fraction=fraction, tiles=config.tiles == "auto", stride=stride)


def views(options: TrainedNetwork, data: SegmentationData) -> Views:
    """The views of each image; `data`: the training's, perhaps changed by the command."""
    window, tta = options.window, options.tta
    scales = tuple(tta.scales)
    return Views(data.base_size, data.antialias, window.size, window.overlap, scales, tta.flip)
