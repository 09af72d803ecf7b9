"""Choices from outside the repository: the plugins of docs/extending.md in an empty folder, and what is refused."""

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from engine.assemble.tasks import added_scores
from engine.checkpoint import recorded
from engine.configuration import config as cfg
from engine.configuration.choices import about_choice, choices
from engine.process import plugins
from engine.schema.classification import ImageNetData, SmallImagesData
from engine.schema.evaluation import Evaluation, Prediction
from engine.schema.keys import CHOICES
from engine.schema.segmentation import SegmentationRun
from scripts import browse_data, run_table  # noqa: F401  # commands that tests compose
from scripts.reports import papers
from tests import runs
from tests.choices import forgotten
from tests.runs import REPOSITORY, SHORT, checked, classification_config, run_config

PAGE = (REPOSITORY / "docs" / "extending.md").read_text()
WANDB = """
def init(**given):
    print("wandb begins", given["dir"].name, given["config"]["loss"]["name"], given["sync_tensorboard"])
    return type("Run", (), {"finish": lambda self, exit_code: print("wandb ends with", exit_code)})()
"""
DARKER = """
from typing import ClassVar

from engine.schema.additions import Augmentation
from engine.schema.keys import choice, key


@choice("augmentations")
class Darker(Augmentation):
    name: str = "darker"
    least: float = key(0.5, above=0, most=1)
    builds: ClassVar[str] = "darker.Darken"


class Darken:
    def __init__(self, least):
        self.least = least

    def __call__(self, image, label, rng):
        return (image * rng.uniform(self.least, 1)).astype("uint8"), label
"""
NADAM = """
from typing import ClassVar

import torch

from engine.schema.keys import choice, key
from engine.schema.optim import Optim


@choice("optim")
class NAdam(Optim):
    name: str = "nadam"
    lr: float = key(2e-3, above=0)
    builds: ClassVar[type] = torch.optim.NAdam
"""
EXPERIMENT = """# @package _global_
defaults:
  - override /loss: focal
  - override /scores: [boundary_f1]

loss:
  gamma: 1.0
trainer:
  steps: 2
  epochs: null
"""


def load(words: list[str]) -> None:
    plugins.load(words, CHOICES)


def code_of(name: str) -> str:
    return re.search(rf"<!-- {name} start -->\n```python\n(.*?)```\n<!-- {name} end -->", PAGE, re.DOTALL)[1]


@pytest.fixture
def folder(tmp_path) -> Path:
    sources = {"mine": code_of("plugin"), "tracked": code_of("logger"), "boundaries": code_of("scores")}
    sources["plus"] = code_of("head")
    for name, text in (sources | {"wandb": WANDB, "darker": DARKER, "nesterov": NADAM}).items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "configs" / "experiment").mkdir(parents=True)
    (tmp_path / "configs" / "experiment" / "mine.yaml").write_text(EXPERIMENT)
    return tmp_path


def command(folder: Path, *words: str) -> str:
    """What a command prints that is started in the folder."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_page_s_plugins_train_are_evaluated_and_predict_from_an_empty_folder(folder):
    assert len(code_of("plugin").splitlines()) <= 40
    plugin_words = ("plugins=[mine,tracked,boundaries,darker,plus,nesterov]", "experiment=mine", "logger=wandb")
    plugin_words += ("augmentations=[darker]", "optim=nadam")
    head = ("head=deeplabv3plus", "head.hidden_channels=8", "head.out_channels=16", "head.auxiliary_weight=0.4")
    least = "augmentations.darker.least=0.9"
    printed = command(folder, str(REPOSITORY / "train_seg.py"), *plugin_words, *head, "run_dir=run", least, *SHORT)
    assert "wandb begins run focal True" in printed and "wandb ends with 0" in printed and "boundary_f1" in printed
    results = json.loads((folder / "run" / "results.json").read_text())
    assert 0 < results["boundary_f1"] < 1 and results["config"]["augmentations"]["darker"]["least"] == 0.9
    assert results["config"]["plugins"] == [*results["environment"]["plugins"]] == [*plugin_words[0][9:-1].split(",")]
    said_by_eval = command(folder, str(REPOSITORY / "eval.py"), "plugins=[plus]", "checkpoint=run", "device=cpu")
    assert "scores=[boundary_f1] could not be computed" in said_by_eval
    assert (folder / "run" / "results_all_images_without_boundary_f1.json").is_file()
    state = torch.load(folder / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert state["plugins"] == results["environment"]["plugins"]
    assert f"# plugin mine: mine.py {state['plugins']['mine']['mine.py']}" in (folder / "run/config.yaml").read_text()
    (evaluate,) = re.findall(r"evaluate +(python .*)", printed)
    assert "'plugins=[mine,tracked,boundaries,darker,plus,nesterov]'" in evaluate
    shapes = {name: values.shape for name, values in state["network"].items()}
    assert shapes["head.reduce.0.weight"][0] == 48 and shapes["head.auxiliary.classifier.weight"][0] == 19

    with pytest.raises(ValueError) as error:  # a checkpoint imports nothing
        recorded.of_checkpoint(state, "checkpoint=last.pt")
    assert str(error.value).startswith("checkpoint=last.pt: optim=nadam: registered by plugins=[mine,tracked,")
    assert str(error.value).endswith("which is not given") and "mine" not in sys.modules

    words = ("checkpoint=run", "device=cpu", f"input={next((REPOSITORY / 'docs').rglob('*.png'))}", "output=predicted")
    with (folder / "mine.py").open("a") as file:
        file.write("# changed\n")
    plugins_by_path = "plugins=[" + ",".join(str(folder / f"{name}.py") for name in state["plugins"]) + "]"
    words = ("-m", "scripts.predict", plugins_by_path, f"checkpoint={folder / 'run'}", *words[1:])
    printed = command(folder.parent, *words)
    assert "was made with other versions of its plugins' files mine.py" in " ".join(printed.split())
    assert [*(folder.parent / "predicted").rglob("*.png")]


@pytest.fixture
def leaves(tmp_path) -> Path:
    """The page's dataset, body, norm and sampler, and photographs."""
    for name, module in {"dataset": "leaves", "body": "plain", "norm": "groups", "sampler": "hard"}.items():
        (tmp_path / f"{module}.py").write_text(code_of(name))
    rng = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 2)):
        (tmp_path / "photographs" / split).mkdir(parents=True)
        for number in range(count):
            file = tmp_path / "photographs" / split / f"{number}.jpg"
            Image.fromarray(rng.integers(0, 256, (70, 90, 3), np.uint8)).save(file)
            Image.fromarray(rng.integers(0, 2, (70, 90), np.uint8)).save(file.with_suffix(".png"))
    return tmp_path


@pytest.mark.slow
def test_the_page_s_dataset_body_norm_and_sampler_train_and_are_evaluated(leaves):
    names = [f"{number}" for number in range(6)]
    rows = "".join(f"{name},{int(name != '3')}\n" for name in names)  # one image is hard
    (leaves / "train.csv").write_text(f"name,miou_of_image\n{rows}")
    plugin_words = ("plugins=[leaves,plain,groups,hard]",)
    words = (*plugin_words, "data=leaves", "data.root=photographs", "body=plain", "body.output_stride=4", "norm=groups")
    words += ("sampler=hard", "sampler.table=train.csv", "head.hidden_channels=16", "trainer.device=cpu")
    command(leaves, str(REPOSITORY / "train_seg.py"), *words, "trainer.epochs=null", "trainer.steps=2", "run_dir=run")
    evaluated = (*plugin_words, "checkpoint=run", "device=cpu", "data.split=train")
    evaluated += ("per_image=scores.csv", "results=r.json")
    command(leaves, str(REPOSITORY / "eval.py"), *evaluated)
    results = json.loads((leaves / "r.json").read_text())
    assert {*results["iou"]} == {"ground", "leaf"} and results["images"] == 6
    assert [line.split(",")[0] for line in (leaves / "scores.csv").read_text().splitlines()[1:]] == names
    state = torch.load(leaves / "run" / "checkpoints" / "last.pt", weights_only=True)["network"]
    assert [name for name in state if name.startswith("body")][:2] == ["body.mod1.0.weight", "body.mod1.1.0.weight"]
    with forgotten():
        exec(code_of("sampler"), namespace := {"__name__": __name__})
    order = {"crops_per_minibatch": 4, "seed": 0, "steps": 9}
    drawn = [draw for keys in namespace["HardMinibatches"](6, leaves / "train.csv", names, **order) for draw in keys]
    assert len({*drawn}) == 36 and sum(draw.image == 3 for draw in drawn) > 30


@pytest.fixture
def loading(folder, monkeypatch):
    """Plugins are loaded in this process, and forgotten after the test."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("hydra.compose", runs._compose)  # other tests' are kept for all
    monkeypatch.setattr("tests.runs.Repository.read", {})
    with forgotten():
        yield folder
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", "") or "").startswith(str(folder)):
            del sys.modules[name]
    plugins.LOADED.clear()


def test_a_plugin_s_choices_and_experiments_are_listed_and_checked(loading):
    load(["plugins=[mine,boundaries]"])
    assert "focal" in choices("loss", SegmentationRun) and "mine" in choices("experiment", SegmentationRun)
    assert about_choice("loss", "focal") == "Focal loss (Lin et al., 2017): hard pixels weigh more."
    config = run_config("plugins=[mine,boundaries]", "experiment=mine")
    assert config.loss.gamma == 1 and [*config.scores] == ["boundary_f1"] and config.scores["boundary_f1"].radius == 2
    assert recorded.from_plain(cfg.plain(config), SegmentationRun) == config
    no_such = "^loss=focall: there is no such loss; the nearest is focal; a plugin adds it: docs/extending.md$"
    with pytest.raises(ValueError, match=no_such):
        run_config("plugins=[mine,boundaries]", "loss=focall")
    with pytest.raises(ValueError, match="loss.gamma=-1.0: expected a number, 0 or more"):
        run_config("plugins=[mine,boundaries]", "loss=focal", "loss.gamma=-1")
    with pytest.raises(ValueError, match=r"plugins=\['other'\]: only the command line names plugins"):
        run_config("plugins=[other]")


def test_an_augmentation_may_be_browsed_and_excludes_a_mean_image(loading):
    load(["plugins=[darker,boundaries,mine]"])
    plugin_words = ("plugins=[darker,boundaries,mine]", "augmentations=[darker]")
    words = (*plugin_words, "data=cifar10", "data.val_split=test", "data.mean=[0,0,0]")
    assert [*checked("train_imagenet", *words).augmentations] == ["darker"]
    with pytest.raises(ValueError, match=r"data.mean_image=true with augmentations=\[darker\], which take whole"):
        checked("train_imagenet", *words, "data.mean_image=true")
    assert [*checked("browse_data", *plugin_words, "experiment=mine", "out=pages").augmentations] == ["darker"]


def test_a_command_asks_only_for_the_plugins_of_what_it_builds(loading, caplog):
    """The rest stays in the configuration as it is, such as in a file of scripts.convert_checkpoint."""
    with forgotten():
        words = ("experiment=mine", "augmentations=[darker]", "optim=nadam", "sampler=class_uniform")
        load([word := "plugins=[mine,boundaries,darker,nesterov]"])
        state = {"task": "segmentation", "config": cfg.plain(run_config(word, *words))}
    plugins.LOADED.clear()
    state["config"]["data"] |= {"name": "leaves", "season": ["spring", 2], "mean": [0.1, 0.2, 0.3]}
    state["config"]["logger"] = {"mlflow": {"name": "mlflow", "uri": "none"}}
    config = recorded.of_checkpoint(state, "net.pt", Prediction.needed)
    assert cfg.plain(config) == state["config"]
    assert config.data.normalisation().mean == (0.1, 0.2, 0.3) and config.data.season == ["spring", 2]
    (message,) = caplog.messages
    left = {"optim=nadam", "loss=focal", "data=leaves", "augmentations=darker", "scores=boundary_f1", "logger=mlflow"}
    assert {*re.findall(r"\w+=\w+(?=[,:])", message)} == left
    assert f"{word}, which is not given; this command does without" in message
    Evaluation(checkpoint="run/last.pt").apply_to(config)
    assert added_scores(config, SimpleNamespace(classes=["a"])).by_name == {}
    assert Evaluation(checkpoint="run/last.pt").default_results_file(config).stem == "results_without_boundary_f1"
    with pytest.raises(recorded.PluginsNeeded, match="^net.pt: data=leaves: registered by plugins="):
        recorded.of_checkpoint(state, "net.pt", Evaluation.needed)
    state["config"]["norm"] = {"name": "in_groups"}
    with pytest.raises(recorded.PluginsNeeded, match="^net.pt: norm=in_groups: "):
        recorded.of_checkpoint(state, "net.pt", Prediction.needed)


def test_a_classifier_trained_on_a_plugin_s_data_predicts_without_it(loading):
    """What its class derives from says how images are cropped."""
    for data, base in (("cifar10", SmallImagesData), ("imagenet", ImageNetData)):
        config = cfg.plain(classification_config(f"data={data}", "data.val_split=test"))
        config |= {"plugins": ["mine"], "data": config["data"] | {"name": "leaves"}}
        opened = recorded.of_checkpoint({"task": "classification", "config": config}, "net.pt", Prediction.needed)
        assert isinstance(opened.data, base) and cfg.plain(opened) == config


def test_an_experiment_with_a_table_of_its_own_breaks_no_other(loading, monkeypatch):
    mine = loading / "configs" / "experiment" / "mine.yaml"
    mine.write_text("# @package _global_\n# paper: {table: theirs, row: 1}\n" + EXPERIMENT.partition("\n")[2])
    load(["plugins=[mine,boundaries]"])
    monkeypatch.setattr(papers, "all_experiments", cache(papers.all_experiments.__wrapped__))  # others' are cached
    listed = run_table.trainings_of(checked("run_table", "plugins=[mine,boundaries]", "table=theirs"))
    assert [training.title for training in listed] == ["mine, seed 0"] and "experiment=mine" in listed[0].command
    assert run_table.trainings_of(checked("run_table", "plugins=[mine,boundaries]", "table=camvid"))
    with pytest.raises(ValueError, match="^table=other: expected one of table1, .*cifar10, theirs$"):
        checked("run_table", "plugins=[mine,boundaries]", "table=other")


def test_a_trained_network_is_given_further_scores(loading):
    load(["plugins=[boundaries]"])
    options = checked("eval", "plugins=[boundaries]", "checkpoint=run/checkpoints/last.pt", "scores=[boundary_f1]")
    config = run_config()
    assert options.default_results_file(config).name == "results_boundary_f1.json"
    options.apply_to(config)
    assert config.scores == {"boundary_f1": options.scores["boundary_f1"]}


@pytest.mark.parametrize(
    "name, text, word, problem",
    [
        ("models", "", "models", r"models.py is hidden by .*models/__init__.py, of the same name: rename it"),
        (
            "empty",
            "x = 1\n",
            "empty",
            r"empty.py registers no choice by @choice\(GROUP\), and has no folder",
        ),
        ("focal", "x = 1\n", "focal.Focal", r"Focal is no module in focal: give plugins=\[focal\], which is one"),
        ("absent", None, "absent", r"there is no absent.py or package absent in .*, nor where Python looks"),
        ("absent", None, "./absent.py", r"there is no such file, nor a package; expected a .py or a package's folder"),
        ("sys", None, "sys", r"sys is no file of Python code: expected a module of your own"),
        ("root", None, "/", r"expected a module's name, or the path of a .py file or of a package's folder"),
        ("here", None, "..", r"expected a module's name, or the path of a .py file or of a package's folder"),
        ("ended", "raise SystemExit(1)\n", "ended", "cannot be imported: SystemExit: 1"),
        ("wrong", "import no_such\n", "wrong", r"cannot be imported: ModuleNotFoundError: No module named 'no_such'"),
        ("twice", "", "twice", r"loss=bootstrapped is registered twice: in .*segmentation.py and in "),
        ("busy", "import threading\nthreading.Timer(1, print).start()\n", "busy", r"starts a thread or uses a GPU"),
    ],
)
def test_a_plugin_that_cannot_be_used_is_refused(name, text, word, problem, loading):
    code = code_of("plugin").replace("mine.", f"{name}.")
    if text is not None:
        texts = {"twice": code.replace('"focal"', '"bootstrapped"'), "busy": f"{text}{code}"}
        (loading / f"{name}.py").write_text(texts.get(name, text))
    if name == "empty":
        shutil.rmtree(loading / "configs")
    with pytest.raises(ValueError, match=re.escape(f"plugins=[{word}]") + ".*" + problem):
        load([f"plugins=[{word}]"])


def test_what_other_users_could_change_is_imported_by_its_word_alone(loading):
    """It would run as this user. Where others may only add files, as in /tmp, a plugin of one's own is imported, and
    nothing else of the folder; nor is a __pycache__, which others may have made."""
    mine, configs, package = loading / "mine.py", loading / "configs" / "experiment" / "mine.yaml", loading / "own"
    package.mkdir()
    (package / "__init__.py").write_text(code_of("plugin").replace("mine.", "own."))
    attempts = [(mine, 0o666, mine), (configs, 0o666, mine), (configs.parent, 0o777, mine), (loading, 0o777, mine)]
    attempts += [(package, 0o777, package), (package / "__init__.py", 0o602, package)]
    for path, mode, refused in attempts:
        usual = path.stat()
        path.chmod(mode)
        with pytest.raises(ValueError, match=rf"another user owns {path}, or can write to it.* or give trust_plugins"):
            load([f"plugins=[{refused}]"])
        path.chmod(usual.st_mode)
    loading.chmod(0o1777)
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != loading]
    before = [*sys.path]
    load([f"plugins=[{mine}]"])
    assert sys.path == before and "focal" in choices("loss", SegmentationRun)
    assert not (loading / "__pycache__").exists() and plugins.words() == [f"plugins=[{mine}]"]
    configs.chmod(0o666)
    load([f"plugins=[{loading / 'boundaries.py'}]", "trust_plugins=true"])
    assert sys.path == before and plugins.words()[1:] == ["trust_plugins=true"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files away")
def test_a_plugin_of_another_user_is_refused(loading):
    for path in (loading / "mine.py", loading / "configs", loading):
        for user, group in ((65534, 0), (0, 65534)):
            os.chown(path, user, group)
            path.chmod(usual := path.stat().st_mode | 0o020)
            with pytest.raises(ValueError, match=rf"another user owns {path}, "):
                load(["plugins=[mine]"])
            path.chmod(usual & ~0o022)
        os.chown(path, 0, 0)


def test_a_name_of_ours_in_a_plugin_s_configs_is_searched_after_ours(loading):
    (loading / "configs" / "optim").mkdir()
    (loading / "configs" / "optim" / "sgd_scratch.yaml").write_text("defaults:\n  - /schema/optim/sgd\nlr: 0.7\n")
    load(["plugins=[mine]"])
    assert run_config("plugins=[mine]").optim.lr == 0.05


def test_a_package_and_its_configs_are_found_by_their_folder(loading):
    """Its own modules register, and experiments lie in its folder."""
    package = loading / "elsewhere" / "own"
    (package / "configs" / "experiment").mkdir(parents=True)
    experiment = EXPERIMENT.replace("  - override /scores: [boundary_f1]\n", "")
    (package / "configs" / "experiment" / "theirs.yaml").write_text(experiment)
    (package / "__init__.py").write_text("from own import losses  # noqa: F401\n")
    (package / "losses.py").write_text(code_of("plugin").replace("mine.", "own.losses."))
    load([f"plugins=[{package}]"])
    config = run_config(f"plugins=[{package}]", "experiment=theirs")
    assert config.loss.name == "focal" and plugins.words() == [f"plugins=[{package}]"]
    assert {*plugins.hashes()["own"]} == {"__init__.py", "losses.py"}
    (package / "losses.py").write_text("# other\n")
    before = {**plugins.hashes()["own"], "losses.py": "before", "gone.py": ""}
    assert plugins.changed_since({"own": before}) == ["losses.py", "gone.py"]


def test_resuming_and_ranks_compare_names_of_plugins(loading):
    """Their paths differ between machines."""
    load([f"plugins=[{loading / 'mine.py'}]"])
    config = run_config(f"plugins=[{loading / 'mine.py'}]", "loss=focal")
    marks = "free_on_resume", "per_machine"
    for values in (cfg.plain(config), *(cfg.values_but(config, mark) for mark in marks)):
        assert values["plugins"] == ["mine"]
