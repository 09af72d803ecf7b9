"""A network with everything that changes in training: optimiser, schedule, loss scale, averaged weights."""

import copy
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from engine.checkpoint.comparison import check_tensors, not_finite, number_in
from engine.process.distributed import World
from engine.process.forward import Forward

ONE_NUMBER = torch.zeros(())  # AdamW's count of steps
SMALLEST_SCALE = 2.0**-14  # of a float16 loss; below it, gradients are broken, not just too large


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

    def backward(self, loss: Tensor) -> None:
        self.scaler.scale(loss).backward()

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
            name, norm = _largest({name: p.detach() for name, p in self.network.named_parameters()})
            raise FloatingPointError(f"the loss is {loss}; the weights with the largest norm are {name} ({norm:.3g})")
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

        Learning rates are those of the schedule after the checkpoint's steps, whatever the checkpoint says.

        ValueError: `state` does not match this learner; nothing is loaded.
        """
        with _schedule_alone():
            for _ in range(state["step"] - self.scheduler.last_epoch):  # two microseconds each
                self.scheduler.step()
        own = self._state()
        for part in ("network", "optimizer", "scheduler", "scaler", "ema", "ema_updates"):
            if (part in state) != (part in own):
                raise ValueError(f"it has {'no' if part in own else 'a'} part {part}, unlike this run")
        for part in ("network", "ema"):
            check_tensors(part, state.get(part, {}), own.get(part, {}))
        step, stepped = state["step"], state["step"] > 0
        scaler = own.get("scaler", {})
        if scaler:
            scale, tracker = (
                number_in("scaler", state["scaler"], key, scaler[key]) for key in ("scale", "_growth_tracker")
            )
            stepped &= scale > scaler["scale"] * scaler["backoff_factor"] ** step  # skipped steps lower it
            scaler |= {"scale": scale, "_growth_tracker": tracker}
        optimizer = self._momentum(state["optimizer"], stepped)
        if self.average is not None and (updates := number_in("ema", state, "ema_updates", 0)) > step:
            raise ValueError(f"its weights were averaged {updates} times in {step} steps")

        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(optimizer)
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(scaler)
        if self.average is not None:
            self.average.module.load_state_dict(state["ema"])
            self.average.updates = updates

    def _momentum(self, given: Any, stepped: bool) -> dict:
        """The optimiser's state to load. `stepped`: it has updated the weights at least once.

        torch loads momentum by position, unchecked: another shape would read beyond its memory.
        """
        own, keys = self.optimizer.state_dict()["param_groups"], self._momentum_keys()
        try:
            buffers = given["state"] if keys else {}
            theirs = [part["param_names"] for part in given["param_groups"]]
        except (TypeError, KeyError, IndexError) as error:
            raise ValueError("its part optimizer does not hold the states of parameters") from error
        if theirs != [part["param_names"] for part in own]:
            raise ValueError("its part optimizer is of other parameters")
        parameters = dict(self.network.named_parameters())
        names = [name for part in own for name in part["param_names"]]
        expected = range(len(names)) if keys else range(0)
        if not isinstance(buffers, dict) or (buffers.keys() != {*expected} and (stepped or buffers)):
            raise ValueError("its part optimizer has momentum for other parameters")
        for number, buffer in buffers.items():
            wanted = {key: ONE_NUMBER if key == "step" else parameters[names[number]] for key in keys}
            check_tensors(f"optimizer ({names[number]})", buffer, wanted)
        return {"state": buffers, "param_groups": own}

    def _momentum_keys(self) -> tuple[str, ...]:
        """Names of the optimiser's states per parameter."""
        if isinstance(self.optimizer, torch.optim.SGD):
            return ("momentum_buffer",) if self.optimizer.defaults["momentum"] else ()
        assert isinstance(self.optimizer, torch.optim.AdamW), self.optimizer
        return ("step", "exp_avg", "exp_avg_sq")

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
