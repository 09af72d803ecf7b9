"""Train a segmentation network: `python train_seg.py [experiment=…] [key=value …]`; `--help` lists the choices."""

import shlex
import sys
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig, OmegaConf

from engine import build, checkpoint, loop, reporting
from engine import config as configuration
from engine.evaluation import PictureCollector, evaluate_dataset
from engine.inference import WHOLE_IMAGE
from engine.run_directory import RunDirectory

configuration.register()


def train(values: DictConfig, command: str = "train_seg.train") -> dict:
    """Train as configured, evaluate the last checkpoint, and leave a run directory.

    Args:
        values: a composed `engine.schema.SegmentationRun`.
        command: how the run was started, kept in config.yaml.

    Returns:
        The results of the final evaluation, as in results.json.

    Raises:
        ValueError: the configuration, the data or the run directory do not fit; before the first step.
        FloatingPointError: the loss became infinite or NaN; the last checkpoint is of an earlier step.
    """
    config = configuration.typed(values)
    plain_config = configuration.plain(config)
    run = RunDirectory(config.run_dir, dataset=config.data.name, norm=config.norm.name)
    device = build.device(config.trainer.device)
    train_set = build.labelled_dataset(config.data, "data.train_split", config.data.train_split)
    val_set = build.labelled_dataset(config.data, "data.val_split", config.data.val_split)
    schedule = build.schedule(config, images=len(train_set))
    resumed = run.checkpoint_to_resume(config.resume, plain_config, schedule.total_steps)
    console = reporting.make_console()
    reporting.log_to(console, run.log)
    reporting.logger.debug(command)
    if resumed is None:
        run.config.write_text(f"# {command}\n{OmegaConf.to_yaml(plain_config)}")
    if config.data.verify:
        reporting.verify_with_progress(train_set, console)
        reporting.verify_with_progress(val_set, console)

    network, optimizer, scheduler = build.trainable(config, len(train_set.classes), schedule.total_steps, device)
    start_step, best_miou = 0, -1.0
    if resumed is not None:
        start_step = checkpoint.restore_run(resumed, network, optimizer, scheduler)
        best_miou = resumed["best_miou"]
    reporting.logger.info(
        f"{run.path}: {sum(p.numel() for p in network.parameters()):,} parameters, {len(train_set)} training and "
        f"{len(val_set)} validation images, steps {start_step} to {schedule.total_steps} on {device}"
    )

    with reporting.counted(console, "indexing the classes") as progress:
        train_loader = build.training_loader(
            config, train_set, schedule.total_steps, start_step, device, progress=progress
        )
    val_loader = build.evaluation_loader(val_set, config.data.workers, device, config.trainer.evaluate_images)
    forward = dict(
        image_input=build.image_input(config, device), autocast=build.autocast(config.trainer.precision, device)
    )
    report = reporting.RunReport(run.path, console, schedule.total_steps, start_step)

    def save(step: int, path: Path = run.last) -> None:
        state = {
            **checkpoint.run_state(network, optimizer, scheduler, step),
            "total_steps": schedule.total_steps,
            "best_miou": best_miou,
            "config": plain_config,
            "classes": list(train_set.classes),
            "palette": [list(colour) for colour in train_set.palette],
        }
        checkpoint.save(path, state)

    def evaluate(step: int) -> tuple[dict, torch.Tensor]:
        nonlocal best_miou
        pictures = PictureCollector(val_set, config.trainer.pictures)
        scores, confusion = evaluate_dataset(
            network, val_set, val_loader, progress=report.progress, on_prediction=pictures, **forward
        )
        report.evaluation(step, schedule.epoch(step), scores, pictures.pictures)
        if scores["miou"] > best_miou:
            best_miou = scores["miou"]
            save(step, run.best)
        return scores, confusion

    with report:
        loop.train(
            network,
            build.loss(config.loss, train_set.ignore_index),
            optimizer,
            scheduler,
            train_loader,
            start_step=start_step,
            schedule=schedule,
            accumulation_steps=config.trainer.accumulation_steps,
            report=report,
            evaluate=evaluate,
            save=save,
            **forward,
        )
        scores, confusion = evaluate(schedule.total_steps)

    console.print(reporting.iou_table(scores, title=f"{val_set.name} {val_set.split}, last checkpoint"))
    again = shlex.join(["python", "eval.py", f"checkpoint={run.last}"])
    console.print(f"evaluate again with: {again}", soft_wrap=True, markup=False)
    return reporting.write_results(
        run.results,
        dataset=val_set,
        scores=scores,
        confusion=confusion,
        images=len(val_loader),
        views=WHOLE_IMAGE.record(),
        checkpoint=run.last,
        config=plain_config,
    )


@hydra.main(version_base="1.3", config_path="configs", config_name="train_seg")
def main(values: DictConfig) -> None:
    with reporting.errors_for_users():
        train(values, command=shlex.join(["python", *sys.argv]))


if __name__ == "__main__":
    main()
