"""A training with trainer.recompute=budget: the same weights in the bytes that the budget leaves."""

import re

import pytest
import torch

from engine.checkpoint import files as checkpoint
from engine.schema.memory import device_memory
from engine.training import loop, planner
from tests.runs import SHORT, composed, run_config, same
from train_seg import train

SMALL = ("body.base_channels=[8,8,16]", "body.stem_channels=8", "head.hidden_channels=8", "head.out_channels=8")
NETWORK = (*SHORT, "body=resnext_tiny", *SMALL, "norm=std", "data.crops_per_minibatch=4")
CROPS, SIZE = 4, 64


@pytest.mark.slow
def test_a_resumed_run_plans_again_and_is_equal_to_the_bit(tmp_path, capsys, monkeypatch):
    step = planner.planned_step(run_config(*NETWORK), CROPS, SIZE)
    device = device_memory(step.needed(step.plans[0][0]))  # a real step needs more, for the operators of a CPU
    budget = ("trainer.recompute=budget", f"memory.budget={device // 2**10}KiB", "resume=auto")
    options = (*NETWORK, "trainer.steps=6", "trainer.checkpoint_every_steps=4")

    def weights(run: str, *more: str) -> dict[str, torch.Tensor]:
        train(composed("train_seg", f"run_dir={tmp_path / run}", *options, *more))
        return checkpoint.load(tmp_path / run / "checkpoints" / "last.pt")["network"]

    plain = weights("plain")
    counted, take = iter(range(5)), loop.train_step

    def interrupted(*arguments):
        if next(counted) == 4:
            raise KeyboardInterrupt
        return take(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "train_step", interrupted)
        weights("planned", *budget)
    sums = r"MiB less .* of weights, .* of momentum, .* of images, .* of gradients, .* of loss leave .* for activations"
    assert re.search(sums, capsys.readouterr().out)
    assert same(weights("planned", *budget), plain)
