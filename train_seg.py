"""Train a segmentation network; writes checkpoints, scores and curves to run_dir:

    python train_seg.py                         # synthetic street scenes, minutes
    python train_seg.py experiment=camvid/resnext_small data.root=DIR norm=std
    torchrun --nproc-per-node 4 train_seg.py … run_dir=RUN_DIR resume=auto  # on four devices

The same command continues a run that was stopped; several machines: docs/training.md.
"""

import engine.process.start  # noqa: F401

from functools import partial

from datasets import WholeImages
from engine import assemble
from engine.configuration.command_line import command_line, configured
from engine.process.console import counted
from engine.schema.segmentation import SegmentationRun
from engine.training import loop, planner, resumption
from engine.training.preparation import open_run
from engine.training.validation import segment_in_run


def train(config: SegmentationRun, command: str = "train_seg.train", watch: resumption.Watch | None = None) -> dict:
    """Train as configured, evaluate the last checkpoint, and write a run directory.

    Under torchrun every process calls this and gets its share of every minibatch and every evaluation.

    Args:
        config: the checked keys.
        command: how the run was started, for config.yaml.
        watch: follows the run, for a comparison.

    Returns:
        The results of the final evaluation, as in results.json.

    Raises:
        ValueError: configuration, data or run directory is wrong (found before the first step), or an image cannot be
            read.
        FloatingPointError: a loss, gradient or weight is infinite or NaN; the last checkpoint is from an earlier step.
        MemoryError: the device does not have enough memory.
        OSError: a checkpoint cannot be written, reading data timed out, or another process was lost.
        Preempted: a signal such as SIGTERM stopped the run; it can be resumed.
    """
    config, eager_because = planner.fit_to_budget(config)
    with open_run(config, command, assemble.labelled_splits, watch) as run:
        world = run.world
        steps = run.schedule.total_steps
        run.start(eager_because)

        with counted(run.console, "indexing the classes") as progress:
            index = assemble.class_index(config, run.train_set, world, progress)
        minibatches = assemble.training_loader(config, run.train_set, steps, world, run.start_step, index)
        loss = assemble.loss(config.loss, index, network=run.learner.network).to(world.device)
        image_count = config.trainer.evaluate_images  # None: all
        images = assemble.evaluation_loader(WholeImages(run.val_set), config.data, world, image_count)
        at_once = assemble.at_once(config, world.device, world.size)
        return run.conclude(loop.train(run, minibatches, loss, partial(segment_in_run, run, images, at_once)))


@configured("train_seg", SegmentationRun)  # Hydra's completion for fish looks for the text "@hydra.main"
def main(config: SegmentationRun) -> dict | None:
    if not config.trainer.resume_check:
        return train(config, command_line())
    resumption.check(config)
    return None


if __name__ == "__main__":
    main()
