"""The room that a training step leaves for activations, and the plans that fit in: `trainer.recompute=budget`."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.training.learner import Learner
from engine.training.loop import Loss
from engine.training.planner.trace import FakeTensors, begun
from keepless.budget.budget import plan
from keepless.fit.made_tensors import MadeTensors

_SHARES = [share / 100 for share in range(100, 0, -1)]  # of the peak without a plan


@dataclass(frozen=True)
class Room:
    """A step of one process, in bytes, with plans for its forward and backward pass."""

    beside: dict[str, int]  # held throughout both passes (weights, momentum, …), by category
    optimizer: int  # temporary bytes of the optimiser's step
    plans: list[tuple[int, float]]  # peak, and time of the step (estimated; without a plan: 1), by decreasing peak

    def needed(self, peak: int) -> int:
        """Bytes of a step whose forward and backward pass take at most `peak`."""
        return sum(self.beside.values()) + max(peak, self.optimizer)

    def least(self, time: float) -> int:
        """The least bytes of a step that takes at most so much time."""
        return self.needed(min((peak for peak, of_plan in self.plans if of_plan <= time), default=self.plans[0][0]))

    def within(self, available: int) -> tuple[int, float]:
        """Peak and time of the fastest plan with which a step fits; of the plan with the lowest peak if none does."""
        left = available - sum(self.beside.values())
        return next((found for found in self.plans if found[0] <= left), self.plans[-1])


def room_of(make: Callable[[], tuple[Learner, Loss, dict]]) -> Room:
    """Plan the second step of a training. `make`: see `engine.training.planner.trace.traced`."""
    with FakeTensors():
        learner, loss, minibatch = make()
        beside, forward = begun(learner, minibatch), learner.forward
        images, labels = (minibatch[key].tensor_split(learner.accumulation_steps)[0] for key in ("image", "label"))
        inputs = forward.normalised(images)
        beside["images"] += inputs.nbytes
        with forward.autocast():
            found = plan(learner.network, inputs, _SHARES)
            with torch.no_grad():
                logits = learner.network(inputs)
        with MadeTensors() as of_loss:
            loss(logits.detach().requires_grad_(), labels).backward()
        parameters = list(learner.network.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with MadeTensors() as of_optimizer:
            learner.gradient_norm()
            learner.step(1.0)
    beside |= {"gradients": sum(parameter.nbytes for parameter in parameters), "loss": of_loss.peak}
    plans = dict.fromkeys((row.peak, 1 + row.seconds) for row in found.rows)
    return Room(beside, of_optimizer.peak, list(plans))
