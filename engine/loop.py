"""The training loop."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from engine.evaluated import Evaluated
from engine.out_of_memory import memory_errors
from engine.peak_memory import peak_memory_mib
from engine.prefetching import prefetched
from engine.profiling import profiled
from engine.run import Config, Run, Split
from engine.stopping import Preempted
from engine.training_step import Loss, train_step
from engine.waits import DataWait


def train(
    run: Run[Config, Split], minibatches: Iterable[dict], loss: Loss, evaluate: Callable[[], Evaluated]
) -> Evaluated:
    """Train `run.learner`, one optimiser step per minibatch; evaluate when scheduled and at the end.

    `minibatches` holds this rank's share of each: "image" (N, 3, H, W) in levels of 0 to 255, "label", and lists of N
    "name" and "skipped" (lines about unreadable images). If any rank is asked to stop, all stop after the same step.

    Raises:
        FloatingPointError: the loss or gradient of a step, or a weight to be saved, is not finite.
        MemoryError: the device does not have enough memory; the message says what would need less.
        Preempted: the run was asked to stop; the current step has been saved.
        ValueError: too many images could not be read.
    """
    learner, schedule, metrics, world = run.learner, run.schedule, run.metrics, run.world
    minibatch_size = run.config.data.crops_per_minibatch
    if run.config.trainer.profile and world.first:
        minibatches = profiled(minibatches, run.config.trainer.profile, run.directory.path / "profile")
    run.stop.training = True
    with metrics:
        if schedule.evaluates(run.start_step) and run.start_step not in metrics.scores:  # the run was stopped during it
            run.evaluate(run.start_step, evaluate)
        if run.stop.anywhere(world):
            raise Preempted(f"stopped before step {run.start_step + 1}")
        waiting = DataWait(prefetched(minibatches, world.device))
        for step, minibatch in enumerate(waiting, start=run.start_step + 1):
            assert step <= schedule.total_steps, "the minibatches do not begin after run.start_step"
            lr = learner.optimizer.param_groups[0]["lr"]
            with _errors_of(step, minibatch, run):
                loss_value, gradient_norm = train_step(learner, loss, minibatch, minibatch_size, world)
            skipped = [reason for reasons in minibatch["skipped"] for reason in reasons.splitlines()]
            asked, skips = world.sum_(torch.tensor([int(run.stop.requested), len(skipped)])).tolist()
            exchange_s = learner.exchange.seconds if learner.exchange is not None else 0.0
            metrics.step(loss_value, gradient_norm, minibatch_size, waiting.seconds, exchange_s)
            metrics.skips(skips, skipped)
            run.config.data.check_skipped(metrics.skipped)
            if schedule.logs(step):
                waits = world.gather(metrics.waits())
                memory_mib = peak_memory_mib(world.device)
                metrics.training(step, schedule.epoch(step), lr, memory_mib, learner.loss_scale, waits)
            run.directory.saved(wait=False)
            if schedule.checkpoints(step) or asked:
                run.save(step)
            if asked:
                run.directory.saved()
                raise Preempted(f"stopped after step {step} of {schedule.total_steps}")
            if schedule.evaluates(step):
                run.evaluate(step, evaluate)
            metrics.pause_ended()
        return run.evaluate(schedule.total_steps, evaluate)


@contextmanager
def _errors_of(step: int, minibatch: dict, run: Run[Config, Split]) -> Iterator[None]:
    """Wraps a step: errors name the step, the images, and what would need less memory."""
    images, parts = minibatch["image"], run.learner.accumulation_steps
    crops = f"{-(-len(images) // parts)} crops of {images.shape[2]}x{images.shape[3]} pixels at a time"
    advice = run.config.memory_advice(run.world.size)
    try:
        with memory_errors(f"in step {step} with {crops} on this device {advice}"):
            yield
    except FloatingPointError as error:
        raise FloatingPointError(f"step {step}: {error} (images {', '.join(minibatch['name'])})") from error
