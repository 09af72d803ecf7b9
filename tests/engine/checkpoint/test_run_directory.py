"""A run that was killed during a save, or damaged, resumes from a good checkpoint."""

import errno
import fcntl
import itertools
import logging
import os
import re
import shutil
import signal
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from engine.checkpoint import files as checkpoint
from engine.checkpoint.run_directory import RunDirectory, new_run_path
from engine.configuration import config as cfg
from engine.configuration.command_line import checked
from engine.configuration.help import as_text
from engine.schema.keys import deciding
from engine.schema.segmentation import SegmentationRun
from scripts.reports.runs import DATE
from tests.runs import run_config, same, with_key


@pytest.fixture(scope="module")
def config() -> SegmentationRun:
    return run_config("run_dir=unused", "resume=auto")


def weights_of(step: int) -> dict[str, torch.Tensor]:
    return {f"w{i}": torch.full((5000,), 10.0 * step + i) for i in range(2)}


def state_of(step: int, config: SegmentationRun) -> dict:
    state = {"task": "segmentation", "step": step, "network": weights_of(step), "total_steps": 9, "finished": step == 9}
    of_training = {"best": None, "scores": [], "data": {}}
    return {**state, **of_training, "config": cfg.plain(config), "classes": ["road", "sky"]}


def save(run: RunDirectory, state: dict) -> None:
    run.start_saving(state)
    run.finish_saving()


def run_in(path: Path, config: SegmentationRun | None = None, *steps: int) -> RunDirectory:
    """A run's folder, with checkpoints of these steps."""
    run = RunDirectory(str(path))
    path.mkdir(exist_ok=True)
    for step in steps:
        save(run, state_of(step, config))
    return run


def damage(path: Path) -> None:
    """Change a byte in the middle of a tensor, which torch.load alone does not notice."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def resumed(run: RunDirectory, config: SegmentationRun) -> int | None:
    """The step of the checkpoint to resume, whose tensors must be that step's; None for a new run."""
    state = run.checkpoint_to_resume(config, total_steps=9, files={})
    if state is None:
        return None
    assert same(state["network"], weights_of(state["step"]))
    return state["step"]


# A process is killed before each of these lines of a save: ours, and torch's between the tensors.
WATCHED = {(checkpoint.__file__, "save"), (torch.serialization.__file__, "_save")}


def killed_while_saving(run: RunDirectory, state: dict, fatal_line: int) -> bool:
    """Save in a forked process that is killed before the given watched line; False if it survives."""
    child = os.fork()
    if child == 0:
        lines = itertools.count(1)

        def line(frame, event, _):
            if event == "line" and next(lines) == fatal_line:
                os.kill(os.getpid(), signal.SIGKILL)
            return line

        def call(frame, *_):
            return line if (frame.f_code.co_filename, frame.f_code.co_name) in WATCHED else None

        threading.settrace(call)  # the thread that saves starts now
        try:
            save(run, state)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "content, old, stride",
    [
        ("last and previous", 2, 4),
        pytest.param("nothing", None, 1, marks=pytest.mark.slow),
        pytest.param("last", 2, 1, marks=pytest.mark.slow),
        pytest.param("last and previous", 2, 1, marks=pytest.mark.slow),
        pytest.param("damaged last and previous", 1, 1, marks=pytest.mark.slow),
    ],
)
def test_killed_before_any_line_of_a_save_a_run_continues(tmp_path, config, monkeypatch, content, old, stride):
    """It continues from the step before (`old`) or the saved one (3), and its next save works normally.

    `every`: 4 for every fourth line.
    """
    monkeypatch.setattr(os, "fsync", lambda _: None)  # only a power failure would need it, and it is slow
    # The configuration is not tested here, and reading it a hundred times is slow.
    monkeypatch.setattr("engine.checkpoint.run_directory.of_checkpoint", lambda *_: config)
    start = run_in(tmp_path / "start", config, *{"nothing": (), "last": (2,)}.get(content, (1, 2)))
    if content.startswith("damaged"):
        damage(start.last)

    third, fourth = state_of(3, config), state_of(4, config)
    steps, killed = [], True
    while killed:
        folder = tmp_path / f"killed_{len(steps)}"
        shutil.copytree(start.last.parent, folder / "checkpoints") if content != "nothing" else folder.mkdir()
        run = run_in(folder)
        if content.startswith("damaged"):
            assert resumed(run, config) == old
        killed = killed_while_saving(run, third, fatal_line=stride * len(steps) + 1)
        run = run_in(folder)
        steps.append(resumed(run, config))
        save(run, fourth)
        assert {path.name for path in run.last.parent.iterdir()} <= {"last.pt", "previous.pt"}
        assert checkpoint.load(run.last)["step"] == 4
        if steps[-1] is not None:
            assert checkpoint.load(run.previous)["step"] in (steps[-1], 1)
    assert len(steps) > 40 // stride and set(steps) == {old, 3} and steps == sorted(steps, key=[old, 3].index)


def test_the_previous_checkpoint_takes_the_place_of_a_damaged_one_and_the_log_says_why(tmp_path, config):
    run = run_in(tmp_path, config, 1, 2, 3)
    assert resumed(run, config) == 3 and run.notice is None and run.resumed == run.last
    damage(run.last)
    assert resumed(run, config) == 2 and run.resumed == run.previous
    assert f"checkpoint {run.last} is damaged" in run.notice and "checksum" in run.notice
    assert f"The run continues from {run.previous}, of step 2" in run.notice
    save(run, state_of(3, config))  # the good one is kept, not the damaged one
    assert [checkpoint.load(path)["step"] for path in (run.last, run.previous)] == [3, 2]
    damage(run.last), damage(run.previous)  # now the run neither continues nor starts anew
    with pytest.raises(ValueError, match="cannot be continued: .*last.pt is damaged.*previous.pt is damaged") as error:
        resumed(run, config)
    assert "another run_dir to start a new run" in str(error.value) and "best.pt to" not in str(error.value)
    checkpoint.save(run.best, state_of(1, config))
    with pytest.raises(ValueError, match="copy .*best.pt to .*last.pt to continue from its step"):
        resumed(run, config)


def test_an_error_in_a_run_says_which_checkpoint_is_good(tmp_path, config):
    run = run_in(tmp_path)
    full = OSError(errno.ENOSPC, "No space left on device")

    def says(error: BaseException, message: str) -> None:
        with pytest.raises(type(error), match=message), run.in_use():
            raise error

    says(full, f"^run_dir={tmp_path} cannot be written to: No space left on device. .* free there; there is no earlier")
    says(FloatingPointError("the loss is nan"), "^the loss is nan. There is no checkpoint yet: try a lower optim.lr$")
    run_in(tmp_path, config, 1, 2)
    full.filename = str(run.results)  # as engine.process.output_files names it
    says(full, f"bytes are free there; the last good checkpoint is kept: {run.last}, of step 2. Make room")
    for good, step in ((run.last, 2), (run.previous, 1)):
        kept = f"last good checkpoint is {good}, of step {step}: with another run_dir, init.weights={good} starts"
        says(FloatingPointError("the loss is nan"), f"^the loss is nan. .*{kept}")
        damage(run.last)


def test_one_process_trains_in_a_folder_at_a_time(tmp_path, monkeypatch, caplog):
    """Others wait for it to end, and say so once, or give up. A killed process leaves no lock."""
    monkeypatch.setattr("engine.checkpoint.run_directory.logger", logging.getLogger("of this test"))
    run, child = run_in(tmp_path), os.fork()
    if child == 0:
        try:
            run.lock()
            os.kill(os.getpid(), signal.SIGSTOP)
        finally:
            os._exit(0)
    assert os.WIFSTOPPED(os.waitpid(child, os.WUNTRACED)[1])
    monkeypatch.setattr("engine.checkpoint.run_directory.SECONDS_FOR_ANOTHER", 0.3)
    named = rf"another process \(process {child} on .+\) is training there; end it, or give another run_dir"
    with pytest.raises(ValueError, match=named):
        run.lock()
    waits = itertools.count(1)

    def sleep(_: float) -> None:
        if next(waits) == 2:
            os.kill(child, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(child, 0)[1])

    clock = SimpleNamespace(monotonic=itertools.count().__next__, sleep=sleep)
    monkeypatch.setattr("engine.checkpoint.run_directory.time", clock)
    monkeypatch.setattr("engine.checkpoint.run_directory.SECONDS_FOR_ANOTHER", 9)
    caplog.clear()
    run.lock()
    assert len(caplog.messages) == 1 and f"is training in run_dir={tmp_path}: waiting for it" in caplog.text


def test_a_disk_without_locks_takes_runs(tmp_path, config, monkeypatch):
    monkeypatch.setattr(fcntl, "lockf", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    run = run_in(tmp_path)
    run.lock()
    save(run, state_of(1, config))
    assert resumed(run, config) == 1


def test_a_lock_is_not_written_where_a_link_leads(tmp_path, config):
    """Another user of a shared folder may have made the link."""
    run, victim = RunDirectory(str(tmp_path / "run")), tmp_path / "victim"
    victim.write_text("mine")
    run.path.mkdir()
    run.lock_file.symlink_to(victim)
    with pytest.raises(OSError, match=f"{run.lock_file}: Too many levels .* or remove the link, which"):
        with run.in_use():
            run.lock()
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize("moved", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("renamed"))])
def test_a_run_whose_folder_is_gone_ends_and_leaves_nothing_at_the_old_place(tmp_path, config, moved, replaced):
    """Another run may have been started there."""
    path = tmp_path / "run"
    run, next_run = RunDirectory(str(path)), RunDirectory(str(path))
    gone = rf"^run_dir={path} \(.*\) was removed or renamed while the run used it: restore it and continue"
    with pytest.raises(OSError, match=gone), run.in_use():
        run.lock()
        save(run, state_of(1, config))
        moved(path)
        if replaced:
            next_run.lock()
        for notices in (
            run.check_in_place,
            run.raise_if_save_failed,
            lambda: run.start_saving(state_of(2, config)),
        ):
            with pytest.raises(OSError, match=gone):
                notices()
        run._saving = run._thread.submit(run._write, state_of(2, config), True)  # it was under way
    assert not path.exists() if not replaced else [file.name for file in path.iterdir()] == [".lock"]


def test_what_cannot_be_a_folder_of_a_run_is_named(tmp_path, config):
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((file, "File exists"), (file / "run", "Not a directory")):
        run = RunDirectory(str(path))
        with pytest.raises(OSError, match=f"run_dir={path} cannot be used: .*{reason}. Give another run_dir"):
            with run.in_use():
                run.lock()


# Keys that say where and how to compute, not what.
FREE_ON_RESUME = {
    *("run_dir", "resume", "trust_plugins", "sampler.folder", "trainer.device", "trainer.pictures", "trainer.profile"),
    *("data.root", "data.workers", "data.verify", "data.timeout_seconds", "trainer.capture"),
    *("trainer.evaluate_every_epochs", "trainer.evaluate_every_steps", "trainer.checkpoint_every_steps"),
    *("trainer.evaluate_images", "trainer.log_every_steps", "trainer.recompute", "trainer.timeout_seconds"),
    *("trainer.evaluate_batch_size", "trainer.patience"),
    *(f"memory.{name}" for name in ("budget", "gpus", "fit", "time", "activations")),
}


def test_a_folder_is_named_by_what_makes_its_run_another(tmp_path):
    """Overrides of keys that a resumed run may change are left out. The time tells equal runs apart."""
    overrides = ("norm=std", "+optim.lr=0.1", f"data.root={tmp_path}", "trainer.evaluate_images=2", "experiment=a/b")
    of_hydra = ("hydra.verbose=true", "hydra/job_logging=stdout")
    assert deciding((*overrides, *of_hydra), run_config()) == ["norm=std", "+optim.lr=0.1", "experiment=a/b"]
    date = DATE.pattern
    assert len({new_run_path("streets", "std", []) for _ in range(3)}) == 3
    assert re.fullmatch(
        f"runs/streets-std/norm=std,experiment=a-b/{date}", new_run_path("streets", "std", overrides[::4])
    )
    assert re.fullmatch(f"runs/streets-std/{date}", new_run_path("streets", "std", []))


def test_exactly_the_free_keys_may_change(tmp_path, monkeypatch):
    config = run_config(f"run_dir={tmp_path}", "resume=auto", "sampler=class_uniform")
    config.plugins = ["ours"]
    run, keys = run_in(tmp_path, config, 1), cfg.flat(cfg.plain(config))
    assert FREE_ON_RESUME <= keys.keys()
    # Reading it for each key is slow.
    monkeypatch.setattr("engine.checkpoint.run_directory.of_checkpoint", lambda *_: config)
    for key, value in keys.items():
        new_value = ["mine"] if key == "plugins" else f"not {value}"
        changed_config = with_key(config, key, new_value)
        if key in FREE_ON_RESUME:
            assert run.checkpoint_to_resume(changed_config, total_steps=9, files={})["step"] == 1
        else:
            expected = f"another configuration: {key} was {as_text(value)} and is {as_text(new_value)}."
            with pytest.raises(ValueError, match=re.escape(expected)):
                run.checkpoint_to_resume(changed_config, total_steps=9, files={})


def test_a_run_that_differs_in_many_keys_says_how_it_was_started(tmp_path, config):
    run = run_in(tmp_path, config, 1)
    run.config.write_text("# python train_seg.py norm=std seed=3\n# 1 x cpu\n")
    changed = run_config(
        "run_dir=RUN", "resume=auto", "norm=std", "optim=adamw", "data.crop_size=64", "norm.learn_scale=false"
    )
    expected = r"and \d+ more\. It was started by python train_seg\.py norm=std seed=3: give the same to continue it"
    with pytest.raises(ValueError, match=expected):
        resumed(run, changed)


def test_a_resumed_run_may_have_more_plugins_in_any_order_and_none_fewer(tmp_path, config, monkeypatch):
    """One may only register a logger, which a resumed run may add."""
    recorded = with_key(config, "plugins", ["mine", "ours"])
    monkeypatch.setattr("engine.checkpoint.run_directory.of_checkpoint", lambda *_: recorded)
    run = run_in(tmp_path, recorded, 1)
    for plugins in (["ours", "mine"], ["ours", "tracked", "elsewhere/mine.py"]):
        assert resumed(run, with_key(config, "plugins", plugins)) == 1
    with pytest.raises(ValueError, match=re.escape("plugins was [mine,ours] and is [ours,tracked]. Give the same")):
        resumed(run, with_key(config, "plugins", ["tracked", "ours"]))


def test_a_resumed_run_takes_the_normalisation_that_it_measured_when_it_began(tmp_path):
    keys = ("data=folder", "data.root=gone", "data.channels=2", "data.std=[1,1]", "run_dir=unused", "resume=auto")
    unmeasured = run_config(*keys)
    run = run_in(tmp_path, with_key(unmeasured, "data.mean", [0.25, 0.5]), 1)
    assert resumed(run, unmeasured) == 1 and unmeasured.data.mean == [0.25, 0.5]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, config, monkeypatch):
    """The file holds the values of the call, and the next save, or `finish_saving`, waits."""
    may_write, write = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *args, **kwargs: may_write.wait(300) and write(*args, **kwargs))
    run, state = run_in(tmp_path), state_of(1, config)
    weights = next(iter(state["network"].values()))
    run.start_saving(state)
    run.raise_if_save_failed()
    weights += 1
    assert not run.last.exists()
    may_write.set()
    run.start_saving(state_of(2, config))
    run.finish_saving()
    assert resumed(run, config) == 2
    run.last.unlink()
    assert resumed(run, config) == 1  # with the values from before


def test_a_checkpoint_that_cannot_be_written_ends_the_run_soon(tmp_path, config, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", Mock(side_effect=OSError("no room")))
    run = run_in(tmp_path)
    for notices in (run.finish_saving, lambda: run.start_saving(state_of(2, config))):
        run.start_saving(state_of(1, config))
        with pytest.raises(OSError, match="no room"):
            notices()
        run.finish_saving()  # it has been raised
    run.start_saving(state_of(1, config))
    with pytest.raises(OSError, match="no room"), run.in_use():
        pass
    run.start_saving(state_of(1, config))
    with pytest.raises(KeyError, match="first"), run.in_use():
        raise KeyError("first")


@pytest.mark.parametrize("lost", ["missing", "empty", "broken link"])
def test_a_lost_last_checkpoint_is_no_new_run(tmp_path, config, lost):
    run = run_in(tmp_path, config, 1, 2)
    run.last.unlink()
    {"empty": run.last.touch, "broken link": lambda: run.last.symlink_to("gone")}.get(lost, lambda: None)()
    assert resumed(run, config) == 1 and str(run.last) in run.notice
    with pytest.raises(ValueError, match="already holds a run: give resume=auto"):
        resumed(run, replace(config, resume=None))


def test_a_checkpoint_of_another_task_or_length_or_of_weights_alone_is_refused(tmp_path, config):
    run = run_in(tmp_path, config, 1)
    longer = with_key(config, "trainer.steps", 12)
    with pytest.raises(ValueError, match="trainer.steps was null and is 12. Give the same values to continue it"):
        run.checkpoint_to_resume(longer, total_steps=12, files={})  # it has not ended
    save(run, state_of(9, config))
    with pytest.raises(ValueError, match=f"The run has ended. .*: another run_dir, and '?init.weights=.*{run.last}"):
        run.checkpoint_to_resume(longer, total_steps=12, files={})
    with pytest.raises(ValueError, match="trainer.steps was null and is 6. Give the same values to continue it"):
        run.checkpoint_to_resume(with_key(config, "trainer.steps", 6), total_steps=6, files={})
    with pytest.raises(ValueError, match="seed was 0 and is 1. Give the same values to continue it"):
        run.checkpoint_to_resume(with_key(config, "seed", 1), total_steps=9, files={})
    images = cfg.plain(checked("train_imagenet", "data=cifar10", "data.root=DIR"))
    save(run, {**state_of(1, config), "task": "classification", "config": images})
    expected = "expected segmentation; train_imagenet.py continues it"
    with pytest.raises(ValueError, match=f"^run_dir={tmp_path} is for the task classification: {expected}$"):
        run.checkpoint_to_resume(config, total_steps=9, files={})
    for part in ("total_steps", "data"):
        save(run, {name: value for name, value in state_of(1, config).items() if name != part})
        with pytest.raises(ValueError, match="has only a run's weights, which cannot be resumed: .*init.weights="):
            resumed(run, config)


@pytest.mark.parametrize("left", ["checkpoints/best.pt", "results.json", "metrics.jsonl"])
def test_a_run_whose_last_checkpoints_are_gone_is_not_overwritten(left, config, tmp_path):
    run = run_in(tmp_path)
    run.best.parent.mkdir()
    (tmp_path / left).write_text("{}")
    with pytest.raises(ValueError, match=f"already holds {Path(left).name} of a run, which a new run would overwrite"):
        resumed(run, replace(config, resume=None))
    if left == "metrics.jsonl":
        assert resumed(run, config) is None  # it died before its first checkpoint
        return
    copied = f"copy {run.best} to {run.last}" if run.best.exists() else "Restore one of the two, or give another"
    gone = f"it holds {Path(left).name}, but .*last.pt and .*previous.pt are gone.*{copied}"
    with pytest.raises(ValueError, match=gone):
        resumed(run, config)


@pytest.mark.parametrize("resume", [None, "auto"])
def test_another_programs_configuration_is_not_overwritten(config, tmp_path, resume):
    run, again = run_in(tmp_path), replace(config, resume=resume)
    for ours in ("", "\0\0\0", "# python train_seg.py\n# 2 x cuda\nseed: 0\n"):  # the run died before its first step
        run.config.write_text(ours)
        assert resumed(run, again) is None
    inside = RunDirectory(f"{run.last.parent}")
    save(run, state_of(1, config))
    with pytest.raises(ValueError, match=f"holds the checkpoints of a run: give run_dir={tmp_path}$"):
        resumed(inside, again)
    run.last.unlink()
    run.config.write_text("# my project\nlr: 0.1\n")
    with pytest.raises(ValueError, match=f"^run_dir={tmp_path} holds a config.yaml of something else, which a run"):
        resumed(run, again)


def test_data_that_changed_since_the_last_save_is_refused_or_named(config, tmp_path):
    run = run_in(tmp_path)

    def step(*hashes: str) -> int:
        return run.checkpoint_to_resume(config, 9, {"training": [*hashes]}, {"training": "7 images"})["step"]

    save(run, {**state_of(3, config), "data": {"training": ["names", "sizes", "ids"]}})
    assert step("names", "sizes", "ids") == 3 and run.notice is None
    with pytest.raises(ValueError, match=r"training files were added, removed or renamed \(now 7 images\)"):
        step("other names", "sizes", "ids")
    with pytest.raises(ValueError, match="a run on other data: training labels number the classes differently"):
        step("names", "sizes", "other ids")
    assert step("names", "other sizes", "ids") == 3 and "training files have other sizes" in run.notice
