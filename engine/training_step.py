"""One optimiser step of a training."""

from collections.abc import Callable

import torch
from torch import Tensor

from engine.distributed import World
from engine.learner import Learner

Loss = Callable[[Tensor, Tensor], Tensor]  # logits, labels -> mean over the images of a micro-batch


def train_step(learner: Learner, loss: Loss, minibatch: dict, minibatch_size: int, world: World) -> tuple[float, float]:
    """One optimiser step on this rank's share of a minibatch of `minibatch_size` images.

    Returns:
        The mean loss of the whole minibatch, and the norm of the gradient before clipping.

    Raises:
        FloatingPointError: loss or gradient is not finite; weights are unchanged.
    """
    learner.network.train()
    learner.optimizer.zero_grad()
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

    Returns:
        This rank's sum of weighted losses, a float64 scalar on the device.
    """
    total_loss = torch.zeros((), dtype=torch.float64, device=world.device)
    images, labels = (minibatch[key].tensor_split(learner.accumulation_steps) for key in ("image", "label"))
    for number, (image_part, label_part) in enumerate(zip(images, labels, strict=True), start=1):
        with learner.accumulating(more_follow=number < learner.accumulation_steps):
            logits = learner.forward(image_part)
            part_loss = loss(logits, label_part.to(logits.device, non_blocking=True))
            part_loss = part_loss * (len(image_part) * world.size / minibatch_size)
            learner.backward(part_loss)
        total_loss += part_loss.detach()
    return total_loss
