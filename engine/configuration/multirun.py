"""Sweeps, with -m: Hydra's sweeper makes jobs of a command's words, and Hydra's launcher starts them."""

import copyreg
import itertools
import json
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.console import Console

from engine.configuration.texts import ERRORS_OF_WORDS
from engine.process import distributed, plugins
from engine.process.console import log_to, make_console
from engine.process.jobs import ENDED_BEFORE, has_ended, print_summary, run_job
from engine.schema.keys import CHOICES, CONFIGS, Keys, deciding, leaves, named_after, override

Check = Callable[..., Keys]  # of the words of a job
OF_RUN_DIRECTORIES = ("run_dir", "resume")  # keys that a sweep sets for each job


@dataclass(frozen=True)
class Jobs:
    """What Hydra's launchers call for each job, here or in a worker that has unpickled it."""

    schema: type[Any]  # of Keys
    options: Sequence[str]  # of Hydra, for every job
    swept: Sequence[str] = ()  # keys that differ between jobs
    count: int = 0
    has_digests: bool = False  # without them, two jobs' run directories would have the same name
    first_trial: int | None = None  # of a sweeper that goes on choosing values: its jobs are trials, with numbers
    program: str = field(default_factory=lambda: sys.argv[0])
    start: Sequence[str] = field(default_factory=lambda: sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])])

    def __call__(self, values: DictConfig) -> float | str | None:
        """Run the job that a launcher has chosen, in a process of its own, unless it has ended.

        Returns a trial's score, None of ranks that may be done before rank 0 has written it. Returns of other jobs what
        `print_summary` takes: an error of one would hide the others.

        ValueError: a trial has failed. Preempted: see `run_job`.
        """
        settings = HydraConfig.get()
        differing = self.differing(settings.overrides.task)
        title = " ".join(differing)
        if self.first_trial is None:
            name = named_after(differing, self.has_digests)
            place = f"job {settings.job.num + 1} of {self.count}"
        else:
            name = str(self.first_trial + settings.job.num)
            place = f"trial {name}"
        run_dir = Path(settings.sweep.dir, name)
        words = [*self.options, *settings.overrides.task]
        words += [override("run_dir", run_dir), "resume=auto"] if self.has_run_dir else []
        console = make_console()
        if self.first_trial is None and has_ended(run_dir, [self.program, *words], distributed.world_size()):
            console.print(f"already finished: {title}", soft_wrap=True)
            return ENDED_BEFORE
        failure = run_job(place, title, [sys.executable, *self.start, *words], console)
        if self.first_trial is None:
            return failure
        if failure:
            raise ValueError(f"{place}: {failure}")
        results = run_dir / "results.json"
        return json.loads(results.read_text("utf-8"))[self.schema.score] if results.is_file() else None

    @property
    def has_run_dir(self) -> bool:
        """Whether each job writes a run directory of its own."""
        return "run_dir" in self.schema.__dataclass_fields__

    def differing(self, words: Sequence[str]) -> list[str]:
        """The overrides that differ between jobs."""
        return [word for word in words if word.partition("=")[0] in self.swept]


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
        Preempted: see `run_job`.
    """
    if distributed.launcher():
        raise ValueError(
            "-m under torchrun: a sweep starts its jobs itself, each as one process. For several devices use the "
            "shell: for s in 0 1; do torchrun … seed=$s run_dir=FOLDER/seed$s resume=auto; done"
        )
    console = make_console()
    log_to(console, None)
    overrides = _parsed(program, words)
    try:
        settings = program.compose_config(primary, [*words], RunMode.MULTIRUN).hydra
    except ERRORS_OF_WORDS:
        check(*(words_of(parsed)[0] for parsed in overrides.values()))  # says what is wrong with ours
        raise
    params = [f"{key}={value}" for key, value in (settings.sweeper.get("params") or {}).items()]
    overrides = _parsed(program, params) | overrides
    jobs = replace(jobs, swept=[key for key, parsed in overrides.items() if parsed.is_sweep_override()])
    is_basic = settings.sweeper["_target_"].endswith(BasicSweeper.__name__)  # else it chooses values as it goes
    words_by_job = _words_by_job(overrides) if is_basic else [[words_of(parsed)[0] for parsed in overrides.values()]]
    differing_by_job = [jobs.differing(job_words) for job_words in words_by_job]
    configs = [check(*job_words) for job_words in words_by_job]
    check_different(differing_by_job, configs)
    _refuse_minimising(settings, jobs.schema)
    is_named = any(word.startswith("hydra.sweep.dir=") for word in words)
    folder = Path(settings.sweep.dir) if is_named else _default_folder(jobs, overrides, configs[0])
    if is_basic:
        names = {named_after(differing) for differing in differing_by_job}
        jobs = replace(jobs, count=len(configs), has_digests=len(names) < len(configs))
    else:
        jobs = replace(jobs, first_trial=_next_trial(folder))
    remaining_words = [word for word in words if word.partition("=")[0] not in OF_RUN_DIRECTORIES]
    jobs_here = settings.launcher.get("n_jobs") or 1  # a setting of joblib's
    of_jobs = [override("hydra.sweep.dir", folder), override(f"+hydra.job.env_set.{distributed.JOBS_HERE}", jobs_here)]
    _pickle_for_workers()
    try:
        batches = program.multirun(primary, jobs, [*remaining_words, *of_jobs, "hydra.mode=MULTIRUN"])
        failures = print_summary([job.return_value for batch in batches for job in batch], console) if is_basic else []
    finally:
        copyreg.dispatch_table.pop(DictConfig)
        if not jobs.has_run_dir:
            _remove_sweep_files(folder)
        elif folder.is_dir():
            _print_comparing_commands(folder, console)
    if failures:
        raise ValueError(failures[0])


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
        os.removedirs(folder)


def _parsed(program: Hydra, words: Sequence[str]) -> dict[str, Override]:
    """{key: override} of a sweep's words, without Hydra's. ValueError: one has no values, or may not have several."""
    for word, next_word in itertools.pairwise(words):
        if "=" in word and "=" not in next_word:
            raise ValueError(
                f"{next_word}: a sweep's values have commas between them, without spaces: {word},{next_word}"
            )
    parsed = OverridesParser.create(program.config_loader).parse_overrides([*words])
    overrides = {override.get_key_element(): override for override in parsed if not override.is_hydra_override()}
    for key, swept in overrides.items():
        if not words_of(swept):
            raise ValueError(f"{swept.input_line}: there are no such values")
        if key in OF_RUN_DIRECTORIES and swept.is_sweep_override():
            raise ValueError(f"{swept.input_line}: a sweep names its jobs' folders itself; give one folder for all")
    return overrides


def words_of(parsed: Override) -> list[str]:
    """An override as words, one for each of its values; of an interval its start."""
    if parsed.is_interval_sweep():
        value: Any = parsed.value()
        return [f"{parsed.get_key_element()}={value.start}"]
    (jobs,) = BasicSweeper.split_arguments([parsed], None)
    return [word for (word,) in jobs]


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


def check_different(differing_by_job: Sequence[Sequence[str]], configs: Sequence[Keys]) -> None:
    """ValueError if jobs are equal, or would write the same file or folder: only the last one's would be left."""
    jobs = zip(map(" ".join, differing_by_job), configs, strict=True)
    for (title, config), (other_title, other_config) in itertools.combinations(jobs, 2):
        if config == other_config:
            raise ValueError(f"{title} and {other_title} are the same job: leave one of them out")
        for name, path in sorted(_paths_written(config) & _paths_written(other_config)):
            key = title.partition("=")[0]
            raise ValueError(
                f"{name}={path}: {title} would write there, and {other_title} replace it: give each its own, such as "
                f"'{name}=NAME-${{{key}}}'"
            )


def _paths_written(config: Keys) -> set[tuple[str, str]]:
    """(key, file or folder) that a job replaces."""
    return {(name, value) for name, value, entry in leaves(config) if entry.metadata.get("written") and value}


def _pickle_for_workers() -> None:
    """Make configurations find this repository when they are unpickled, in the process of a launcher such as submitit.

    Nothing that is unpickled before them refers to it. So each is unpickled by an expression that puts the repository
    on Python's path, and returns what `start_worker` does.
    """
    code = (  # a tuple of values, of which the last counts
        f"'engine' in __import__('sys').modules or __import__('sys').path.insert(0, {str(CONFIGS.parent)!r}), "
        f"__import__('{__name__}', fromlist=['start_worker']).start_worker({', '.join(map(repr, plugins.words()))})"
    )
    copyreg.pickle(DictConfig, lambda config: (eval, (f"({code})[-1]",), config.__getstate__()))


def start_worker(*words: str) -> DictConfig:
    """Load the plugins of these words, in a launcher's worker; return an empty configuration, to be filled."""
    plugins.load(words, CHOICES)
    _pickle_for_workers()  # for a job that is preempted and requeued
    return DictConfig.__new__(DictConfig)
