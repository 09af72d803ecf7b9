"""Parts that keep something: what has `state_dict` resumes to the bit, and `debug=resume` names what has not."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from datasets import ShuffledMinibatches
from engine.assemble.optimization import optimizer
from engine.checkpoint import files as checkpoint
from engine.process import plugins
from engine.schema import keys
from engine.schema.additions import Augmentation, Logger
from engine.schema.data import Sampler
from engine.schema.network import DeepLabV3Head
from engine.schema.optim import LRSchedule, Optim
from engine.schema.segmentation import Loss
from engine.segmentation.cross_entropy import CrossEntropy, SummedLoss
from engine.training import resumption
from models.heads import DeepLabV3
from tests.choices import registered
from tests.runs import SHORT, checked
from train_seg import train


class Averaging(CrossEntropy):
    """Keeps how often each class was seen."""

    def __init__(self, ignore_index, weights, stride):
        super().__init__(ignore_index, weights, stride=stride)
        self.seen = None
        self.teacher = nn.Conv2d(1, 1, 1).requires_grad_(False)

    def forward(self, logits, labels):
        counts = torch.bincount(labels.flatten().long(), minlength=256).float()
        self.seen = counts if self.seen is None else 0.9 * self.seen + 0.1 * counts
        return super().forward(logits, labels) * self.seen[:9].sum() / self.seen.sum()


class SavedAveraging(Averaging):
    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


class Growing(ShuffledMinibatches):
    """Draws from more images in every epoch."""

    def __init__(self, images, **order):
        super().__init__(images, **order)
        self.kept = {"epoch": -1, "most": 1, "drawn": []}

    def keys(self, epoch):
        if epoch != self.kept["epoch"]:
            rng = np.random.default_rng([self.seed, epoch])
            most = self.kept["most"] + 2
            drawn = rng.integers(0, self.kept["most"] + 2, self.draws).tolist()
            self.kept = {"epoch": epoch, "most": most, "drawn": [[epoch, number] for number in drawn]}
        return self.kept["drawn"]


class SavedGrowing(Growing):
    def state_dict(self):
        return self.kept

    def load_state_dict(self, state):
        self.kept = state


class Late:
    """Begins after some crops, of which only the process that makes them knows."""

    calls = 0

    def __call__(self, image, label, rng):
        self.calls += 1
        return (image if self.calls < 9 else 255 - image), label


def late_by_arguments():
    return lambda image, label, rng, step, place: ((image if place < 9 else 255 - image) // (1 + step % 2), label)


class Inner(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)

    def step(self, closure=None):
        self.inner.step()


class SavedInner(Inner):
    def state_dict(self):
        return {**super().state_dict(), "inner": self.inner.state_dict()["state"]}

    def load_state_dict(self, state):
        super().load_state_dict({key: value for key, value in state.items() if key != "inner"})
        self.inner.param_groups = self.param_groups
        parameters = [value for group in self.param_groups for value in group["params"]]
        self.inner.state.update({parameters[number]: value for number, value in state["inner"].items()})


class Lengthening(torch.optim.Optimizer):
    """Keeps all gradients of each parameter in a tensor."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            past = [self.state[parameter]["past"]] if parameter in self.state else []
            self.state[parameter]["past"] = torch.cat([*past, parameter.grad[None]])


class Wandering(LRScheduler):
    """A rate that depends on all weights before."""

    def __init__(self, optimizer, steps, steps_per_epoch, warmup):
        self.total = 0.0
        super().__init__(optimizer)

    def get_lr(self):
        self.total += self.optimizer.param_groups[0]["params"][0].abs().sum().item()
        return [group["initial_lr"] / (1 + self.total) for group in self.optimizer.param_groups]

    def state_dict(self):
        return {}


class SavedWandering(Wandering):
    state_dict = LRScheduler.state_dict


class Counting(DeepLabV3):
    passes = 0

    def forward(self, features):
        self.passes += self.training
        return super().forward(features) * self.passes


class Notes:
    """A logger that keeps what it was told."""

    def __init__(self, folder, config):
        self.calls = 0

    def scalars(self, step, values):
        self.calls += 1

    def end(self, status):
        pass

    def state_dict(self):
        return {"told": self.calls}

    def load_state_dict(self, state):
        self.calls = state["told"]


OWN = (
    ("loss", Loss, "averaging", Averaging),
    ("loss", Loss, "saved_averaging", SavedAveraging),
    ("sampler", Sampler, "growing", Growing),
    ("sampler", Sampler, "saved_growing", SavedGrowing),
    ("augmentations", Augmentation, "late", Late),
    ("augmentations", Augmentation, "late_by_arguments", f"{__name__}.late_by_arguments"),
    ("optim", Optim, "inner", Inner),
    ("optim", Optim, "saved_inner", SavedInner),
    ("optim", Optim, "lengthening", Lengthening),
    ("lr_schedule", LRSchedule, "wandering", Wandering),
    ("lr_schedule", LRSchedule, "saved_wandering", SavedWandering),
    ("head", DeepLabV3Head, "counting", Counting),
    ("logger", Logger, "notes", Notes),
)


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch) -> Iterator[None]:
    """The choices; trainings are compared in this process, as a fresh one takes seconds."""
    monkeypatch.setattr(resumption, "run_in_fresh_interpreter", lambda function, *arguments: function(*arguments))
    with registered(OWN):
        yield


FRESH = resumption.run_in_fresh_interpreter
SMALL = ("head.out_channels=8", "head.hidden_channels=8", "data.crop_size=32", "trainer.pictures=0")
SMALL += ("trainer.evaluate_images=1", "trainer.resume_check=8", "trainer.log_every_steps=1")


def check(*words: str) -> None:
    resumption.check(checked("train_seg", *SHORT, *SMALL, *words))


def test_parts_with_state_dict_resume_to_the_bit_also_where_workers_read_ahead(capsys, monkeypatch):
    monkeypatch.setitem(plugins.LOADED, "test_resumption", plugins.Plugin((Path(__file__),), None))
    saved = ("sampler=saved_growing", "optim=saved_inner", "lr_schedule=saved_wandering", "logger=[notes]")
    words = ("loss=saved_averaging", *saved, "augmentations=[late_by_arguments]", "data.workers=1")
    config = checked("train_seg", *SHORT, *SMALL, *words)
    assert not resumption.has_passed(config)
    check(*words, "head.auxiliary_weight=0.4")
    message = capsys.readouterr().out
    assert "debug=resume: all is equal after 8 steps, also if a run is stopped after step 6 and continued" in message
    assert "(What begins after step 8, or is in no checkpoint, such as a logger's count, was not compared.)" in message
    assert resumption.has_passed(checked("train_seg", *SHORT, *SMALL, *words, "head.auxiliary_weight=0.4"))


@pytest.mark.table
@pytest.mark.parametrize(
    "word, first",
    [
        ("loss=averaging", "the loss of step 7"),
        ("sampler=growing", "the draws of step 7"),
        ("augmentations=[late]", "the crops of step 7"),
        ("optim=inner", "the weights of step 7"),
        ("lr_schedule=wandering", "the learning rates of step 8"),
        ("head=counting", "the outputs of step 7"),
    ],
)
def test_a_part_that_keeps_what_no_checkpoint_has_is_named(word, first):
    words = () if word.startswith("head") else ("head.auxiliary_weight=0.4",)
    with pytest.raises(ValueError, match="^debug=resume: ") as error:
        check(word, *words)
    message = str(error.value)
    assert "differ if a run is stopped after step 6 and continued" in message and first in message, message
    assert word.replace("[", "").replace("]", "") in message
    assert ("compute from step, epoch, place and rng" in message) == word.startswith("augmentations")
    assert ("in a network a buffer" in message) == (not word.startswith("augmentations"))


def test_where_two_whole_runs_differ_it_says_so_first(monkeypatch):
    monkeypatch.setattr(Late, "__call__", lambda _, image, label, rng: (image // (1 + os.urandom(1)[0] % 200), label))
    with pytest.raises(ValueError, match="two whole runs differ already: first the crops of step 1, of aug"):
        check("augmentations=[late]")


FAILING = """
from dataclasses import dataclass
from engine.schema.additions import Augmentation
from engine.schema.keys import choice

def make():
    return lambda image, label, rng: {}["level"]

@choice("augmentations")
class Failing(Augmentation):
    name: str = "failing"
    builds = make
"""


def test_each_training_has_a_fresh_interpreter_which_loads_plugins_and_says_what_fails(tmp_path, monkeypatch):
    monkeypatch.setattr(resumption, "run_in_fresh_interpreter", FRESH)
    (tmp_path / "failing_own.py").write_text(FAILING)
    monkeypatch.setattr(sys, "path", [*sys.path])
    plugins.load([f"plugins=[{tmp_path}/failing_own.py]"], keys.CHOICES)
    try:
        with pytest.raises(ValueError, match="^debug=resume: a training fails: augmentations=failing: .* 'level'"):
            check("augmentations=[failing]")
    finally:
        del plugins.LOADED["failing_own"], sys.modules["failing_own"]


def test_it_is_refused_under_torchrun(monkeypatch):
    monkeypatch.setattr(resumption, "launcher", lambda: "torchrun")
    with pytest.raises(ValueError, match="start train_seg.py by python, without torchrun"):
        check()


def test_parameters_of_a_loss_are_saved_once_they_have_changed():
    loss, resumed = (SummedLoss(lambda _: SavedAveraging(255, None, None), (8,)) for _ in range(2))
    assert [*loss.state_dict()["8"]] == ["_extra_state"]
    with torch.no_grad():
        loss.losses["8"].teacher.weight.data.fill_(3)  # its version says nothing
    state = loss.state_dict()
    assert {*state["8"]} == {"teacher.weight", "_extra_state"}
    resumed.load_state_dict(state)
    assert resumed.losses["8"].teacher.weight.item() == 3 and {*resumed.state_dict()["8"]} == {*state["8"]}
    state["8"]["teacher.weight"] = torch.zeros(2)
    with pytest.raises(RuntimeError, match="size mismatch for teacher.weight"):
        resumed.load_state_dict(state)


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(SavedGrowing, "state_dict", lambda self: {"pace": np.float64(1)})
    words = (*SHORT, *SMALL, "trainer.resume_check=0", "sampler=saved_growing", f"run_dir={tmp_path / 'run'}")
    with pytest.raises(ValueError, match="^sampler=saved_growing has a state_dict of more than tensors, numbers"):
        train(checked("train_seg", *words))


def test_an_optimiser_whose_state_cannot_be_continued_is_named(tmp_path, monkeypatch):
    words = (*SHORT, *SMALL, "trainer.resume_check=0", "trainer.steps=2", f"run_dir={tmp_path}", "resume=auto")
    train(checked("train_seg", *words, "optim=lengthening"))
    says = r"past of .* expected .*\. Let the state of optim=lengthening keep the shapes of its first step, or give"
    with pytest.raises(ValueError, match=says):
        train(checked("train_seg", *words, "optim=lengthening"))
    monkeypatch.setattr(SavedInner, "state_dict", lambda self: {"state": {}, "slow": []})
    config = checked("train_seg", *SHORT, "optim=saved_inner")
    with pytest.raises(ValueError, match=r"^optim=saved_inner: SavedInner\.state_dict\(\) lacks param_groups"):
        optimizer(config.optim, nn.Linear(2, 1), ())


def test_a_training_with_plugins_that_no_check_has_passed_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(plugins.LOADED, "own", plugins.Plugin((), None))
    words = (*SHORT, *SMALL, "trainer.resume_check=0", "trainer.steps=1", f"run_dir={tmp_path / 'run'}")
    train(checked("train_seg", *words))
    assert (tmp_path / "run" / "log.txt").read_text().count("no debug=resume has passed with these plugins") == 1


def test_a_profiled_training_saves_its_sampler_too(tmp_path):
    words = ("sampler=saved_growing", "trainer.resume_check=0", "trainer.steps=1", "trainer.profile=1")
    train(checked("train_seg", *SHORT, *SMALL, *words, f"run_dir={tmp_path}"))
    (parts,) = checkpoint.load(tmp_path / "checkpoints" / "last.pt")["parts"]
    assert parts["sampler=saved_growing"]["epoch"] == 0
