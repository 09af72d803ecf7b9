"""A run, until its first step."""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from engine import assemble
from engine.configuration import config as configuration
from engine.process.distributed import World
from engine.training.run import Run, opened
from tests.engine.learners import learner_of
from tests.runs import REPOSITORY, SHORT, run_config


@pytest.mark.parametrize(
    "experiment, overrides, warned",
    [
        ("table3/cityscapes_wrn38_std", (), True),
        ("table3/cityscapes_wrn38_std", ("init.weights=net.pt",), False),
        ("camvid/resnext_small", (), False),
        ("somebodys/own", (), False),
    ],
)
def test_an_experiment_of_a_trained_body_warns_without_weights(tmp_path, monkeypatch, experiment, overrides, warned):
    """The table says so after 66,600 steps, too late."""
    config, plain, made = (
        run_config(*SHORT, f"run_dir={tmp_path}", "data.verify=false", *overrides),
        configuration.plain,
        [],
    )
    monkeypatch.setattr(configuration, "plain", lambda config: made.append(config) or plain(config))
    with opened(config, f"python train_seg.py experiment={experiment} norm=std", assemble.labelled_splits) as run:
        assert run.plain_config is run.plain_config and len(made) == 1  # it takes longer than copying a small network
    log = (tmp_path / "log.txt").read_text()
    assert (f"experiment={experiment} starts from a trained body, and this run from random weights" in log) == warned


@pytest.mark.parametrize(
    "device, because, said",
    [
        (
            "cuda",
            "49 steps gain little (fewer than 50)",
            "capture off: 49 steps gain little (fewer than 50); compile off",
        ),
        ("cuda", "", "capture off; compile off"),
        ("cpu", "only a CUDA device has graphs, and this is a CPU", "TF32 off; capture off; compile off"),
    ],
)
def test_the_first_line_says_why_a_run_is_not_captured(device, because, said):
    """On a CPU nobody expects it."""
    own = SimpleNamespace(config=run_config(), world=World(device=torch.device(device)))
    learner = replace(learner_of(nn.Conv2d(3, 5, 1)), eager_because=because)
    assert f"; {said}; " in Run._applied(own, learner)


def test_a_float32_training_on_a_device_for_bfloat16_is_told_what_it_gains():
    """The message quotes docs/results/steps.md; this compares the two."""
    said = run_config().precision_advice()
    table = (REPOSITORY / "docs" / "results" / "steps.md").read_text()
    part = table[table.index("## Card of table3/cityscapes_resnext101_inplace_fixed_crop") :]
    half = "trainer.precision=bfloat16"
    for switch in ("default", "`trainer.capture=true`", f"`{half}`", f"`{half} trainer.capture=true`"):
        (milliseconds,) = re.findall(
            rf"(?m)^\| {re.escape(switch)} \| (\d+) \|", part[: part.index("### Not measured")]
        )[:1]
        assert re.search(rf"\b{milliseconds}\b", said)
    assert half in said and run_config(half).precision_advice() is None
    assert run_config("norm=package").precision_advice() is None
