"""Commands compose what Hydra composes, and --help describes it."""

import functools
import importlib
import logging
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, fields, is_dataclass

import hydra
import pytest
from hydra._internal import config_loader_impl
from hydra._internal.config_repository import CachingConfigRepository
from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin

from engine.configuration.choices import choices, groups_in
from engine.configuration.command_line import checked, composed
from engine.configuration.help import as_text, help_text, sentences
from engine.process.console import logger
from engine.process.stopping import EXIT_CODE, Preempted
from engine.schema.classification import ClassificationRun
from engine.schema.keys import CHOICES, CONFIGS, groups_of
from engine.schema.segmentation import SegmentationRun
from tests.runs import REPOSITORY, _compose


def test_choices_that_refer_to_others_are_followed(tmp_path, monkeypatch):
    """Choices are relative to their folder, as in Hydra, whose message names what cannot be found."""

    def write(name: str, *defaults: str) -> None:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("defaults:\n" + "".join(f"  - {entry}\n" for entry in defaults))

    write("data/streets.yaml", "/schema/data/cityscapes", "_self_")
    write("data/photographs.yaml", "/schema/data/imagenet")
    write("experiment/mine/a.yaml", "override /data: photographs")
    write("experiment/mine/b.yaml", "a", "_self_")
    write("experiment/mine/c.yaml", "b", "override /head: null", "optional gone")
    write("experiment/d.yaml", "override /data: streets")
    monkeypatch.setattr("engine.configuration.choices.CONFIGS", tmp_path)
    assert choices("experiment", ClassificationRun) == ["mine/a", "mine/b", "mine/c"]
    assert choices("experiment", SegmentationRun) == ["d"]
    assert {*choices("data", SegmentationRun)} - {*CHOICES["data"]} == {"streets"}


@pytest.mark.parametrize(
    "entry, overrides",
    [
        ("train_imagenet", "experiment=revnet/cifar10_resnet32 optim.lr=0.5 lr_schedule.steps=[1,2] run_dir='a b'"),
        ("train_seg", "norm=checkpoint body=revnet_tiny data=vistas sampler=class_uniform optim=adamw optim.lr=0.5"),
    ],
)
def test_tests_compose_what_hydra_composes(entry, overrides, monkeypatch):
    words = shlex.split(overrides)
    quickly = composed(entry, *words), checked(entry, *words)
    monkeypatch.setattr(hydra, "compose", _compose)
    monkeypatch.setattr(config_loader_impl, "CachingConfigRepository", CachingConfigRepository)
    assert quickly == (composed(entry, *words), checked(entry, *words))


COMMANDS = {
    name: path.relative_to(REPOSITORY).with_suffix("").as_posix().replace("/", ".")
    for path in [*REPOSITORY.glob("*.py"), *(REPOSITORY / "scripts").rglob("*.py")]
    for name in re.findall(r'\bconfigured\("(\w+)"', path.read_text())
}


def listed(text: str, title: str) -> dict[str, str]:
    """The two columns of a section of --help."""
    section = text.partition(f"\n{title} (")[2].strip().partition("\n\n")[0]
    rows = [row.split(maxsplit=1) for row in re.split(r"\n  (?=\S)", section)[1:]]
    return {name: " ".join(" ".join(meaning).split()) for name, *meaning in rows if "=" in name or meaning}


@pytest.mark.table
@pytest.mark.parametrize("name", COMMANDS)
def test_help_describes_a_command_its_keys_and_the_choices_that_it_accepts(name, monkeypatch, capsys):
    """Lines have 80 columns. A command with keys has three examples, which tests/test_commands.py checks."""
    module = importlib.import_module(COMMANDS[name])
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    monkeypatch.setenv("COLUMNS", "80")
    module.main()
    text = capsys.readouterr().out
    groups, keys = listed(text, "Groups"), listed(text, "Keys")
    assert len(re.findall(rf"^    (?:python|torchrun) .*\b{name}\b", text, re.MULTILINE)) >= (3 if keys else 1)
    assert [key for key, meaning in keys.items() if not meaning] == []
    assert [line for line in text.partition("\n\nKeys")[2].splitlines() if len(line) > 80] == []
    assert bool(groups) == (CONFIGS / f"{name}.yaml").is_file()
    assert [choice for choice, meaning in groups.items() if not meaning] == []
    chosen = [choice for choice in groups if "=" in choice and "…" not in choice]
    kinds = {choice.partition("=")[0]: choice for choice in chosen}
    # It raises if the command does not accept one of each.
    composed(name, *(choice for group, choice in kinds.items() if group != "debug"))
    for group, default in groups_in(name).items():
        if default is not None:
            assert next(choice for choice in chosen if choice.startswith(f"{group}=")) == f"{group}={default}"
            assert groups[f"{group}={default}"].startswith("* ")


def test_help_leaves_out_the_choices_for_other_tasks_and_puts_experiments_first():
    schemas = {"train_seg": SegmentationRun, "train_imagenet": ClassificationRun}
    texts = [help_text("", name, schema, composed(name)) for name, schema in schemas.items()]
    assert ["body=revnet_tiny" in text for text in texts] == [False, True]
    for text in texts:
        assert "For classification:" not in text and "type: ignore" not in text
        assert [*listed(text, "Groups")][0].startswith("experiment=")


def test_a_right_command_asks_for_no_messages_and_no_words_of_other_programs(monkeypatch):
    for name in ("arguments", "messages", "words"):
        monkeypatch.setitem(sys.modules, f"engine.configuration.{name}", None)  # cannot be imported
    config = checked("train_seg", "norm=std", "optim={lr: 0.1}", "data.root=1.10", "trainer.epochs=3")
    assert (config.norm.name, config.optim.lr, config.data.root) == ("std", 0.1, "1.10")
    with pytest.raises(ImportError):
        checked("train_seg", "optim.lrr=0.1")


def test_values_are_shown_as_they_are_given():
    assert [*map(as_text, (None, "", True, [0.5, "a"], 1e-4))] == ["null", "''", "true", "[0.5,a]", "0.0001"]


def test_help_of_a_wrong_command_says_what_is_wrong(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train_seg.py", "--help", "norm=std=x"])
    with pytest.raises(SystemExit, match="^error: .*norm=std=x"):
        importlib.import_module("train_seg").main()


def test_a_configuration_is_shown_that_still_lacks_values(monkeypatch, capsys):
    main = importlib.import_module("eval").main
    monkeypatch.setattr(sys, "argv", ["eval.py", "--cfg", "job", "tta.flip=true"])
    main()
    assert "checkpoint: ???\n" in (shown := capsys.readouterr().out) and "flip: true\n" in shown
    monkeypatch.setattr(sys, "argv", ["eval.py", "--cfg=job", "tta.flips=true"])
    with pytest.raises(SystemExit, match="^error: tta.flips=true: there is no such key"):
        main()


def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, command: str, *words: str) -> str:
    """Run a command and return its standard output."""
    monkeypatch.setattr(sys, "argv", [f"{command}.py", *words])
    importlib.import_module(command).main()
    return capsys.readouterr().out


def test_options_of_hydra_are_hydra_s(monkeypatch, capsys, tmp_path):
    """Options may stand between words. --config-dir adds a user's folder of configurations and choices."""
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    (tmp_path / "own.yaml").write_text("defaults:\n  - train_seg\n  - _self_\nseed: 8\nrun_dir: a${seed}\n")
    show = functools.partial(shown, monkeypatch, capsys, "train_seg")
    assert show("--cfg", "job", "-p", "optim", "optim.lr=3").startswith("# @package optim\nname: sgd\nlr: 3.0\n")
    assert "output_subdir: null\n" in show("--cfg=hydra", "hydra.verbose=true")
    assert "\nseed: 7\n" in show("experiment=mine", "-cd", str(tmp_path), "-c", "job")
    assert "\nrun_dir: a8\n" in show("-c", "job", "--resolve", "--config-dir", str(tmp_path), "-cn", "own")
    assert "== Flags ==" in show("--hydra-help")
    assert "Groups (group=choice" in show("--help", "--resolve")
    monkeypatch.setenv("COMP_LINE", "python train_seg.py optim=ad")
    assert show("--shell-completion", "query=bash").split() == ["optim=adamw"]
    monkeypatch.setenv("COMP_LINE", "python train_seg.py norm=std norm.ep")
    assert show("-sc", "query=bash").split() == ["norm.eps="]
    assert checked("train_seg").seed == 0  # nothing of these is left


def test_a_choice_goes_to_the_package_that_it_names(monkeypatch, capsys, tmp_path):
    """GROUP@PACKAGE=CHOICE, for a group of the user's own: chosen in a configuration, or added."""
    (tmp_path / "rates").mkdir()
    for name, rate in (("slow", 0.25), ("fast", 0.5)):
        (tmp_path / "rates" / f"{name}.yaml").write_text(f"lr: {rate}\n")
    (tmp_path / "rated.yaml").write_text("defaults:\n  - train_seg\n  - rates@optim: slow\n  - _self_\n")
    show = functools.partial(shown, monkeypatch, capsys, "train_seg", "--cfg=job", "-p=optim", f"-cd={tmp_path}")
    assert "\nlr: 0.25\n" in show("-cn=rated")
    assert "\nlr: 0.5\n" in show("-cn=rated", "rates@optim=fast")
    assert "\nlr: 0.5\n" in show("+rates@optim=fast")


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_is_installed_by_hydra_s_script(shell, monkeypatch, capsys):
    script = shown(monkeypatch, capsys, "train_seg", "--shell-completion", f"install={shell}")
    (plugin,) = (
        candidate for candidate in Plugins.instance().discover(CompletionPlugin) if candidate.provides() == shell
    )
    plugin(config_loader=None).install()
    assert script == capsys.readouterr().out and "complete" in script


@pytest.mark.slow
def test_completion_imports_no_torch_once_a_command_has_been_completed(tmp_path):
    """The first completion writes a cache, which is used until a file of engine/schema changes."""
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")

    def completed(line: str, **environment: str) -> list[str]:
        environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "COMP_LINE": line, **environment}
        command = [sys.executable, str(REPOSITORY / "train_seg.py"), "-sc", "query=bash"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout.split()

    first = completed("python train_seg.py norm=std norm.ep")
    assert first == completed("python train_seg.py norm=std norm.ep", PYTHONPATH=str(tmp_path)) == ["norm.eps="]
    assert completed("python train_seg.py loss=libr", PYTHONPATH=str(tmp_path)) == ["loss=library"]


def test_plus_and_tilde_add_and_remove_choices_and_names_of_free_mappings():
    """Keys have no need of them: there, + changes what is there, as without it."""
    importlib.import_module("scripts.run_table")  # declares the command
    assert composed("train_seg", "+optim.lr=3", "++seed=2").optim.lr == 3
    assert composed("train_seg", "debug=smoke", "~debug").trainer.smoke is False
    assert composed("train_seg", "augmentations=[]").augmentations == {}  # also without a plugin that has some
    assert composed("run_table", "weights={a: b}", "+weights.c=d", "~weights.a").weights == {"c": "d"}


def test_one_run_leaves_nothing_of_hydra_s(monkeypatch, tmp_path):
    """Neither outputs/ nor a log, nor another current folder."""
    monkeypatch.chdir(tmp_path)
    entry, starts = importlib.import_module("train_seg"), []
    monkeypatch.setattr(entry, "train", lambda config, _: starts.append((config.seed, os.getcwd())))
    monkeypatch.setattr(sys, "argv", ["train_seg.py", "seed=3"])
    entry.main()
    assert starts == [(3, str(tmp_path))] and [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    "command, function, words, again",
    [
        ("scripts.run_table", "run", ["table=table3"], "start it again"),
        ("train_seg", "train", ["run_dir=runs/a"], "start it again with resume=auto"),
    ],
)
def test_a_stop_says_how_to_go_on_also_where_there_is_no_log(command, function, words, again, monkeypatch, caplog):
    main = importlib.import_module(command)

    def stop(*_: object) -> None:
        raise Preempted("stopped")

    monkeypatch.setattr(main, function, stop)
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(sys, "argv", [command, *words])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == EXIT_CODE
    assert caplog.record_tuples[-1][1:] == (logging.WARNING, f"stopped; exit status 75: {again}")  # Python prints these


def test_only_a_command_s_own_function_ends_it_with_a_status(monkeypatch):
    """sys.exit(1) in a plugin, or in what it calls, ended a training without a word."""
    main = importlib.import_module("train_seg")
    monkeypatch.setattr(main, "train", lambda *_: sys.exit(1))
    monkeypatch.setattr(sys, "argv", ["train_seg.py"])
    with pytest.raises(RuntimeError, match=rf"^{re.escape(__file__)}, line \d+, ends the program: SystemExit\(1\)$"):
        main.main()
    verify = importlib.import_module("scripts.verify_data")
    monkeypatch.setattr(verify, "verify_data", lambda _: {"train": verify.SplitReport(0, None, {"unreadable": ["a"]})})
    with pytest.raises(SystemExit, match="^True$"):
        verify.main()


@dataclass
class Plain:
    own: int = 1  # of the class

    # Not above a key.

    silent: int = 2


@dataclass
class Extending(Plain):
    own: int = 2  # replaced
    # Above in
    # two lines.
    both: str = "# no comment"  # And beside.
    silent: int = 3


def test_help_describes_the_keys_of_every_choice():
    """The comment at a declaration is the help, also in a dataclass that another one extends."""
    for schema in (SegmentationRun, ClassificationRun):
        for alternatives in groups_of(schema).values():
            for alternative in alternatives.values():
                keys = {entry.name for entry in fields(alternative) if not is_dataclass(entry.default_factory)}
                assert keys - {"name"} <= sentences(alternative).keys(), alternative
    assert sentences(Extending) == {"own": "replaced", "both": "Above in two lines. And beside."}
