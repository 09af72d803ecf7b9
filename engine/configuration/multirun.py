"""Sweeps, with -m: Hydra's sweeper makes jobs of a command's words, and Hydra's launcher starts them."""

import copyreg
import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from engine.process import distributed, plugins
from engine.process.console import log_to, make_console
from engine.process.jobs import has_ended, run_jobs
from engine.schema.keys import CHOICES, CONFIGS, Keys, deciding, leaves, named_after, override

Check = Callable[..., Keys]  # of the words of a job
OF_RUN_DIRECTORIES = ("run_dir", "resume")  # keys that a sweep sets for each job


class Job(NamedTuple):
    title: str  # its own overrides
    words: list[str]  # of its command, without -m
    run_dir: Path | None  # None: the command writes none


@dataclass(frozen=True)
class Jobs:
    """What a launcher calls for each job, here or in a process that has unpickled it: each is a process of its own."""

    schema: type[Any]  # of Keys
    options: Sequence[str]  # of Hydra, for every job
    swept: Sequence[str] = ()  # keys that differ between jobs
    first_trial: int | None = None  # a sweeper's trials have numbers; None: jobs are named after their overrides
    has_digests: bool = False  # without them, two jobs would have the same name
    program: str = field(default_factory=lambda: sys.argv[0])
    start: Sequence[str] = field(default_factory=lambda: sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])])

    def __call__(self, values: DictConfig) -> Any:
        """Run the job that a launcher has chosen, unless it has ended, and return its score."""
        settings = HydraConfig.get()
        job = self.job(settings.overrides.task, settings.sweep.dir, settings.job.num)
        jobs_here = settings.launcher.get("n_jobs") or 1  # a setting of joblib's
        failures = self.run([job], Console(quiet=True), {distributed.JOBS_HERE: str(jobs_here)})
        if failures:
            raise failures[job.title]
        return self.score(job)

    def launch(self, overrides: Iterable[Sequence[str]], folder: str, first_number: int) -> list[JobReturn]:
        """Run jobs with these overrides, of which the first has a number in the sweep of a folder."""
        jobs = [self.job(words, folder, number) for number, words in enumerate(overrides, first_number)]
        failures = self.run(jobs, make_console())
        returns = []
        for job in jobs:
            failure = failures.get(job.title)
            status = JobStatus.COMPLETED if failure is None else JobStatus.FAILED
            returns.append(JobReturn(job.words, status=status, _return_value=failure or self.score(job)))
        return returns

    def job(self, words: Sequence[str], folder: str | Path, number: int) -> Job:
        """The job of these words, which has this number in the sweep of a folder."""
        differing = self.differing(words)
        title = " ".join(differing)
        if not self.has_run_dir:
            return Job(title, [*self.options, *words], None)
        if self.first_trial is None:
            run_dir = Path(folder, named_after(differing, self.has_digests))
        else:
            run_dir = Path(folder, str(self.first_trial + number))
            title = f"trial {run_dir.name}: {title}"
        return Job(title, [*self.options, *words, override("run_dir", run_dir), "resume=auto"], run_dir)

    @property
    def has_run_dir(self) -> bool:
        """Whether each job writes a run directory of its own."""
        return "run_dir" in self.schema.__dataclass_fields__

    def differing(self, words: Sequence[str]) -> list[str]:
        """The overrides that differ between jobs."""
        return [word for word in words if word.partition("=")[0] in self.swept]

    def run(
        self, jobs: Sequence[Job], console: Console, variables: Mapping[str, str] | None = None
    ) -> dict[str, ValueError]:
        """Run the jobs that have not ended in turn. Returns {title: error} of the jobs that fail with a message.

        `variables`: added to the environment of the jobs. Preempted: see `run_jobs`.
        """
        process_count = distributed.world_size()
        commands = {}
        for job in jobs:
            if job.run_dir is not None and has_ended(job.run_dir, [self.program, *job.words], process_count):
                console.print(f"already finished: {job.title}", soft_wrap=True)
            else:
                commands[job.title] = [sys.executable, *self.start, *job.words]
        errors = run_jobs(commands, console, ended_before=len(jobs) - len(commands), variables=variables)
        return {title: ValueError(f"{title}: {error}") for title, error in errors.items()}

    def score(self, job: Job) -> float | None:
        """The score that a job's run has left; None of other ranks than the first, which may be done before it."""
        if job.run_dir is None or not (job.run_dir / "results.json").is_file():
            return None
        return json.loads((job.run_dir / "results.json").read_text("utf-8"))[self.schema.score]


def sweep(program: Hydra, primary: str, check: Check, jobs: Jobs, words: Sequence[str]) -> None:
    """Run a sweep, and print how to compare its runs.

    A job's run directory is named after its own overrides, or a trial's has its number. It lies in the folder
    `run_dir`, by default multirun/COMMAND,OVERRIDES, with the overrides that all jobs share.

    Args:
        program: has found the primary configuration.
        check: returns the checked keys of a job's words, or raises ValueError.
        jobs: without the keys that differ.
        words: of the command as Hydra reads them, without options.

    Raises:
        ValueError: no key has several values, a job's words are wrong, or the sweeper would minimise a score (nothing
            has run); or a job has failed.
        Preempted: see `run_jobs`.
    """
    if distributed.launcher():
        raise ValueError(
            "-m under torchrun: a sweep starts its jobs itself, each as one process. For several devices use the "
            "shell: for s in 0 1; do torchrun … seed=$s run_dir=FOLDER/seed$s resume=auto; done"
        )
    console = make_console()
    log_to(console, None)
    overrides, settings = _parsed_sweep(program, primary, check, words)
    jobs = replace(jobs, swept=[key for key, override in overrides.items() if override.is_sweep_override()])
    is_basic = settings.sweeper["_target_"].endswith(BasicSweeper.__name__)  # else it chooses values as it goes
    words_by_job = _words_by_job(overrides) if is_basic else [[*first_values(overrides)]]
    differing_by_job = [jobs.differing(job_words) for job_words in words_by_job]
    configs = [check(*job_words) for job_words in words_by_job]
    check_different(differing_by_job, configs)
    _refuse_minimising(settings, jobs.schema)
    is_named = any(word.startswith("hydra.sweep.dir=") for word in words)
    folder = Path(settings.sweep.dir) if is_named else _default_folder(jobs, overrides, configs[0])
    if is_basic:
        names = {named_after(differing) for differing in differing_by_job}
        jobs = replace(jobs, has_digests=len(names) < len(differing_by_job))
    else:
        jobs = replace(jobs, first_trial=_next_trial(folder))
    remaining_words = [word for word in words if word.partition("=")[0] not in OF_RUN_DIRECTORIES]
    _pickle_for_workers()
    try:
        program.multirun(primary, jobs, [*remaining_words, override("hydra.sweep.dir", folder), "hydra.mode=MULTIRUN"])
    finally:
        copyreg.dispatch_table.pop(DictConfig)
        if not jobs.has_run_dir:
            _remove_sweep_files(folder)
        elif folder.is_dir():
            _print_comparing_commands(folder, console)


def _refuse_minimising(settings: DictConfig, schema: type[Any]) -> None:
    """ValueError: a sweeper that looks for low values is to choose by a score of which a higher one is better."""
    score = getattr(schema, "score", None)
    if score and str(settings.sweeper.get("direction")).endswith("minimize"):
        raise ValueError(f"this sweeper minimises, and a higher {score} is better: give hparams_search=optuna")


def _print_comparing_commands(folder: Path, console: Console) -> None:
    """Print how to compare the runs in a sweep's folder."""
    compare = shlex.join([*plugins.words(), override("runs", folder), override("out", folder / "comparison")])
    console.print(f"compare   python -m scripts.compare_runs {compare}", soft_wrap=True)
    console.print(f"curves    tensorboard --logdir {shlex.quote(str(folder))}", soft_wrap=True)


def _next_trial(folder: Path) -> int:
    """The first number that no trial in a sweep's folder has. The folder is made, for the sweeper's file of trials."""
    folder.mkdir(parents=True, exist_ok=True)
    return 1 + max((int(path.name) for path in folder.iterdir() if path.name.isdecimal()), default=-1)


def _default_folder(jobs: Jobs, overrides: Mapping[str, Override], config: Keys) -> Path:
    """The folder of a sweep whose words name none for Hydra. `config`: of any job."""
    run_dir = getattr(config, "run_dir", None)
    if run_dir:
        return Path(run_dir)
    differing = (*jobs.swept, *OF_RUN_DIRECTORIES)
    shared = [override.input_line or "" for key, override in overrides.items() if key not in differing]
    return Path("multirun", named_after([Path(jobs.program).stem, *deciding(shared, config)]))


def _remove_sweep_files(folder: Path) -> None:
    """Remove Hydra's file of a sweep whose command writes no runs, and folders that are empty then."""
    (folder / "multirun.yaml").unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()
        folder.parent.rmdir()


def _parsed_sweep(
    program: Hydra, primary: str, check: Check, words: Sequence[str]
) -> tuple[dict[str, Override], DictConfig]:
    """{key: override} of a sweep's words and its sweeper's, without Hydra's; and the group hydra that they choose."""
    for word, next_word in itertools.pairwise(words):
        if "=" in word and "=" not in next_word:
            raise ValueError(
                f"{next_word}: a sweep's values have commas between them, without spaces: {word},{next_word}"
            )
    parser = OverridesParser.create(program.config_loader)
    parsed = parser.parse_overrides([*words])
    overrides = {override.get_key_element(): override for override in parsed if not override.is_hydra_override()}
    for swept in filter(Override.is_sweep_override, overrides.values()):
        if not swept.is_interval_sweep() and next(swept.sweep_string_iterator(), None) is None:
            raise ValueError(f"{swept.input_line}: there are no such values")
    try:
        settings = program.compose_config(primary, [*words], RunMode.MULTIRUN).hydra
    except (HydraException, ValueError):
        check(*first_values(overrides))  # says what is wrong with ours
        raise
    params = [f"{key}={value}" for key, value in (settings.sweeper.get("params") or {}).items()]
    sweeper_overrides = {override.get_key_element(): override for override in parser.parse_overrides(params)}
    overrides = sweeper_overrides | overrides
    for key in OF_RUN_DIRECTORIES:
        if key in overrides and overrides[key].is_sweep_override():
            raise ValueError(
                f"{overrides[key].input_line}: a sweep names its jobs' folders itself; give one folder for all"
            )
    return overrides, settings


def first_values(overrides: Mapping[str, Override]) -> Iterator[str]:
    """Yield each override as a word, with the first of its values if it has several."""
    for key, parsed in overrides.items():
        value: Any = parsed.value()
        if parsed.is_interval_sweep():
            yield f"{key}={value.start}"
        elif parsed.is_sweep_override():
            yield f"{key}={next(parsed.sweep_string_iterator())}"
        else:
            yield parsed.input_line or ""


def _words_by_job(overrides: Mapping[str, Override]) -> list[list[str]]:
    """The words of each job of Hydra's basic sweeper. The last key's values change fastest."""
    for parsed in overrides.values():
        if parsed.is_interval_sweep():
            raise ValueError(
                f"{parsed.input_line}: expected values with commas between them, as in seed=0,1,2; "
                f"hparams_search=optuna draws from intervals"
            )
    if not any(parsed.is_sweep_override() for parsed in overrides.values()):
        raise ValueError("-m: no key has several values; give some without brackets, as in seed=0,1,2, or leave -m out")
    return BasicSweeper.split_arguments([*overrides.values()], None)[0]


def check_different(differing_by_job: list[list[str]], configs: list[Keys]) -> None:
    """ValueError if jobs are equal, or would write the same file or folder: only the last one's would be left."""
    jobs = zip(map(" ".join, differing_by_job), configs, map(_paths_written, configs), strict=True)
    for (title, config, path_by_key), (other_title, other_config, other_path_by_key) in itertools.combinations(jobs, 2):
        if config == other_config:
            raise ValueError(f"{title} and {other_title} are the same job: leave one of them out")
        for name, path in path_by_key.items():
            if other_path_by_key.get(name) == path:
                key = title.partition("=")[0]
                raise ValueError(
                    f"{name}={path}: {title} would write there, and {other_title} replace it: give each its own, such "
                    f"as '{name}=NAME-${{{key}}}'"
                )


def _paths_written(config: Keys) -> dict[str, str]:
    """{key: file or folder} that a job replaces."""
    return {name: value for name, value, entry in leaves(config) if entry.metadata.get("written") and value}


def _pickle_for_workers() -> None:
    """Make configurations find this repository when they are unpickled, in the process of a launcher such as submitit.

    Nothing that is unpickled before them refers to it. So each is unpickled by an expression that puts the repository
    on Python's path, imports what a command imports first, and returns what `start_worker` does.
    """
    code = (  # a tuple of values, of which the last counts
        f"'engine' in __import__('sys').modules or __import__('sys').path.insert(0, {str(CONFIGS.parent)!r}), "
        f"__import__('engine.process.start'), "
        f"__import__('{__name__}', fromlist=['start_worker']).start_worker({', '.join(map(repr, plugins.words()))})"
    )
    copyreg.pickle(DictConfig, lambda config: (eval, (f"({code})[-1]",), config.__getstate__()))


def start_worker(*words: str) -> DictConfig:
    """Load the plugins of these words, in a launcher's worker; return an empty configuration, to be filled."""
    plugins.load(words, CHOICES)
    _pickle_for_workers()  # for a job that is preempted and requeued
    return DictConfig.__new__(DictConfig)
