"""Evaluate a checkpoint: `python eval.py checkpoint=RUN_DIR/checkpoints/last.pt [key=value …]`.

On several devices: `torchrun --nproc-per-node N eval.py …`; every image is evaluated once.
"""

from functools import partial
from pathlib import Path

import hydra
from omegaconf import DictConfig

from datasets import worker_failures
from engine import build, checkpoint, distributed, reporting
from engine import config as configuration
from engine.distributed import World
from engine.evaluation import PredictionWriter, evaluate_dataset
from engine.inference import WHOLE_IMAGE, Views
from engine.pictures import writable_folder
from engine.schema import Evaluation, SegmentationRun

configuration.register()


def evaluate(values: DictConfig) -> dict:
    """Score a checkpoint on a split; whole images at a single scale, where the command does not name other views.

    What it does not name of network, data and precision is as in the training.

    Returns:
        The results, as written to the JSON file; nothing for a split without labels.

    Raises:
        ValueError: the checkpoint or the data cannot be used, or do not fit each other.
        OSError: the images do not come in time, or a process that reads them, or another one, is lost.
    """
    options = configuration.typed(values)
    path = Path(options.checkpoint)
    state = checkpoint.load(path)
    config = configuration.from_plain(state["config"], f"checkpoint {path}")
    results_file = Path(options.results or default_results_file(options, config))
    apply_options(config, options)
    with (
        distributed.joined(options.device, config.trainer.timeout_seconds) as world,
        worker_failures(options.workers, config.data.timeout_seconds, keys="", advice=""),
    ):
        return score(state, path, config, options, results_file, world)


def score(
    state: dict, path: Path, config: SegmentationRun, options: Evaluation, results_file: Path, world: World
) -> dict:
    """What `evaluate` does in one of the processes of `world`, with the state of the checkpoint `path`."""
    console = reporting.make_console(world.rank)
    reporting.log_to(console, None, world.rank)
    split = options.data.split or config.data.val_split
    views = build.views(options)
    dataset = build.dataset(config.data, split)
    with world.first_goes_ahead() as first:
        if config.data.verify and first:
            reporting.verify_with_progress(dataset, console)
    make = partial(build.network_on, config, len(state["classes"]), world.device)
    build.arithmetic(config.trainer)
    network = checkpoint.load_network(make, state, dataset.classes, path, options.averaged)
    if results_file.is_dir():
        raise ValueError(f"results={results_file} is a folder: expected a file to write, such as results.json in it")
    writable_folder("results", results_file.parent)
    writer = PredictionWriter(
        dataset,
        predictions=options.predictions and writable_folder("predictions", _folder(options.predictions)),
        overlays=options.overlays and writable_folder("overlays", _folder(options.overlays)),
        overlay_images=options.overlay_images,
    )

    loader = build.evaluation_loader(dataset, options.workers, config.data.timeout_seconds, world, images=None)
    with reporting.progress_bar(console) as progress:
        scores, confusion = evaluate_dataset(
            network,
            dataset,
            loader,
            world=world,
            progress=progress,
            image_input=build.image_input(config, world.device),
            autocast=build.autocast(config.trainer.precision, world.device),
            on_prediction=writer,
            views=views,
        )

    results = {}
    if dataset.has_labels:
        results = reporting.write_results(
            results_file if world.first else None,
            dataset=dataset,
            scores=scores,
            confusion=confusion,
            images=len(dataset),
            views=views.record(),
            checkpoint=path,
            config=configuration.plain(config),
        )
        reporting.print_scores(console, scores, f"{dataset.name} {split}, {path}, step {state['step']}")
    else:
        console.print(f"{dataset.name} has no labels in split {split!r}: nothing to score")
    written = {
        "results": results_file if results else None,
        "predictions": options.predictions,
        "overlays": options.overlays,
    }
    for what, where in written.items():
        if where is not None:
            console.print(f"{what}: {where}", soft_wrap=True)
    return results


def apply_options(config: SegmentationRun, options: Evaluation) -> None:
    """Put what the command names in place of what the training had.

    Raises:
        ValueError: a data folder that is not there or empty; it would be another one, or, from a checkpoint of
            somebody else, one to write drawn pictures into.
    """
    root = options.data.root or config.data.root
    if root is not None and not (_folder(root).is_dir() and any(_folder(root).iterdir())):
        raise ValueError(f"data.root={root} is not a folder with files: give data.root=DIR, that of {config.data.name}")
    config.data.root = root
    config.data.timeout_seconds = options.timeout_seconds or config.data.timeout_seconds
    config.trainer.evaluate_images = None
    configuration.override(config, options)


def default_results_file(options: Evaluation, config: SegmentationRun) -> Path:
    """RUN_DIR/results.json for the last checkpoint evaluated as in training; other names tell what differs."""
    path = Path(options.checkpoint)
    words = [path.stem] if path.stem != "last" else []
    if options.data.split not in (None, config.data.val_split):
        words.append(options.data.split)
    if options.data.root is not None and _folder(options.data.root) != _folder(config.data.root):
        words.append(_folder(options.data.root).name)
    if options.data.base_size not in (None, config.data.base_size):
        words.append(f"base{options.data.base_size}")
    if options.head.pooling_size not in (None, config.head.pooling_size):
        words.append("pooling{}x{}".format(*options.head.pooling_size))
    if options.precision not in (None, config.trainer.precision):
        words.append(options.precision)
    words += ["trained"] if not options.averaged else []
    words += _words(build.views(options))
    folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    return folder / f"{'_'.join(['results', *words])}.json"


def _words(views: Views) -> list[str]:
    """What of the views differs from a whole image at a single scale."""
    words = []
    if views.window is not None:
        words.append(f"window{views.window}")
        if views.overlap != WHOLE_IMAGE.overlap:
            words.append(f"overlap{views.overlap:g}")
    if views.scales != WHOLE_IMAGE.scales:
        words.append("scales" + "-".join(f"{scale:g}" for scale in views.scales))
    return [*words, "flip"] if views.flip else words


def _folder(path: str | None) -> Path | None:
    return None if path is None else Path(path).expanduser().resolve()


@hydra.main(version_base="1.3", config_path="configs", config_name="eval")
def main(values: DictConfig) -> None:
    with reporting.errors_for_users():
        evaluate(values)


if __name__ == "__main__":
    main()
