"""Train a segmentation network: `python train_seg.py [experiment=…] [key=value …]`; `--help` lists the choices.

On several devices or machines: `torchrun --nproc-per-node N train_seg.py …` (docs/training.md).
"""

import shlex
import sys
from typing import NamedTuple

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from torch.distributed.elastic.multiprocessing.errors import record

from datasets import SegmentationDataset, worker_failures
from engine import build, distributed, loop, reporting
from engine import config as configuration
from engine.distributed import World
from engine.evaluation import Validated, Validation
from engine.inference import WHOLE_IMAGE
from engine.learner import Learner
from engine.memory import keep_freed_memory
from engine.pictures import class_legend
from engine.profiling import profiled
from engine.run_directory import RunDirectory, fixed, new_run_path
from engine.run_report import RunReport
from engine.run_state import restore_run, run_state
from engine.schedule import Schedule
from engine.schema import SegmentationRun
from engine.stopping import StopRequest

configuration.register()


def train(values: DictConfig, command: str = "train_seg.train") -> dict:
    """Train as configured, evaluate the last checkpoint, and leave a run directory.

    Under torchrun every process calls this, and has its share of every minibatch and of every evaluation.

    Args:
        values: a composed `engine.schema.SegmentationRun`.
        command: how the run was started, kept in config.yaml.

    Returns:
        The results of the final evaluation, as in results.json.

    Raises:
        ValueError: the configuration, the data or the run directory do not fit; before the first step.
        FloatingPointError: loss or gradient became infinite or NaN; the last checkpoint is of an earlier step.
        MemoryError: the device has not enough memory.
        OSError: a checkpoint cannot be written, the data does not come in time, or another process is lost.
        Preempted: SIGTERM or SIGUSR1 asked the run to stop, and it can be continued.
    """
    config = configuration.typed(values)
    with (
        distributed.joined(config.trainer.device, config.trainer.timeout_seconds) as world,
        worker_failures(config.data.workers, config.data.timeout_seconds),
        StopRequest() as stop,
    ):
        configuration.check_shares(config, world.size)
        directory = RunDirectory(world.gather(config.run_dir or new_run_path(config.data.name, config.norm.name))[0])
        with directory.in_use():
            return run(config, directory, world, stop, command)


class Opened(NamedTuple):
    """What a run has before its network is built."""

    directory: RunDirectory
    train_set: SegmentationDataset
    val_set: SegmentationDataset
    schedule: Schedule
    console: Console


def run(config: SegmentationRun, directory: RunDirectory, world: World, stop: StopRequest, command: str) -> dict:
    """What `train` does in one of the processes of `world`."""
    data, trainer = config.data, config.trainer
    opened, resumed = open_run(config, directory, world, command)
    _, train_set, val_set, schedule, console = opened
    learner, start_step = learner_at_start(config, opened, resumed, world)
    report = report_at_start(config, opened, resumed, world)
    del resumed  # as much memory as the network and its momentum
    with reporting.counted(console, "indexing the classes") as progress:
        minibatches = build.training_loader(
            config, train_set, schedule.total_steps, world, start_step=start_step, progress=progress
        )
    if trainer.profile and world.first:
        minibatches = profiled(minibatches, trainer.profile, directory.path / "profile")
    statistics_crops = ()
    if trainer.ema_statistics_minibatches:
        statistics_crops = build.training_loader(config, train_set, trainer.ema_statistics_minibatches, world)
    image_input = build.image_input(config, world.device)
    autocast = build.autocast(trainer.precision, world.device)
    validation = Validation(
        learner=learner,
        dataset=val_set,
        loader=build.evaluation_loader(val_set, data.workers, data.timeout_seconds, world, trainer.evaluate_images),
        statistics_crops=statistics_crops,
        stop=stop,
        world=world,
        image_input=image_input,
        autocast=autocast,
        pictures=trainer.pictures,
        crop_size=data.crop_size,
    )

    def save(step: int, best: bool = False) -> None:
        if not best and schedule.scores(step):  # what is scored is what was saved
            validation.prepare()
        state = checkpoint_state(config, opened, learner, step, report.skipped, world)
        if world.first:
            directory.save(state, best)

    def evaluate(step: int) -> Validated:
        validated = validation.run(report.progress)
        if validated.scores["miou"] > report.best_miou:
            save(step, best=True)  # before it is recorded: a run that is killed in between evaluates again
        report.evaluation(step, schedule.epoch(step), validated.scores, validated.pictures, validated.layers)
        return validated

    with report:
        if schedule.evaluates(start_step) and start_step not in report.mious:  # the run was stopped in it
            evaluate(start_step)
            report.pause_ended()
        loop.train(
            learner,
            build.loss(config.loss, train_set.ignore_index),
            minibatches,
            start_step=start_step,
            schedule=schedule,
            world=world,
            image_input=image_input,
            autocast=autocast,
            accumulation_steps=trainer.accumulation_steps,
            crops_per_minibatch=data.crops_per_minibatch,
            report=report,
            evaluate=evaluate,
            save=save,
            stop=stop,
        )
        validated = evaluate(schedule.total_steps)
        report.figure("val/confusion", validated.confusion_picture(val_set), schedule.total_steps)
    images = int(world.sum_(torch.tensor(len(validation.loader))))
    return conclude(config, opened, report, validated, images, world)


def open_run(
    config: SegmentationRun, directory: RunDirectory, world: World, command: str
) -> tuple[Opened, dict | None]:
    """Find the data, and the checkpoint to continue from, None for a run that starts; open the log; check the data.

    Raises:
        ValueError: the data or the run directory do not fit, or are not the same for all processes.
    """
    data, plain_config = config.data, configuration.plain(config)
    train_set = build.labelled_dataset(data, "data.train_split", data.train_split)
    val_set = build.labelled_dataset(data, "data.val_split", data.val_split)
    schedule = build.schedule(config, images=len(train_set))
    world.check_equal(fixed(plain_config), "start all of them with the same keys and values")
    with world.first_goes_ahead() as first:
        if first:
            directory.lock()
    resumed = directory.checkpoint_to_resume(config.resume, plain_config, schedule.total_steps)
    found = f"{len(train_set)} training and {len(val_set)} validation images, {schedule.total_steps} steps to train, "
    found += f"{resumed['step']} of them done" if resumed else f"no checkpoint in {directory.path}"
    world.check_equal(
        found, "data.root must hold the same files on every machine, and run_dir be a folder that all of them share"
    )
    console = reporting.make_console(world.rank)
    reporting.log_to(console, directory.log if world.first else None, world.rank)
    reporting.logger.debug(command)
    if directory.notice and world.first:
        reporting.logger.warning(directory.notice)
    if resumed is None and world.first:
        directory.config.write_text(f"# {command}\n{OmegaConf.to_yaml(plain_config)}")
    with world.first_goes_ahead() as first:
        if data.verify and first:
            reporting.verify_with_progress(train_set, console, stops=data.on_error == "stop")
            reporting.verify_with_progress(val_set, console)
    return Opened(directory, train_set, val_set, schedule, console), resumed


def learner_at_start(
    config: SegmentationRun, opened: Opened, resumed: dict | None, world: World
) -> tuple[Learner, int]:
    """What learns, with the weights that the run starts from or continues with, and the number of steps done."""
    directory, train_set, val_set, schedule, _ = opened
    build.arithmetic(config.trainer)
    if world.device.type == "cpu":
        keep_freed_memory()  # a quarter less time per step: docs/results/training_cpu.md
    learner = build.learner(config, len(train_set.classes), schedule.total_steps, world)
    start_step = 0 if resumed is None else restore_run(resumed, learner, world)
    if resumed is None and config.init.weights is not None:
        reporting.logger.info(str(build.initialise(config, learner, train_set.classes)))
    reporting.logger.info(
        f"{directory.path}: {sum(p.numel() for p in learner.network.parameters()):,} parameters, {len(train_set)} "
        f"training and {len(val_set)} validation images, steps {start_step} to {schedule.total_steps} on "
        f"{world.size} x {world.device.type}"
    )
    return learner, start_step


def report_at_start(config: SegmentationRun, opened: Opened, resumed: dict | None, world: World) -> RunReport:
    """The report, going on in what an earlier process of the run has recorded."""
    directory, starts = opened.directory, world.first and resumed is None
    report = RunReport(
        run_dir=directory.path if world.first else None,
        console=opened.console,
        total_steps=opened.schedule.total_steps,
        start_step=0 if resumed is None else resumed["step"],
        max_skipped=config.data.max_skipped,
        skipped=0 if resumed is None else resumed.get("skipped_images", 0),
        config_text=directory.config.read_text() if starts else "",
    )
    report.mious = world.gather(report.mious)[0]
    if starts and config.trainer.pictures:
        report.figure("image_label_prediction/legend", class_legend(opened.val_set), 0)
    return report


def checkpoint_state(
    config: SegmentationRun, opened: Opened, learner: Learner, step: int, skipped: int, world: World
) -> dict:
    """What a checkpoint holds: the state to continue from, and what an evaluation needs. Every process must call it."""
    return {
        **run_state(learner, step, world),
        "total_steps": opened.schedule.total_steps,
        "config": configuration.plain(config),
        "classes": list(opened.train_set.classes),
        "palette": [list(colour) for colour in opened.train_set.palette],
        "skipped_images": skipped,
    }


def conclude(
    config: SegmentationRun, opened: Opened, report: RunReport, validated: Validated, images: int, world: World
) -> dict:
    """Write the results of the last checkpoint, from `images` validation images; print them and the run's summary."""
    directory, val_set, console = opened.directory, opened.val_set, opened.console
    results = reporting.write_results(
        directory.results if world.first else None,
        dataset=val_set,
        scores=validated.scores,
        confusion=validated.confusion,
        images=images,
        views=WHOLE_IMAGE.record(),
        checkpoint=directory.last,
        config=configuration.plain(config),
    )
    of = f" on the first {images} of {len(val_set)} images" if images < len(val_set) else ""
    reporting.print_scores(console, validated.scores, f"{val_set.name} {val_set.split}, last checkpoint{of}")
    summary = report.summary(directory, of)
    console.print(summary, soft_wrap=True, highlight=False)
    reporting.logger.debug(summary)
    return results


@hydra.main(version_base="1.3", config_path="configs", config_name="train_seg")
def main(values: DictConfig) -> None:
    # What torchrun says of a process that failed is what `record` leaves it.
    recorded = record(train) if distributed.launched() else train
    with reporting.errors_for_users():
        recorded(values, command=shlex.join(["python", *sys.argv]))


if __name__ == "__main__":
    main()
