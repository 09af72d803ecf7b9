"""Runs of any task: what is refused."""

import pytest

import train_imagenet
from engine import assemble
from tests.runs import SHORT_SHAPES, composed


def train(*overrides: str) -> dict:
    options = ("trainer.steps=3", "trainer.checkpoint_every_steps=2")
    return train_imagenet.train(composed("train_imagenet", *SHORT_SHAPES, *options, *overrides))


def test_minibatches_that_begin_again_are_noticed(tmp_path, monkeypatch):
    """A sampler without the run's `start_step` would train a resumed run for too many steps."""
    train(f"run_dir={tmp_path}")
    order_of = assemble.order_of
    monkeypatch.setattr(assemble.classification, "order_of", lambda *arguments: order_of(*arguments[:3]))
    with pytest.raises(AssertionError, match="begin after run.start_step"):
        train(f"run_dir={tmp_path}", "resume=auto")
