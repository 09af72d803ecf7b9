"""Running a command for its user: configuration, --help, exit statuses and error messages."""

import difflib
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import cache, partial, wraps
from pathlib import Path, PurePosixPath

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from engine.configuration import sweep
from engine.configuration.config import register, typed
from engine.console import logger, make_printing_safe
from engine.distributed import launched
from engine.memory import is_out_of_memory
from engine.schema.keys import Keys, groups_of, override
from engine.stopping import EXIT_CODE, Preempted

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
# ${per_process:2} in a configuration: twice the number of processes.
OmegaConf.register_new_resolver("per_process", lambda count: count * int(os.environ.get("WORLD_SIZE", "1")))


def declare(name: str, schema: type, about: str) -> None:
    """Make a command known to Hydra as command/NAME.

    Hydra writes no logs and makes no folders (see engine/checkpoint/run_directory.py); --help lists the command's
    groups alone.
    """
    register(name, schema)
    defaults, groups = f"/schema/{name}", []
    if (file := CONFIGS / f"{name}.yaml").is_file():
        defaults = f"/{name}"
        entries = OmegaConf.load(file).defaults
        groups = sorted(str(group) for entry in entries if isinstance(entry, DictConfig) for group in entry)
    lines = [f"  {group}: {', '.join(names)}" for group in groups if (names := choices(group, schema))]
    keys = "Keys (key=value; ??? must be given; for their meaning see engine/schema):"
    listed = ["Groups (group=choice):", *lines, ""] if lines else []
    node = {
        "defaults": [defaults, "_self_", *({f"override /hydra/{log}_logging": "none"} for log in ("job", "hydra"))],
        "hydra": {
            "run": {"dir": "."},
            "output_subdir": None,
            "help": {"template": "\n".join([about.strip(), "", *listed, keys, "$CONFIG"])},
        },
    }
    ConfigStore.instance().store(group="command", name=name, node=node, package="_global_")


def configured(
    name: str, schema: type, about: str | None = None
) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Decorator: makes `main(values)` a command that takes the keys of `schema` as key=value.

    configs/NAME.yaml holds its defaults and groups; a command without groups needs no file. --help prints `about`,
    by default the docstring of main's module. Errors: see `errors_for_users`.
    """

    def decorated(main: Callable[[DictConfig], object]) -> Callable[[], None]:
        declare(name, schema, about or sys.modules[main.__module__].__doc__ or name)

        @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=f"command/{name}")
        @wraps(main)
        def run(values: DictConfig) -> None:
            with errors_for_users():
                (record(main) if launched() else main)(values)  # torchrun prints the error that `record` leaves it

        @wraps(run)
        def checked() -> None:
            sys.argv[1:] = map(_quoted_path, sys.argv[1:])
            with errors_for_users():  # Hydra's own message would not say what the command takes
                if sweep.asked_for(sys.argv[1:]):
                    has_run_dir = any(entry.name == "run_dir" for entry in fields(schema))
                    sweep.run(sys.argv[1:], partial(_checked, name, schema), has_run_dir)
                    return
                _check_choices(sys.argv[1:], schema)
            run()

        return checked

    return decorated


def composed(name: str, *overrides: str) -> DictConfig:
    """Compose the configuration of a declared command with `overrides`, also while another command runs."""
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(f"command/{name}", list(overrides))
    finally:
        GlobalHydra.instance().hydra = running


def _checked(name: str, schema: type, overrides: list[str]) -> Keys:
    """The configuration that a declared command gets from `overrides`. ValueError: they are wrong."""
    _check_choices(overrides, schema)
    try:
        return typed(composed(name, *overrides), schema)
    except (HydraException, OmegaConfBaseException) as error:
        raise ValueError(f"{' '.join(overrides)}: {str(error.__cause__ or error).splitlines()[0]}") from error


def _quoted_path(argument: str) -> str:
    """key=PATH as Hydra takes it, if PATH exists and has a = or a comma, as run directories of sweeps have."""
    key, _, value = argument.partition("=")
    return override(key, value) if {"=", ","} & set(value) and os.path.exists(value) else argument


def command_line() -> str:
    """The command that started this process, quoted for the shell."""
    return shlex.join(["python", *sys.argv])


def choices(group: str, schema: type, configs: Path = CONFIGS) -> list[str]:
    """The choices of a group that fit the schema: their files use alternatives of its groups only."""
    folder, groups = configs / group, groups_of(schema)
    names = sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))
    return [
        name
        for name in names
        if all(used in groups[own] for own, used in alternatives_of(group, name, configs) if own in groups)
    ]


def alternatives_of(group: str, choice: str, configs: Path = CONFIGS) -> Iterator[tuple[str, str]]:
    """(group, alternative) of every schema that a choice uses, directly or by other choices that can be found."""
    file = configs / group / f"{choice}.yaml"
    for entry in _defaults(file) if file.is_file() else ():
        if isinstance(entry, dict):  # of an experiment, such as {"override /data": "camvid"}
            for other, name in entry.items():
                yield from alternatives_of(str(other).split("/")[-1], str(name), configs)
        elif entry.startswith("/schema/"):
            _, _, own, name = entry.split("/")
            yield own, name
        elif entry.startswith("/"):  # of another folder, such as "/experiment/revnet/cifar10_revnet38"
            _, other, name = entry.split("/", 2)
            yield from alternatives_of(other, name, configs)
        else:  # relative to the choice's folder
            yield from alternatives_of(group, (PurePosixPath(choice).parent / entry).as_posix(), configs)


@cache
def _defaults(file: Path) -> list:
    """The defaults list of a choice's file. Many choices share others, so each file is read once."""
    content = OmegaConf.to_container(OmegaConf.load(file))
    return content.get("defaults", []) if isinstance(content, dict) else []


def _check_choices(arguments: list[str], schema: type) -> None:
    """Raise ValueError for a choice that does not exist, or only for another command."""
    if any(argument.startswith(("--config-dir", "-cd", "hydra.searchpath")) for argument in arguments):
        return  # choices may lie elsewhere
    groups = groups_of(schema)
    for group, choice in re.findall(r"^\+?(\w+)=([\w/.-]+)$", "\n".join(arguments), re.MULTILINE):
        if not groups or group not in (*groups, "experiment", "debug") or choice == "null":
            continue
        fitting = choices(group, schema)
        if (CONFIGS / group / f"{choice}.yaml").is_file() and choice not in fitting:
            raise ValueError(f"{group}={choice} is for another command: expected one of {', '.join(fitting)}")
        if choice not in fitting:
            raise no_such_choice(group, choice, fitting)


def no_such_choice(group: str, choice: str, known: Iterable[str]) -> ValueError:
    """The error for a choice that does not exist, which names the nearest ones."""
    nearest = difflib.get_close_matches(choice, known, n=5, cutoff=0)
    return ValueError(f"{group}={choice}: there is no such {group}; the nearest are {', '.join(nearest)}")


def _ignore_interrupts() -> None:
    """While Python exits, another Ctrl-C would only print a traceback."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def errors_for_users() -> Iterator[None]:
    """Wraps a command: errors that its user can fix become a message and exit status 1; others keep their traceback.

    HYDRA_FULL_ERROR=1 keeps all tracebacks.
    """
    make_printing_safe()
    try:
        yield
    except KeyboardInterrupt:
        _ignore_interrupts()
        sys.exit("interrupted")
    except Preempted as stopped:
        _ignore_interrupts()
        logger.info(f"{stopped}; exit status {EXIT_CODE}: start it again with resume=auto")
        sys.exit(EXIT_CODE)
    except Exception as error:  # OpenCV's and PyTorch's, for lack of memory, are of any type
        for_users = isinstance(error, (ValueError, FloatingPointError, MemoryError, OSError)) and bool(str(error))
        out_of_memory = not for_users and is_out_of_memory(error)
        if not out_of_memory and (not for_users or os.environ.get("HYDRA_FULL_ERROR") == "1"):
            raise
        logger.debug("", exc_info=True)  # the traceback goes to log.txt
        if out_of_memory:
            what = next(iter(str(error).strip().splitlines()), "the system gives no more")
            sys.exit(
                f"error: out of memory outside of steps and images: {what}. The network and its optimiser alone need "
                f"more than is free: stop other processes, raise ulimit -v if it is set, or use a smaller body"
            )
        # DataLoader workers put the original message at the end of a traceback.
        message = re.split(rf"\n(?:\w+\.)*{type(error).__name__}: ", str(error))[-1]
        sys.exit(f"error: {message.strip()}")
