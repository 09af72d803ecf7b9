"""Configuration keys -> segmentation's loss and views."""

import torch
from torch import nn

from datasets.class_index import ClassIndex
from engine.schema.data import SegmentationData
from engine.schema.evaluation import TrainedNetwork
from engine.schema.segmentation import BootstrappedLoss, Loss
from engine.segmentation.inference import Views
from engine.segmentation.losses import CrossEntropy, inverse_frequencies
from models.segmentation import SegmentationNetwork


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
