"""What checkpoints of whole blocks do is among the choices of a plan."""

import copy

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from keepless.budget.budget import traced_step
from keepless.budget.costs import peak_bytes
from keepless.budget.execution import ByPlan
from keepless.budget.search import Choice
from keepless.budget.segments import segmented
from keepless.budget.simulation import simulate
from keepless.recompute.recording import Recording
from tests.keepless.budget.transformers import TEXTS, Blocks


def gradients(network: Blocks, words: Tensor, policy: ByPlan | None = None) -> list[Tensor]:
    """Of a step, plain or by a plan. They are there before, and zeroed."""
    torch.manual_seed(1)
    for parameter in network.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.zero_()
    if policy is None:
        loss = network(words)
    else:
        with Recording(policy, inputs=[words]):
            loss = network(words)
    loss.backward()
    return [parameter.grad.clone() for parameter in network.parameters()]


@pytest.mark.parametrize("name", TEXTS)
def test_segments_reach_the_peak_of_checkpoints_with_the_same_gradients(name):
    torch.manual_seed(0)
    network, words = TEXTS[name](), torch.randint(50, (2, 128))
    checkpointed = copy.deepcopy(network)
    checkpointed.run = lambda block, *arguments: checkpoint(block, *arguments, use_reentrant=False)
    expected = gradients(network, words)
    theirs = peak_bytes(lambda: gradients(checkpointed, words), "cpu")
    step, _ = traced_step(network, (words,), {})
    kept = min(segmented(step), key=lambda kept: simulate(step, kept).peak)
    plan = Choice(0, 0.0, tuple(kept)).plan(step)
    assert all(map(torch.equal, gradients(network, words, ByPlan([plan])), expected))
    ours = peak_bytes(lambda: gradients(network, words, ByPlan([plan])), "cpu")
    assert ours <= theirs
    assert simulate(step, kept).peak == pytest.approx(ours, rel=0.03)
