"""What checkpoints of whole blocks do is among the choices of a plan."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from keepless.recompute.costs import peak_bytes
from keepless.recompute.rehearsal import traced_step
from keepless.recompute.search import Choice, segmented
from keepless.recompute.simulation import simulate
from tests.keepless.budget.ahead import step
from tests.keepless.budget.transformers import TEXTS


@pytest.mark.parametrize("name", TEXTS)
def test_segments_reach_the_peak_of_checkpoints_with_the_same_gradients(name):
    torch.manual_seed(0)
    network, words = TEXTS[name](), torch.randint(50, (2, 128))
    checkpointed = copy.deepcopy(network)
    checkpointed.run = lambda block, *arguments: checkpoint(block, *arguments, use_reentrant=False)
    expected = step(network, words)
    theirs = peak_bytes(lambda: step(checkpointed, words), "cpu")
    traced, _ = traced_step(network, (words,), {})
    kept = min(segmented(traced), key=lambda kept: simulate(traced, kept).peak)
    plan = Choice(0, 0.0, tuple(kept)).plan(traced)
    assert all(map(torch.equal, step(network, words, plan), expected))
    ours = peak_bytes(lambda: step(network, words, plan), "cpu")
    assert ours <= theirs
    assert simulate(traced, kept).peak == pytest.approx(ours, rel=0.03)
