"""Runs of any task: refusals before the first step, and scores of any size."""

import pytest

from tests.second_task import shapes, train_shapes
from tests.second_task.test_second_task import shapes_config


@pytest.mark.parametrize("count", [0, 4])
def test_a_number_of_classes_that_the_task_cannot_have_is_refused_before_the_first_step(tmp_path, monkeypatch, count):
    """The run's checkpoints could not be loaded."""
    monkeypatch.setattr(shapes.Shapes, "classes", ("a", "b", "c", "d")[:count])
    monkeypatch.setattr(shapes.ShapesRun, "most_classes", 3)
    with pytest.raises(ValueError, match=f"^shapes has {count} classes: expected 1 to 3 for shapes$"):
        train_shapes.train(shapes_config(f"run_dir={tmp_path / 'run'}"))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_score_below_zero_can_be_the_best(tmp_path, monkeypatch):
    scores = iter([-52.0, -7.0, -8.0])

    def evaluation_of(run, loader):
        found = shapes.evaluation_of(run, loader)

        def evaluate():
            evaluated = found()
            evaluated.scores["top1"] = next(scores)
            return evaluated

        return evaluate

    monkeypatch.setattr(train_shapes, "evaluation_of", evaluation_of)
    train_shapes.train(shapes_config(f"run_dir={tmp_path}"))
    summary = (tmp_path / "log.txt").read_text()
    assert "best.pt, step 24, top-1 -700.00 %" in summary and (tmp_path / "checkpoints" / "best.pt").is_file()


def test_minibatches_that_begin_again_are_noticed(tmp_path, monkeypatch):
    """A sampler without the run's `start_step` would train a resumed run for too many steps."""
    train_shapes.train(shapes_config(f"run_dir={tmp_path}"))
    order_of = train_shapes.build.order_of
    monkeypatch.setattr(train_shapes.build, "order_of", lambda *arguments: order_of(*arguments[:3]))
    with pytest.raises(AssertionError, match="begin after run.start_step"):
        train_shapes.train(shapes_config(f"run_dir={tmp_path}", "resume=auto"))
