"""A network with everything that changes in training: optimiser, schedule, loss scale, averaged weights."""

import copy
import math
import warnings
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine.dataset import SizedIterable
from engine.distributed import World
from engine.forward import Forward
from engine.records.waits import GradientExchange
from models.layers import renew_statistics

ONE_NUMBER = torch.zeros(())  # AdamW's count of steps
SMALLEST_SCALE = 2.0**-14  # of a float16 loss: below it the gradients are broken, not just too large


class WeightAverage:
    """An average of the weights of `network`, updated after every step.

    PyTorch's AveragedModel makes the host wait for the device at every update, and copies all buffers each time.
    `module` is a copy of the network with the averaged weights, and gets the network's buffers from `take_buffers`.
    """

    def __init__(self, network: nn.Module, decay: float):
        self.module = copy.deepcopy(network)
        self.updates = 0
        self._average = get_ema_multi_avg_fn(decay)
        self._buffers_are_old = False

    @torch.no_grad()
    def update(self, network: nn.Module) -> None:
        """average = decay * average + (1 - decay) * weights; the first update copies the weights."""
        own, weights = ([p.detach() for p in each.parameters()] for each in (self.module, network))
        if self.updates:
            self._average(own, weights, self.updates)
        else:
            torch._foreach_copy_(own, weights)
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
    # Renew the average's norm statistics before an evaluation; if empty, its norms keep the trained network's.
    statistics_minibatches: SizedIterable[dict] = ()
    max_gradient_norm: float | None = None  # gradients are clipped to it; None: never
    exchange: GradientExchange | None = None  # times the wait for other ranks' gradients; None in a single process

    @property
    def evaluated(self) -> Forward:
        """The forward pass through the bare network that is scored: the averaged one, if any."""
        if self.average is None:
            return self.forward.through(self.network)
        self.average.take_buffers(self.network)
        return self.forward.through(self.average.module)

    def prepare_evaluation(self, world: World) -> None:
        """Give the evaluated network its running statistics, equal on all ranks. Every rank must call it."""
        if len(self.statistics_minibatches) > 0:
            images = (minibatch["image"] for minibatch in self.statistics_minibatches)
            renew_statistics(self.evaluated.network, images, forward=self.evaluated)
        world.share_buffers(self.evaluated.network)

    def accumulating(self, more_follow: bool) -> AbstractContextManager:
        """Context for one micro-batch: DDP synchronises gradients only on the last."""
        if more_follow and isinstance(self.forward.network, DistributedDataParallel):
            return self.forward.network.no_sync()
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()
        if self.exchange is not None:
            self.exchange.ended()

    def gradient_norm(self) -> Tensor:
        """Euclidean norm of the whole gradient, a scalar on the network's device; clips to `max_gradient_norm`."""
        self.scaler.unscale_(self.optimizer)
        norm = get_total_norm([p.grad for p in self.network.parameters() if p.grad is not None])
        if self.max_gradient_norm is not None:
            clip_grads_with_norm_(self.network.parameters(), self.max_gradient_norm, norm)
        return norm

    def check(self, loss: float, gradient_norm: float) -> None:
        """Check loss and gradient before a step.

        FloatingPointError: one is not finite. In float16, gradients may overflow: the step is then skipped and the loss
        scaled down. That is an error only once the scale has fallen to `SMALLEST_SCALE`.
        """
        if not math.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss}; {self._largest_weight()}")
        if math.isfinite(gradient_norm):
            return
        if not self.scaler.is_enabled() or self.scaler.get_scale() <= SMALLEST_SCALE:
            raise FloatingPointError(f"the gradient is {gradient_norm}; {self._largest_gradient()}")

    def step(self, gradient_norm: float) -> None:
        """Update the weights, the learning rate and the averaged weights."""
        if math.isfinite(gradient_norm):
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)  # it would look at the gradients again, and wait for the device
        self.scaler.update()
        # float16 may skip the first optimiser steps. (In float16 only, as catch_warnings makes Python repeat warnings.)
        with warnings.catch_warnings() if self.scaler.is_enabled() else nullcontext():
            if self.scaler.is_enabled():
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
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
            "scheduler": without_counters(self.scheduler.state_dict()),
        }
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["ema"] = self.evaluated.network.state_dict()
            state["ema_updates"] = self.average.updates
        return state

    def load_state_dict(self, state: dict) -> None:
        """The inverse of `state_dict`. Every rank must call it.

        ValueError: a part is missing, superfluous, of other names or shapes, or not finite; nothing is loaded.
        """
        self._check_state(state)
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        if self.average is not None:
            self.average.module.load_state_dict(state["ema"])
            self.average.updates = state["ema_updates"]

    def _check_state(self, state: dict) -> None:
        own = self._state()
        for part in ("network", "optimizer", "scheduler", "scaler", "ema", "ema_updates"):
            if (part in state) != (part in own):
                raise ValueError(f"it has {'no' if part in own else 'a'} part {part}, unlike this run")
            if part in own and not isinstance(state[part], type(own[part])):
                raise ValueError(
                    f"its part {part} is {type(state[part]).__name__}: expected {type(own[part]).__name__}"
                )
        for part in ("network", "ema"):
            given, wanted = state.get(part, {}), own.get(part, {})
            check_tensors(part, given, wanted)
            if broken := not_finite(given):
                raise ValueError(f"{len(broken)} tensors of its part {part} are not finite, {broken[0]} among them")
        if state["scheduler"].get("last_epoch") != state["step"]:
            raise ValueError(f"its learning rate schedule is at step {state['scheduler'].get('last_epoch')}")
        if absent := own.get("scaler", {}).keys() - state.get("scaler", {}).keys():
            raise ValueError(f"its part scaler has no {min(absent)}")
        self._check_momentum(state["optimizer"])

    def _check_momentum(self, given: dict) -> None:
        """torch loads momentum by position, unchecked: another shape would read beyond its memory."""
        own = self.optimizer.state_dict()["param_groups"]
        groups, buffers = given.get("param_groups"), given.get("state")
        if not isinstance(groups, list) or len(groups) != len(own) or not isinstance(buffers, dict):
            raise ValueError("its part optimizer has other groups of parameters than this run")
        for group, wanted in zip(groups, own, strict=True):
            members = wanted["param_names"]
            if group.get("params") != wanted["params"] or group.get("param_names", members) != members:
                raise ValueError("its part optimizer belongs to other parameters than this run's")
        parameters = dict(self.network.named_parameters())
        names = [name for group in own for name in group["param_names"]]
        for number, buffer in buffers.items():
            if number not in range(len(names)) or not isinstance(buffer, dict):
                raise ValueError(f"its part optimizer has momentum for parameter {number} of {len(names)}")
            momentum = {key: value for key, value in buffer.items() if value is not None}
            wanted = {key: ONE_NUMBER if key == "step" else parameters[names[number]] for key in momentum}
            check_tensors(f"optimizer ({names[number]})", momentum, wanted)

    def _largest_weight(self) -> str:
        name, norm = _largest({name: p.detach() for name, p in self.network.named_parameters()})
        return f"the weights with the largest norm are {name} ({norm:.3g})"

    def _largest_gradient(self) -> str:
        gradients = {name: p.grad for name, p in self.network.named_parameters() if p.grad is not None}
        broken = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        name, norm = _largest(gradients)
        which = f"{len(broken)} of {len(gradients)} are not finite, {broken[0]} first" if broken else "all are finite"
        return f"{which}; the gradient with the largest norm is {name} ({norm:.3g})"


def without_counters(state: dict) -> dict:
    """A scheduler's state in plain containers, without the milestones, which the configuration fixes."""
    kept = {key: value for key, value in state.items() if not isinstance(value, Counter)}
    if "_schedulers" in kept:
        kept["_schedulers"] = [without_counters(part) for part in kept["_schedulers"]]
    return kept


def not_finite(tensors: dict[str, Tensor]) -> list[str]:
    """Names of the tensors with an infinite or NaN value. Waits for their device once."""
    finite = [tensor.isfinite().all() for tensor in tensors.values()]
    good = torch.stack(finite).tolist() if finite else []
    return [name for name, is_good in zip(tensors, good, strict=True) if not is_good]


def check_tensors(part: str, given: dict, wanted: dict[str, Tensor]) -> None:
    """ValueError unless `given` has the names and shapes of `wanted`."""
    for name in wanted.keys() | given.keys():
        shapes = [
            list(tensors[name].shape) if isinstance(tensors.get(name), Tensor) else "missing"
            for tensors in (given, wanted)
        ]
        if shapes[0] != shapes[1]:
            raise ValueError(f"{name} of its part {part} is {shapes[0]}: expected {shapes[1]}")


def _largest(tensors: dict[str, Tensor]) -> tuple[str, float]:
    """Name and Euclidean norm (float64) of the tensor with the largest norm; NaN counts as the largest."""
    norms = {name: tensor.double().norm().item() for name, tensor in tensors.items()}
    return max(norms.items(), key=lambda entry: math.inf if math.isnan(entry[1]) else entry[1])
