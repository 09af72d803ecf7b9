"""Train a classification network; writes checkpoints, scores and curves to run_dir:

    python train_imagenet.py                    # synthetic shapes, two minutes
    python train_imagenet.py experiment=cifar10/resnet14 data.root=DIR
    torchrun --nproc-per-node 4 train_imagenet.py … run_dir=RUN_DIR resume=auto  # on four devices

The same command continues a run that was stopped; several machines: docs/training.md.
"""

import engine.process.start  # noqa: F401

from functools import partial

from engine import assemble
from engine.configuration.command_line import command_line, configured
from engine.schema.classification import ClassificationRun
from engine.training import loop, planner, resumption
from engine.training.preparation import open_run
from engine.training.validation import classify_in_run


def train(
    config: ClassificationRun, command: str = "train_imagenet.train", watch: resumption.Watch | None = None
) -> dict:
    """Train as configured, evaluate the last checkpoint, and write a run directory.

    See `train_seg.train`.
    """
    config, eager_because = planner.fit_to_budget(config)
    with open_run(config, command, assemble.classified_splits, watch) as run:
        run.start(eager_because)
        val_minibatches = assemble.evaluation_minibatches(
            config.data,
            run.val_set,
            run.world,
            config.trainer.evaluate_images,
            batch_size=config.trainer.evaluate_batch_size,
        )
        steps = run.schedule.total_steps
        minibatches = assemble.classified_crops(config, run.train_set, steps, run.world, run.start_step)
        evaluate = partial(classify_in_run, run, val_minibatches)
        return run.conclude(loop.train(run, minibatches, assemble.cross_entropy, evaluate))


@configured("train_imagenet", ClassificationRun)  # Hydra's completion for fish looks for the text "@hydra.main"
def main(config: ClassificationRun) -> dict | None:
    if not config.trainer.resume_check:
        return train(config, command_line())
    resumption.check(config)
    return None


if __name__ == "__main__":
    main()
