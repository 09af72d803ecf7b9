"""Durations in steps."""

from functools import partial

from engine.schema.schedule import Schedule, in_steps


def test_durations_in_steps():
    in_run = partial(in_steps, steps_per_epoch=185)
    assert in_run(360, None) == 66_600  # Cityscapes: 2975 images, 16 crops
    assert in_run(360, 500) == in_run(1000, 500) == 500
    assert in_run(2, 500) == 370  # the shorter one
    assert in_run(None, None) is None
    schedule = Schedule(total_steps=10, steps_per_epoch=4, evaluate_every=5, checkpoint_every=4, log_every=3)
    done = range(1, 11)
    assert [s for s in done if schedule.evaluates(s)] == [5]  # the final evaluation is separate
    assert [s for s in done if schedule.checkpoints(s)] == [4, 5, 8, 10]  # and before an evaluation
    assert [s for s in done if schedule.logs(s)] == [3, 6, 9, 10]
    assert schedule.epoch(10) == 2.5
