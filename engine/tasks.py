"""The tasks: how each is evaluated, and what eval.py, the planner and the papers' tables need to know of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from datasets import ClassificationDataset, SegmentationDataset, WholeImages
from engine import assemble
from engine.classification import evaluation as classification
from engine.console import progress_bar
from engine.distributed import World
from engine.forward import Forward
from engine.loop import Loss
from engine.output_files import check_outside, writable_folder
from engine.records.evaluated import Evaluated
from engine.run import Run
from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation import evaluation as segmentation
from engine.segmentation.inference import Views
from engine.segmentation.predictions import PictureCollector, PredictionWriter
from engine.stopping import UntilStopped
from keepless import Extreme, layer_health


def segment(
    forward: Forward,
    dataset: SegmentationDataset,
    config: SegmentationRun,
    options: Evaluation,
    world: World,
    console: Console,
) -> Evaluated:
    """Predict and score this rank's images, and write predictions and pictures if asked."""
    writer = PredictionWriter(
        dataset,
        predictions=_writable("predictions", options.predictions, dataset),
        overlays=_writable("overlays", options.overlays, dataset),
        overlay_images=options.overlay_images,
    )
    with progress_bar(console) as progress:
        return segmentation.evaluate_split(
            forward,
            dataset,
            assemble.evaluation_loader(WholeImages(dataset), replace(config.data, workers=options.workers), world),
            batch_size=options.batch_size or 1,
            views=assemble.views(options, config.data),
            world=world,
            progress=progress,
            memory_advice=config.evaluation_memory_advice,
            on_prediction=writer,
        )


def classify(
    forward: Forward,
    dataset: ClassificationDataset,
    config: ClassificationRun,
    options: Evaluation,
    world: World,
    console: Console,
) -> Evaluated:
    """Score this rank's images."""
    images = assemble.classified_images(
        replace(config.data, workers=options.workers),
        dataset,
        world,
        batch_size=config.trainer.evaluate_batch_size,
        ten_crops=options.view == "ten_crop",
    )
    with progress_bar(console) as progress:
        evaluated = classification.evaluate_split(
            forward,
            dataset,
            images,
            world=world,
            progress=progress,
            memory_advice=config.evaluation_memory_advice,
        )
    return replace(evaluated, details={**evaluated.details, "view": options.view})


def segment_in_run(run: Run[SegmentationRun, SegmentationDataset], loader: DataLoader) -> Evaluated:
    """Evaluate the current network of a run; measure its norms on two crops of the first image.

    Args:
        loader: this rank's share of the images.

    Raises:
        MemoryError: the device does not have enough memory.
        Preempted: the run was asked to stop.
    """
    data, trainer, world, learner = run.config.data, run.config.trainer, run.world, run.learner
    collector = PictureCollector(run.val_set, trainer.pictures)
    evaluated = segmentation.evaluate_split(
        learner.evaluated,
        run.val_set,
        UntilStopped(loader, run.stop, world),
        batch_size=trainer.evaluate_batch_size,
        views=Views(data.base_size, data.antialias, base_side=data.base_side),
        world=world,
        progress=run.metrics.progress,
        memory_advice=run.config.evaluation_memory_advice,
        on_prediction=collector,
    )
    shown = {
        f"val_pictures/{name}": picture
        for share in world.gather(collector.pictures())
        for name, picture in share.items()
    }
    crops = segmentation.corner_crops(loader.dataset[0]["image"], *data.crop())  # the same at every evaluation
    return replace(evaluated, pictures=shown, layers=_health(run, crops))


def classify_in_run(run: Run[ClassificationRun, ClassificationDataset], loader: DataLoader) -> Evaluated:
    """As `segment_in_run`; norms are measured on two images."""
    world, learner = run.world, run.learner
    evaluated = classification.evaluate_split(
        learner.evaluated,
        run.val_set,
        UntilStopped(loader, run.stop, world),
        world=world,
        progress=run.metrics.progress,
        memory_advice=run.config.evaluation_memory_advice,
    )
    images = torch.stack([loader.dataset[number]["image"] for number in (0, min(1, evaluated.images - 1))])
    return replace(evaluated, layers=_health(run, images))


def _health(run: Run, images: Tensor) -> dict[str, Extreme]:
    """`layer_health` of the trained network, on rank 0 only."""
    network = run.learner.network
    return layer_health(network, images, forward=run.learner.forward.through(network)) if run.world.first else {}


def _writable(key: str, path: str | None, dataset: SegmentationDataset) -> Path | None:
    """The folder for pictures. ValueError: it is not writable, or its files would become images of the dataset."""
    if path is None:
        return None
    folder = Path(path).resolve()
    # Names are paths below the folder of images.
    images = {file.image.parents[file.name.count("/")] for file in dataset.files if file.image is not None}
    check_outside(key, folder, images)
    return writable_folder(key, folder)


class Task(NamedTuple):
    """A task."""

    entry: str  # the command that trains it
    schema: type[TrainingRun]  # its configuration
    dataset: Callable[[Any, str, dict], Any]  # (keys of data, split, content of a checkpoint) -> split for evaluation
    evaluate: Callable[..., Evaluated]  # scores a split, see `segment`
    labels: Callable[[int, tuple[int, int]], Tensor]  # (crops, their size) -> a minibatch of labels, all zero
    loss: Callable[[Any], Loss]  # configuration -> loss of logits and labels


TASKS = {
    SegmentationRun.task: Task(
        "train_seg",
        SegmentationRun,
        lambda data, split, _: assemble.dataset(data, split),
        segment,
        lambda crops, size: torch.zeros(crops, *size, dtype=torch.uint8),
        lambda config: assemble.loss(config.loss, ignore_index=255),
    ),
    ClassificationRun.task: Task(
        "train_imagenet",
        ClassificationRun,
        assemble.evaluated_split,
        classify,
        lambda crops, _: torch.zeros(crops, dtype=torch.int64),
        lambda _: nn.CrossEntropyLoss(),
    ),
}
