"""Evaluate a checkpoint of either task: `python eval.py checkpoint=RUN_DIR/checkpoints/last.pt [key=value …]`.

On several devices: `torchrun --nproc-per-node N eval.py …`; every image is evaluated once.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig
from rich.console import Console
from torch import nn

from datasets import (
    ClassificationDataset,
    SegmentationDataset,
    WholeImages,
    reading_errors,
    verify,
    verify_images,
)
from engine import assemble
from engine.checkpoint import files as checkpoint
from engine.classification import evaluation as classification
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.console import log_to, make_console, progress_bar
from engine.distributed import World, joined
from engine.forward import Forward
from engine.output_files import writable_folder
from engine.records.evaluated import Evaluated
from engine.records.results import print_results, write_results
from engine.run import verify_with_progress
from engine.schema.classification import ClassificationRun
from engine.schema.evaluation import Evaluation
from engine.schema.keys import refuse_other_tasks
from engine.schema.segmentation import SegmentationRun
from engine.schema.training import TrainingRun
from engine.segmentation import evaluation as segmentation
from engine.segmentation.predictions import PredictionWriter


def evaluate(values: DictConfig) -> dict:
    """Score a checkpoint on a split.

    Segmentation: whole images at a single scale, unless the command names other views. Classification: central crops.
    Keys of network, data and precision default to the training's.

    Returns:
        The results, as written to the JSON file; an empty dict for a split without labels.

    Raises:
        ValueError: the checkpoint or the data cannot be used, or do not fit each other.
        OSError: reading images timed out, or a data worker or another process was lost.
    """
    options = configuration.typed(values, Evaluation)
    path = Path(options.checkpoint)
    state = checkpoint.load(path)
    name = state["task"]
    if name not in TASKS:
        raise ValueError(f"checkpoint {path} is for the task {name}: expected {' or '.join(TASKS)}")
    refuse_other_tasks(options, name, f"checkpoint {path}")
    config = configuration.of_checkpoint(state, TASKS[name].schema, f"checkpoint {path}")
    results_file = Path(options.results) if options.results else options.default_results_file(config)
    apply_options(config, options)
    with (
        joined(options.device, config.trainer.timeout_seconds) as world,
        reading_errors(config.data.timeout_seconds),
    ):
        return score(state, path, config, options, results_file, world)


def score(state: dict, path: Path, config: TrainingRun, options: Evaluation, results_file: Path, world: World) -> dict:
    """`evaluate` on one rank of `world`; `state` is the content of the checkpoint `path`."""
    console, task = make_console(world.rank), TASKS[config.task]
    log_to(console, None, world.rank)
    split = options.data.split or config.data.val_split
    dataset = task.dataset(config.data, split, state)
    with world.first_goes_ahead() as first:
        if config.data.verify and first:
            verify_with_progress(dataset, console, task.verify)
    assemble.arithmetic(config.trainer)
    network, averaged = task.network, options.averaged
    forward = assemble.trained_forward(config, network, state, path, dataset.classes, averaged, world.device)
    if results_file.is_dir():
        raise ValueError(f"results={results_file} is a folder: expected a file to write, such as results.json in it")
    writable_folder("results", results_file.parent)
    evaluated = task.evaluate(forward, dataset, config, options, world, console)

    results = {}
    if dataset.has_labels:
        file = results_file if world.first else None
        results = write_results(file, evaluated, dataset, checkpoint=path, config=configuration.plain(config))
        print_results(console, evaluated, f"{dataset.name} {split}, {path}, step {state['step']}")
    else:
        console.print(f"{dataset.name} has no labels in split {split!r}: nothing to score")
    written = (results and results_file, options.predictions, options.overlays)
    for what, where in zip(("results", "predictions", "overlays"), written, strict=True):
        if where:
            console.print(f"{what}: {where}", soft_wrap=True)
    return results


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
            memory_advice=options.memory_advice(config),
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
        advice = options.memory_advice(config)
        evaluated = classification.evaluate_split(
            forward, dataset, images, world=world, progress=progress, memory_advice=advice
        )
    return replace(evaluated, details={**evaluated.details, "view": options.view})


class Task(NamedTuple):
    """What an evaluation needs to know of a task."""

    schema: type[TrainingRun]
    dataset: Callable[[Any, str, dict], Any]  # configuration of the data, split, content of the checkpoint
    verify: Callable[..., None]
    network: Callable[..., nn.Module]
    evaluate: Callable[..., Evaluated]


TASKS = {
    "segmentation": Task(
        SegmentationRun,
        lambda data, split, _: assemble.dataset(data, split),
        verify,
        assemble.segmentation_network,
        segment,
    ),
    "classification": Task(
        ClassificationRun, assemble.evaluated_split, verify_images, assemble.classification_network, classify
    ),
}


def apply_options(config: TrainingRun, options: Evaluation) -> None:
    """Override the training's keys with the command's.

    Raises:
        ValueError: the data folder does not exist or is empty, e.g. because the checkpoint is from another machine.
            (Synthetic data would otherwise be drawn there.)
    """
    root = options.data.root or config.data.root
    if root is not None and not _exists(_folder(root)):
        raise ValueError(
            f"data.root={root} is not a folder with files: give data.root=DIR, the folder of {config.data.name}"
        )
    config.data.root = root
    options.apply_to(config)


def _exists(root: Path) -> bool:
    """Whether there is a folder with files, or an archive."""
    return root.is_file() or (root.is_dir() and any(root.iterdir()))


def _writable(key: str, path: str | None) -> Path | None:
    return writable_folder(key, _folder(path)) if path else None


def _folder(path: str) -> Path:
    return Path(path).expanduser().resolve()


@configured("eval", Evaluation)
def main(values: DictConfig) -> None:
    evaluate(values)


if __name__ == "__main__":
    main()
