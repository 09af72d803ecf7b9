"""The memory of a training step, traced on fake tensors: no device, no arithmetic."""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from engine.process.distributed import World
from engine.training.learner import Learner
from engine.training.loop import Loss, accumulate_gradients
from keepless.made_tensors import Change, MadeTensors, bytes_of_tensors
from keepless.saved import kept_bytes
from keepless.torch_internals import FakeTensorMode, backward_runs
from models.freezing import training_mode


class FakeTensors(FakeTensorMode):
    """Context of fake tensors. Copies of networks (averaged weights) belong to the same mode."""

    def __deepcopy__(self, memo: dict) -> "FakeTensors":
        return self


@dataclass(frozen=True)
class StepMemory:
    """The memory of one step of one process, in bytes."""

    # By category, when their sum is largest: weights (with running statistics), average, momentum, gradients, images
    # (with labels), activations (still there when the forward pass ends) and temporary.
    at_peak: dict[str, int]
    place: str  # what ran at that moment: the forward pass, the backward pass or the optimizer
    kept: int  # for the backward pass of a micro-batch
    parameters: int  # trained or not, without running statistics

    @property
    def peak(self) -> int:
        return sum(self.at_peak.values())


def traced(make: Callable[[], tuple[Learner, Loss, dict]], in_buckets: bool = False) -> StepMemory:
    """Trace the second step of a training, when momentum exists.

    `make` is called under fake tensors. It returns a learner, a loss, and the minibatch of this process.
    `in_buckets`: DDP holds memory for all gradients throughout (`gradient_as_bucket_view=True`), and copies each there.
    """
    with FakeTensors():
        learner, loss, minibatch = make()
        network, resident, forward_ends = learner.network, first_step(learner, minibatch), 0
        places = ["forward"]
        with MadeTensors(lambda: "backward" if backward_runs() else places[-1]) as made:

            def marked(logits: Tensor, labels: Tensor) -> Tensor:
                nonlocal forward_ends
                result = loss(logits, labels)
                forward_ends = len(made.changes)
                return result

            accumulate_gradients(learner, marked, minibatch, len(minibatch["image"]), World())
            gradients = {made.number(p.grad) for p in network.parameters() if p.grad is not None}
            places.append("optimizer")
            learner.step(*torch.zeros(2, dtype=torch.float64))
        # In a separate pass: hooks on saved tensors keep some of them for longer.
        inputs = [minibatch[key].tensor_split(learner.accumulation_steps)[0] for key in ("image", "label")]
        kept = kept_bytes(network, lambda: loss(learner.forward(inputs[0]), inputs[1]), inputs)
    trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
    changes, parameters = made.changes, bytes_of_tensors(network.parameters())
    if in_buckets and learner.accumulation_steps == 1:  # otherwise they are copied only with the last micro-batch
        changes = _copied_at_once(changes, gradients)  # the forward pass makes none
    totals = list(accumulate(change.bytes for change in changes))
    moment = totals.index(max(totals))
    held = bytes_of_tensors(trained) if in_buckets else 0
    at_peak = resident | {"gradients": held, "activations": 0, "temporary": 0}
    after_forward = _alive(changes[:forward_ends])
    for number, change in _alive(changes[: moment + 1]).items():
        kind = "gradients" if number in gradients else "activations" if number in after_forward else "temporary"
        at_peak[kind] += change.bytes
    return StepMemory(at_peak, changes[moment].place, kept, parameters)


def first_step(learner: Learner, minibatch: dict) -> dict[str, int]:
    """Take an optimiser step, which creates the momentum; return the bytes held between steps."""
    network = learner.network
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
    learner.step(*torch.zeros(2, dtype=torch.float64))
    learner.optimizer.zero_grad()
    training_mode(network)
    return {
        "weights": bytes_of_tensors([*network.parameters(), *network.buffers()]),
        "average": 0 if learner.average is None else bytes_of_tensors(learner.average.module.state_dict().values()),
        "momentum": bytes_of_tensors([value for state in learner.optimizer.state.values() for value in state.values()]),
        "images": bytes_of_tensors([minibatch["image"], minibatch["label"]]),
    }


def _copied_at_once(changes: list[Change], gradients: Set[int | None]) -> list[Change]:
    """The changes if DDP copies each gradient into its bucket at once, before another tensor is made."""
    found: list[Change] = []
    copied: list[Change] = []
    for change in changes:
        if change.number not in gradients:
            if change.bytes > 0:
                found += [one._replace(bytes=-one.bytes) for one in copied]
                copied.clear()
            found.append(change)
        elif change.bytes > 0:
            found.append(change)
            copied.append(change)
    return found


def _alive(changes: Iterable[Change]) -> dict[int, Change]:
    """The allocations that are not freed, by number."""
    alive: dict[int, Change] = {}
    for change in changes:
        if change.bytes < 0:
            del alive[change.number]
        else:
            alive[change.number] = change
    return alive
