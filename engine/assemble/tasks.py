"""The tasks: how a split is evaluated, and what eval.py, the planner and the papers' tables need from each."""

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from datasets import IGNORED, ClassificationDataset, ClassIndex, SegmentationDataset, WholeImages
from engine.assemble.classification import classified_images, cross_entropy, evaluated_split
from engine.assemble.contracts import builder, imported
from engine.assemble.data import at_once, evaluation_loader
from engine.assemble.data import dataset as segmentation_dataset
from engine.assemble.network import body, norm_act
from engine.classification import accuracy as classification
from engine.process.console import progress_bar
from engine.process.distributed import World
from engine.process.output_files import WrittenBehind, check_outside, claim_folder, short_name
from engine.records.added_scores import AddedScores
from engine.records.evaluated import Evaluated
from engine.schema.classification import ClassificationRun
from engine.schema.data import SegmentationData
from engine.schema.evaluation import Evaluation, TrainedNetwork
from engine.schema.network import Head
from engine.schema.segmentation import Loss, SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation import evaluation as segmentation
from engine.segmentation.cross_entropy import SummedLoss, inverse_frequencies
from engine.segmentation.inference import Views
from engine.segmentation.pictures import write_predictions
from engine.segmentation.scores import ImageScores
from models.forward import Forward
from models.freezing import freeze
from models.heads import FCN
from models.recomputation import choose_recomputation
from models.segmentation import SegmentationNetwork, features_read


def loss(config: Loss, index: ClassIndex | None = None, *, network: nn.Module | None = None) -> nn.Module:
    """Build the loss: the `Outputs` of a network, or logits (N, K, h, w) alone; labels (N, H, W) -> scalar.

    Args:
        index: of the training split, for class weights; None: equal weights.
        network: the network to train, whose losses are then built before the first step.
    """
    weights = None
    if index is not None and config.class_weights == "frequency":
        weights = inverse_frequencies(torch.from_numpy(index.counts.sum(axis=0)))
    make = builder("loss", config)
    strides = network.strides if isinstance(network, SegmentationNetwork) else (None,)
    return SummedLoss(lambda stride: make(IGNORED, weights=weights, stride=stride), strides)


def views(options: TrainedNetwork, data: SegmentationData) -> Views:
    """The views of each image; `data`: the training's, perhaps changed by the command."""
    window, tta = options.window, options.tta
    scales = tuple(tta.scales)
    return Views(data.base_size, data.antialias, window.size, window.overlap, scales, tta.flip)


def segment(
    forward: Forward,
    dataset: SegmentationDataset,
    config: SegmentationRun,
    options: Evaluation,
    world: World,
    console: Console,
    processes: int,
) -> Evaluated:
    """Predict and score this rank's images, and write predictions, pictures and each image's scores if asked.

    `processes`: of the training.
    """
    given = {"predictions": options.predictions, "overlays": options.overlays}
    places = [Path(path).resolve() for path in given.values() if path is not None]
    if len({*places}) < len(places):
        raise ValueError(f"predictions={options.predictions} is also the folder of overlays: give two folders")
    names = [f"{short_name(entry.name)}.png" for entry in dataset.files] if places else []
    images = None
    if options.per_image is not None:
        if not dataset.has_labels:
            raise ValueError(f"per_image={options.per_image}: split {dataset.split} of {dataset.name} has no labels")
        images = ImageScores(dataset.classes, Path(options.per_image), "per_image")
    predictions, overlays = (path and folder_for_pictures(key, path, dataset, names) for key, path in given.items())
    with progress_bar(console) as progress, WrittenBehind() as files:
        written = partial(write_predictions, dataset, predictions or None, overlays or None, files)
        evaluated = segmentation.evaluate_split(
            forward,
            dataset,
            evaluation_loader(WholeImages(dataset), replace(config.data, workers=options.workers), world),
            views=replace(views(options, config.data), upsampling=options.upsampling),
            world=world,
            progress=progress,
            on_prediction=written if images is None else partial(_in_turn, [written, images.add]),
            at_once=at_once(config, world.device, processes),
            added=added_scores(config, dataset),
        )
    if images is not None:
        images.write(world)
    return evaluated


def _in_turn(functions: Collection[Callable[..., None]], *given: Any) -> None:
    for function in functions:
        function(*given)


def classify(
    forward: Forward,
    dataset: ClassificationDataset,
    config: ClassificationRun,
    options: Evaluation,
    world: World,
    console: Console,
    processes: int,
) -> Evaluated:
    """Score this rank's images."""
    images = classified_images(
        replace(config.data, workers=options.workers),
        dataset,
        world,
        batch_size=config.trainer.evaluate_batch_size,
        ten=options.view == "ten_crop",
    )
    with progress_bar(console) as progress:
        evaluated = classification.evaluate_split(
            forward, dataset, images, world=world, progress=progress, added=added_scores(config, dataset)
        )
    return replace(evaluated, details={**evaluated.details, "view": options.view})


def added_scores(config: TrainingRun, dataset: SegmentationDataset | ClassificationDataset) -> AddedScores:
    """The run's own scores, for one evaluation."""
    given = {"classes": dataset.classes, "ignore_index": IGNORED}
    return AddedScores({name: builder("scores", own)(**given) for name, own in config.scores.items()})


def folder_for_pictures(
    key: str, path: str, dataset: SegmentationDataset | ClassificationDataset, names: Collection[str]
) -> Path:
    """The folder for pictures, see `claim_folder`. ValueError: they would become images, or replace labels."""
    folder = Path(path).resolve()
    if isinstance(dataset, ClassificationDataset):
        check_outside(key, folder, [dataset.files.root] if dataset.pixels is None else [])
        return claim_folder(key, folder, names)
    # Names are paths below the folder of images.
    images = {file.image.parents[file.name.count("/")] for file in dataset.files if file.image is not None}
    check_outside(key, folder, images)
    labels = {file.label.parents[file.name.count("/")] for file in dataset.files if file.label is not None}
    if folder in {place.resolve() for place in labels}:
        raise ValueError(f"{key}={folder} holds labels of the dataset, which would be replaced: give another folder")
    return claim_folder(key, folder, names)


def network_of(config: TrainingRun, classes: int, auxiliary: bool = True) -> nn.Module:
    """Build the network of either task, initialised from torch's global generator, on the current default device.

    `auxiliary`: with `head.auxiliary_weight`, which only trainings need.
    ValueError: the head reads features that the body lacks.
    """
    norm, own_momentum = norm_act(config.norm, eager=config.trainer.smoke), config.norm.momentum is None
    network: nn.Module
    if isinstance(config, SegmentationRun):
        features = body(config.body, norm, own_momentum=own_momentum, channels=config.data.channels)
        reads, channels = getattr(imported("head", type(config.head)), "reads", None), [features.out_channels]
        if reads is not None:
            channels = [each.channels for each in features_read(features, reads, f"head={config.head.name}")]
        head = builder("head", config.head)(channels[0] if reads is None else channels, norm_act=norm)
        network = SegmentationNetwork(features, head, classes)
        if auxiliary and config.head.auxiliary_weight:
            _add_auxiliary(network, config.head, norm)
    else:
        network = features = body(config.body, norm, classes, own_momentum)
    freeze(network, config.head_modules, config.body.frozen, config.body.frozen_norms)
    choose_recomputation(network, features, config.trainer.recompute, config.memory.activation_bytes())
    return network


def _add_auxiliary(network: SegmentationNetwork, config: Head, norm: Callable[[int], nn.Module]) -> None:
    asked = f"head.auxiliary_weight={config.auxiliary_weight}"
    if hasattr(network.head, "auxiliary"):
        raise ValueError(f"{asked} with head={config.name}, which has an auxiliary head of its own: leave it out")
    channels = [feature.channels for feature in features_read(network.body, FCN.reads, asked)]
    network.head.auxiliary = FCN(channels, network.classes, norm, loss_weight=config.auxiliary_weight)


class Task(NamedTuple):
    """A task."""

    dataset: Callable[[Any, str, dict], Any]  # (keys of data, split, content of a checkpoint) -> split for evaluation
    evaluate: Callable[..., Evaluated]  # scores a split, see `segment`
    labels: Callable[[int, tuple[int, int]], Tensor]  # (crops, their size) -> a minibatch of labels, all zero
    loss: Callable[..., Callable[[Any, Tensor], Tensor]]  # configuration, network -> loss of its outputs and labels


TASKS = {
    SegmentationRun.task: Task(
        lambda data, split, _: segmentation_dataset(data, split),
        segment,
        lambda crops, size: torch.zeros(crops, *size, dtype=torch.uint8),
        lambda config, network: loss(config.loss, network=network),
    ),
    ClassificationRun.task: Task(
        evaluated_split,
        classify,
        lambda crops, _: torch.zeros(crops, dtype=torch.int64),
        lambda *_: cross_entropy,
    ),
}
