"""Hydra's launcher `processes`: a process of its own for each job of a sweep, one after the other."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

ConfigStore.instance().store("processes", {"_target_": f"{__name__}.Processes"}, "hydra/launcher")


class Processes(Launcher):
    """Starts each job's command, and skips jobs that an earlier sweep has finished. See `multirun.Jobs`."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.jobs = task_function
        self.folder = config.hydra.sweep.dir

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        return self.jobs.launch(job_overrides, self.folder, initial_job_idx)
