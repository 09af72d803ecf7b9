"""Evaluate a checkpoint: `python eval.py checkpoint=RUN_DIR/checkpoints/last.pt [key=value …]`.

On several devices: `torchrun --nproc-per-node N eval.py …`; every image is evaluated once.
"""

from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig

from datasets import WholeImages, reading_errors, verify
from engine import build, checkpoint
from engine import config as configuration
from engine.command_line import configured
from engine.console import log_to, make_console, progress_bar
from engine.distributed import World, joined
from engine.output_files import writable_folder
from engine.results import print_results, write_results
from engine.run import verify_with_progress
from engine.schema.evaluation import Evaluation
from engine.schema.segmentation import SegmentationRun
from engine.segmentation.evaluation import evaluate_split
from engine.segmentation.inference import WHOLE_IMAGE, Views
from engine.segmentation.predictions import PredictionWriter


def evaluate(values: DictConfig) -> dict:
    """Score a checkpoint on a split: whole images at a single scale, unless the command names other views.

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
    config = configuration.of_checkpoint(state, SegmentationRun, f"checkpoint {path}")
    results_file = Path(options.results or default_results_file(options, config))
    apply_options(config, options)
    with (
        joined(options.device, config.trainer.timeout_seconds) as world,
        reading_errors(config.data.timeout_seconds),
    ):
        return score(state, path, config, options, results_file, world)


def score(
    state: dict, path: Path, config: SegmentationRun, options: Evaluation, results_file: Path, world: World
) -> dict:
    """`evaluate` on one rank of `world`; `state` is the content of the checkpoint `path`."""
    console = make_console(world.rank)
    log_to(console, None, world.rank)
    split = options.data.split or config.data.val_split
    dataset = build.dataset(config.data, split)
    with world.first_goes_ahead() as first:
        if config.data.verify and first:
            verify_with_progress(dataset, console, verify)
    build.arithmetic(config.trainer)
    forward = build.trained_forward(config, state, path, dataset.classes, options.averaged, world.device)
    if results_file.is_dir():
        raise ValueError(f"results={results_file} is a folder: expected a file to write, such as results.json in it")
    writable_folder("results", results_file.parent)
    writer = PredictionWriter(
        dataset,
        predictions=_writable("predictions", options.predictions),
        overlays=_writable("overlays", options.overlays),
        overlay_images=options.overlay_images,
    )
    loader = build.evaluation_loader(WholeImages(dataset), replace(config.data, workers=options.workers), world)
    views = build.views(options, config.data)
    with progress_bar(console) as progress:
        evaluated = evaluate_split(
            forward,
            dataset,
            loader,
            batch_size=options.batch_size,
            views=views,
            world=world,
            progress=progress,
            memory_advice=options.memory_advice(),
            on_prediction=writer,
        )

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


def apply_options(config: SegmentationRun, options: Evaluation) -> None:
    """Override the training's keys with the command's.

    Raises:
        ValueError: the data folder does not exist or is empty, e.g. because the checkpoint is from another machine.
            (Synthetic data would otherwise be drawn there.)
    """
    root = options.data.root or config.data.root
    if root is not None and not (_folder(root).is_dir() and any(_folder(root).iterdir())):
        raise ValueError(
            f"data.root={root} is not a folder with files: give data.root=DIR, the folder of {config.data.name}"
        )
    config.data.root = root
    config.trainer.evaluate_images = None
    options.apply_to(config)


def default_results_file(options: Evaluation, config: SegmentationRun) -> Path:
    """RUN_DIR/results.json for the last checkpoint evaluated as in training; other names say what differs."""
    path = Path(options.checkpoint)
    words = [path.stem] if path.stem != "last" else []
    if options.data.split not in (None, config.data.val_split):
        words.append(options.data.split)
    trained_on = None if config.data.root is None else _folder(config.data.root)
    if options.data.root is not None and _folder(options.data.root) != trained_on:
        words.append(_folder(options.data.root).name)
    if options.data.base_size not in (None, config.data.base_size):
        words.append(f"base{options.data.base_size}")
    if options.data.antialias not in (None, config.data.antialias):
        words.append("antialiased" if options.data.antialias else "aliased")
    if options.head.pooling_size not in (None, config.head.pooling_size):
        words.append("pooling{}x{}".format(*options.head.pooling_size))
    if options.precision not in (None, config.trainer.precision):
        words.append(options.precision)
    words += ["trained"] if not options.averaged else []
    words += _words(build.views(options, config.data))
    folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return folder / f"{'_'.join(['results', *words])}.json"


def _words(views: Views) -> list[str]:
    """How the views differ from a whole image at a single scale."""
    words = [f"window{views.window}"] if views.window else []
    if views.overlap != WHOLE_IMAGE.overlap:
        words.append(f"overlap{views.overlap:g}")
    if views.scales != WHOLE_IMAGE.scales:
        words.append("scales" + "-".join(f"{scale:g}" for scale in views.scales))
    return [*words, "flip"] if views.flip else words


def _writable(key: str, path: str | None) -> Path | None:
    return writable_folder(key, _folder(path)) if path else None


def _folder(path: str) -> Path:
    return Path(path).expanduser().resolve()


@configured("eval", Evaluation)
def main(values: DictConfig) -> None:
    evaluate(values)


if __name__ == "__main__":
    main()
