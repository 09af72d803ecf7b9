"""A network with everything that changes in training: optimiser, schedule, loss scale, averaged weights."""

import copy
import math
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine.process.distributed import World
from engine.process.forward import Forward
from engine.training.capture import CapturedMicroBatches, MicroBatch
from models.checkpoints.loading import not_finite

SMALLEST_SCALE = 2.0**-14  # of a float16 loss; below it, gradients are broken, not just too large


class WeightAverage:
    """An average of the weights of `network`, updated after every step.

    Used instead of PyTorch's AveragedModel, which waits for the device and copies all buffers at every update.
    `module` is a copy of the network with the averaged weights; `take_buffers` gives it the network's buffers.
    """

    def __init__(self, network: nn.Module, decay: float):
        self.module = copy.deepcopy(network)
        self.updates = 0
        self._average = get_ema_multi_avg_fn(decay)
        self._buffers_are_old = False

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """average = decay * average + (1 - decay) * weights; the first update copies the weights."""
        pairs = [*zip(self.module.parameters(), network.parameters(), strict=True)]
        if self.updates:  # frozen weights stay as the first update has copied them
            pairs = [pair for pair in pairs if pair[1].requires_grad]
        own, weights = ([parameter.detach() for parameter in each] for each in zip(*pairs, strict=True))
        if self.updates:
            self._average(own, weights, self.updates)
        else:
            for average, new in zip(own, weights, strict=True):
                average.copy_(new)
        self.updates += 1
        self._buffers_are_old = True

    @torch.no_grad()
    def take_buffers(self, network: nn.Module) -> None:
        """Copy the buffers of the network (its running statistics), unless there was no update since the last time."""
        if self._buffers_are_old:
            for own, new in zip(self.module.buffers(), network.buffers(), strict=True):
                own.copy_(new, non_blocking=True)
        self._buffers_are_old = False


@dataclass
class Learner:
    """A network in training."""

    network: nn.Module  # the bare network, which is trained, saved and (unless averaged) evaluated
    forward: Forward  # from images through the same parameters, compiled and wrapped in DDP as configured
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    scaler: torch.amp.GradScaler  # scales the loss in float16
    accumulation_steps: int = 1  # micro-batches per minibatch on each rank
    average: WeightAverage | None = None  # exponential moving average of the weights, evaluated instead of `network`
    max_gradient_norm: float | None = None  # gradients are clipped to it; None: never
    captured: CapturedMicroBatches | None = None  # runs micro-batches as a CUDA graph; None: eagerly

    @property
    def evaluated(self) -> Forward:
        """Forward pass of the network to evaluate: the average, if there is one."""
        if self.average is None:
            return self.forward.through(self.network)
        self.average.take_buffers(self.network)
        return self.forward.through(self.average.module)

    def prepare_evaluation(self, world: World) -> None:
        """Give the evaluated network its running statistics, equal on all ranks. Every rank must call it."""
        world.share_buffers(self.evaluated.network)

    def accumulating(self, more_follow: bool) -> AbstractContextManager:
        """Context for one micro-batch: DDP synchronises gradients only on the last."""
        if more_follow and isinstance(self.forward.network, DistributedDataParallel):
            return self.forward.network.no_sync()
        return nullcontext()

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        if self.captured is None:
            self.optimizer.zero_grad()
        else:
            self.captured.gradients.zero_()

    def run(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor) -> Tensor:
        """The loss of a micro-batch, computed eagerly or by a graph, which overwrites it in its next call."""
        return (micro_batch if self.captured is None else partial(self.captured, micro_batch))(images, labels)

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

    def gradient_norm(self) -> Tensor:
        """Unscale the gradient; return its Euclidean norm over all parameters, a scalar on the network's device."""
        self.scaler.unscale_(self.optimizer)
        return get_total_norm([p.grad for p in self.network.parameters() if p.grad is not None])

    def check(self, loss: float, gradient_norm: float) -> None:
        """Check loss and gradient before a step.

        FloatingPointError: one is not finite. In float16, gradients may overflow: the step is then skipped and the loss
        scaled down. That is an error only once the scale has fallen to `SMALLEST_SCALE`.
        """
        if not math.isfinite(loss):
            name, norm = _largest({name: p.detach() for name, p in self.network.named_parameters()})
            raise FloatingPointError(f"the loss is {loss}; the weights with the largest norm are {name} ({norm:.3g})")
        if math.isfinite(gradient_norm):
            return
        if not self.scaler.is_enabled() or self.scaler.get_scale() <= SMALLEST_SCALE:
            raise FloatingPointError(f"the gradient is {gradient_norm}; {self._largest_gradient()}")

    def step(self, gradient_norm: float) -> None:
        """Clip the gradient, which has this norm; update the weights, the learning rate and the averaged weights."""
        if math.isfinite(gradient_norm):
            if self.max_gradient_norm is not None:
                parameters = [p for p in self.network.parameters() if p.grad is not None]
                norm = parameters[0].new_full((), gradient_norm)  # new_tensor would wait for the device
                clip_grads_with_norm_(parameters, self.max_gradient_norm, norm)
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # skips the step; not used above, because it waits for the device
        self.scaler.update()
        # float16 may skip the first optimiser steps. (In float16 only, as catch_warnings makes Python repeat warnings.)
        with _schedule_alone() if self.scaler.is_enabled() else nullcontext():
            self.scheduler.step()
        if self.average is not None:
            self.average.update(self.network)

    @property
    def loss_scale(self) -> float | None:
        """The scale of a float16 loss; None in other precisions."""
        return self.scaler.get_scale() if self.scaler.is_enabled() else None

    def state_dict(self, step: int) -> dict:
        """The state after `step` steps, as tensors in plain containers; averaged weights have the network's names.

        FloatingPointError: a weight or statistic is not finite, so the checkpoint would be useless.
        """
        state = self._state()
        tensors = state["network"] | {f"averaged {name}": tensor for name, tensor in state.get("ema", {}).items()}
        if broken := not_finite(tensors):
            raise FloatingPointError(
                f"after step {step}, {len(broken)} weights and statistics are not finite, {broken[0]} among them"
            )
        return {"step": step, **state}

    def _state(self) -> dict:
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["ema"] = self.evaluated.network.state_dict()
            state["ema_updates"] = self.average.updates
        return state

    def load_state_dict(self, state: dict) -> None:
        """The inverse of `state_dict`; learning rates follow from the step. Every rank must call it.

        ValueError: `state` does not match this learner.
        """
        with _schedule_alone():
            for _ in range(state["step"] - self.scheduler.last_epoch):  # two microseconds each
                self.scheduler.step()
        groups = self.optimizer.state_dict()["param_groups"]
        try:
            self.network.load_state_dict(state["network"])
            saved = state["optimizer"]["param_groups"]  # whose states are loaded by position
            if [group["param_names"] for group in saved] != [group["param_names"] for group in groups]:
                raise RuntimeError("its optimiser has parameters of other names, or in another order")
            self.optimizer.load_state_dict({"state": state["optimizer"]["state"], "param_groups": groups})
            if self.scaler.is_enabled():
                self.scaler.load_state_dict(state["scaler"])
            if self.average is not None:
                self.average.module.load_state_dict(state["ema"])
                self.average.updates = state["ema_updates"]
        except (KeyError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            missing = isinstance(error, KeyError)
            raise ValueError(f"it has no part {error}" if missing else f"it does not fit this run: {error}") from error

    def _largest_gradient(self) -> str:
        gradients = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
        broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        name, norm = _largest(gradients)
        which = f"{len(broken)} of {len(gradients)} are not finite, {broken[0]} first" if broken else "all are finite"
        return f"{which}; the gradient with the largest norm is {name} ({norm:.3g})"


@contextmanager
def _schedule_alone() -> Iterator[None]:
    """Silence PyTorch's warning about a schedule that steps before the optimiser."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        yield


def _largest(tensors: dict[str, Tensor]) -> tuple[str, float]:
    """Name and Euclidean norm (float64) of the tensor with the largest norm; NaN counts as the largest."""
    norms = {name: tensor.double().norm().item() for name, tensor in tensors.items()}
    return max(norms.items(), key=lambda entry: math.inf if math.isnan(entry[1]) else entry[1])
