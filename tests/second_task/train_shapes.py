"""Train a classifier of drawn shapes: `python -m tests.second_task.train_shapes [key=value …]`."""

from functools import partial
from pathlib import Path

import torch.distributed as dist
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import DataLoader

from datasets import ShuffledMinibatches
from engine import build, loop
from engine import config as configuration
from engine.command_line import command_line, configured
from engine.run import opened
from tests.second_task.shapes import ShapesRun, evaluation_of, shapes, verify

CONFIGS = Path(__file__).parent / "configs"


def train(values: DictConfig, command: str = "train_shapes.train") -> dict:
    """Train as configured, evaluate the last checkpoint, and leave a run directory; errors: see `train_seg.train`."""
    config = configuration.typed(values, ShapesRun)
    with opened(config, command, shapes, verify) as run:
        world, total_steps = run.world, run.schedule.total_steps
        run.start(build.learner(config, partial(classifier, config, len(run.train_set.classes)), run.schedule, world))

        def minibatches_of(steps: int, start_step: int = 0) -> DataLoader:
            sampler = ShuffledMinibatches(len(run.train_set), **build.order_of(config, steps, world, start_step))
            return build.loader(run.train_set, config.data, world, batch_sampler=sampler)

        run.learner.statistics_minibatches = minibatches_of(config.trainer.ema_statistics_minibatches)
        minibatches = minibatches_of(total_steps, run.start_step)
        images = build.evaluation_loader(run.val_set, config.data, world, config.trainer.evaluate_images, batch_size=4)
        return run.conclude(loop.train(run, minibatches, nn.CrossEntropyLoss(), evaluation_of(run, images)))


def classifier(config: ShapesRun, classes: int, group: dist.ProcessGroup | None) -> nn.Module:
    body = build.body(config.body, build.norm_act(config.norm, group), classes)
    return nn.Sequential(nn.Dropout(0.1), body)  # random numbers that a resumed run must continue


@configured("train_shapes", ShapesRun, CONFIGS)
def main(values: DictConfig) -> None:
    train(values, command_line())


if __name__ == "__main__":
    main()
