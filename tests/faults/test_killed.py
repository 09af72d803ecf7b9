"""SIGKILL and signals that request a stop, also of ranks under torchrun: only the current step is lost."""

import functools
import os
import re
import signal
from pathlib import Path

import pytest

from engine.checkpoint import files as checkpoint
from engine.process.stopping import EXIT_CODE
from tests.faults import runs
from tests.faults.runs import OPTIONS, Run, children, killed_after, says, stopped, survived, waiting_after

# make test interrupts a run in tests/test_train_seg.py, and kills saves with the files.
pytestmark = pytest.mark.slow("kills processes")


@pytest.fixture(scope="module")
def whole_of(tmp_path_factory):
    """A function of an entry, overrides and a number of processes: the folder of their uninterrupted run."""

    @functools.cache
    def whole(entry: str, *overrides: str, processes: int = 1):
        run_dir = tmp_path_factory.mktemp("whole") / "run"
        runs.finished(run_dir, *overrides, entry=entry, processes=processes)
        return run_dir

    return whole


@pytest.mark.parametrize("entry", OPTIONS)
def test_killed_again_and_again_with_a_damaged_checkpoint(tmp_path, whole_of, entry):
    """The checkpoint before it is then used. tests/engine/checkpoint has all kinds of damage."""
    killed_after(2, tmp_path / "run", entry=entry)
    run = killed_after(5, tmp_path / "run", entry=entry)
    last, previous = runs.last_of(run.run_dir), run.run_dir / "checkpoints" / "previous.pt"
    os.truncate(last, last.stat().st_size // 2)
    step = checkpoint.load(previous)["step"]
    output = survived(tmp_path / "run", whole_of(entry), entry=entry)
    assert says(output, f"checkpoint {last} is ", f"The run continues from {previous}, of step {step}")


@pytest.mark.parametrize(
    "entry, number, workers", [("train_seg", signal.SIGHUP, 2), ("train_imagenet", signal.SIGINT, 0)]
)
def test_asked_to_stop(tmp_path, whole_of, entry, number, workers):
    run = Run(tmp_path / "run", f"data.workers={workers}", entry=entry, inject=waiting_after(4))
    run.until_step(4).send(number, workers=True)
    (run.run_dir / "go").touch()
    assert run.ends() == EXIT_CODE, run.output
    stopped(run.run_dir, run.output)
    survived(run.run_dir, whole_of(entry), entry=entry)


def launched_until(step: int, run_dir: Path, *overrides: str, **options) -> tuple[Run, list[int]]:
    """A run under torchrun after a step, and the pids of its processes, by rank."""
    run = Run(run_dir, *overrides, processes=2, **options).until_step(step)
    return run, children(run.process.pid)


def test_the_others_stop_with_its_error(tmp_path, whole_of):
    # torchrun looks after the other rank, however slow, has noticed: otherwise it asks that one to stop.
    run, ranks = launched_until(3, tmp_path / "run", torchrun=("--monitor-interval", "10"))
    os.kill(ranks[1], signal.SIGKILL)
    assert run.ends() != 0
    assert "error: process 0 of the run lost another process" in run.output, run.output
    assert "start all of them again with resume=auto" in run.output, run.output
    # As the root cause or, if both ranks end in the same second, beside it.
    assert re.search(r"rank      : 1 (?:(?!rank  ).)*SIGKILL", run.output, re.DOTALL), run.output
    survived(tmp_path / "run", whole_of("train_seg", processes=2), processes=2)


def test_torchrun_restarts_a_classification_that_resumes(tmp_path, whole_of):
    entry = "train_imagenet"
    run, ranks = launched_until(2, tmp_path / "run", torchrun=("--max-restarts", "1"), entry=entry)
    os.kill(ranks[0], signal.SIGKILL)
    assert run.ends() == 0, run.output
    survived(tmp_path / "run", whole_of(entry, processes=2), entry=entry, processes=2)


def test_who_waits_too_long_for_another_ends(tmp_path, whole_of, monkeypatch):
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "2")  # torchrun's grace period for the stopped rank
    run, ranks = launched_until(3, tmp_path / "run", "trainer.timeout_seconds=60")
    os.kill(ranks[1], signal.SIGSTOP)
    assert run.ends() != 0
    lost = "process 0 of the run lost another process, or waited for it longer than trainer.timeout_seconds=60"
    assert says(run.output, lost)
    survived(tmp_path / "run", whole_of("train_seg", processes=2), processes=2)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_torchrun_is_asked_to_stop(tmp_path, whole_of, number):
    """Each rank has two data workers. tests/faults/test_slurm.py sends SIGUSR1."""
    run, _ = launched_until(2, tmp_path / "run", "data.workers=2")
    run.send(number)
    assert run.ends() == 1  # torchrun does not pass on its processes' exit status 75
    stopped(tmp_path / "run", run.output)
    survived(tmp_path / "run", whole_of("train_seg", processes=2), processes=2)


WITHOUT_HOME = "import pwd\npwd.getpwuid = {}.__getitem__\n"  # as of a user whom a container does not know


@pytest.mark.parametrize("trap", [False, True])
def test_ranks_of_a_user_without_a_home_make_one_private_folder_or_none(tmp_path, tmp_path_factory, monkeypatch, trap):
    """Both draw the streets and count their classes there, in the folder for temporary files."""
    shared, name = tmp_path_factory.mktemp("s"), f"inplace-abn-segmentation-{os.getuid()}"  # short, as sockets need it
    shared.chmod(0o1777)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_HOME)
    for variable in ("HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TMPDIR", str(shared))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    if trap:
        (tmp_path / "victim").mkdir()
        (shared / name).symlink_to(tmp_path / "victim")
    run = Run(tmp_path / "run", "trainer.steps=1", "sampler=class_uniform", processes=2)
    status, folder = run.ends(), shared / name
    if trap:
        assert status == 1, run.output
        assert says(run.output, "the synthetic dataset has no cache folder", "data.root=DIR"), run.output
        assert not [*(tmp_path / "victim").iterdir()] and not run.run_dir.exists()
        return
    assert status == 0, run.output
    assert folder.stat().st_mode & 0o7777 == 0o700
    assert {path.name for path in folder.iterdir()} >= {"class-index", "compiled", "verified"}
    for inside in ("class-index", "synthetic-streets-*"):  # the ranks share one file, and no unfinished one is left
        assert len([*folder.glob(f"{inside}/*")]) == 1, inside
