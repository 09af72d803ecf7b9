"""Small trainings in processes of their own, to be killed, signalled and resumed."""

import contextlib
import importlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from engine.checkpoint import files as checkpoint
from engine.configuration.command_line import command_line
from engine.process.stopping import errors_for_users
from engine.records.metrics_logger import MetricsLogger
from tests.ranks import FORKSERVER
from tests.runs import REPOSITORY, SHORT, SHORT_SHAPES, checked, hasten

STEPS = 8
# Less than an epoch, with averaged weights, a checkpoint after every step and an evaluation on the way.
_EITHER = (
    *(f"trainer.steps={STEPS}", "trainer.checkpoint_every_steps=1", "resume=auto"),
    *("trainer.log_every_steps=1", "trainer.evaluate_every_steps=6", "trainer.ema_decay=0.5"),
)
OPTIONS = {
    "train_seg": (*SHORT, *_EITHER, "data.crop_size=32", "data.crops_per_minibatch=4", "trainer.pictures=0"),
    "train_imagenet": (*SHORT_SHAPES, *_EITHER),
}


class Run:
    """A training in a process of its own, or under torchrun in several, with `OPTIONS` and `overrides`.

    `inject` is called there before a training in one process; it is pickled by name, so it must stand at the top of a
    module. `torchrun`: options of that program.
    """

    def __init__(self, run_dir: Path, *overrides: str, entry="train_seg", processes=1, inject=None, torchrun=()):
        self.run_dir = run_dir
        self.output_file = run_dir.with_name(f"{run_dir.name}.{time.monotonic_ns()}.txt")
        words = (f"run_dir={run_dir}", *OPTIONS[entry], *overrides)
        if processes == 1:
            self.process = FORKSERVER.Process(target=_main, args=(self.output_file, inject, entry, *words))
            self.process.start()
            return
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), *torchrun]
        with socket.socket() as free:  # other tests run at the same time
            free.bind(("localhost", 0))
            launcher += ["--master-port", str(free.getsockname()[1])]
        with open(self.output_file, "w") as output:
            command = [*launcher, f"{entry}.py", *words]
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=output, stderr=output)

    @property
    def status(self) -> int | None:
        """The exit status, or None."""
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    @property
    def output(self) -> str:
        return self.output_file.read_text() if self.output_file.exists() else ""

    def until(self, condition: Callable[[], bool], seconds: float = 300) -> "Run":
        """Wait until the condition is true or the training has ended."""
        deadline = time.monotonic() + seconds
        while not condition() and self.status is None:
            if time.monotonic() > deadline:
                self.process.kill()
                raise AssertionError(f"it hangs:\n{self.output}")
            time.sleep(0.05)
        return self

    def until_step(self, step: int) -> "Run":
        return self.until(lambda: step in steps_of(self.run_dir))

    def send(self, number: signal.Signals, workers: bool = False) -> None:
        """Send a signal to the process and, with `workers`, to its data workers."""
        for pid in [self.process.pid, *(children(self.process.pid) if workers else [])]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def killed(self) -> "Run":
        self.send(signal.SIGKILL)
        assert self.ends() == -signal.SIGKILL, "it ended before it was killed"
        return self

    def ends(self) -> int:
        """Wait for the training to end in time; return its exit status."""
        return self.until(lambda: False).status


def _main(output: Path, inject: Callable | None, entry: str, *overrides: str) -> None:
    """Do what `python ENTRY.py` does."""
    hasten(pytest.MonkeyPatch())
    torch.set_num_threads(1)
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1, closefd=False) for number in (1, 2))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has the tests ignore
    if inject is not None:
        inject()
    with errors_for_users("start it again with resume=auto"):
        importlib.import_module(entry).train(checked(entry, *overrides), command_line())


def before_call(owner: object, name: str, number: int | None, fault: Callable[..., object]) -> None:
    """From now on call fault(*arguments) before the call `number`, from 1 (None: each), of a method or function."""
    original, calls = getattr(owner, name), itertools.count(1)

    def patched(*arguments, **options):
        if next(calls) == number or number is None:
            fault(*arguments)
        return original(*arguments, **options)

    setattr(owner, name, patched)


def _waits_after(step: int, logger: MetricsLogger, *_) -> None:
    while step in steps_of(logger.run_dir) and not (logger.run_dir / "go").exists():
        time.sleep(0.05)


def waiting_after(step: int) -> Callable:
    """A fault to inject: the run waits after a step until its directory holds a file "go"."""
    return partial(before_call, MetricsLogger, "count_step", None, partial(_waits_after, step))


def killed_after(step: int, run_dir: Path, *overrides: str, **options) -> Run:
    """A run that is killed as soon as it has recorded a step."""
    return Run(run_dir, *overrides, inject=waiting_after(step), **options).until_step(step).killed()


def finished(run_dir: Path, *overrides: str, **options) -> str:
    """Train or resume to the end; return the output."""
    run = Run(run_dir, *overrides, **options)
    assert run.ends() == 0, run.output
    return run.output


def last_of(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / "last.pt"


def steps_of(run_dir: Path) -> list[int]:
    """Steps of the training records, in the order written; a half-written line does not count."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [record["step"] for record in map(json.loads, lines) if record["kind"] == "train"]


def says(output: str, *words: str) -> bool:
    """Whether the output contains all words, however its lines are wrapped."""
    unbroken = "".join(output.split())
    return all("".join(text.split()) in unbroken for text in words)


def children(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            found += [int(stat.parent.name)] * (int(parent) == pid)
    return sorted(found)


def stopped(run_dir: Path, output: str) -> None:
    """Check that a run was stopped on request, after a step that is saved, and said so."""
    step = checkpoint.load(last_of(run_dir))["step"]
    assert says(output, f"stopped after step {step} of {STEPS}; exit status 75: start it again with resume=auto")
    assert steps_of(run_dir) == list(range(1, step + 1))


def survived(run_dir: Path, whole: Path, *overrides: str, **options) -> str:
    """Resume a run to its end and check that it equals the uninterrupted run to the bit; return its output."""
    output = finished(run_dir, *overrides, **options)
    assert steps_of(run_dir) == list(range(1, STEPS + 1)), output
    ended, expected = (checkpoint.load(last_of(path)) for path in (run_dir, whole))
    assert ended["step"] == STEPS
    for part in ("network", "ema"):
        assert all(torch.equal(ended[part][name], tensor) for name, tensor in expected[part].items())
    for key, state in expected["optimizer"]["state"].items():
        assert torch.equal(ended["optimizer"]["state"][key]["momentum_buffer"], state["momentum_buffer"])
    assert ended.get("scaler") == expected.get("scaler")
    scores = [json.loads((path / "results.json").read_text())["confusion_matrix"] for path in (run_dir, whole)]
    assert scores[0] == scores[1]
    names = {path.name for path in (run_dir / "checkpoints").iterdir()}
    assert names == {"last.pt", "previous.pt", "best.pt"}
    return output
