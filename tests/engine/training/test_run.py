"""Runs of any task: what is refused."""

import pytest

import train_imagenet
from engine import assemble
from engine.schema.classification import ClassificationRun
from tests.runs import SHORT_SHAPES, composed


def train(*overrides: str) -> dict:
    options = ("trainer.steps=3", "trainer.checkpoint_every_steps=2")
    return train_imagenet.train(composed("train_imagenet", *SHORT_SHAPES, *options, *overrides))


@pytest.mark.parametrize("count", [0, 4])
def test_a_number_of_classes_that_the_task_cannot_have_is_refused_before_the_first_step(tmp_path, monkeypatch, count):

    def with_classes(*arguments):
        made = shapes(*arguments)
        made.classes = made.classes[:count]
        return made

    shapes = assemble.classified_split
    monkeypatch.setattr(assemble.classification, "classified_split", with_classes)
    monkeypatch.setattr(ClassificationRun, "most_classes", 3)
    with pytest.raises(ValueError, match=f"^shapes has {count} classes: expected 1 to 3 for classification$"):
        train(f"run_dir={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_minibatches_that_begin_again_are_noticed(tmp_path, monkeypatch):
    """A sampler without the run's `start_step` would train a resumed run for too many steps."""
    train(f"run_dir={tmp_path}")
    order_of = assemble.order_of
    monkeypatch.setattr(assemble.classification, "order_of", lambda *arguments: order_of(*arguments[:3]))
    with pytest.raises(AssertionError, match="begin after run.start_step"):
        train(f"run_dir={tmp_path}", "resume=auto")
