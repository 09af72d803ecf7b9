"""A network with everything that changes while it learns, and what one optimiser step does to it."""

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import AveragedModel

from engine.distributed import World

SMALLEST_SCALE = 2.0**-14  # of float16's losses: below, the gradients are broken and not just too large


@dataclass
class Learner:
    """
    `network`: what is trained, saved and evaluated. `forward`: the same parameters as the training calls them, where
    the network is compiled or distributed. `average`: the exponential moving average of the weights, where there is
    one. `scaler`: of the loss, for float16. `max_gradient_norm`: the gradient is clipped to it.
    """

    network: nn.Module
    forward: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler
    average: AveragedModel | None = None
    max_gradient_norm: float | None = None

    @property
    def evaluated(self) -> nn.Module:
        """The network whose scores count: the averaged one where there is one."""
        return self.network if self.average is None else self.average.module

    def accumulating(self, more_follow: bool) -> AbstractContextManager:
        """Around the forward and backward pass of a part of a minibatch: the processes exchange gradients last."""
        if more_follow and isinstance(self.forward, DistributedDataParallel):
            return self.forward.no_sync()
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, a scalar on the network's device; clips where that is asked for."""
        self.scaler.unscale_(self.optimizer)
        parameters = [p for p in self.network.parameters() if p.grad is not None]
        norm = get_total_norm([p.grad for p in parameters])
        if self.max_gradient_norm is not None:
            clip_grads_with_norm_(parameters, self.max_gradient_norm, norm)
        return norm

    def check(self, loss: float, gradient_norm: float) -> None:
        """Before a step.

        Raises:
            FloatingPointError: loss or gradient are not finite. An infinite gradient of float16 is no error: its
                step is left out and the loss scaled down, until that has happened too often.
        """
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}; {self._largest_weight()}")
        forgiven = self.scaler.is_enabled() and self.scaler.get_scale() > SMALLEST_SCALE
        if not math.isfinite(gradient_norm) and not forgiven:
            raise FloatingPointError(f"the gradient is {gradient_norm}; {self._largest_gradient()}")

    def step(self) -> None:
        """Change the weights, then the learning rate and the averaged weights."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled():
            self._step_scheduler_quietly()
        else:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.network)

    def _step_scheduler_quietly(self) -> None:
        with warnings.catch_warnings():  # float16 may leave out the very first steps of the optimiser
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
            self.scheduler.step()

    def _largest_weight(self) -> str:
        name, norm = _largest({name: p.detach() for name, p in self.network.named_parameters()})
        return f"the weights with the largest norm are {name} ({norm:.3g})"

    def _largest_gradient(self) -> str:
        gradients = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
        broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        name, norm = _largest(gradients)
        which = f"{len(broken)} of {len(gradients)} are not finite, {broken[0]} first" if broken else "all are finite"
        return f"{which}; the largest norm has that of {name} ({norm:.3g})"


@torch.no_grad()
def renew_statistics(network: nn.Module, minibatches: Iterable[Tensor], autocast: Callable, world: World) -> None:
    """Running statistics of all norms from `minibatches` alone, each counting the same: PyTorch's `update_bn` for
    norms of any kind, with everything else (dropout) as in an evaluation.

    Every process gives its own minibatches, as many as the others, and gets the average of all.
    """
    norms = [m for m in network.modules() if getattr(m, "running_mean", None) is not None]
    momenta = [norm.momentum for norm in norms]
    network.eval()
    for number, images in enumerate(minibatches, start=1):
        for norm in norms:
            norm.train()
            norm.momentum = 1 / number
        with autocast():
            network(images)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        for statistics in (norm.running_mean, norm.running_var):
            world.sum_(statistics).div_(world.size)
    network.eval()


def _largest(tensors: dict[str, Tensor]) -> tuple[str, float]:
    """Name and Euclidean norm of the largest one, in float64; NaN is larger than anything."""
    norms = {name: tensor.double().norm().item() for name, tensor in tensors.items()}
    return max(norms.items(), key=lambda entry: math.inf if math.isnan(entry[1]) else entry[1])
