"""Sweeps: which jobs -m makes of a command, where they write, which of them run, and what workers unpickle."""

import copy
import importlib
import os
import re
import shlex
import sys
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from omegaconf import DictConfig

import train_imagenet
from engine.configuration import multirun
from engine.configuration.command_line import command_line
from engine.process import distributed
from tests.runs import checked


def with_task(loader: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
    """What a launcher composes for a job, with the values of no job."""
    config = copy.deepcopy(master_config)
    config.hydra.overrides.task = sweep_overrides
    return config


@pytest.fixture
def swept(monkeypatch, tmp_path):
    """A function that starts train_imagenet.py with -m; returns the jobs {title: command} that it would run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(ConfigLoaderImpl, "load_sweep_config", with_task)  # which would compose every job, twice
    started, fails = {}, False

    def run(place: str, title: str, command: list[str], console: object) -> str | None:
        started[title] = command
        (run_dir,) = (word.partition("=")[2].strip('"') for word in command if word.startswith("run_dir="))
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        return f"{title}: exit status 1" if fails else None

    def start(*arguments: str, failed: bool = False) -> dict[str, list[str]]:
        nonlocal fails
        fails = failed
        monkeypatch.setattr(sys, "argv", ["train_imagenet.py", *arguments])
        monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "train_imagenet.py", *arguments])
        started.clear()
        monkeypatch.setattr(multirun, "run_job", run)
        train_imagenet.main()
        return dict(started)

    return start


def finish(command: list[str], monkeypatch) -> None:
    """Leave what the training of a job's command leaves when it ends."""
    monkeypatch.setattr(sys, "argv", command[2:])
    (run_dir,) = (word.partition("=")[2].strip('"') for word in command if word.startswith("run_dir="))
    Path(run_dir, "config.yaml").write_text(f"# {command_line()}\n# 1 x cpu\n")
    Path(run_dir, "results.json").write_text('{"top1": 0.5}')


def test_jobs_are_named_after_their_overrides_and_run_as_pasted(swept):
    """The last key's values change first. Each job's command is complete: without -m, in a directory of its own."""
    of_mappings = swept("-m", "optim={lr: 0.1},{lr: 0.2}", "seed=4").values()
    assert [shlex.join(words[4:6]) for words in of_mappings] == [
        f"""seed=4 'run_dir="multirun/train_imagenet,seed=4/optim=lr-{lr}"'""" for lr in (0.1, 0.2)
    ]
    jobs = swept("optim.lr=0.01,1e-3", "-m", "norm=std", "seed=0,1", "data.workers=0")
    assert list(jobs) == [f"optim.lr={lr} seed={seed}" for lr in ("0.01", "0.001") for seed in (0, 1)]
    run_dir = 'run_dir="multirun/train_imagenet,norm=std/optim.lr=0.01,seed=1"'  # without keys that a resume may change
    words = ["optim.lr=0.01", "norm=std", "seed=1", "data.workers=0", run_dir, "resume=auto"]
    assert jobs["optim.lr=0.01 seed=1"] == [sys.executable, "-u", "train_imagenet.py", *words]
    values = checked("train_imagenet", *words)
    assert (values.optim.lr, values.seed) == (0.01, 1)
    assert values.run_dir == "multirun/train_imagenet,norm=std/optim.lr=0.01,seed=1"
    assert list(swept("--multirun", "seed=range(0,3)")) == ["seed=0", "seed=1", "seed=2"]
    named = swept("-m", "data.val_split=val,1.10", "run_dir=2024_05")
    (_, number) = named.values()
    values = checked("train_imagenet", *number[3:])
    assert (values.data.val_split, values.run_dir) == ("1.10", "2024_05/data.val_split=1.10")


def test_what_has_ended_is_skipped_and_what_was_asked_for_otherwise_is_not(swept, monkeypatch, capsys):
    arguments = ("-m", "seed=0,1,2", "run_dir=a b")
    jobs = swept(*arguments, "resume=auto")
    finish(jobs["seed=1"], monkeypatch)
    capsys.readouterr()
    assert list(swept(*arguments)) == ["seed=0", "seed=2"]
    said = capsys.readouterr().out
    assert said.startswith("already finished: seed=1\n2 succeeded, 1 had already finished, 0 failed\ncompare ")
    importlib.import_module("scripts.compare_runs")  # declares the command
    compare = shlex.split(next(line for line in said.splitlines() if line.startswith("compare")))[1:]
    assert checked("compare_runs", *compare[3:]).runs == "a b"
    assert list(swept(*arguments, "optim.lr=1")) == ["seed=0", "seed=1", "seed=2"]  # the run itself says what differs
    (Path("a b") / "seed=1" / "results.json").unlink()
    assert list(swept(*arguments)) == ["seed=0", "seed=1", "seed=2"]


def test_a_sweep_fails_if_a_job_has_failed_after_all_have_run(swept, capsys):
    with pytest.raises(SystemExit, match="^error: seed=0: exit status 1$"):
        swept("-m", "seed=0,1", failed=True)
    assert "0 succeeded, 0 had already finished, 2 failed\nfailed: seed=0: exit status 1\nfailed: seed=1: " in (
        capsys.readouterr().out
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("optim.lr=0.1", "-m: no key has several values; give some without brackets, as in seed=0,1"),
        ("run_dir=a,b", "run_dir=a,b: a sweep names its jobs' folders itself; give one folder for all"),
        ("optim.lrr=1,2", "optim.lrr=1.*lr"),
        ("optim.lr=1,-1", "optim.lr=-1.0: expected a number above 0"),
        ("seed=0,1,0", "seed=0 and seed=0 are the same job: leave one of them out"),
        ("optim.lr=interval(0,1)", r"optim.lr=interval\(0,1\): expected values with commas between them, as in"),
        ("seed=range(0,0) optim.lr=x", r"seed=range\(0,0\): there are no such values"),
        ("norm=glob(nope*)", r"norm=glob\(nope\*\): there are no such values"),
        ("optim=null seed=0,1", "optim=null: there is no such optim; the nearest are "),
        ("seed=0,1 --config-file=.", "--config-file=.: keys have no dashes"),
        ("seed=0,1 hydra/launcher=nope", ".*Could not find 'hydra/launcher/nope'"),
        ("optim.lr=interval(0.1,1) hydra/sweeper=optuna", "this sweeper minimises.*: give hparams_search=optuna"),
    ],
)
def test_what_is_no_sweep_is_refused_before_anything_runs(arguments, message, swept, tmp_path):
    with pytest.raises(SystemExit, match=f"^error: {message}"):
        swept("-m", *arguments.split())
    assert list(tmp_path.iterdir()) == []


def test_jobs_that_would_replace_each_others_files_are_refused():
    """They need different files, which may be named after what differs. Only the last job's scores were left."""

    def check(*words: str) -> None:
        overrides_by_job = ["tta.flip=false"], ["tta.flip=true"]
        multirun.check_different(
            overrides_by_job, [checked("eval", "checkpoint=a.pt", *overrides, *words) for overrides in overrides_by_job]
        )

    for word in ("results=a.json", "predictions=OUT", "overlays=OUT"):
        with pytest.raises(ValueError, match=rf"^{word}: tta.flip=false would .* such as '.*=NAME-\${{tta.flip}}'$"):
            check(word)
    check("results=a-${tta.flip}.json")


def test_jobs_know_how_many_share_their_machine(swept, monkeypatch):
    """Joblib starts several at once. They divide the cores (`distributed.cores_per_rank`)."""
    seen: list[str] = []
    monkeypatch.setattr(multirun, "has_ended", lambda *_: seen.append(os.environ[distributed.JOBS_HERE]))
    swept("-m", "seed=0,1")
    launchers = importlib.import_module("hydra._internal.core_plugins.basic_launcher")
    monkeypatch.setattr(launchers.BasicLauncher, "__init__", lambda self, n_jobs: None)
    swept("-m", "seed=2,3", "+hydra.launcher.n_jobs=-2")
    assert seen == ["1", "1", "-2", "-2"] and distributed.JOBS_HERE not in os.environ


def test_under_torchrun_a_line_says_what_to_do(swept, monkeypatch):
    monkeypatch.setattr(distributed, "launcher", lambda: "torchrun")
    with pytest.raises(SystemExit, match="^error: -m under torchrun: .* for s in 0 1; do torchrun … seed="):
        swept("-m", "seed=0,1")


def test_every_job_has_a_folder_that_can_be_made(swept, tmp_path, monkeypatch):
    """Overrides may have lists, slashes and quotes, and be longer than a file name can be."""
    lists = swept("-m", "data.mean=[0,0,0],[0.5,0.5,0.5]")
    assert [Path(word).name for words in lists.values() for word in words if "run_dir" in word] == [
        'data.mean=0,0,0"',
        'data.mean=0.5,0.5,0.5"',
    ]
    alike = swept("-m", "data.root=/a/b,/a-b,'/a \"b\"',/c")
    long = swept("-m", *(f"optim.{key}=0.1,0.2" for key in ("lr", "momentum", "weight_decay")), f"run_dir={'x/' * 9}")
    many = swept("-m", "seed=0,1", *(f"data.std=[0.{digit}{'1' * 40},1,1]" for digit in range(1, 4)))
    monkeypatch.setenv("SWEEPS", str(tmp_path / "s"))
    named = swept("-m", "seed=0,1", "run_dir=${oc.env:SWEEPS}/${norm.name}")
    assert shlex.join(named["seed=0"]).endswith(f"""'run_dir="{tmp_path}/s/inplace/seed=0"' resume=auto""")
    deep = swept("-m", "seed=0,1", f"init.weights={'weights/' * 40}")
    folders = []
    for words in [*alike.values(), *long.values(), *many.values(), *deep.values()]:
        folder = Path(checked("train_imagenet", *words[3:]).run_dir)
        assert folder.is_dir()  # its name has at most 255 bytes
        folders.append(folder)
    assert len(set(folders)) == 4 + 8 + 2 + 2
    assert re.search("data.root=-a-b-[0-9a-f]{8}$", str(folders[0]))


def test_a_sweep_of_a_command_without_run_directories_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    started: list[str] = []
    monkeypatch.setattr(multirun, "run_job", lambda place, title, *_: started.append(title))
    monkeypatch.setattr(sys, "argv", ["eval.py", "-m", "checkpoint=a.pt", "tta.flip=false,true"])
    importlib.import_module("eval").main()
    assert started == ["tta.flip=False", "tta.flip=True"] and list(tmp_path.iterdir()) == []


def test_jobs_have_hydra_s_options_of_their_sweep(swept, tmp_path):
    """A configuration of the user's own: without these, jobs would train another one."""
    (tmp_path / "sweep_of_mine.yaml").write_text("defaults:\n  - train_imagenet\n  - _self_\nseed: 5\n")
    (command,) = swept("-m", "-cd", str(tmp_path), "optim.lr=choice(1)", "-cn", "sweep_of_mine").values()
    assert command[3:7] == ["-cd", str(tmp_path), "-cn", "sweep_of_mine"]
