"""Sweeps: with -m, a command runs once for every combination of its keys' values."""

import itertools
import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ValueType
from hydra.errors import HydraException

from engine.configuration.texts import as_typed
from engine.process import plugins
from engine.process.console import log_to, make_console
from engine.process.distributed import launched
from engine.process.jobs import has_ended, run_jobs
from engine.schema.keys import Keys, deciding, leaves, named_after, override

FLAGS = ("-m", "--multirun")
OF_RUN_DIRECTORIES = ("run_dir", "resume")  # keys that the sweep sets for each job


class Job(NamedTuple):
    title: str  # its own overrides
    arguments: list[str]
    run_dir: Path | None  # None: the command writes none


def run(arguments: list[str], schema: type[Keys], check: Callable[[list[str]], Keys]) -> None:
    """Run a sweep's jobs one after the other, each in its own process.

    A job's run directory is named after its own overrides. It lies in the folder `run_dir`, by default
    multirun/COMMAND,OVERRIDES, with the overrides that all jobs share. If the same sweep is started again, it skips
    jobs that have ended and continues the others.

    Args:
        arguments: of the command, without -m.
        schema: of the command. If it has the key `run_dir`, each job writes a run directory.
        check: returns the configuration that a job's arguments give, or raises ValueError.

    Raises:
        ValueError: no key has several values, or a job's arguments are wrong; no job has run.
        Preempted: see `run_jobs`.
        SystemExit: a job has failed.
    """
    if launched():
        raise ValueError(
            "-m under torchrun: a sweep starts its jobs itself, each as one process. For several devices use the "
            "shell: for s in 0 1; do torchrun … seed=$s run_dir=FOLDER/seed$s resume=auto; done"
        )
    console = make_console()
    log_to(console, None)
    folder, jobs = jobs_of(arguments, schema, check)
    waiting = []
    for job in jobs:
        if job.run_dir is not None and has_ended(job.run_dir, [sys.argv[0], *job.arguments]):
            console.print(f"already finished: {job.title}", soft_wrap=True)
        else:
            waiting.append(job)
    start = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv[1:])]]
    commands = {job.title: [*start, *job.arguments] for job in waiting}
    failed = run_jobs(commands, console, ended_before=len(jobs) - len(waiting))
    if folder is not None and folder.is_dir():  # otherwise no job has begun
        keys = shlex.join([*plugins.words(), override("runs", folder), override("out", folder / "comparison")])
        console.print(f"compare   python -m scripts.compare_runs {keys}", soft_wrap=True)
        console.print(f"curves    tensorboard --logdir {shlex.quote(str(folder))}", soft_wrap=True)
    if failed:
        sys.exit(1)


def jobs_of(
    arguments: list[str], schema: type[Keys], check: Callable[[list[str]], Keys]
) -> tuple[Path | None, list[Job]]:
    """The sweep's folder and its jobs; the last key's values change fastest. Texts in jobs' arguments are quoted."""
    has_run_dir = any(entry.name == "run_dir" for entry in fields(schema))
    if any(word.startswith(("-", "hydra.", "hydra/")) for word in arguments):
        check(arguments)  # says that these are no keys
    arguments = [as_typed(word, schema, sweeps=True) for word in arguments]
    shared, values, given_folder = _parsed(arguments, has_run_dir)
    owns = [
        [f"{key}={value}" for key, value in zip(values, chosen, strict=True)]
        for chosen in itertools.product(*values.values())
    ]
    configs = [check([*shared, *own, *given_folder]) for own in owns]
    for (own, config), (other, other_config) in itertools.combinations(zip(owns, configs, strict=True), 2):
        if config == other_config:
            raise ValueError(f"{' '.join(own)} and {' '.join(other)} are the same job: leave one of them out")
    _check_places(owns, configs)
    if not has_run_dir:
        return None, [Job(" ".join(own), [*shared, *own], None) for own in owns]
    default = Path("multirun", named_after([Path(sys.argv[0]).stem, *deciding(shared, configs[0])]))
    folder = Path(getattr(configs[0], "run_dir", None) or default)
    names, jobs = [named_after(own) for own in owns], []
    for own, name in zip(owns, names, strict=True):
        run_dir = folder / named_after(own, digest=names.count(name) > 1)
        jobs.append(Job(" ".join(own), [*shared, *own, override("run_dir", run_dir), "resume=auto"], run_dir))
    return folder, jobs


def _check_places(owns: list[list[str]], configs: list[Keys]) -> None:
    """ValueError if two jobs would write the same file or folder: only what the last one writes would be left."""
    places: dict[tuple[str, str], list[str]] = {}
    for own, config in zip(owns, configs, strict=True):
        for name, value, entry in leaves(config):
            if entry.metadata.get("written") and value and (first := places.setdefault((name, value), own)) is not own:
                raise ValueError(
                    f"{name}={value}: {' '.join(first)} would write there, and {' '.join(own)} replace it: give each "
                    f"its own, such as '{name}=NAME-${{{own[0].partition('=')[0]}}}'"
                )


def _parsed(arguments: list[str], has_run_dir: bool) -> tuple[list[str], dict[str, list[str]], list[str]]:
    """The overrides that all jobs share, the values of the other keys, and the override of `run_dir`, if any."""
    for before, word in itertools.pairwise(arguments):
        if "=" in before and "=" not in word:
            raise ValueError(f"{word}: a sweep's values have commas between them, without spaces: {before},{word}")
    try:
        given = {each.get_key_element(): each for each in OverridesParser.create().parse_overrides(arguments)}
    except HydraException as error:
        raise ValueError(str(error).splitlines()[0]) from error
    swept = {key: each for key, each in given.items() if each.is_sweep_override()}
    for each in swept.values():
        if each.value_type in (ValueType.GLOB_CHOICE_SWEEP, ValueType.INTERVAL_SWEEP):
            raise ValueError(f"{each.input_line}: expected values with commas between them, as in seed=0,1,2")
    if not swept:
        raise ValueError("-m: no key has several values; give some without brackets, as in seed=0,1,2, or leave -m out")
    values = {key: [*each.sweep_string_iterator()] for key, each in swept.items()}
    own = given.keys() & {*OF_RUN_DIRECTORIES} if has_run_dir else set()
    for key in own & values.keys():
        raise ValueError(f"{given[key].input_line}: a sweep names its jobs' folders itself; give one folder for all")
    shared = [each.input_line or "" for key, each in given.items() if key not in {*values, *own}]
    return shared, values, [given["run_dir"].input_line or ""] if "run_dir" in own else []
