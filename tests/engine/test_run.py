"""Runs of any task: refusals before the first step, and scores of any size."""

import pytest

import train_imagenet
from datasets import ClassificationDataset
from engine import build
from engine.schema.classification import ClassificationRun
from tests.runs import SHORT_SHAPES, composed

RUN = (*SHORT_SHAPES, "trainer.steps=6", "trainer.evaluate_every_steps=2", "trainer.checkpoint_every_steps=2")


def train(*overrides: str) -> dict:
    return train_imagenet.train(composed("train_imagenet", *RUN, *overrides))


@pytest.mark.parametrize("count", [0, 4])
def test_a_number_of_classes_that_the_task_cannot_have_is_refused_before_the_first_step(tmp_path, monkeypatch, count):
    """The run's checkpoints could not be loaded."""

    def with_classes(config, split, key="data.split"):
        made = shapes(config, split, key)
        classes = made.classes[:count]
        return ClassificationDataset(
            made.name, made.split, classes, made.labels, made.files, made.pixels, names=made.names
        )

    shapes = build.classified_split
    monkeypatch.setattr(build.classification, "classified_split", with_classes)
    monkeypatch.setattr(ClassificationRun, "most_classes", 3)
    with pytest.raises(ValueError, match=f"^shapes has {count} classes: expected 1 to 3 for classification$"):
        train(f"run_dir={tmp_path / 'run'}")
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_score_below_zero_can_be_the_best(tmp_path, monkeypatch):
    scores = iter([-52.0, -7.0, -8.0])

    def with_score(run, loader):
        found = evaluation_of(run, loader)

        def evaluate():
            evaluated = found()
            evaluated.scores["top1"] = next(scores)
            return evaluated

        return evaluate

    evaluation_of = train_imagenet.evaluation_of
    monkeypatch.setattr(train_imagenet, "evaluation_of", with_score)
    train(f"run_dir={tmp_path}")
    summary = (tmp_path / "log.txt").read_text()
    assert "best.pt, step 4, top-1 -700.00 %" in summary and (tmp_path / "checkpoints" / "best.pt").is_file()


def test_minibatches_that_begin_again_are_noticed(tmp_path, monkeypatch):
    """A sampler without the run's `start_step` would train a resumed run for too many steps."""
    train(f"run_dir={tmp_path}", "trainer.evaluate_every_steps=null")
    order_of = build.order_of
    monkeypatch.setattr(build.classification, "order_of", lambda *arguments: order_of(*arguments[:3]))
    with pytest.raises(AssertionError, match="begin after run.start_step"):
        train(f"run_dir={tmp_path}", "trainer.evaluate_every_steps=null", "resume=auto")
