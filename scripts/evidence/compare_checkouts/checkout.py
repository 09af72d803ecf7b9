"""A checkout: its version and its results."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import TextIO

import torch

from engine.output_files import write_file
from scripts.evidence.compare_checkouts.scenarios import SCENARIOS, STOP_STEP, Command

TIMEOUT_SECONDS = 600  # of a command


class CommandFailed(Exception):
    """A command ended with an unexpected exit status."""


class Side:
    """One of the two checkouts, and the folder of its results in `work`."""

    def __init__(self, name: str, checkout: str, camvid: Path, work: Path):
        self.name, self.camvid, self.checkout = name, camvid, Path(checkout).resolve()
        if not (self.checkout / "train_seg.py").is_file():
            raise ValueError(f"{name}={checkout} holds no train_seg.py: expected a checkout of this project")
        git = partial(subprocess.run, cwd=self.checkout, capture_output=True, text=True)
        commit = git(["git", "rev-parse", "--short=12", "HEAD"]).stdout.strip() or "unknown commit"
        status = git(["git", "status", "--porcelain", "--untracked-files=no"])
        self.clean = status.returncode == 0 and not status.stdout
        self.version = commit if self.clean else f"{commit} with uncommitted changes"
        self.folder = work / f"{name}-{self.version.replace(' ', '-')}"
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "XDG_CACHE_HOME": str(work / "cache"),  # the synthetic data is drawn once
            "PYTHONDONTWRITEBYTECODE": "1",  # leaves the checkout unchanged
        }

    def results(self, scenario: str, old: "Side") -> Path:
        """Run a scenario and return the folder of its results; earlier results of the same commit are reused."""
        commands, here = SCENARIOS[scenario], self.folder / scenario
        marker, wanted = self.folder / f"{scenario}.finished", f"torch {torch.__version__}: {commands}"
        if self.clean and marker.is_file() and marker.read_text() == wanted:
            return here
        marker.unlink(missing_ok=True)
        for leftover in (here, self.half_way(scenario)):
            shutil.rmtree(leftover, ignore_errors=True)
        here.mkdir(parents=True)
        with open(self.folder / f"{scenario}.log", "w") as log:
            for command in commands:
                if command.only_old and self is not old:
                    shutil.copytree(old.half_way(scenario), here, dirs_exist_ok=True)
                    continue
                self.run(command, here, log)
                if command.only_old:
                    shutil.copytree(here, self.half_way(scenario))
        write_file(marker, wanted)
        return here

    def half_way(self, scenario: str) -> Path:
        """A copy of the old checkout's folder after the commands that only it runs."""
        return self.folder / f"{scenario}.half_way"

    def run(self, command: Command, here: Path, log: TextIO) -> None:
        """Run a command to its end. Raises CommandFailed."""
        launcher = [sys.executable]
        if command.processes > 1:
            launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(command.processes)]
        words = [word.format(here=here, camvid=self.camvid) for word in command.line.split()]
        print("$", *words, file=log, flush=True)
        process = subprocess.Popen([*launcher, *words], cwd=self.checkout, env=self.environment, stdout=log, stderr=log)
        expected = 0
        try:
            if command.stop is not None:
                _wait_for_step(process, here / "run" / "metrics.jsonl")
                process.send_signal(command.stop)
                stopped = 75 if command.processes == 1 else 1  # torchrun does not pass on the status
                expected = stopped if command.stop == signal.SIGTERM else -command.stop
            status: int | str = process.wait(TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            status = f"none in {TIMEOUT_SECONDS} s"
        finally:
            process.kill()
        if status != expected:
            raise CommandFailed(f"exit status {status}, not {expected}: {log.name}")


def _wait_for_step(process: subprocess.Popen, metrics: Path) -> None:
    """Wait until the training has recorded `STOP_STEP` or has ended."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        lines = metrics.read_text().split("\n")[:-1] if metrics.is_file() else []
        if any(json.loads(line)["step"] >= STOP_STEP for line in lines):
            return
        time.sleep(0.005)
