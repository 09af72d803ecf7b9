"""The training loop, and the optimiser step that it repeats."""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn, profiler
from torch.nn.parallel import DistributedDataParallel

from engine.process.allocations import cause_of, forget_peak, is_out_of_memory, peak_memory_mib
from engine.process.console import logger
from engine.process.distributed import World
from engine.process.stopping import Preempted
from engine.records.evaluated import Evaluated
from engine.records.metrics_logger import PLANNED_STEPS
from engine.segmentation.cross_entropy import Batch
from engine.training import advice
from engine.training.learner import Learner, Outcome
from engine.training.run import Config, Run, Split
from keepless import checking_repetitions
from models.freezing import training_mode

CHECKED_STEPS = 2  # first steps, in which outputs of reversible branches are compared with their recomputation
# A network's result, labels, perhaps the `Batch` -> mean over the images of a micro-batch.
Loss = Callable[..., Tensor]


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
        ValueError: an image cannot be read; or the loss has parameters that would be trained.
    """
    schedule = run.schedule
    delivered = _begin(run, minibatches, loss)
    with run.metrics as metrics:
        evaluated = _repeat_evaluation(run, evaluate)
        if run.stop.anywhere(run.world):
            raise Preempted(f"stopped before step {run.start_step + 1}")
        if evaluated is not None and metrics.ends_early:
            return evaluated
        previous_step: LaunchedStep | None = None
        ended_s = time.perf_counter()
        for step, minibatch in enumerate(delivered, start=run.start_step + 1):
            assert step <= schedule.total_steps, "the minibatches do not begin after run.start_step"
            waited_s = time.perf_counter() - ended_s
            lr = run.learner.optimizer.param_groups[0]["lr"]
            outcome = _take_step(run, loss, minibatch, step)
            launched_s = time.perf_counter()
            # The host reads a step's numbers while the device takes the next one.
            must_stop = previous_step is not None and _record_step(previous_step, run)
            must_stop = must_stop or (run.world.size == 1 and run.stop.requested)
            previous_step = LaunchedStep(step, outcome, lr, minibatch["name"], waited_s, launched_s)
            if must_stop or schedule.checkpoints(step):
                must_stop = _record_step(previous_step._replace(launched_s=None), run) or must_stop
                previous_step = None
                _save(run, step, must_stop)
                if schedule.evaluates(step):
                    evaluated = run.evaluate(step, evaluate)
                    if metrics.ends_early:
                        return evaluated
                metrics.pause_ended()
            run.directory.raise_if_save_failed()
            ended_s = time.perf_counter()
        return run.evaluate(schedule.total_steps, evaluate)


def _begin(run: Run[Config, Split], minibatches: Iterable[dict], loss: Loss) -> Iterator[dict]:
    """Restore what a resumed run has saved; return the minibatches on the device, traced with `trainer.profile`.

    From now on a stop is requested, and the run saves its step before it ends.
    """
    if run.learner.captured is not None and getattr(loss, "asks_for_batch", False):
        run.learner.captured.problem = "the loss asks for each batch, and a CUDA graph would give it the first again"
    run.begin(loss, minibatches)
    delivered = run.deliver_minibatches(minibatches, loss)
    run.stop.training = True
    if run.config.trainer.profile and run.world.first:
        return _profile_steps(delivered, run.config.trainer.profile, run.directory.path / "profile")
    return delivered


def _repeat_evaluation(run: Run[Config, Split], evaluate: Callable[[], Evaluated]) -> Evaluated | None:
    """Evaluate before the first step, if the checkpoint lacks its step's score or has ended early; else None."""
    lacks_score = run.schedule.evaluates(run.start_step) and run.start_step not in run.metrics.scores
    if lacks_score or run.metrics.ends_early:
        return run.evaluate(run.start_step, evaluate)
    return None


def _save(run: Run[Config, Split], step: int, must_stop: bool) -> None:
    """Start writing the last checkpoint. Preempted, once it is written: the run must stop."""
    run.save(step)
    if must_stop:
        run.directory.finish_saving()
        raise Preempted(f"stopped after step {step} of {run.schedule.total_steps}")


def _take_step(run: Run[Config, Split], loss: Loss, minibatch: dict, step: int) -> Outcome:
    """Take a step by `train_step`; the first ones of this process are checked, and after three plans and graphs hold.

    Errors: see `train`.
    """
    steps_here = step - run.start_step
    if steps_here == PLANNED_STEPS + 1:
        forget_peak(run.world.device)  # of cuDNN's search for algorithms, and of tracing for plans
    try:
        with checking_repetitions() if steps_here <= CHECKED_STEPS else nullcontext():
            minibatch_size = run.config.data.crops_per_minibatch
            outcome = train_step(run.learner, loss, minibatch, minibatch_size, run.world, run.stop.requested)
        for name, parameter in loss.named_parameters() if isinstance(loss, nn.Module) else ():
            if parameter.grad is not None:  # perhaps in a later step than the first
                raise ValueError(
                    f"{run.loss_name}: {name} gets a gradient, but only the network is trained: let the head have it"
                )
    except (RuntimeError, ValueError) as error:
        _raise_better(error, step, minibatch, run)
        raise
    if steps_here == PLANNED_STEPS:
        run.share_plans()
        if run.learner.captured is not None:
            run.learner.captured.begin()
    return outcome


class LaunchedStep(NamedTuple):
    """A step that the device may still be taking."""

    step: int
    outcome: Outcome
    lr: float
    names: list[str]  # of its images
    waited_s: float  # for its minibatch
    launched_s: float | None  # the clock then; None: the step's time ends when it is read


def _record_step(launched: LaunchedStep, run: Run[Config, Split]) -> bool:
    """Wait for a step, and record it; return whether a rank was asked to stop before it. Every rank must call it."""
    metrics = run.metrics
    step = launched.step
    try:
        loss, gradient_norm, must_stop, loss_scale = run.learner.read(launched.outcome)
    except FloatingPointError as error:
        raise FloatingPointError(f"step {step}: {error} (images {', '.join(launched.names)})") from error
    image_count = run.config.data.crops_per_minibatch
    metrics.count_step(loss, gradient_norm, image_count, launched.waited_s, launched.launched_s)
    if run.schedule.logs(step):
        waits_s = run.world.gather(metrics.data_wait_s())
        memory_mib = peak_memory_mib(run.world.device)
        metrics.record_training(step, run.schedule.epoch(step), launched.lr, memory_mib, loss_scale, waits_s)
    return must_stop


def _profile_steps(minibatches: Iterable[dict], step_count: int, folder: Path) -> Iterator[dict]:
    """Yield the minibatches; after ten, trace so many steps to folder/trace.json, for Perfetto or chrome://tracing."""
    folder.mkdir(parents=True, exist_ok=True)
    schedule = profiler.schedule(wait=8, warmup=2, active=step_count, repeat=1)
    file = str(folder / "trace.json")
    with profiler.profile(
        schedule=schedule, on_trace_ready=lambda trace: trace.export_chrome_trace(file), acc_events=True
    ) as tracer:
        for minibatch in minibatches:
            yield minibatch
            tracer.step()


def _raise_better(error: RuntimeError | ValueError, step: int, minibatch: dict, run: Run[Config, Split]) -> None:
    """Raise a better error for one of a step, if there is one: it names the step, and settings that need less memory.

    A scheduler's signal may also end a compiler that the step has started, and the step then fails.
    """
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        images = minibatch["image"]
        count = -(-len(images) // run.learner.accumulation_steps)
        crops = f"{count} crops of {images.shape[2]}x{images.shape[3]} pixels at a time"
        smaller = advice.on_memory(run.config, run.world.size, is_captured=run.learner.captured is not None)
        raise MemoryError(f"{cause_of(error)} in step {step} with {crops} on this device {smaller}") from error
    if run.stop.requested:
        logger.debug("", exc_info=True)  # the traceback goes to log.txt
        raise Preempted(f"stopped in step {step}, which did not end and will be repeated") from error


def train_step(
    learner: Learner, loss: Loss, minibatch: dict, minibatch_size: int, world: World, stop: bool = False
) -> Outcome:
    """One optimiser step on this rank's share of a minibatch of `minibatch_size` images; `Learner.read` waits for it.

    `stop`: whether this rank was asked to stop. The ranks add that up together with their losses.
    """
    if not learner.network.training:
        training_mode(learner.network)
    if learner.captured is None:
        learner.optimizer.zero_grad()
    else:
        learner.captured.zero_gradients()
    total_loss = accumulate_gradients(learner, loss, minibatch, minibatch_size, world)
    total_loss, stops = world.sum_(torch.stack([total_loss, total_loss.new_full((), stop)])).unbind()
    return learner.step(total_loss / world.size, stops)


def accumulate_gradients(learner: Learner, loss: Loss, minibatch: dict, minibatch_size: int, world: World) -> Tensor:
    """Forward and backward passes of this rank's share of a minibatch, one micro-batch after the other.

    Every image of the minibatch has the same weight, even if ranks or micro-batches differ in size. DDP averages
    gradients over ranks, so a micro-batch's mean loss is weighted by its number of images / the mean number per rank.
    Returns this rank's sum of weighted losses, a float64 scalar on the device.
    """
    batch: dict[str, Batch] = {}
    names = iter(minibatch.get("name", ()))

    def micro_batch(images: Tensor, labels: Tensor) -> Tensor:
        if getattr(loss, "asks_for_batch", False):  # which is never captured
            shown = images.to(world.device, non_blocking=True)
            batch["batch"] = Batch(shown, [*islice(names, len(images))], minibatch["step"], minibatch["epoch"])
        # Without a name, the logits are freed as soon as the backward pass no longer needs them.
        part_loss = loss(learner.forward(images), labels.to(world.device, non_blocking=True), **batch)
        part_loss = part_loss * (len(images) * world.size / minibatch_size)
        learner.scaler.scale(part_loss).backward()
        return part_loss.detach()

    run_micro_batch = micro_batch if learner.captured is None else partial(learner.run_captured, micro_batch)
    total_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    images = minibatch["image"].tensor_split(learner.accumulation_steps)
    labels = minibatch["label"].tensor_split(learner.accumulation_steps)
    ddp = learner.forward.network if isinstance(learner.forward.network, DistributedDataParallel) else None
    for number, part in enumerate(zip(images, labels, strict=True), start=1):
        with nullcontext() if ddp is None or number == learner.accumulation_steps else ddp.no_sync():
            total_loss += run_micro_batch(*part)
    if learner.captured is not None:
        learner.captured.average_gradients(world)
    return total_loss
