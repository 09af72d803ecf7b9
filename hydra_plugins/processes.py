"""Hydra's launcher `processes`: a process of its own for each job of a sweep, one after the other."""

from collections.abc import Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext
from omegaconf import DictConfig

ConfigStore.instance().store("processes", {"_target_": f"{__name__}.Processes"}, "hydra/launcher")


class Processes(Launcher):
    """Starts each job's command, and skips jobs that an earlier sweep has finished. See `multirun.Jobs`."""

    def setup(self, *, hydra_context: HydraContext, task_function: Any, config: DictConfig) -> None:
        self.jobs, self.folder = task_function, config.hydra.sweep.dir

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        numbered = enumerate(job_overrides, initial_job_idx)
        ended = self.jobs.in_processes([self.jobs.job(words, self.folder, number) for number, words in numbered])
        status = {True: JobStatus.FAILED, False: JobStatus.COMPLETED}
        return [JobReturn(job.words, status=status[failed], _return_value=value) for job, value, failed in ended]
