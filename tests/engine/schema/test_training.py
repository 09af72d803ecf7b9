"""Advice given when memory runs out can be followed; lengths and compiling are announced rightly."""

import itertools
import re

from engine.assemble import schedule_of
from tests.runs import run_config, with_key


def accepted(config, crops: int, processes: int, parts: int) -> bool:
    config.data.crops_per_minibatch, config.trainer.accumulation_steps = crops, parts
    try:
        config.check_shares(processes)
    except ValueError:
        return False
    return True


def test_no_process_is_advised_what_would_be_refused():
    """For all minibatches of up to 16 crops, exactly the accepted changes are advised."""
    config = run_config()
    seen = set()
    for crops, processes, parts in itertools.product(range(2, 17), (1, 2, 3), (1, 2)):
        if not accepted(config, crops, processes, parts):
            continue
        advice = config.memory_advice(processes)
        more_parts = re.search(r"halves .*trainer\.accumulation_steps=(\d+)", advice)
        assert more_parts is None or int(more_parts[1]) == 2 * parts
        assert bool(more_parts) == accepted(config, crops, processes, 2 * parts)
        assert ("twice as many processes" in advice) == accepted(config, crops, 2 * processes, parts)
        seen.add((crops, processes, parts, bool(more_parts)))
    assert (7, 2, 1, False) in seen and (8, 2, 1, True) in seen


def test_no_change_is_advised_that_the_run_has_already_or_cannot_have():
    for overrides, advised in (
        (("norm=inplace",), ["trainer.recompute=blocks", "trainer.precision=bfloat16"]),
        (("norm=std", "trainer.recompute=sqrt"), ["norm=inplace", "trainer.precision=bfloat16"]),
        (("norm=inplace_1", "trainer.precision=bfloat16"), ["trainer.recompute=blocks"]),
        (("norm=inplace", "body=resnet32_cifar", "trainer.recompute=sqrt"), ["trainer.precision=bfloat16"]),
        (("norm=inplace", "body=revnet_tiny"), ["trainer.precision=bfloat16"]),  # reversible
        (("norm=inplace", "body=revnet_tiny", "trainer.recompute=activations"), ["trainer.precision=bfloat16"]),
        (("norm=package",), ["norm=inplace", "trainer.recompute=blocks"]),  # computes in float32 only
    ):
        advice = run_config("data.crop_size=96", *overrides).memory_advice(processes=1)
        found, _, planner = advice.partition(": ")[2].partition(". ")
        assert planner == "memory.budget=… memory.fit=batch chooses a minibatch that fits"
        always = ["trainer.accumulation_steps=2", "twice as many processes", "data.crop_size=67"]
        assert found.split("; ") == [*always, *advised]


def test_the_log_says_which_of_two_lengths_counts():
    for epochs, steps, total, said in (
        (4, 39, 39, "trainer.steps=39 ends the run before trainer.epochs=4 (40 steps)"),
        (4, 41, 40, "trainer.epochs=4 (40 steps) ends the run before trainer.steps=41"),
        (4, 40, 40, None),
        ("null", 41, 41, None),
        (4, "null", 40, None),
    ):
        config = run_config(f"trainer.epochs={epochs}", f"trainer.steps={steps}", "data.crops_per_minibatch=2")
        assert config.shorter_length(steps_per_epoch=10) == said
        assert schedule_of(config, images=20).total_steps == total


def test_it_is_known_beforehand_whether_norms_compile():
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
        assert config.compiles("cuda") == on_cuda and with_key(config, "trainer.compile", True).compiles("cuda")
