"""A network with everything that changes in training: optimiser, schedule, loss scale, EMA weights."""

import copy
import gc
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_

from engine.process.console import logger
from engine.schema.training import CAPTURE_ADVICE
from engine.training.capture import CapturedMicroBatches, MicroBatch, NotCaptured
from engine.training.saved_moments import load_moments
from models.checkpoints.loading import not_finite
from models.forward import Forward
from models.freezing import training_mode
from models.private_torch import move_towards, norms_of

PLAIN = {Tensor, bool, int, float, str, type(None)}
SMALLEST_SCALE = 2.0**-14  # of a float16 loss; below it, gradients are broken, not just too large


class WeightAverage:
    """An average of the weights of `network`, updated after every step.

    Used instead of PyTorch's AveragedModel, which waits for the device and copies all buffers at every update.
    `module` is a copy of the network with the EMA weights; `take_buffers` gives it the network's buffers.
    """

    def __init__(self, network: nn.Module, decay: float):
        self.module = copy.deepcopy(network)
        self.updates = 0
        self.decay = decay
        self._buffers_are_old = False

    @torch.no_grad()
    def update(self, network: nn.Module, finite: Tensor | None = None) -> None:
        """average = decay * average + (1 - decay) * weights; the first update copies the weights.

        `finite`: whether the step was, a 0-dimensional boolean on the network's device: if not, the average stays.
        (On CUDA this takes a temporary copy of all weights.) None: the average always changes, as such a step ends the
        run.
        """
        pairs = [*zip(self.module.parameters(), network.parameters(), strict=True)]
        if self.updates:  # frozen weights stay as the first update has copied them
            pairs = [pair for pair in pairs if pair[1].requires_grad]
        averages = [average.detach() for average, _ in pairs]
        weights = [weight.detach() for _, weight in pairs]
        if self.updates:
            share = 1 - self.decay
            move_towards(averages, weights, share if finite is None else finite.double() * share)
        else:
            for average, weight in zip(averages, weights, strict=True):
                average.copy_(weight)
        self.updates += 1
        self._buffers_are_old = True

    @torch.no_grad()
    def take_buffers(self, network: nn.Module) -> None:
        """Copy the network's buffers, its running statistics. Until the next update ranks may share the copies."""
        if self._buffers_are_old:
            for copied, buffer in zip(self.module.buffers(), network.buffers(), strict=True):
                copied.copy_(buffer, non_blocking=True)
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
    eager_because: str = ""  # why trainer.capture=auto does not capture
    parameters: list[nn.Parameter] = field(init=False)  # of the network

    def __post_init__(self) -> None:
        self.parameters = list(self.network.parameters())
        training_mode(self.network)

    @property
    def evaluated(self) -> Forward:
        """Forward pass of the network to evaluate: the average, if there is one, with the network's present buffers."""
        if self.average is None:
            return self.forward.with_network(self.network)
        self.average.take_buffers(self.network)
        return self.forward.with_network(self.average.module)

    def run_captured(self, micro_batch: MicroBatch, images: Tensor, labels: Tensor) -> Tensor:
        """Run a micro-batch by `captured`; return its loss. If a capture fails, this and all later ones are eager.

        ValueError: it cannot be captured, and trainer.capture=true; or see `CapturedMicroBatches`.
        """
        if self.captured is None:
            return micro_batch(images, labels)
        try:
            return self.captured(micro_batch, images, labels)
        except NotCaptured as problem:
            if self.captured.requested:
                raise ValueError(f"{problem}: {CAPTURE_ADVICE}") from problem
            self.captured = None
            self.eager_because = str(problem)
        logger.warning(f"capture off: {self.eager_because}; this run goes on eagerly")
        self.optimizer.zero_grad()
        gc.collect()  # of the pass that failed, with the memory of its graph
        torch.cuda.empty_cache()
        return micro_batch(images, labels)

    def step(self, loss: Tensor, stops: Tensor) -> "Outcome":
        """Clip the gradients; update the weights, the learning rate and the EMA weights. Nothing is waited for.

        If loss or gradient is not finite, weights and momentum stay, in float16 the average too, and `read` tells it
        later: fused optimisers skip a step by a flag on the device. Before others the host waits for the flag.

        Args:
            loss: of the minibatch, a float64 scalar on the network's device.
            stops: how many ranks were asked to stop, likewise.
        """
        scale = self.scaler.scale(torch.ones_like(loss))
        self.scaler.unscale_(self.optimizer)
        parameters = [parameter for parameter in self.parameters if parameter.grad is not None]
        norms = torch.stack(norms_of([parameter.grad for parameter in parameters]))
        norm = torch.linalg.vector_norm(norms)
        finite = loss.isfinite() & norm.isfinite()
        if self.max_gradient_norm is not None:
            clip_grads_with_norm_(parameters, self.max_gradient_norm, norm)
        optimizer: Any = self.optimizer
        if optimizer.defaults.get("fused"):
            optimizer.found_inf = (~finite).float()
            optimizer.grad_scale = None
            optimizer.step()
        elif finite:
            optimizer.step()
        self.scaler.update()
        # float16 may skip the first optimiser steps. (In float16 only, as catch_warnings makes Python repeat warnings.)
        with _without_schedule_warning() if self.scaler.is_enabled() else nullcontext():
            self.scheduler.step()
        if self.average is not None:
            self.average.update(self.network, finite if self.scaler.is_enabled() else None)
        numbers = torch.stack([loss, norm.double(), stops, scale, self.scaler.scale(torch.ones_like(loss))])
        numbers = numbers.to("cpu", non_blocking=True)  # from a device: into pinned memory
        copied = torch.cuda.current_stream().record_event() if loss.is_cuda else None
        return Outcome(numbers, copied, norms, parameters)

    def read(self, outcome: "Outcome") -> tuple[float, float, bool, float | None]:
        """Wait for a step; return its loss, gradient norm before clipping, whether to stop, and float16's loss scale.

        FloatingPointError: loss or gradient is not finite. In float16, gradients may overflow: the step is then skipped
        and the loss scaled down. That is an error only once the scale is below `SMALLEST_SCALE`.
        """
        if outcome.copied is not None:
            outcome.copied.synchronize()
        loss, gradient_norm, stops, scale, next_scale = outcome.numbers.tolist()
        if not math.isfinite(loss):
            weights = self.network.named_parameters()
            name, norm = _largest_norm({name: weight.detach().double().norm().item() for name, weight in weights})
            raise FloatingPointError(f"the loss is {loss}; the weights with the largest norm are {name} ({norm:.3g})")
        if not math.isfinite(gradient_norm) and not SMALLEST_SCALE <= next_scale < scale:
            raise FloatingPointError(f"the gradient is {gradient_norm}; {self._broken_gradients(outcome)}")
        return loss, gradient_norm, stops > 0, next_scale if self.scaler.is_enabled() else None

    def state_dict(self, step: int) -> dict:
        """The state after `step` steps, as tensors in plain containers; EMA weights have the network's names.

        FloatingPointError: a weight or statistic is not finite, so the checkpoint would be useless.
        """
        state: dict[str, Any] = {
            "step": step,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedules": [_plain_state(schedule) for schedule in self._schedules()],
            "rates": [float(group["lr"]) for group in self.optimizer.param_groups],
        }
        if self.scaler.is_enabled():
            state["scaler"] = self.scaler.state_dict()
        if self.average is not None:
            state["ema"] = self.evaluated.network.state_dict()
            state["ema_updates"] = self.average.updates
        tensors = state["network"] | {f"averaged {name}": tensor for name, tensor in state.get("ema", {}).items()}
        broken = not_finite(tensors)
        if broken:
            raise FloatingPointError(
                f"after step {step}, {len(broken)} weights and statistics are not finite, {broken[0]} among them"
            )
        return state

    def load_state_dict(self, state: dict) -> None:
        """The inverse of `state_dict`. Every rank must call it. ValueError: `state` does not match this learner."""
        try:
            self.network.load_state_dict(state["network"])
            if self.scaler.is_enabled():
                self.scaler.load_state_dict(state["scaler"])
            load_moments(state["optimizer"], self.optimizer)
            if self.average is not None:
                self.average.module.load_state_dict(state["ema"])
                self.average.updates = state["ema_updates"]
            for schedule, saved in zip(self._schedules(), state["schedules"], strict=True):
                schedule.load_state_dict({**schedule.state_dict(), **saved})
            for group, rate in zip(self.optimizer.param_groups, state["rates"], strict=True):
                group["lr"] = rate
        except (LookupError, RuntimeError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"it does not fit this run: {error}") from error

    def _schedules(self) -> list[Any]:
        """The schedule of the learning rate, and with a warm-up its parts."""
        return [self.scheduler, *getattr(self.scheduler, "_schedulers", ())]

    def _broken_gradients(self, outcome: "Outcome") -> str:
        """The gradients that are not finite, for messages."""
        names = {parameter: name for name, parameter in self.network.named_parameters()}
        with_gradient = [names[parameter] for parameter in outcome.parameters]
        norms = dict(zip(with_gradient, outcome.norms.tolist(), strict=True))
        broken = [name for name, norm in norms.items() if not math.isfinite(norm)]
        which = f"{len(broken)} of {len(norms)} are not finite, {broken[0]} first" if broken else "all are finite"
        name, norm = _largest_norm(norms)
        return f"{which}; the gradient with the largest norm is {name} ({norm:.3g})"


def _plain_state(schedule: Any) -> dict[str, Any]:
    """What a checkpoint can hold of a schedule. Other values, such as functions, are as constructors made them."""
    state = schedule.state_dict()
    return {name: value for name, value in state.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    """Whether a value is one of `PLAIN`, or a list, tuple or dictionary of such values."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value.values()))
    return type(value) in PLAIN


class Outcome(NamedTuple):
    """A step on the device, as far as the host reads it, one step later."""

    numbers: Tensor  # float64: loss, gradient norm before clipping, ranks asked to stop, loss scale, next loss scale
    copied: torch.cuda.Event | None  # once `numbers` are in the host's memory
    norms: Tensor  # of the gradients before clipping, one per parameter, on the device
    parameters: list[nn.Parameter]


@contextmanager
def _without_schedule_warning() -> Iterator[None]:
    """Context without PyTorch's warning about a schedule that steps before the optimiser."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step")
        yield


def _largest_norm(norms: dict[str, float]) -> tuple[str, float]:
    """Name and norm of the tensor with the largest norm; NaN counts as the largest."""
    return max(norms.items(), key=lambda pair: math.inf if math.isnan(pair[1]) else pair[1])
