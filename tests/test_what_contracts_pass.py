"""What the choices of a plugin get if they ask for it, in trainings as users start them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from engine.assemble.contracts import batch_problem, check_choices
from engine.checkpoint import files as checkpoint
from engine.process.distributed import World
from engine.schema.keys import choice
from engine.schema.segmentation import Loss
from engine.segmentation.cross_entropy import Batch, CrossEntropy
from engine.training import build, capture
from engine.training.planner import step_memory
from tests.choices import forgotten
from tests.runs import SHORT, checked, run_config, same
from train_seg import train


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    """The choices of this file, which are forgotten after each test."""
    with forgotten():
        for group, own in OWN:
            choice(group)(own)
        yield


def train_short(run_dir: Path, *words: str) -> dict:
    return train(checked("train_seg", f"run_dir={run_dir}", *SHORT, "trainer.pictures=0", *words))


def weights_of(run_dir: Path) -> dict[str, torch.Tensor]:
    return checkpoint.load(run_dir / "checkpoints" / "last.pt")["network"]


class Watching(CrossEntropy):
    """Cross entropy that notes what it is given."""

    seen: ClassVar[list[Batch]] = []

    def __init__(self, ignore_index, weights, stride):
        super().__init__(ignore_index, weights, stride=stride)

    def forward(self, logits, labels, batch):
        assert len(batch.images) == len(batch.names) == len(labels) and batch.images.shape[2:] == labels.shape[1:]
        self.seen.append(batch)
        return super().forward(logits, labels)


def made_by_a_function(ignore_index, weights, stride):
    return Watching(ignore_index, weights, stride)


@dataclass
class WatchingLoss(Loss):
    name: str = "watching"
    builds: ClassVar[type] = Watching


@dataclass
class MadeLoss(Loss):
    name: str = "made"
    builds: ClassVar[str] = f"{__name__}.made_by_a_function"


def test_a_loss_is_given_each_micro_batch_and_changes_nothing_else(tmp_path):
    words = (
        "trainer.steps=2",
        "trainer.accumulation_steps=2",
        "data.crops_per_minibatch=4",
        "head.auxiliary_weight=0.4",
    )
    Watching.seen.clear()
    results = train_short(tmp_path / "own", "loss=watching", *words)
    own, usual = results, train_short(tmp_path / "usual", "loss=cross_entropy", *words)
    assert own["miou"] == usual["miou"] and same(weights_of(tmp_path / "own"), weights_of(tmp_path / "usual"))
    assert [batch.step for batch in Watching.seen] == [1] * 4 + [2] * 4  # two micro-batches, two outputs
    assert [batch.epoch for batch in Watching.seen[::4]] == [step / 15 for step in (1, 2)]
    names = [batch.names for batch in Watching.seen]
    assert names[0] == names[1] and len({*names[0], *names[2]}) == 4  # the outputs see the same, the micro-batches not
    assert Watching.seen[0].images.dtype == torch.uint8 and Watching.seen[0].images.shape == (2, 3, 64, 64)


def test_a_loss_that_asks_for_batches_is_not_captured():
    words = (*SHORT, "loss=watching", "trainer.device=cuda")
    why = "loss=watching asks for each batch, and a CUDA graph would give it the first again"
    config = run_config(*words)
    assert batch_problem(config) == why and batch_problem(run_config(*SHORT)) is None
    assert build.why_eager(config, nn.Identity(), 10_000, World(device=torch.device("cuda"))) == why
    check_choices(config)
    config.trainer.capture = True
    with pytest.raises(ValueError, match=f"^trainer.capture=true: {why}; "):
        check_choices(config)


def test_one_that_a_function_makes_is_found_before_it_would_be_captured(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "why_eager", lambda *_: None)
    monkeypatch.setattr(capture.torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(capture.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_rng_state", torch.get_rng_state)
    Watching.seen.clear()
    train_short(tmp_path / "run", "loss=made", "trainer.steps=5")
    assert [batch.step for batch in Watching.seen] == [1, 2, 3, 4, 5]
    assert "capture off: the loss asks for each batch" in (tmp_path / "run" / "log.txt").read_text()


def test_the_memory_of_a_loss_that_asks_for_batches_is_planned():
    peaks = [step_memory(run_config(*SHORT, f"loss={loss}"), 2, 64).peak for loss in ("watching", "cross_entropy")]
    assert peaks[0] == peaks[1]


OWN = (("loss", WatchingLoss), ("loss", MadeLoss))
