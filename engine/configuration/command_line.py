"""Command-line entry points: from key=value to a checked dataclass."""

import re
import shlex
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import wraps
from typing import Any

import hydra
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from engine.configuration import sweep
from engine.configuration.choices import CONFIGS, folders, store_choices
from engine.configuration.config import Schema, register, typed
from engine.configuration.help import help_text
from engine.configuration.texts import value_of
from engine.process import plugins
from engine.process.distributed import launched, world_size
from engine.process.stopping import errors_for_users
from engine.schema.keys import CHOICES, Keys, declared_in, groups_of, quoted

HELP = ("--help", "-h")
SHOW = ("--cfg", "-c", "--cfg=job")  # Hydra's option `--cfg job`
CHOICE = re.compile(r"(\w+)(?:=(?!\{)|$)")  # norm=std; norm={sync: true} sets a key
# ${per_process:2} in a configuration: twice the number of processes.
OmegaConf.register_new_resolver("per_process", lambda count: count * world_size())


def configured(
    name: str, schema: type[Schema], about: str | None = None
) -> Callable[[Callable[[Schema], object]], Callable[[], None]]:
    """Decorator: makes `main(config)` a command that takes the keys of `schema` as key=value.

    configs/NAME.yaml holds its defaults and groups; a command without groups needs no file. --help starts with
    `about`, by default the docstring of main's module; `--cfg job` prints the configuration, which may lack values; -m
    runs a sweep. Wrong arguments are answered in a line.
    """
    register(name, schema)

    def decorated(main: Callable[[Schema], object]) -> Callable[[], None]:
        """Make `main` a command, which reads its arguments from `sys.argv`."""
        started = record(main) if launched() else main  # `record` leaves the error for torchrun to print

        @wraps(main)
        def run() -> None:
            """Print the help or the configuration, run a sweep, or call `main`."""
            helps, shows, sweeps = (not {*flags}.isdisjoint(sys.argv) for flags in (HELP, SHOW, sweep.FLAGS))
            flags = {*HELP, *SHOW, *sweep.FLAGS, *["job"] * shows}
            words = [word for word in sys.argv[1:] if word not in flags]
            with errors_for_users("start it again" if sweeps else _again(words, schema)):
                plugins.load(words, CHOICES)
                if helps:
                    text = about or sys.modules[main.__module__].__doc__ or name
                    print(help_text(text, name, schema, composed(name, *words)))
                elif shows:
                    print(OmegaConf.to_yaml(composed(name, *words)))
                elif sweeps:
                    sweep.run(words, schema, lambda job: checked(name, *job))
                else:
                    config = checked(name, *words)
                    try:
                        started(config)
                    except ValueError as error:  # a file that does not exist, such as init.weights=last
                        named = [word for word in words if str(error).startswith(f"{word.partition('=')[0]}=")]
                        if not named or named[0].partition("=")[0] in groups_of(schema):
                            raise
                        raise _for_users(name, named, error) from error
                    except SystemExit as ended:
                        *_, (last, line) = traceback.walk_tb(ended.__traceback__)
                        if last.f_code is main.__code__:
                            raise
                        file = last.f_code.co_filename  # such as a plugin's, which would end a run without a word
                        raise RuntimeError(f"{file}, line {line}, ends the program: {ended!r}") from ended

        return run

    return decorated


def _again(words: list[str], schema: type[Keys]) -> str:
    """How to go on with a command that was stopped."""
    if all(entry.name != "resume" for entry in fields(schema)):
        return "start it again"
    has_folder = any(word.startswith("run_dir=") for word in words)
    return "start it again with resume=auto" + ("" if has_folder else " and run_dir=FOLDER, the one that it has named")


def checked(name: str, *words: str) -> Any:
    """The checked keys of a declared command with these words.

    ValueError: a word is wrong, a key has no value, or the keys break a rule. The message names the fix.
    """
    values = composed(name, *words)
    try:
        return typed(values, schema_of(name))
    except (OmegaConfBaseException, ValueError) as error:
        raise _for_users(name, words, error) from error


def composed(name: str, *words: str) -> DictConfig:
    """The configuration of a declared command with these words. It may lack values, or break rules between keys.

    Hydra composes the choices of groups; each other key=value is read by its declared type. ValueError: see `checked`.
    """
    schema, word = schema_of(name), ""
    keys = {key: declared for key, declared in declared_in(schema).items() if "is_group" not in declared.metadata}
    choices = [each for each in words if (found := CHOICE.match(each)) and found[1] not in keys]
    try:
        config = _of_choices(name, choices)
        for word in (each for each in words if each not in choices):
            key, equals, text = word.lstrip("+").partition("=")
            if not equals:
                raise HydraException(f"{word}: expected key=value")
            above = keys.get(key.rpartition(".")[0])
            is_free = above is not None and above.kind is Any  # a mapping with any names, such as `roots`
            OmegaConf.update(config, key, value_of(text, keys.get(key)), merge=True, force_add=is_free)
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise _for_users(name, words, error, word) from error
    return config


def schema_of(name: str) -> type[Keys]:
    """The schema of a declared command."""
    schema = OmegaConf.get_type(ConfigStore.instance().load(f"schema/{name}.yaml").node)
    assert schema is not None, name
    return schema


def _of_choices(name: str, choices: list[str]) -> DictConfig:
    """Compose the choices of a command, also inside a program of Hydra's. Hydra makes no folders and writes no logs."""
    store_choices(schema_of(name))
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    _, *own = (quoted(f"file://{folder}") for folder in folders())
    searched = [f"hydra.searchpath=[{','.join(own)}]"] if own else []
    try:
        with hydra.initialize_config_dir(str(CONFIGS), version_base="1.3"):
            has_file = (CONFIGS / f"{name}.yaml").is_file()
            return hydra.compose(name if has_file else f"schema/{name}", [*searched, *choices])
    finally:
        GlobalHydra.instance().hydra = running


def _for_users(name: str, words: Sequence[str], error: Exception, word: str = "") -> ValueError:
    """The error of wrong words; `word` is the one that sets a key wrongly, if it is known."""
    from engine.configuration.messages import Messages  # a right command needs no words of other programs

    return ValueError(Messages(name, schema_of(name)).about(words, error, word))


def command_line() -> str:
    """The command that started this process, quoted for the shell."""
    return shlex.join(["python", *sys.argv])
