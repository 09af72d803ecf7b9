"""The length of a run, and when it evaluates, saves and logs, in steps."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Durations in optimiser steps. `step` arguments count the steps done so far."""

    total_steps: int
    steps_per_epoch: int
    evaluate_every: int | None
    checkpoint_every: int
    log_every: int
    patience: int | None = None  # evaluations in a row without a better score, after which the run ends

    def evaluates(self, step: int) -> bool:
        # The final evaluation is separate: it also happens if the run is resumed at its end.
        return self.evaluate_every is not None and step % self.evaluate_every == 0 and 0 < step < self.total_steps

    def scores(self, step: int) -> bool:
        """Whether this step's network is evaluated, as scheduled or at the end."""
        return self.evaluates(step) or step == self.total_steps

    def checkpoints(self, step: int) -> bool:
        # Before evaluations too: nothing is lost if one fails.
        evaluate_every = self.evaluate_every or self.total_steps
        return step % self.checkpoint_every == 0 or step % evaluate_every == 0 or step == self.total_steps

    def logs(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.total_steps

    def epoch(self, step: int) -> float:
        return step / self.steps_per_epoch


def in_steps(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int | None:
    """The shorter of two durations, in steps; None if neither is given."""
    durations = (None if epochs is None else epochs * steps_per_epoch, steps)
    return min((duration for duration in durations if duration is not None), default=None)
