"""What eval.py, the planner and the papers' tables need to know of each task."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from torch import Tensor, nn

from datasets import ClassificationDataset, SegmentationDataset, WholeImages, verify, verify_images
from engine import assemble
from engine.classification import evaluation as classification
from engine.console import progress_bar
from engine.distributed import World
from engine.forward import Forward
from engine.loop import Loss
from engine.output_files import writable_folder
from engine.records.evaluated import Evaluated
from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation import evaluation as segmentation
from engine.segmentation.predictions import PredictionWriter


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
        predictions=_writable("predictions", options.predictions),
        overlays=_writable("overlays", options.overlays),
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
            memory_advice=config.evaluation_memory_advice(options.batch_size or 1, "batch_size"),
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
        advice = config.evaluation_memory_advice(config.trainer.evaluate_batch_size, "batch_size")
        evaluated = classification.evaluate_split(
            forward, dataset, images, world=world, progress=progress, memory_advice=advice
        )
    return replace(evaluated, details={**evaluated.details, "view": options.view})


def _writable(key: str, path: str | None) -> Path | None:
    return writable_folder(key, Path(path).resolve()) if path else None


class Task(NamedTuple):
    """A task."""

    entry: str  # the command that trains it
    schema: type[TrainingRun]  # its configuration
    network: Callable[..., nn.Module]  # (configuration, number of classes, process group of norms) -> network
    dataset: Callable[[Any, str, dict], Any]  # (keys of data, split, content of a checkpoint) -> split for evaluation
    verify: Callable[..., list[str]]  # checks the files of a dataset
    evaluate: Callable[..., Evaluated]  # scores a split, see `segment`
    labels: Callable[[int, tuple[int, int]], Tensor]  # (crops, their size) -> a minibatch of labels, all zero
    loss: Callable[[Any], Loss]  # configuration -> loss of logits and labels


TASKS = {
    SegmentationRun.task: Task(
        "train_seg",
        SegmentationRun,
        assemble.segmentation_network,
        lambda data, split, _: assemble.dataset(data, split),
        verify,
        segment,
        lambda crops, size: torch.zeros(crops, *size, dtype=torch.uint8),
        lambda config: assemble.loss(config.loss, ignore_index=255),
    ),
    ClassificationRun.task: Task(
        "train_imagenet",
        ClassificationRun,
        assemble.classification_network,
        assemble.evaluated_split,
        verify_images,
        classify,
        lambda crops, _: torch.zeros(crops, dtype=torch.int64),
        lambda _: nn.CrossEntropyLoss(),
    ),
}


def task_of(state: dict, source: str) -> Task:
    """The task of a checkpoint with the content `state`. ValueError, which names `source`: there is no such task."""
    if state["task"] not in TASKS:
        raise ValueError(f"{source} is for the task {state['task']}: expected {' or '.join(TASKS)}")
    return TASKS[state["task"]]
