"""The length of a run, whether it compiles, and what a check leaves of a configuration that it refuses."""

import copy
from dataclasses import replace

import pytest

from engine.assemble import schedule_of
from engine.schema.keys import CHOICES, complete_and_check
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


def test_a_configuration_that_is_refused_stays_as_it_is():
    body = CHOICES["body"]["torchvision"](network="resnet18", weights="weights.pt")
    config = replace(run_config("norm=std", "trainer.steps=9"), body=body)
    config.norm.activation = config.data.mean = None
    config.trainer.epochs = config.trainer.steps = None
    refused = copy.deepcopy(config)
    with pytest.raises(ValueError, match="trainer.epochs and trainer.steps are both null"):
        complete_and_check(refused)
    assert refused == config
    config.trainer.steps = 9
    complete_and_check(config)
    assert (config.init.weights, config.init.format, config.body.weights) == ("weights.pt", "torchvision", None)
    assert config.norm.activation == "relu" and config.data.mean == [0.485, 0.456, 0.406]
