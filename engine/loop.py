"""Training, with everything it uses as an explicit argument."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from datasets.transforms import base_scale, scaled
from engine.memory import peak_memory_mib, reset_peak_memory
from engine.reporting import RunReport
from engine.schedule import Schedule

Autocast = Callable[[], AbstractContextManager]  # a fresh autocast context for each forward pass


class ImageInput:
    """uint8 RGB images (N, 3, H, W) on any device -> normalised float32 ones on the network's device.

    Pixels travel as bytes and are normalised where the network is: (image / 255 - mean) / std. `base_size`: pixels of
    the longest side of whole images (those of the training are resized while they are cropped); None is their own.
    """

    def __init__(
        self,
        mean: list[float],
        std: list[float],
        device: torch.device,
        channels_last: bool,
        base_size: int | None = None,
    ):
        self.device = device
        self.mean = torch.tensor(mean, device=device).view(1, 3, 1, 1) * 255
        self.std = torch.tensor(std, device=device).view(1, 3, 1, 1) * 255
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.base_size = base_size

    def __call__(self, images: Tensor) -> Tensor:
        images = images.to(self.device, non_blocking=True)
        return ((images - self.mean) / self.std).contiguous(memory_format=self.memory_format)

    def size(self, own_size: tuple[int, int], scale: float = 1.0) -> tuple[int, int]:
        """(H, W) at which the network sees a whole image of `own_size`, times `scale`."""
        return scaled(own_size, scale * base_scale(own_size, self.base_size))


def train(
    network: nn.Module,
    loss_function: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    minibatches: Iterable[dict],
    *,
    start_step: int,
    schedule: Schedule,
    image_input: ImageInput,
    autocast: Autocast,
    accumulation_steps: int,
    report: RunReport,
    evaluate: Callable[[int], object],
    save: Callable[[int], None],
) -> None:
    """Train to the end of `minibatches`, one optimiser step each; `start_step` steps are already done.

    `evaluate(step)` and `save(step)` are called when the schedule says so, with the number of steps done.

    Raises:
        FloatingPointError: the loss of a step is not finite; nothing was saved since.
    """
    for step, minibatch in enumerate(minibatches, start=start_step + 1):
        lr = optimizer.param_groups[0]["lr"]
        try:
            loss = train_step(
                network,
                loss_function,
                optimizer,
                scheduler,
                minibatch["image"],
                minibatch["label"],
                image_input=image_input,
                autocast=autocast,
                accumulation_steps=accumulation_steps,
            )
        except FloatingPointError as error:
            raise FloatingPointError(
                f"step {step}: {error} (images {', '.join(minibatch['name'])}); checkpoints, if any, are of earlier "
                f"steps: try a lower optim.lr, or trainer.precision=float32"
            ) from error
        report.step(loss, images=len(minibatch["name"]))
        if schedule.logs(step):
            report.training(step, schedule.epoch(step), lr, peak_memory_mib(image_input.device))
        if schedule.evaluates(step):
            evaluate(step)
            reset_peak_memory(image_input.device)  # whole images may need more than the crops of the training
        if schedule.checkpoints(step):
            save(step)
        report.pause_ended()


def train_step(
    network: nn.Module,
    loss_function: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    images: Tensor,
    labels: Tensor,
    *,
    image_input: ImageInput,
    autocast: Autocast,
    accumulation_steps: int,
) -> float:
    """One optimiser step on a minibatch: uint8 images (N, 3, H, W), uint8 labels (N, H, W). Returns the mean loss.

    Raises:
        FloatingPointError: the loss is not finite; the weights are then as before the step.
    """
    network.train()
    optimizer.zero_grad()
    total_loss = 0.0
    parts = zip(images.chunk(accumulation_steps), labels.chunk(accumulation_steps), strict=True)
    for image_part, label_part in parts:
        inputs = image_input(image_part)
        with autocast():
            logits = network(inputs)
        loss = loss_function(logits, label_part.to(logits.device, non_blocking=True)) / accumulation_steps
        loss.backward()
        total_loss += loss.item()
    if not math.isfinite(total_loss):
        raise FloatingPointError(f"the loss is {total_loss}")
    optimizer.step()
    scheduler.step()
    return total_loss
