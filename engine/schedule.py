"""How long a run is and when it does what. Configurations speak of epochs or steps; from here on, steps count."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """All durations in optimiser steps. `step` arguments are the number of steps done so far."""

    total_steps: int
    steps_per_epoch: int
    evaluate_every: int | None
    checkpoint_every: int
    log_every: int

    def evaluates(self, step: int) -> bool:
        # The end of the run has an evaluation of its own, also for a run that is resumed there.
        return self.evaluate_every is not None and step % self.evaluate_every == 0 and 0 < step < self.total_steps

    def scores(self, step: int) -> bool:
        """Whether the network of this step is evaluated, in between or as the run's result."""
        return self.evaluates(step) or step == self.total_steps

    def checkpoints(self, step: int) -> bool:
        # Before an evaluation too, so that nothing is lost if that cannot be finished.
        return step % self.checkpoint_every == 0 or self.scores(step)

    def logs(self, step: int) -> bool:
        return step % self.log_every == 0 or step == self.total_steps

    def epoch(self, step: int) -> float:
        return step / self.steps_per_epoch


def in_steps(epochs: int | None, steps: int | None, steps_per_epoch: int) -> int | None:
    """The shorter of two durations, in steps; None where neither is given."""
    durations = [] if epochs is None else [epochs * steps_per_epoch]
    durations += [] if steps is None else [steps]
    return min(durations, default=None)
