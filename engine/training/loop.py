"""The training loop, and the optimiser step that it repeats."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, profiler

from engine.process.console import logger
from engine.process.distributed import World
from engine.process.memory import forget_peak, memory_errors, peak_memory_mib
from engine.process.stopping import Preempted
from engine.process.transfers import prefetched
from engine.records.evaluated import Evaluated
from engine.training.learner import Learner
from engine.training.run import Config, Run, Split
from keepless import checking_repetitions
from models.freezing import training_mode

PLANNED_STEPS = 3  # first steps, after which traces have corrected the plans of a memory budget
CHECKED_STEPS = 2  # first steps, in which outputs of reversible branches are compared with their recomputation
Loss = Callable[[Tensor, Tensor], Tensor]  # logits, labels -> mean over the images of a micro-batch


def train(
    run: Run[Config, Split], minibatches: Iterable[dict], loss: Loss, evaluate: Callable[[], Evaluated]
) -> Evaluated:
    """Train `run.learner`, one optimiser step per minibatch; evaluate when scheduled and at the end.

    In the first steps, recomputed outputs of reversible branches are compared with the originals.

    `minibatches` holds this rank's share of each: "image" (N, 3, H, W) in levels of 0 to 255, "label", and a list of N
    "name". If any rank is asked to stop, all stop after the same step.

    Raises:
        FloatingPointError: the loss or gradient of a step, or a weight to be saved, is not finite.
        MemoryError: the device does not have enough memory; the message suggests settings that need less.
        Preempted: the run was asked to stop; the current step has been saved.
        RuntimeError: a reversible branch's recomputation differs (see `checking_repetitions`).
        ValueError: an image cannot be read.
    """
    learner, schedule, metrics, world = run.learner, run.schedule, run.metrics, run.world
    minibatch_size = run.config.data.crops_per_minibatch
    if run.config.trainer.profile and world.first:
        minibatches = _profiled(minibatches, run.config.trainer.profile, run.directory.path / "profile")
    run.stop.training = True
    with metrics:
        if schedule.evaluates(run.start_step) and run.start_step not in metrics.scores:  # the run was stopped during it
            run.evaluate(run.start_step, evaluate)
        if run.stop.anywhere(world):
            raise Preempted(f"stopped before step {run.start_step + 1}")
        timed = _timed(prefetched(minibatches, world.device))
        for step, (minibatch, waited_s) in enumerate(timed, start=run.start_step + 1):
            assert step <= schedule.total_steps, "the minibatches do not begin after run.start_step"
            lr = learner.optimizer.param_groups[0]["lr"]
            first = step <= run.start_step + CHECKED_STEPS
            if step == run.start_step + PLANNED_STEPS + 1:
                forget_peak(world.device)  # of cuDNN's search for algorithms, and of tracing for plans
            with _errors_of(step, minibatch, run), checking_repetitions() if first else nullcontext():
                loss_value, gradient_norm = train_step(learner, loss, minibatch, minibatch_size, world)
            if step == run.start_step + PLANNED_STEPS:
                run.share_plans()
                if learner.captured is not None:
                    learner.captured.begin()
            asked = run.stop.anywhere(world)
            metrics.step(loss_value, gradient_norm, minibatch_size, waited_s)
            if schedule.logs(step):
                waits_s = world.gather(metrics.data_wait_s())
                memory_mib = peak_memory_mib(world.device)
                metrics.training(step, schedule.epoch(step), lr, memory_mib, learner.loss_scale, waits_s)
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


def _timed(minibatches: Iterable[dict]) -> Iterator[tuple[dict, float]]:
    """Each minibatch, and how many seconds it took to arrive."""
    waiting = iter(minibatches)
    while True:
        started = time.perf_counter()
        minibatch = next(waiting, None)
        if minibatch is None:
            return
        yield minibatch, time.perf_counter() - started


def _profiled(minibatches: Iterable[dict], steps: int, folder: Path) -> Iterator[dict]:
    """Yield the minibatches; after ten of them, trace `steps` to folder/trace.json, for Perfetto or chrome://tracing."""
    folder.mkdir(parents=True, exist_ok=True)
    rhythm = profiler.schedule(wait=8, warmup=2, active=steps, repeat=1)
    file = str(folder / "trace.json")
    with profiler.profile(
        schedule=rhythm, on_trace_ready=lambda done: done.export_chrome_trace(file), acc_events=True
    ) as tracer:
        for minibatch in minibatches:
            yield minibatch
            tracer.step()


@contextmanager
def _errors_of(step: int, minibatch: dict, run: Run[Config, Split]) -> Iterator[None]:
    """Wraps a step: errors name the step, the images, and settings that need less memory.

    A scheduler's signal may also end a compiler that the step has started, and the step then fails.
    """
    images, parts = minibatch["image"], run.learner.accumulation_steps
    crops = f"{-(-len(images) // parts)} crops of {images.shape[2]}x{images.shape[3]} pixels at a time"
    advice = run.config.memory_advice(run.world.size)
    try:
        with memory_errors(f"in step {step} with {crops} on this device {advice}"):
            yield
    except FloatingPointError as error:
        raise FloatingPointError(f"step {step}: {error} (images {', '.join(minibatch['name'])})") from error
    except (RuntimeError, ValueError) as error:
        if not run.stop.requested:
            raise
        logger.debug("", exc_info=True)  # the traceback goes to log.txt
        raise Preempted(f"stopped in step {step}, which did not end and will be repeated") from error


def train_step(learner: Learner, loss: Loss, minibatch: dict, minibatch_size: int, world: World) -> tuple[float, float]:
    """One optimiser step on this rank's share of a minibatch of `minibatch_size` images.

    Returns the mean loss of the whole minibatch, and the norm of the gradient before clipping.
    FloatingPointError: loss or gradient is not finite; weights are unchanged.
    """
    training_mode(learner.network)
    learner.zero_grad()
    total_loss = accumulate_gradients(learner, loss, minibatch, minibatch_size, world)
    mean_loss = world.sum_(total_loss) / world.size
    mean_loss, gradient_norm = torch.stack([mean_loss, learner.gradient_norm().double()]).tolist()
    learner.check(mean_loss, gradient_norm)
    learner.step(gradient_norm)
    return mean_loss, gradient_norm


def accumulate_gradients(learner: Learner, loss: Loss, minibatch: dict, minibatch_size: int, world: World) -> Tensor:
    """Forward and backward passes of this rank's share of a minibatch, one micro-batch after the other.

    Every image of the minibatch has the same weight, even if ranks or micro-batches differ in size. DDP averages
    gradients over ranks, so a micro-batch's mean loss is weighted by its number of images / the mean number per rank.
    Returns this rank's sum of weighted losses, a float64 scalar on the device.
    """

    def micro_batch(images: Tensor, labels: Tensor) -> Tensor:
        # Without a name, the logits are freed as soon as the backward pass no longer needs them.
        part_loss = loss(learner.forward(images), labels.to(world.device, non_blocking=True))
        part_loss = part_loss * (len(images) * world.size / minibatch_size)
        learner.backward(part_loss)
        return part_loss.detach()

    total_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    images, labels = (minibatch[key].tensor_split(learner.accumulation_steps) for key in ("image", "label"))
    for number, part in enumerate(zip(images, labels, strict=True), start=1):
        with learner.accumulating(more_follow=number < learner.accumulation_steps):
            total_loss += learner.run(micro_batch, *part)
    if learner.captured is not None:
        learner.captured.average_gradients(world)
    return total_loss
