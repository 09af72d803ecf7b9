"""What `engine.loop.train` adds to the bare work of a step."""

import io
import itertools
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from datasets import synthetic
from engine.evaluated import Evaluated
from engine.loop import train
from engine.metrics_logger import MetricsLogger
from engine.run import Run
from engine.run_directory import RunDirectory
from engine.schedule import Schedule
from engine.stopping import StopRequest

from .switches import PLAIN
from .training import Training

NEVER = 10**9  # steps


class Overhead(Training):
    """The same network, optimiser and minibatches in the real loop and in a bare one."""

    def __init__(self, common: tuple[str, ...], threads: int, steps: int):
        super().__init__(common, PLAIN, threads)
        self.steps = steps
        # Every round writes one record, more often than a run does.
        schedule = Schedule(NEVER, steps_per_epoch=NEVER, evaluate_every=None, checkpoint_every=NEVER, log_every=steps)
        self.prepared = [
            (self.learner.forward.normalised(minibatch["image"]), minibatch["label"].to(self.world.device))
            for minibatch in self.in_memory
        ]
        self.folder = tempfile.TemporaryDirectory()
        terminal = Console(file=io.StringIO(), force_terminal=True)  # the progress bar is drawn, for nobody
        directory, data = RunDirectory(self.folder.name), synthetic(None, "train")
        self.run = Run(self.config, self.world, StopRequest(), directory, data, data, schedule, terminal)
        self.run.learner = self.learner
        self.run.metrics = MetricsLogger(Path(self.folder.name), terminal, self.config.score, NEVER, start_step=0)

    def rounds(self, count: int) -> dict[str, list[float]]:
        """{"bare": [milliseconds per step in each round], "real": […]}, after one round to warm up. Call it once."""
        times: dict[str, list[float]] = {"bare": [], "real": []}
        train(self.run, self._timed_minibatches(count, times), self.loss, _nothing)
        return {name: values[1:] for name, values in times.items()}

    def _timed_minibatches(self, count: int, times: dict[str, list[float]]) -> Iterator[dict]:
        """The minibatches of the real loop. Between its rounds the bare loop runs; which comes first alternates."""
        for number in range(count + 1):
            if number % 2:
                times["bare"].append(self.bare())
            started_s = time.perf_counter()
            yield from itertools.islice(itertools.cycle(self.in_memory), self.steps)
            # The loop asks for a minibatch when a step has ended, on CUDA one step earlier: there, the last step of a
            # round counts in the next one, and each round still has as many.
            times["real"].append(self._ms_per_step(started_s))
            if not number % 2:
                times["bare"].append(self.bare())

    def bare(self) -> float:
        """Milliseconds per step of nothing but the work, on images that are normalised already."""
        started_s = time.perf_counter()
        self.learner.network.train()
        for images, labels in itertools.islice(itertools.cycle(self.prepared), self.steps):
            self.learner.optimizer.zero_grad()
            self.loss(self.learner.forward.network(images), labels).backward()
            self.learner.optimizer.step()
        return self._ms_per_step(started_s)

    def _ms_per_step(self, started_s: float) -> float:
        self._finish()
        return round(1e3 * (time.perf_counter() - started_s) / self.steps, 3)


def _nothing() -> Evaluated:
    return Evaluated(scores={"miou": math.nan}, summary="nothing", images=0)
