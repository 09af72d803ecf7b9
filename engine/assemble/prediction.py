"""Configuration keys of a training, and of a command -> a network that predicts images."""

from dataclasses import replace

import torch.distributed as dist
from torch import nn

from datasets import CentreCrop, TenCrops
from engine.assemble.classification import classification_network, trained_mean_image
from engine.assemble.segmentation import segmentation_network, views
from engine.forward import Forward
from engine.predictors import Classifier, Segmenter
from engine.schema.classification import ClassificationRun, ImageNetData
from engine.schema.evaluation import TEN_CROP, TrainedNetwork
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun


def network_of(config: TrainingRun, classes: int, group: dist.ProcessGroup | None = None) -> nn.Module:
    """Build the network of either task, see `segmentation_network` and `classification_network`."""
    if isinstance(config, SegmentationRun):
        return segmentation_network(config, classes, group)
    assert isinstance(config, ClassificationRun), config
    return classification_network(config, classes, group)


def predictor(config: TrainingRun, options: TrainedNetwork, state: dict, forward: Forward) -> Segmenter | Classifier:
    """Add to the network of a checkpoint with the content `state` what it needs to see images as an evaluation does.

    ValueError: the checkpoint lacks the mean image to subtract, or the colours of its classes.
    """
    classes, advice = state["classes"], config.evaluation_memory_advice
    if isinstance(config, SegmentationRun):
        if "palette" not in state:
            raise ValueError("it has no palette: expected a colour for each class, as training writes them")
        ids = state.get("label_ids", range(len(classes)))  # files of others have no labels
        if len(ids) != len(classes):
            raise ValueError(f"it has {len(ids)} label_ids: expected one for each of {len(classes)} classes")
        return Segmenter(forward, classes, advice, state["palette"], ids, views(options, config.data))
    data = config.data
    if isinstance(data, ImageNetData):
        view = (TenCrops if options.view == TEN_CROP else CentreCrop)(data.resize, data.crop_size)
        return Classifier(forward, classes, advice, view)
    if getattr(data, "mean_image", False):
        mean = trained_mean_image(state, (3, data.crop_size, data.crop_size))
        forward = replace(forward, mean=forward.mean + mean.to(forward.mean)[None])
    return Classifier(forward, classes, advice, CentreCrop(data.crop_size, data.crop_size))
