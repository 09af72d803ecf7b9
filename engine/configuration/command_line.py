"""Command-line entry points: from key=value to a typed configuration."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import wraps

import hydra
from hydra._internal.utils import get_args_parser
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from torch.distributed.elastic.multiprocessing.errors import record

from engine.configuration import sweep
from engine.configuration.choices import CONFIGS, groups_in
from engine.configuration.config import register, typed
from engine.configuration.help import help_text
from engine.configuration.messages import explained, refuse_options
from engine.configuration.texts import as_typed
from engine.process.distributed import launched, world_size
from engine.process.stopping import errors_for_users
from engine.schema.keys import Keys

# ${per_process:2} in a configuration: twice the number of processes.
OmegaConf.register_new_resolver("per_process", lambda count: count * world_size())


def declare(name: str, schema: type) -> None:
    """Make a command known to Hydra as command/NAME.

    Hydra writes no logs and makes no folders (see engine/checkpoint/run_directory.py).
    """
    register(name, schema)
    defaults = f"/{name}" if groups_in(name) else f"/schema/{name}"
    node = {
        "defaults": [defaults, "_self_", *({f"override /hydra/{log}_logging": "none"} for log in ("job", "hydra"))],
        "hydra": {"run": {"dir": "."}, "output_subdir": None},
    }
    ConfigStore.instance().store(group="command", name=name, node=node, package="_global_")


def configured(
    name: str, schema: type[Keys], about: str | None = None
) -> Callable[[Callable[[DictConfig], object]], Callable[[], None]]:
    """Decorator: makes `main(values)` a command that takes the keys of `schema` as key=value.

    configs/NAME.yaml holds its defaults and groups; a command without groups needs no file. --help starts with
    `about`, by default the docstring of main's module. Wrong arguments are answered in a line (`messages`), other
    options of Hydra than -m, such as --cfg job, by Hydra itself.
    """

    def decorated(main: Callable[[DictConfig], object]) -> Callable[[], None]:
        declare(name, schema)

        @hydra.main(version_base="1.3", config_path=str(CONFIGS), config_name=f"command/{name}")
        @wraps(main)
        def run(values: DictConfig) -> None:
            with errors_for_users():
                (record(main) if launched() else main)(values)  # `record` leaves the error for torchrun to print

        def check(overrides: list[str]) -> Keys:
            with explained(name, schema, overrides):
                return typed(composed(name, *overrides), schema)

        @wraps(run)
        def checked() -> None:
            sweeps = not {*sweep.FLAGS}.isdisjoint(sys.argv)
            sys.argv[1:] = arguments = [as_typed(word, schema, sweeps) for word in sys.argv[1:]]
            given, unknown = get_args_parser().parse_known_intermixed_args(arguments)
            with errors_for_users():
                refuse_options(unknown, schema)
                if given.help:
                    text = about or sys.modules[main.__module__].__doc__ or name
                    with explained(name, schema, given.overrides):
                        print(help_text(text, name, schema, composed(name, *given.overrides)))
                    return
                if sweeps:
                    has_run_dir = any(entry.name == "run_dir" for entry in fields(schema))
                    sweep.run(arguments, check, has_run_dir)
                    return
                of_hydra = {**vars(given), "overrides": None}  # values known only in the run, too
                if not any(of_hydra.values()) and "${hydra:" not in "".join(arguments):
                    check(given.overrides)
            run()

        return checked

    return decorated


def composed(name: str, *overrides: str) -> DictConfig:
    """Compose the configuration of a declared command with `overrides`, also while another command runs."""
    schema = OmegaConf.get_type(ConfigStore.instance().load(f"schema/{name}.yaml").node)
    assert schema is not None, name
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return hydra.compose(f"command/{name}", [as_typed(word, schema) for word in overrides])
    finally:
        GlobalHydra.instance().hydra = running


def command_line() -> str:
    """The command that started this process, quoted for the shell."""
    return shlex.join(["python", *sys.argv])
