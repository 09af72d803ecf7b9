"""The folder of one run: where its files are, and whether a run may start or go on in it."""

from datetime import datetime
from pathlib import Path

from engine import checkpoint
from engine.config import flat

# Keys that a resumed run may change: they say where and how it runs, not what it computes.
_FREE_ON_RESUME = (
    "run_dir",
    "resume",
    "data.root",
    "data.workers",
    "data.verify",
    "sampler.folder",
    "trainer.device",
    "trainer.evaluate_every_epochs",
    "trainer.evaluate_every_steps",
    "trainer.checkpoint_every_steps",
    "trainer.log_every_steps",
    "trainer.pictures",
)


class RunDirectory:
    """Paths of a run's files below `path`."""

    def __init__(self, path: str | None, dataset: str, norm: str):
        """`path`: `run_dir`; where it is None, a new folder runs/DATASET-NORM/DATE."""
        self.path = Path(path or f"runs/{dataset}-{norm}/{datetime.now():%Y-%m-%d_%H-%M-%S}")
        self.config = self.path / "config.yaml"
        self.log = self.path / "log.txt"
        self.results = self.path / "results.json"
        self.last = self.path / "checkpoints" / "last.pt"
        self.best = self.path / "checkpoints" / "best.pt"

    def checkpoint_to_resume(self, resume: str | None, config: dict, total_steps: int) -> dict | None:
        """The state to continue from, None for a run that starts here.

        Raises:
            ValueError: there is a run already and `resume` is not "auto", or it has another configuration or, because
                the data changed, another length.
        """
        if resume not in (None, "auto"):
            raise ValueError(f"resume={resume}: expected auto (continue the run in run_dir) or nothing")
        if not self.last.is_file():
            return None
        if resume is None:
            raise ValueError(
                f"run_dir={self.path} already holds a run: give resume=auto to continue it, another run_dir, or "
                f"remove the folder"
            )
        state = checkpoint.load(self.last)
        before, now = flat(state["config"]), flat(config)
        changed = [key for key in before.keys() | now.keys() if before.get(key) != now.get(key)]
        changed = sorted(key for key in changed if key not in _FREE_ON_RESUME)
        if changed:
            listed = "; ".join(f"{key} was {before.get(key)} and is {now.get(key)}" for key in changed)
            raise ValueError(
                f"run_dir={self.path} holds a run of another configuration: {listed}. Give the same values to "
                f"continue it, or another run_dir to start anew"
            )
        if state["total_steps"] != total_steps:
            raise ValueError(
                f"run_dir={self.path} holds a run of {state['total_steps']} steps, and with the images found now it "
                f"would have {total_steps}: continue it on the data that it was started on"
            )
        return state
