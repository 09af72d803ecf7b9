"""A run, until its first step."""

import re
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from torch import nn

from engine import assemble
from engine.assemble.network import arithmetic, forward
from engine.configuration.config import plain
from engine.process.distributed import World
from engine.schema.training import Trainer
from engine.training import advice
from engine.training.preparation import open_run
from engine.training.run import Run
from tests import trees
from tests.engine.learners import learner_of
from tests.runs import SHORT, run_config


@pytest.mark.parametrize(
    "experiment, overrides, warned",
    [
        ("table3/cityscapes_wrn38_std", (), True),
        ("table3/cityscapes_wrn38_std", ("init.weights=net.pt",), False),
        ("camvid/resnext_small", (), False),
    ],
)
def test_an_experiment_of_a_trained_body_warns_without_weights(tmp_path, monkeypatch, experiment, overrides, warned):
    """The table says so after 66,600 steps, too late."""
    config = run_config(*SHORT, f"run_dir={tmp_path}", "data.verify=false", *overrides)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.pt").touch()
    with open_run(config, f"python train_seg.py experiment={experiment} norm=std", assemble.labelled_splits):
        pass
    log = (tmp_path / "log.txt").read_text()
    assert (f"experiment={experiment} starts from a pretrained backbone, and this run from random" in log) == warned


def test_weights_for_images_of_another_scale_are_doubted_in_the_log(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.training.run.ratio_of_scales", lambda *_: 9e3)
    weights = tmp_path / "net.pt"
    small = ("norm=std", "norm.backend=eager", "data.verify=false", "trainer.device=cpu")
    config = run_config(*SHORT, *small, f"run_dir={tmp_path}/run", f"init.weights={weights}", "init.format=standard_bn")
    network = assemble.network_of(config, 19)
    torch.save(network.state_dict(), weights)
    with open_run(config, "train_seg.py", assemble.labelled_splits) as run:
        run.start()
    assert "the first norm sees 9.0e+03 times the variance" in (tmp_path / "run" / "log.txt").read_text()


def test_the_log_counts_the_files_that_each_split_leaves_out(tmp_path):
    root = trees.folder(tmp_path / "data")
    (root / "train/images/a/half.png.part").touch()
    next((root / "val/images/b").iterdir()).unlink()
    config = run_config(*SHORT, "data=folder", f"data.root={root}", f"run_dir={tmp_path}/run", "data.verify=false")
    with open_run(config, "train_seg.py", assemble.labelled_splits):
        log = (tmp_path / "run" / "log.txt").read_text()
    left_out = [
        f"training split train: left out 1 files that are not read as images, such as {root}/train/images/a/half.png",
        f"validation split val: left out 1 labels without an image, such as {root}/val/labels/b/board.1.png",
    ]
    assert [log.count(sentence) for sentence in left_out] == [1, 1]


@pytest.mark.parametrize("is_folder", [False, True])
def test_missing_weights_are_named_before_the_data_are_checked(tmp_path, monkeypatch, is_folder):
    """Reading every file of a large dataset takes long."""
    if is_folder:
        (tmp_path / "start").mkdir()
    monkeypatch.setattr("engine.training.preparation.verify", lambda *_, **__: pytest.fail("the data were checked"))
    config = run_config(*SHORT, f"run_dir={tmp_path}/run", f"init.weights={tmp_path}/start")
    instead = "is a folder without checkpoints/last.pt" if is_folder else "does not exist"
    with pytest.raises(ValueError, match=f"^init.weights={tmp_path}/start {instead}: expected a file of weights"):
        with open_run(config, "train_seg.py", assemble.labelled_splits) as run:
            run.start()


@pytest.mark.parametrize("method, problem", [("end", ValueError("gone")), ("scalars", SystemExit(1))])
def test_a_logger_that_fails_is_named_and_the_others_and_the_run_go_on(method, problem, monkeypatch):
    received = []
    warnings = []
    monkeypatch.setattr("engine.training.run.logger", SimpleNamespace(warning=warnings.append))
    bad, good = (SimpleNamespace(**{method: call}) for call in (Mock(side_effect=problem), received.append))
    Run.tell_loggers(MagicMock(loggers={"bad": bad, "good": good}), method, "finished")
    assert received == ["finished"] and warnings == [f"logger=bad: {type(problem).__name__}: {problem}"]


def test_a_logger_that_never_ends_is_given_up_and_named(monkeypatch):
    received = []
    warnings = []
    monkeypatch.setattr("engine.training.run.SECONDS_TO_END", 0.01)
    monkeypatch.setattr("engine.training.run.logger", SimpleNamespace(warning=warnings.append))
    endless = SimpleNamespace(end=lambda status: threading.Event().wait())
    Run.tell_loggers(MagicMock(loggers={"stuck": endless, "good": MagicMock(end=received.append)}), "end", "finished")
    assert received == ["finished"] and warnings == ["logger=stuck: TimeoutError: did not return within 0.01 s"]


def test_arithmetic_is_of_the_keys():
    """tests/engine/test_every_key.py shows that runs take it from them."""
    try:
        arithmetic(Trainer(deterministic=True, tf32=True))
        assert torch.are_deterministic_algorithms_enabled()
        assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_record_says_whether_steps_were_captured_and_the_configuration_stays():
    config = run_config("trainer.capture=auto", "data=cityscapes", "data.root=data")
    learner = learner_of(nn.Conv2d(3, 5, 1))
    recorded = Run.recorded_config(SimpleNamespace(config=config, learner=learner))
    expected = plain(config)
    assert recorded.pop("trainer") == expected.pop("trainer") | {"capture": False} and config.trainer.capture == "auto"
    absolute = expected.pop("data") | {"root": f"{Path.cwd()}/data"}  # which commands find from any folder
    assert recorded.pop("data") == absolute and recorded == expected


@pytest.mark.parametrize("computes, precision", [(False, "bfloat16"), (True, "bfloat16"), (False, "float16")])
def test_bfloat16_that_a_device_only_emulates_gets_a_warning(computes, precision, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: computes)
    monkeypatch.setattr(torch, "tensor", lambda *args, device, _make=torch.tensor: _make(*args))
    network = MagicMock()
    forward(run_config(f"trainer.precision={precision}"), network, torch.device("cuda"))
    assert ("only emulates it" in caplog.text) is (precision == "bfloat16" and not computes)


@pytest.mark.parametrize(
    "words, crops, ways",
    [
        ([], 4, "twice the .*, trainer.recompute=blocks, trainer.precision=bfloat16, norm=inplace, data.crop_size=.*"),
        (["norm=inplace", "trainer.recompute=blocks", "trainer.precision=float16"], 2, r"data.crop_size=\d+"),
        (["body=revnet_tiny", "norm=checkpoint"], 2, r"trainer.precision=bfloat16, data.crop_size=\d+"),
    ],
)
def test_advice_against_too_little_memory_leaves_out_what_is_set(words, crops, ways):
    config = run_config("norm=std", *words, f"data.crops_per_minibatch={crops}")
    advised = re.search("memory for crops: (.*?)[.] memory.budget=… memory.fit=batch", advice.on_memory(config, 1))
    assert re.fullmatch(ways, advised[1])
    config.memory.fit = "batch"
    assert "memory.fit" not in advice.on_memory(config, 1)


def test_in_an_evaluation_cudnn_does_not_search(monkeypatch):
    """It would search for every size of an image."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    run = MagicMock(config=run_config(), world=World())
    seen = []
    run.metrics.best, run.metrics.ends_early, run.schedule.total_steps = None, False, 1
    Run.evaluate(run, 1, lambda: seen.append(torch.backends.cudnn.benchmark) or SimpleNamespace(scores={"miou": 0.5}))
    assert seen == [False] and torch.backends.cudnn.benchmark


def test_missing_images_of_a_dataset_are_warned_of_and_refused_in_a_row_of_a_paper(tmp_path):
    root = trees.camvid_folders(tmp_path / "camvid")  # 6 of 367
    words = (*SHORT, "data=camvid", f"data.root={root}", "data.verify=false", "data.crop_size=32")
    row = "python train_seg.py experiment=camvid_table3/std"
    for number, (command, extra) in enumerate([("train_seg.py", ()), (row, ("data.incomplete=true",))]):
        config = run_config(*words, f"run_dir={tmp_path}/{number}", *extra)
        with open_run(config, command, assemble.labelled_splits):
            log = (tmp_path / f"{number}" / "log.txt").read_text()
        assert log.count("data.train_split=train has 6 of the 367 images of camvid") == 1
    with pytest.raises(
        ValueError, match="^experiment=camvid_table3/std is a row of a paper, but data.train_split=train has 6 "
    ):
        with open_run(run_config(*words, f"run_dir={tmp_path}/row"), row, assemble.labelled_splits):
            pass


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), "0.1", 1j, np.ones(2)])
def test_a_rate_that_is_no_rate_is_refused_before_its_step(rate):
    learner = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": 0.1}, {"lr": rate}]))
    run = object.__new__(Run)
    fields = {"watch": None, "world": World(), "start_step": 6, "learner": learner, "config": run_config(*SHORT)}
    vars(run).update(fields)
    expected = f"lr_schedule=poly gives the learning rate {rate!r} in step 7: expected a number, 0 or more"
    with pytest.raises(ValueError, match=f"^{re.escape(expected)}$"):
        next(run.deliver_minibatches([{}], None))
