"""Open a training run: join the ranks, find data and checkpoint, open the log, check the images."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from datasets import reading_errors, verify
from datasets.levels import mean_and_deviation
from engine.assemble.contracts import check_choices, parts_named
from engine.assemble.data import shortfalls
from engine.assemble.network import arithmetic
from engine.assemble.optimization import schedule_of
from engine.checkpoint.initial_weights import check_exists, normalisation_of
from engine.checkpoint.run_directory import RunDirectory, new_run_path
from engine.configuration import config as configuration
from engine.process import plugins
from engine.process.allocations import keep_freed_memory
from engine.process.console import counted, log_to, logger, make_console
from engine.process.distributed import World, joined
from engine.process.output_files import write_file
from engine.process.stopping import Preempted, StopRequest
from engine.records.evaluated import Dataset
from engine.schema.keys import deciding
from engine.schema.training import TrainingRun
from engine.training.papers import paper_of, weights_of
from engine.training.resumption import Watch
from engine.training.run import Config, Run, Split
from models.checkpoints.published import Normalisation


@contextmanager
def open_run(
    config: Config, command: str, find: Callable[[Any], tuple[Split, Split]], watch: Watch | None = None
) -> Iterator[Run[Config, Split]]:
    """Join the other ranks, find the data and the checkpoint to resume, open the log, check the data.

    Args:
        command: how the run was started, kept in config.yaml.
        find: find(config.data) returns the training and the validation split.
        watch: follows the run, which trains on few images.

    Raises:
        ValueError: configuration, data and run directory do not fit each other, or differ between ranks.
        OSError: a checkpoint cannot be written, data do not arrive in time, or another rank is lost.
    """
    data = config.data
    trainer = config.trainer
    with (
        joined(trainer.device, trainer.timeout_seconds, keys="trainer.") as world,
        reading_errors(data.timeout_seconds, keys="data.", advice=" resume=auto continues the run"),
        StopRequest() as stop,
        parts_named(config),
    ):
        check_choices(config)
        config.check_shares(world.size)
        config.check_capture(world.device.type, world.size)
        overrides = [word for word in shlex.split(command) if "=" in word]
        path = config.run_dir or new_run_path(data.name, config.norm.name, deciding(overrides, config))
        directory = RunDirectory(world.gather(path)[0])
        with directory.in_use():
            train_set, val_set = find(data)
            doubts = _doubts(config, overrides, train_set, val_set)
            if watch is not None:
                train_set = watch.first_images(train_set, data.crops_per_minibatch)
            run = _make_run(config, world, stop, directory, train_set, val_set, watch)
            if run.resumed is None:
                check_exists(config.init)
            _begin_log(run, command, doubts)
            _verify_and_measure_images(run)
            if run.resumed is None and world.first:
                _write_config(run, command)
            arithmetic(trainer, fixed_sizes=True)
            if world.device.type == "cpu":
                keep_freed_memory()  # saves a quarter of the time per step: docs/results/steps.md
            with _loggers_told_of_end(run):
                yield run


def _begin_log(run: Run, command: str, doubts: list[str]) -> None:
    """Open the log, in which the command and warnings come first."""
    log_to(run.console, run.directory.log if run.world.first else None, run.world.rank)
    logger.debug(command)
    if run.world.first:
        for doubt in filter(None, [run.directory.notice, *doubts]):
            logger.warning(doubt)


@contextmanager
def _loggers_told_of_end(run: Run) -> Iterator[None]:
    """Context of a run, after which its own loggers are told how it has ended."""
    try:
        yield
    except BaseException as error:
        run.tell_loggers("end", "stopped" if isinstance(error, (Preempted, KeyboardInterrupt)) else "failed")
        raise
    run.tell_loggers("end", "finished")


def _doubts(config: TrainingRun, overrides: list[str], train_set: Dataset, val_set: Dataset) -> list[str]:
    """Warnings about data and initial weights. ValueError: images of a dataset are missing for a row of a paper."""
    experiments = [word.partition("=")[2] for word in overrides if word.lstrip("+").startswith("experiment=")]
    is_row = any(paper_of(experiment).get("table") for experiment in experiments)
    doubts = [f"training split {train_set.split}: {remark}" for remark in train_set.remarks]
    doubts += [f"validation split {val_set.split}: {remark}" for remark in val_set.remarks]
    for shortfall in shortfalls(config.data, train_set, val_set):
        if is_row and not (config.data.incomplete or config.trainer.smoke):
            cure = "get the rest (scripts.verify_data names the layout), or give data.incomplete=true"
            raise ValueError(f"experiment={experiments[-1]} is a row of a paper, but {shortfall}: {cure}")
        doubts.append(f"{shortfall}: an archive is not unpacked, or a folder is missing; scores compare with none")
    if config.init.weights is None and any(map(weights_of, experiments)):
        doubts.append(
            f"experiment={experiments[-1]} starts from a pretrained backbone, and this run from random weights: it "
            f"will count for no row of a table. Give init.weights=FILE; see the head of "
            f"configs/experiment/{experiments[-1]}.yaml"
        )
    return doubts


def _make_run(
    config: Config,
    world: World,
    stop: StopRequest,
    directory: RunDirectory,
    train_set: Split,
    val_set: Split,
    watch: Watch | None,
) -> Run[Config, Split]:
    """The run, once all ranks have compared their configuration, data and checkpoint, and the directory is locked."""
    schedule = schedule_of(config, images=len(train_set))
    world.check_equal(
        configuration.values_but(config, "per_machine"), "start all of them with the same keys and values"
    )
    with world.first_goes_ahead() as first:
        if first:
            directory.lock()
    splits = {"training": train_set, "validation": val_set}
    files = {name: [*split.names_and_sizes(), split.numbering] for name, split in splits.items()}
    descriptions = {name: "; ".join([f"{len(split)} images", *split.remarks]) for name, split in splits.items()}
    resumed = directory.checkpoint_to_resume(config, schedule.total_steps, files, descriptions)
    start_step = resumed["step"] if resumed else 0
    facts_of_rank = {
        **{f"{name} images": len(split) for name, split in splits.items()},
        "steps": schedule.total_steps,
        "steps in the checkpoint": start_step,
        "files": " ".join(digest[:8] for digests in files.values() for digest in digests),
    }
    world.check_equal(
        facts_of_rank, f"every machine needs the same data, and all must share the folder {directory.path}"
    )
    console = make_console(world.rank)
    return Run(config, world, stop, directory, train_set, val_set, schedule, files, console, resumed, start_step, watch)


def _verify_and_measure_images(run: Run) -> None:
    """Verify the images; if the configuration asks for measured channels, give it their mean and deviation."""
    data = run.config.data
    with run.world.first_goes_ahead() as first:
        if data.verify and first:
            doubts = verify_with_progress(run.train_set, run.console)
            doubts += data.doubts_of_sizes(run.train_set.sizes)
            doubts += verify_with_progress(run.val_set, run.console, "validation image")
            for doubt in doubts:
                logger.warning(doubt)
        normalisation = _normalisation(run) if data.is_measured and first else None
    if data.is_measured:
        normalisation = run.world.gather(normalisation)[0]
        assert normalisation is not None, "rank 0 has measured"
        data.mean, data.std = map(list, normalisation)


def _write_config(run: Run, command: str) -> None:
    """Write the configuration of a run, and how it was started."""
    head = f"# {command}\n# {run.world.size} x {run.world.device.type}\n"
    for name, hashes in plugins.hashes().items():
        head += "".join(f"# plugin {name}: {file} {digest}\n" for file, digest in hashes.items())
    write_file(run.directory.config, head + configuration.yaml(run.config))


def _normalisation(run: Run) -> Normalisation:
    """Mean and standard deviation of each channel: as far as they are not given, of init.weights, or measured."""
    data = run.config.data
    normalisation = normalisation_of(run.config.init, data.channels)
    if normalisation is None:
        with counted(run.console, "measuring the channels") as progress:
            normalisation = Normalisation(*map(tuple, mean_and_deviation(run.train_set, progress)))
        logger.info(f"data.channels={data.channels}: measured mean {[*normalisation.mean]}, std {[*normalisation.std]}")
    return Normalisation(tuple(data.mean or normalisation.mean), tuple(data.std or normalisation.std))


def verify_with_progress(
    dataset: Dataset, console: Console, images: str = "training image", keys: str | None = "data."
) -> list[str]:
    """Run `verify` with a progress bar."""
    with counted(console, f"checking {dataset.name} {dataset.split}") as progress:
        return verify(dataset, None, progress, keys, images)
