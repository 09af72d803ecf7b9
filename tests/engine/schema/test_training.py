"""The length of a run, and whether it compiles."""

from engine.assemble import schedule_of
from tests.runs import run_config


def test_the_shorter_of_two_lengths_counts():
    for epochs, steps, total in ((4, 39, 39), (4, 41, 40), ("null", 41, 41), (4, "null", 40)):
        config = run_config(f"trainer.epochs={epochs}", f"trainer.steps={steps}", "data.crops_per_minibatch=2")
        assert schedule_of(config, images=20).total_steps == total


def test_whether_norms_compile_is_known_beforehand():
    """Runs and evaluations announce it."""
    for overrides, on_cpu, on_cuda in (
        ((), True, False),
        (("norm.backend=compiled",), True, True),
        (("norm.backend=eager",), False, False),
        (("debug=smoke",), False, False),
        (("norm=package",), False, False),
    ):
        config = run_config(*overrides)
        assert [config.compiles_norms(device) for device in ("cpu", "cuda")] == [on_cpu, on_cuda]
