"""Training, with everything it uses as an explicit argument."""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn

from engine.distributed import World
from engine.image_input import Autocast, ImageInput
from engine.learner import Learner
from engine.memory import is_out_of_memory, out_of_memory, peak_memory_mib
from engine.run_report import RunReport
from engine.schedule import Schedule
from engine.stopping import Preempted, StopRequest


def train(
    learner: Learner,
    loss_function: nn.Module,
    minibatches: Iterable[dict],
    *,
    start_step: int,
    schedule: Schedule,
    world: World,
    image_input: ImageInput,
    autocast: Autocast,
    accumulation_steps: int,
    crops_per_minibatch: int,
    report: RunReport,
    evaluate: Callable[[int], object],
    save: Callable[[int], None],
    stop: StopRequest,
) -> None:
    """Train to the end of `minibatches`, one optimiser step each; `start_step` steps are already done.

    `minibatches` holds this process's share of each. `evaluate(step)` and `save(step)` are called when the schedule
    says so, with the number of steps done. All processes take the same steps, also when `stop` is requested of one.

    Raises:
        FloatingPointError: the loss or gradient of a step is not finite.
        MemoryError: the device has not enough memory; says what would need less.
        Preempted: `stop` was requested; the step that was under way has been saved.
    """
    if world.sum_(torch.tensor(int(stop.requested))).item():
        raise Preempted(f"stopped before step {start_step + 1}")
    for step, minibatch in enumerate(prefetched(minibatches, world.device), start=start_step + 1):
        lr = learner.optimizer.param_groups[0]["lr"]
        try:
            loss, gradient_norm = train_step(
                learner,
                loss_function,
                minibatch["image"],
                minibatch["label"],
                world=world,
                image_input=image_input,
                autocast=autocast,
                accumulation_steps=accumulation_steps,
                crops_per_minibatch=crops_per_minibatch,
            )
        except FloatingPointError as error:
            raise FloatingPointError(f"step {step}: {error} (images {', '.join(minibatch['name'])})") from error
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            shape, least_share = minibatch["image"].shape, crops_per_minibatch // world.size
            message = out_of_memory(shape, accumulation_steps, learner.network, least_share)
            raise MemoryError(f"step {step}: {message}") from error
        skipped = [reason for reasons in minibatch["skipped"] for reason in reasons.splitlines()]
        asked, skips = world.sum_(torch.tensor([int(stop.requested), len(skipped)])).tolist()
        report.step(loss, gradient_norm, crops_per_minibatch)
        report.skips(skips, skipped)
        if schedule.logs(step):
            scale = learner.scaler.get_scale() if learner.scaler.is_enabled() else None
            report.training(step, schedule.epoch(step), lr, peak_memory_mib(world.device), scale)
        if schedule.checkpoints(step) or asked:
            save(step)
        if asked:
            raise Preempted(f"stopped after step {step} of {schedule.total_steps}")
        if schedule.evaluates(step):
            evaluate(step)
        report.pause_ended()


def train_step(
    learner: Learner,
    loss_function: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    image_input: ImageInput,
    autocast: Autocast,
    accumulation_steps: int,
    crops_per_minibatch: int,
    world: World,
) -> tuple[float, float]:
    """One optimiser step on a minibatch: uint8 images (N, 3, H, W), uint8 labels (N, H, W) of this process.

    Every crop of the whole minibatch counts the same, however many of them a process or a part has: as the processes'
    gradients are averaged, the mean loss of a part is weighted by its crops over those of an average process.

    Returns:
        The mean loss of the whole minibatch, and the norm of the gradient before clipping.

    Raises:
        FloatingPointError: one of both is not finite; the weights are then as before the step.
    """
    learner.network.train()
    learner.optimizer.zero_grad()
    total_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    parts = list(zip(images.tensor_split(accumulation_steps), labels.tensor_split(accumulation_steps), strict=True))
    for number, (image_part, label_part) in enumerate(parts, start=1):
        with learner.accumulating(more_follow=number < accumulation_steps):
            inputs = image_input(image_part)
            with autocast():
                logits = learner.forward(inputs)
            loss = loss_function(logits, label_part.to(logits.device, non_blocking=True))
            loss = loss * (len(image_part) * world.size / crops_per_minibatch)
            learner.backward(loss)
        total_loss += loss.detach()
    mean_loss = world.sum_(total_loss) / world.size
    loss, gradient_norm = torch.stack([mean_loss, learner.gradient_norm().double()]).tolist()
    learner.check(loss, gradient_norm)
    learner.step()
    return loss, gradient_norm


def prefetched(minibatches: Iterable[dict], device: torch.device) -> Iterator[dict]:
    """The minibatches with their tensors on `device`; a CUDA device copies one while it computes on that before."""
    if device.type != "cuda":
        yield from minibatches
        return
    stream, under_way = torch.cuda.Stream(device), None
    for minibatch in minibatches:
        with torch.cuda.stream(stream):
            copied = {
                key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value
                for key, value in minibatch.items()
            }
            before, under_way = under_way, (copied, stream.record_event())
        if before is not None:
            yield _arrived(*before)
    if under_way is not None:
        yield _arrived(*under_way)


def _arrived(minibatch: dict, copied: torch.cuda.Event) -> dict:
    present = torch.cuda.current_stream()
    present.wait_event(copied)
    for value in minibatch.values():
        if isinstance(value, Tensor):
            value.record_stream(present)  # its memory is not free before the present stream is done with it
    return minibatch
