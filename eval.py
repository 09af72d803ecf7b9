"""Evaluate a checkpoint of either task; writes its scores to results.json:

    python eval.py checkpoint=RUN_DIR predictions=DIR overlays=DIR per_image=FILE.csv
    python eval.py checkpoint=FILE.pt tta.scales=[0.7,1,1.2] tta.flip=true  # segmentation
    python eval.py checkpoint=FILE.pt window.size=1024 batch_size=8  # images of one size, or windows, at once
    python eval.py checkpoint=FILE.pt view=ten_crop activation=relu  # classification

On several devices: `torchrun --nproc-per-node N eval.py checkpoint=…`; every image is evaluated once.
"""

import engine.process.start  # noqa: F401

from pathlib import Path

from rich.console import Console

from datasets import reading_errors
from engine import assemble
from engine.assemble.contracts import parts_named
from engine.assemble.tasks import TASKS, evaluated_split
from engine.checkpoint.files import has_ended
from engine.checkpoint.rank_states import ranks_of
from engine.configuration import config as configuration
from engine.configuration.command_line import configured
from engine.prediction.opening import load_checkpoint, trained_forward
from engine.process.console import log_to, logger, make_console
from engine.process.distributed import World, joined
from engine.process.output_files import writable_file
from engine.records.evaluated import print_results, write_results
from engine.schema.evaluation import Evaluation
from engine.schema.training import TrainingRun
from engine.training.preparation import verify_with_progress


def evaluate(options: Evaluation) -> dict:
    """Score a checkpoint on a split.

    Segmentation: whole images at a single scale, unless the command names other views. Classification: central crops.
    Keys of network, data and precision default to the training's.

    Returns:
        The results, as written to the JSON file; an empty dict for a split without labels.

    Raises:
        ValueError: the checkpoint or the data cannot be used, or do not fit each other.
        OSError: reading images timed out, or a data worker or another process was lost.
    """
    path, state, config = load_checkpoint(options)
    step = None if has_ended(state) else state["step"]
    results_file = Path(options.results) if options.results else options.default_results_file(config, step)
    options.apply_to(config)
    with (
        joined(options.device, config.trainer.timeout_seconds) as world,
        reading_errors(config.data.timeout_seconds),
        parts_named(config),
    ):
        assemble.check_classes(config.data, state)
        return score(state, path, config, options, results_file, world)


def score(state: dict, path: Path, config: TrainingRun, options: Evaluation, results_file: Path, world: World) -> dict:
    """`evaluate` on one rank of `world`: score, write and print. `state`: the content of the checkpoint `path`."""
    console = make_console(world.rank)
    task = TASKS[config.task]
    log_to(console, None, world.rank)
    split = options.data.split or config.data.val_split
    dataset = evaluated_split(config.data, split, state)
    if not (dataset.has_labels or options.predictions or options.overlays):
        raise ValueError(
            f"data.split={split}: {dataset.name} has no labels in this split, so there is nothing to score: choose one "
            f"with labels, such as val, or give predictions=DIR or overlays=DIR for images"
        )
    assemble.arithmetic(config.trainer)
    forward = trained_forward(config, state, path, dataset.classes, options.averaged, world.device)
    writable_file("results", results_file, path, kind="results")
    with world.first_goes_ahead() as first:  # last, as it takes long for many files
        if config.data.verify and first:
            for doubt in verify_with_progress(dataset, console, "image", None):
                logger.warning(doubt)
    evaluated = task.evaluate(forward, dataset, config, options, world, console, ranks_of(state))

    results = {}
    if dataset.has_labels:
        file = results_file if world.first else None
        results = write_results(file, evaluated, dataset, checkpoint=path, config=configuration.plain(config))
        print_results(console, evaluated, f"{dataset.name} {split}, {path}, step {state['step']}")
        _print_absent_scores(console, config)
        console.print(f"results: {results_file}", soft_wrap=True)
    else:
        console.print(f"{dataset.name} has no labels in split {split!r}: nothing to score")
    _print_written(console, options)
    return results


def _print_absent_scores(console: Console, config: TrainingRun) -> None:
    """Print which scores of the training could not be computed, as the plugins that register them are not loaded."""
    absent = [name for name, added_score in config.scores.items() if added_score.is_absent]
    if absent:
        console.print(f"scores=[{','.join(absent)}] could not be computed: give the plugins that register them")


def _print_written(console: Console, options: Evaluation) -> None:
    """Print where the files are that the command was asked to write besides its results."""
    for key in ("predictions", "overlays", "per_image"):
        destination = getattr(options, key)
        if destination:
            console.print(f"{key}: {destination}", soft_wrap=True)


@configured("eval", Evaluation)  # fish completes what names @hydra.main
def main(options: Evaluation) -> None:
    evaluate(options)


if __name__ == "__main__":
    main()
