"""The tasks: how a split is evaluated, and what eval.py, the planner and the papers' tables need from each."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from datasets import IGNORED, ClassificationDataset, ClassIndex, SegmentationDataset, WholeImages
from engine.assemble.classification import classified_split, cross_entropy, evaluation_minibatches
from engine.assemble.contracts import builder, imported
from engine.assemble.data import at_once, evaluation_loader
from engine.assemble.data import dataset as segmentation_dataset
from engine.assemble.network import body, norm_act
from engine.classification import accuracy as classification
from engine.process.console import progress_bar
from engine.process.distributed import World
from engine.records.added_scores import AddedScores
from engine.records.evaluated import Dataset, Evaluated
from engine.schema.classification import ClassificationData, ClassificationRun
from engine.schema.data import Data, SegmentationData
from engine.schema.evaluation import Evaluation, TrainedNetwork
from engine.schema.network import Head
from engine.schema.segmentation import Loss, SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation import evaluation as segmentation
from engine.segmentation.cross_entropy import SummedLoss, inverse_frequencies
from engine.segmentation.inference import Views
from models.bodies import Body
from models.forward import Forward
from models.freezing import freeze
from models.heads import FCN
from models.recomputation import choose_recomputation
from models.segmentation import SegmentationNetwork, features_read


def split_of(config: Data, split: str, key: str = "data.split", draw: bool = False) -> Dataset:
    """One split of either task. `draw`: see `dataset`. ValueError, naming its config key `key`: it cannot be opened."""
    if isinstance(config, ClassificationData):
        return classified_split(config, split, key)
    assert isinstance(config, SegmentationData), config
    return segmentation_dataset(config, split, key, draw)


def evaluated_split(config: Data, split: str, state: dict) -> Any:
    """One split, minus the mean image in the checkpoint content `state`. ValueError: it cannot be opened."""
    dataset: Any = split_of(config, split)
    return dataset.minus(state["mean_image"].numpy()) if "mean_image" in state else dataset


def loss(config: Loss, index: ClassIndex | None = None, *, network: nn.Module | None = None) -> nn.Module:
    """Build the loss: the `Outputs` of a network, or logits (N, K, h, w) alone; labels (N, H, W) -> scalar.

    Args:
        index: of the training split, for class weights; None: equal weights.
        network: the network to train, whose losses are then built before the first step.
    """
    weights = _class_weights(config, index)
    strides: tuple[int | None, ...] = (None,)
    if isinstance(network, SegmentationNetwork):
        strides = network.strides
        if weights is not None and len(weights) != network.classes:
            actual = f"loss.class_weights={config.class_weights} has {len(weights)} numbers"
            raise ValueError(f"{actual}: expected {network.classes}, one for each class, in their order")
    build = builder("loss", config)
    return SummedLoss(lambda stride: build(IGNORED, weights=weights, stride=stride), strides)


def _class_weights(config: Loss, index: ClassIndex | None) -> Tensor | None:
    """The weight of each class, float32; None: equal weights."""
    if config.class_weights == "frequency":
        return None if index is None else inverse_frequencies(torch.from_numpy(index.counts.sum(axis=0)))
    return None if config.class_weights == "none" else torch.tensor(config.class_weights, dtype=torch.float32)


def views(options: TrainedNetwork, data: SegmentationData) -> Views:
    """The views of each image; `data`: the training's, perhaps changed by the command."""
    window = options.window
    return Views(
        data.base_size, data.antialias, window.size, window.overlap, tuple(options.tta.scales), options.tta.flip
    )


def segment(
    forward: Forward,
    dataset: SegmentationDataset,
    config: SegmentationRun,
    options: Evaluation,
    world: World,
    console: Console,
    process_count: int,
) -> Evaluated:
    """Predict and score this rank's images, and write what is asked for. `process_count`: of the training."""
    files = options.predictions, options.overlays, options.per_image
    shown = replace(views(options, config.data), upsampling=options.upsampling)
    with segmentation.written_predictions(dataset, world, *files) as write, progress_bar(console) as progress:
        return segmentation.evaluate_split(
            forward,
            dataset,
            evaluation_loader(WholeImages(dataset), replace(config.data, workers=options.workers), world),
            world=world,
            progress=progress,
            on_prediction=write,
            at_once=at_once(config, world.device, process_count, shown),
            added=added_scores(config, dataset),
        )


def classify(
    forward: Forward,
    dataset: ClassificationDataset,
    config: ClassificationRun,
    options: Evaluation,
    world: World,
    console: Console,
    process_count: int,
) -> Evaluated:
    """Score this rank's images."""
    minibatches = evaluation_minibatches(
        replace(config.data, workers=options.workers),
        dataset,
        world,
        batch_size=config.trainer.evaluate_batch_size,
        ten_crops=options.view == "ten_crop",
    )
    with progress_bar(console) as progress:
        evaluated = classification.evaluate_split(
            forward, dataset, minibatches, world=world, progress=progress, added=added_scores(config, dataset)
        )
    return replace(evaluated, details={**evaluated.details, "view": options.view})


def added_scores(config: TrainingRun, dataset: Dataset) -> AddedScores:
    """The scores that a run names, for one evaluation. Those of plugins that are not loaded are left out."""
    choices = {name: choice for name, choice in config.scores.items() if not choice.is_absent}
    return AddedScores(
        {
            name: builder("scores", choice)(classes=dataset.classes, ignore_index=IGNORED)
            for name, choice in choices.items()
        }
    )


def network_of(config: TrainingRun, classes: int, auxiliary: bool = True) -> nn.Module:
    """Build the network of either task, initialised from torch's global generator, on the current default device.

    `auxiliary`: with `head.auxiliary_weight`, which only trainings need.
    ValueError: the head reads features that the body lacks.
    """
    norm = norm_act(config.norm.eager() if config.trainer.smoke else config.norm)
    own_momentum = config.norm.momentum is None
    network: nn.Module
    if isinstance(config, SegmentationRun):
        features = body(config.body, norm, own_momentum=own_momentum, channels=config.data.channels)
        reads = getattr(imported("head", type(config.head)), "reads", None)
        in_channels: Any = features.out_channels
        if reads is not None:
            inputs = features_read(features, reads, f"head={config.head.name}")
            in_channels = [feature.channels for feature in inputs]
        head = builder("head", config.head)(in_channels, norm_act=norm, classes=classes)
        network = SegmentationNetwork(features, head, classes)
        if auxiliary and config.head.auxiliary_weight:
            _add_auxiliary_head(config.head, head, features, classes, norm)
    else:
        network = features = body(config.body, norm, classes, own_momentum)
    freeze(network, config.head_modules, config.body.frozen, config.body.frozen_norms)
    choose_recomputation(network, features, config.trainer.recompute, config.memory.activation_bytes())
    return network


def _add_auxiliary_head(
    config: Head, head: Any, features: Body, classes: int, norm: Callable[[int], nn.Module]
) -> None:
    """Give a head the auxiliary one of `head.auxiliary_weight`. ValueError: it has one, or the body lacks a feature."""
    key = f"head.auxiliary_weight={config.auxiliary_weight}"
    if hasattr(head, "auxiliary"):
        raise ValueError(f"{key} with head={config.name}, which has an auxiliary head of its own: leave it out")
    channels = [feature.channels for feature in features_read(features, FCN.reads, key)]
    head.auxiliary = FCN(channels, classes, norm, loss_weight=config.auxiliary_weight)


class Task(NamedTuple):
    """A task."""

    evaluate: Callable[..., Evaluated]  # scores a split, see `segment`
    labels: Callable[[int, tuple[int, int]], Tensor]  # (crops, their size) -> a minibatch of labels, all zero
    loss: Callable[..., Callable[[Any, Tensor], Tensor]]  # configuration, network -> loss of its outputs and labels


TASKS = {
    SegmentationRun.task: Task(
        segment,
        lambda crops, size: torch.zeros(crops, *size, dtype=torch.uint8),
        lambda config, network: loss(config.loss.planned, network=network),
    ),
    ClassificationRun.task: Task(
        classify, lambda crops, _: torch.zeros(crops, dtype=torch.int64), lambda *_: cross_entropy
    ),
}
