"""A prepared network of which training steps call only parts."""

import re
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from keepless import recompute_activations, undo

X = torch.randn(2, 3, 8, 8)


def block() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.SiLU(), nn.Conv2d(4, 3, 3))


class Task(nn.Module):
    """Stands for a LightningModule that also defines `forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.second_network, self.metric = block(), block(), nn.Softmax(1)
        self.heads = nn.ModuleList([nn.Conv2d(3, 2, 1), nn.Conv2d(3, 2, 1)])

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)

    def training_step(self) -> Tensor:
        return self.network(X).square().mean()

    def training_loss(self) -> Tensor:
        return F.mse_loss(self.heads[1](self.network(X)), torch.zeros(2, 2, 4, 4))


def messages_of(steps: list) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in steps:
            step().backward()
    torch_folder = str(Path(torch.__file__).parent)  # on Python 3.13.0 Dynamo warns of slow guards
    return [str(warning.message) for warning in caught if not warning.filename.startswith(torch_folder)]


@pytest.mark.parametrize("budget", [None, 0.8])
def test_a_step_that_calls_a_part_is_told_once_which_to_prepare(budget):
    """Calling the whole network in an evaluation first does not hide it."""
    task = recompute_activations(Task(), budget=budget)
    with torch.no_grad():
        task.eval()(X)
    task.train()
    (text,) = messages_of([task.training_step, task.training_step, lambda: task(X).sum()])
    assert "has prepared a Task" in text and "prepare its sub-module 'network' instead" in text
    task = recompute_activations(Task(), budget=budget)
    (text,) = messages_of([task.training_loss, task.training_step])
    assert "prepare its sub-modules 'network', 'heads.1' instead" in text


def test_other_uses_of_parts_are_not_warned_of():
    """Steps in which the network is called, or in eval mode, as in virtual adversarial training; prepared parts."""
    task, evaluated, switched, undone, inside = (recompute_activations(Task()) for _ in range(5))
    assert messages_of([lambda: task.network(X).sum() + task(X).sum(), task.training_step]) == []
    evaluated.eval()
    assert messages_of([evaluated.training_step, lambda: evaluated.train()(X).sum(), evaluated.training_step]) == []
    loss = switched.eval()(X).sum()
    switched.train()  # before the backward pass
    recompute_activations(inside.network)
    assert messages_of([lambda: loss, undo(undone).training_step, inside.training_step]) == []


def wrapped(network: nn.Sequential, number: int) -> None:
    network[number] = torch.compile(network[number], backend="eager")


def in_place(network: nn.Sequential, number: int) -> None:
    network[number].compile(backend="eager")


def forward(network: nn.Sequential, number: int) -> None:
    network[number].forward = torch.compile(network[number].forward, backend="eager")


def disabled(network: nn.Sequential, number: int) -> None:
    network[number].forward = torch.compiler.disable(network[number].forward)


@pytest.mark.parametrize("budget", [None, "1GiB"])
@pytest.mark.parametrize("compile_part", [wrapped, in_place, forward, disabled])
def test_compiled_parts_are_named_once(compile_part, budget):
    network = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(4)))
    recompute_activations(network, budget=budget)
    for number in (1, 2):
        compile_part(network, number)
    texts = messages_of([lambda: network(torch.ones(2, 4)).sum()] * 2)
    assert [re.search(r"does nothing inside torch.compile \((.*)\)", text).group(1) for text in texts] == (
        [] if compile_part is disabled else ["1, 2"]
    )
