"""Command-line entry points: from key=value to a typed configuration."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from engine.configuration import plugins, sweep
from engine.configuration.choices import CONFIGS, groups_in, offer, searched
from engine.configuration.config import register, typed
from engine.configuration.help import help_text
from engine.configuration.messages import explained, refuse_options
from engine.configuration.texts import as_typed
from engine.process.distributed import launched, world_size
from engine.process.stopping import errors_for_users
from engine.schema.keys import Keys

HELP = ("--help", "-h")
SHOW = ("--cfg", "-c", "--cfg=job")  # Hydra's option `--cfg job`
# ${per_process:2} in a configuration: twice the number of processes.
OmegaConf.register_new_resolver("per_process", lambda count: count * world_size())


def configured(
    name: str, schema: type[Keys], about: str | None = None
) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Decorator: makes `main(values)` a command that takes the keys of `schema` as key=value.

    configs/NAME.yaml holds its defaults and groups; a command without groups needs no file. --help starts with
    `about`, by default the docstring of main's module; `--cfg job` prints the configuration, which may lack values; -m
    runs a sweep. Wrong arguments are answered in a line.
    """
    register(name, schema)

    def checked(words: list[str]) -> tuple[DictConfig, Keys]:
        with explained(name, schema, words):
            values = composed(name, *words)
            return values, typed(values, schema)

    def decorated(main: Callable[[DictConfig], object]) -> Callable[[], None]:
        """Make `main` a command, which reads its arguments from `sys.argv`."""

        @wraps(main)
        def run() -> None:
            """Print the help or the configuration, run a sweep, or call `main`."""
            sweeps = not {*sweep.FLAGS}.isdisjoint(sys.argv)
            sys.argv[1:] = [as_typed(word, schema, sweeps) for word in sys.argv[1:]]
            words = [word for word in sys.argv[1:] if word not in (*HELP, *sweep.FLAGS, *SHOW)]
            shows = not {*SHOW}.isdisjoint(sys.argv)
            if shows:
                words = [word for word in words if word != "job"]
            with errors_for_users("start it again" if sweeps else _again(words, schema)):
                plugins.load(words)
                refuse_options(name, schema, words)
                if not {*HELP}.isdisjoint(sys.argv):
                    text = about or sys.modules[main.__module__].__doc__ or name
                    with explained(name, schema, words):
                        print(help_text(text, name, schema, composed(name, *words)))
                elif shows:
                    with explained(name, schema, words):
                        print(OmegaConf.to_yaml(composed(name, *words)))
                elif sweeps:
                    has_run_dir = any(entry.name == "run_dir" for entry in fields(schema))
                    sweep.run(words, lambda job: checked(job)[1], has_run_dir)
                else:
                    values, _ = checked(words)
                    (record(main) if launched() else main)(values)  # `record` leaves the error for torchrun to print

        return run

    return decorated


def _again(words: list[str], schema: type[Keys]) -> str:
    """How to go on with a command that was stopped."""
    if all(entry.name != "resume" for entry in fields(schema)):
        return "start it again"
    has_folder = any(word.startswith("run_dir=") for word in words)
    return "start it again with resume=auto" + ("" if has_folder else " and run_dir=FOLDER, the one that it has named")


def composed(name: str, *overrides: str) -> DictConfig:
    """Compose the configuration of a declared command with `overrides`, also inside a program of Hydra's.

    Hydra makes no folders and writes no logs.
    """
    schema = OmegaConf.get_type(ConfigStore.instance().load(f"schema/{name}.yaml").node)
    assert schema is not None, name
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    offer()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = name if groups_in(name) else f"schema/{name}"
            return hydra.compose(config, [*searched(), *(as_typed(word, schema) for word in overrides)])
    finally:
        GlobalHydra.instance().hydra = running


def command_line() -> str:
    """The command that started this process, quoted for the shell."""
    return shlex.join(["python", *sys.argv])
