"""What `engine.loop.train` adds to the bare work of a step."""

import io
import itertools
import tempfile
import time
from pathlib import Path

from rich.console import Console

from engine.loop import train
from engine.run_report import RunReport
from engine.schedule import Schedule
from engine.stopping import StopRequest

from .switches import PLAIN
from .training import Training

NEVER = 10**9  # steps


class Overhead(Training):
    """The same network, optimiser and minibatches in the real loop and in a bare one; results of `round` are times."""

    def __init__(self, common: tuple[str, ...], threads: int, steps: int):
        super().__init__(common, PLAIN, threads)
        self.steps = steps
        self.done = 0
        # Every round writes one record, more often than a run does.
        self.schedule = Schedule(
            NEVER, steps_per_epoch=NEVER, evaluate_every=None, checkpoint_every=NEVER, log_every=steps
        )
        self.prepared = [
            (self.image_input(minibatch["image"]), minibatch["label"].to(self.world.device))
            for minibatch in self.in_memory
        ]
        self.folder = tempfile.TemporaryDirectory()
        terminal = Console(file=io.StringIO(), force_terminal=True)  # where the progress bar is drawn, for nobody
        self.report = RunReport(Path(self.folder.name), terminal, NEVER, start_step=0)
        self.report.__enter__()

    def round(self, bare_first: bool) -> dict:
        """Milliseconds per step of both, one after the other."""
        order = (self.bare, self.real) if bare_first else (self.real, self.bare)
        return {way.__name__: self._timed(way) for way in order}

    def real(self) -> None:
        """Some steps of the loop of train_seg.py."""
        train(
            self.learner,
            self.loss_function,
            itertools.islice(itertools.cycle(self.in_memory), self.steps),
            start_step=self.done,
            schedule=self.schedule,
            world=self.world,
            image_input=self.image_input,
            autocast=self.autocast,
            accumulation_steps=1,
            crops_per_minibatch=self.config.data.crops_per_minibatch,
            report=self.report,
            evaluate=_never,
            save=_never,
            stop=StopRequest(),
        )
        self.done += self.steps

    def bare(self) -> None:
        """As many steps of nothing but the work, on images that are normalised already."""
        self.learner.network.train()
        for images, labels in itertools.islice(itertools.cycle(self.prepared), self.steps):
            self.learner.optimizer.zero_grad()
            self.loss_function(self.learner.forward(images), labels).backward()
            self.learner.optimizer.step()

    def _timed(self, way) -> float:
        started_s = time.perf_counter()
        way()
        self._finish()
        return 1e3 * (time.perf_counter() - started_s) / self.steps


def _never(step: int) -> None:
    raise AssertionError(f"the schedule asked for an evaluation or a checkpoint at step {step}")
