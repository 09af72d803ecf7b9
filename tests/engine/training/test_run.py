"""A run, until its first step."""

import pytest

from engine import assemble
from engine.configuration import config as configuration
from engine.training.run import opened
from tests.runs import SHORT, run_config


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
