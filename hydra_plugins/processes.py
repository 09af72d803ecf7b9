"""Hydra's launcher `processes`: a process of its own for each job of a sweep, one after the other."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

ConfigStore.instance().store("processes", {"_target_": f"{__name__}.Processes"}, "hydra/launcher")


class Processes(Launcher):
    """Starts the commands of jobs (`engine.configuration.multirun.Jobs`), except those that have ended."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.jobs, self.folder = task_function, config.hydra.sweep.dir

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        words = enumerate(map(filter_overrides, job_overrides), initial_job_idx)
        return [
            JobReturn(job.words, status=JobStatus.COMPLETED if error is None else JobStatus.FAILED, _return_value=value)
            for job, error, value in self.jobs.in_processes([self.jobs.job(own, self.folder, n) for n, own in words])
        ]
