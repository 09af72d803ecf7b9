"""Open trained networks, to evaluate them on their dataset or to predict any images."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from rich.progress import Progress

from datasets import (
    ClassificationDataset,
    ImagesInFiles,
    ImagesInMemory,
    SegmentationDataset,
    WholeImages,
    collated,
    fixed_crops,
)
from datasets.workers import Loader
from engine import assemble
from engine.assemble.contracts import parts_named
from engine.checkpoint import files
from engine.checkpoint.rank_states import ranks_of
from engine.checkpoint.recorded import PluginsNeeded, of_checkpoint
from engine.classification import accuracy
from engine.prediction.predictors import Classifier, ImageFormat, Segmenter
from engine.process.console import logger
from engine.process.distributed import World, device_of
from engine.process.plugins import changed_since
from engine.schema.classification import ImageNetData
from engine.schema.evaluation import TEN_CROP, Prediction, TrainedNetwork
from engine.schema.keys import refuse_other_tasks
from engine.schema.network import InPlaceNorm, ReleasedNorm
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation import evaluation as segmentation
from keepless import from_released, to_standard
from models.forward import Forward


def trained_forward(
    config: TrainingRun, state: dict, path: Path, classes: Sequence[str], averaged: bool, device: torch.device
) -> Forward:
    """Build the forward pass of a checkpoint's network, in eval mode. ValueError: see `files.load_network`.

    `config`: the checkpoint's, perhaps changed by the command. `state`: content of the checkpoint `path`. `classes`:
    the network must have been trained on them.
    """
    if config.compiles_norms(device.type):
        logger.info("the first image may take half a minute, as code is compiled")
    make = partial(assemble.network_of, config, len(state["classes"]), auxiliary=False)
    network = files.load_network(make, state, classes, path, averaged, config.data.order_key)
    return assemble.forward(config, network.eval(), device)


def load_checkpoint(options: TrainedNetwork) -> tuple[Path, dict, TrainingRun]:
    """Load `options.checkpoint`; return its path, its content and the configuration of its training.

    A run directory in the options is replaced by the path of its last checkpoint.
    ValueError: the file cannot be read, or options are for another task.
    """
    path = files.file_of(options.checkpoint)
    state = files.load(path)
    options.checkpoint = str(path)
    config = of_checkpoint(state, f"checkpoint {path}", options.needed)
    changed = changed_since(state.get("plugins", {}))
    if changed:
        logger.warning(f"checkpoint {path} was made with other versions of its plugins' files {', '.join(changed)}")
    refuse_other_tasks(options, config.task, f"checkpoint {path}")
    return path, state, config


class Opened(NamedTuple):
    """A network, the configuration that it was trained with, and its checkpoint's content."""

    network: Segmenter | Classifier
    config: TrainingRun
    state: dict


def open_network(checkpoint: str | Path, options: Prediction | None = None) -> Segmenter | Classifier:
    """Open a trained network to predict any images. Its norms become PyTorch's, which compute the same.

    Args:
        checkpoint: a file of this project, or a run directory, whose last checkpoint is taken.
        options: how it predicts, e.g. `Prediction(device="cpu", window=Window(size=1024))` of
            `engine.schema.evaluation`; by default whole images, as in an evaluation, on CUDA if there is a device.

    ValueError: the file cannot be read or is of another kind, the options do not fit the network, or modules that
    register what it is made of are not imported.
    """
    try:
        return open_checkpoint(checkpoint, options).network
    except PluginsNeeded as error:
        raise ValueError(error.in_python) from error


def evaluate(network: Segmenter | Classifier, dataset: SegmentationDataset | ClassificationDataset) -> dict:
    """The scores of eval.py (`miou`, `iou`, …; `top1`, …) on a split, with the network's own views.

    ValueError: the dataset has no labels, or not the network's classes; or an image cannot be read.
    """
    if network.classes != dataset.classes or not dataset.has_labels:
        raise ValueError(f"{dataset}: expected labels of the network's {len(network.classes)} classes")
    world = World(device=network.mean.device)
    progress = Progress(disable=True)
    if isinstance(network, Classifier):
        assert isinstance(dataset, ClassificationDataset)
        images = ImagesInFiles(dataset, network.view) if dataset.pixels is None else ImagesInMemory(dataset)
        minibatches = Loader(images, 0, batch_size=1, collate_fn=collated)
        return accuracy.evaluate_split(
            network.forward_pass, dataset, minibatches, world=world, progress=progress
        ).scores
    assert isinstance(dataset, SegmentationDataset)
    return segmentation.evaluate_split(
        network.forward_pass,
        dataset,
        Loader(WholeImages(dataset), 0, batch_size=1),
        world=world,
        progress=progress,
        on_prediction=lambda *_: None,
        at_once=network.at_once,
    ).scores


def open_checkpoint(checkpoint: str | Path, options: Prediction | None = None) -> Opened:
    """Like `open_network`, with configuration and checkpoint content. `options` override the configuration."""
    options = replace(options or Prediction(), checkpoint=str(checkpoint))
    path, state, config = load_checkpoint(options)
    options.apply_to(config)
    config.trainer.recompute = "none"
    if isinstance(config.norm, ReleasedNorm):  # an in-place norm computes the same, with scales |weight| + eps
        weights = "ema" if options.averaged and "ema" in state else "network"
        state = {**state, weights: from_released(state[weights], config.norm.eps)}
        config.norm = config.norm.as_kind(InPlaceNorm)
    with parts_named(config):
        forward = trained_forward(config, state, path, state["classes"], options.averaged, device_of(options.device))
    forward = forward.with_network(to_standard(forward.network, report=lambda _: None))
    return Opened(predictor(config, options, state, forward), config, state)


def predictor(config: TrainingRun, options: TrainedNetwork, state: dict, forward: Forward) -> Segmenter | Classifier:
    """A predictor that gives the network images as an evaluation does. `state`: content of its checkpoint."""
    classes = state["classes"]
    data = config.data
    image_format = ImageFormat(data.range16, getattr(data, "shown", None))
    if isinstance(config, SegmentationRun):
        ids = state.get("label_ids", range(len(classes)))  # converted files have no label ids
        views = assemble.views(options, config.data)
        at_once = assemble.at_once(config, forward.mean.device, ranks_of(state), views)
        return Segmenter(forward, classes, image_format, palette=state["palette"], label_ids=ids, at_once=at_once)
    if getattr(data, "mean_image", False):
        forward = replace(forward, mean=forward.mean + state["mean_image"].to(forward.mean)[None])
    if isinstance(data, ImageNetData):
        view = fixed_crops(data.resize, data.crop_size, ten=options.view == TEN_CROP)
    else:
        view = fixed_crops(data.crop_size, data.crop_size)
    return Classifier(forward, classes, image_format, view=view)
