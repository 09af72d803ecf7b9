"""Commands: Hydra composes what their words choose, and each starts with a checked dataclass."""

import shlex
import sys
import traceback
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from functools import partial, wraps
from inspect import unwrap
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.distributed.elastic.multiprocessing.errors import record

from engine.configuration.choices import store_choices
from engine.configuration.config import Schema, typed
from engine.configuration.help import help_text
from engine.configuration.multirun import Jobs, sweep
from engine.configuration.texts import as_typed
from engine.process import plugins
from engine.process.completion import write_cache
from engine.process.distributed import launched, world_size
from engine.process.stopping import errors_for_users
from engine.schema.keys import CHOICES, CONFIGS, Keys, groups_of

SCHEMAS: dict[str, type[Keys]] = {}  # of declared commands
MULTIRUN = "hydra.mode=MULTIRUN"  # what -m means
PRIMARY: dict[str, str] = {}  # the configuration of each, which --config-name may change
# ${per_process:2} in a configuration: twice the number of processes.
OmegaConf.register_new_resolver("per_process", lambda count: count * world_size())


def register(name: str, schema: type[Keys]) -> None:
    """Make the keys of a command known to Hydra. It composes configs/NAME.yaml, or without that file has no groups."""
    SCHEMAS[name] = schema
    ConfigStore.instance().store(name, schema, "schema", "_global_")
    if not (CONFIGS / f"{name}.yaml").is_file():
        ConfigStore.instance().store(name, {"defaults": ["command", f"schema/{name}"]})


def configured(
    name: str, schema: type[Schema], description: str | None = None
) -> Callable[[Callable[[Schema], Any]], Callable[[], None]]:
    """Decorator: makes `main(config)` a program of Hydra's that takes the keys of `schema` as key=value.

    configs/NAME.yaml holds its defaults and groups; a command without groups needs no file. --help starts with
    `description`, by default the docstring of main's module. Wrong arguments are answered in a line.
    """
    register(name, schema)

    def decorated(main: Callable[[Schema], Any]) -> Callable[[], None]:
        """Make `main` a command, which reads its arguments from `sys.argv`."""
        started = record(main) if launched() else main  # `record` leaves the error for torchrun to print

        @wraps(main)
        def run() -> None:
            """Print the help, or have Hydra do what its options ask for: by default, compose the keys of `main`."""
            arguments = sys.argv[1:]
            parser = get_args_parser()
            with errors_for_users(_restart_advice(schema, arguments)):
                options, words, malformed = _parsed_arguments(arguments, parser)
                with _configurations_of(name, options, words):
                    if malformed:
                        with _wrong_words_answered(name, words):
                            raise HydraException(f"{malformed[0]}: expected key=value")
                    if not all(map(Path.is_dir, plugins.ADDED)):
                        raise ValueError(f"Additional config directory '{plugins.ADDED[0]}' not found")
                    if options.help:
                        text = description or sys.modules[main.__module__].__doc__ or name
                        print(help_text(text, name, schema, composed(name, *words)))
                    else:
                        _run_hydra(name, started, parser, options, words)

        return run

    return decorated


def _restart_advice(schema: type[Keys], arguments: Sequence[str]) -> str:
    """How to go on with a command that was stopped."""
    can_resume = any(field.name == "resume" for field in fields(schema))
    if not can_resume or not {"-m", "--multirun"}.isdisjoint(arguments):
        return "start it again"
    if any(word.startswith("run_dir=") for word in arguments):
        return "start it again with resume=auto"
    return "start it again with resume=auto and run_dir=FOLDER, the one that it has named"


def _parsed_arguments(arguments: Sequence[str], parser: ArgumentParser) -> tuple[Namespace, list[str], list[str]]:
    """Split arguments, in any order, into Hydra's options and words; of these, again, which are not key=value.

    ValueError: an option is wrong.
    """

    def refuse(message: str) -> NoReturn:
        from engine.configuration.words import ALONE, advice_about

        advice = advice_about(ALONE, "", ())  # the keys that a command needs
        raise ValueError(f"{message}; {advice.say}" if advice else message)

    parser.allow_abbrev = False
    parser.error = refuse  # type: ignore[method-assign]
    options, malformed = parser.parse_known_intermixed_args(arguments)
    if options.package and not options.cfg:
        malformed = [word for word in arguments if word not in options.overrides]
    if options.resolve and not options.cfg:
        raise ValueError("The --resolve flag can only be used in conjunction with --cfg or --help")
    if options.experimental_rerun:
        raise ValueError("--experimental-rerun: leave it out; run_dir=RUN resume=auto continues a run")
    options.multirun |= MULTIRUN in options.overrides
    words = [word for word in arguments if word in (*options.overrides, *malformed) and word != MULTIRUN]
    return options, words, malformed


@contextmanager
def _configurations_of(name: str, options: Namespace, words: Sequence[str]) -> Iterator[None]:
    """Context in which Hydra also finds configurations of plugins and of --config-dir and --config-name.

    ValueError: a plugin cannot be loaded.
    """
    plugins.load(words, CHOICES)
    plugins.ADDED[:] = [Path(folder).resolve() for folder in [options.config_dir] if folder]
    PRIMARY[name] = options.config_name or name
    try:
        yield
    finally:
        plugins.ADDED.clear()
        PRIMARY.clear()


def _run_hydra(
    name: str, main: Callable[[Any], Any], parser: ArgumentParser, options: Namespace, words: list[str]
) -> None:
    """Do what Hydra's options ask for; without any, start the command."""
    errors: list[Exception] = []

    def start(values: DictConfig) -> Any:
        try:
            with _wrong_words_answered(name, words):
                config = typed(values, SCHEMAS[name])
            return _call_main(name, main, words, config)
        except Exception as error:  # about which Hydra would print a traceback
            errors.append(error)

    for word in words:
        if word.startswith("hydra.run.dir=") and any(field.name == "run_dir" for field in fields(SCHEMAS[name])):
            raise ValueError(f"{word}: give {word.removeprefix('hydra.').replace('.', '_', 1)}, the folder of the run")
    primary = PRIMARY[name]
    overrides = words
    try:
        if not options.shell_completion:
            overrides = [as_typed(word, SCHEMAS[name], sweeps=options.multirun) for word in words]
        with composing(name, options.config_path) as program:
            if options.hydra_help:
                program.hydra_help(primary, parser, options)
            elif options.cfg:
                program.show_cfg(primary, overrides, options.cfg, options.package, options.resolve)
            elif options.info:
                program.show_info(options.info, primary, overrides)
            elif options.shell_completion:
                program.shell_completion(primary, overrides)
                write_cache(name)
            elif options.multirun:
                hydra_options = [word for word in sys.argv[1:] if word not in (*words, "-m", "--multirun", MULTIRUN)]
                sweep(program, primary, partial(checked, name), Jobs(SCHEMAS[name], hydra_options), overrides)
            else:
                program.run(primary, start, [*overrides, "hydra.mode=RUN"])
    except (HydraException, OmegaConfBaseException):
        with _wrong_words_answered(name, words):
            raise
    if errors:
        raise errors[0]


def _call_main(name: str, main: Callable[[Any], Any], words: list[str], config: Keys) -> Any:
    """Call a command's own function. Errors name wrong words, or the file that ends the program."""
    try:
        return main(config)
    except ValueError as error:  # a file that does not exist, such as init.weights=last
        wrong_words = [word for word in words if str(error).startswith(f"{word.partition('=')[0]}=")]
        if wrong_words and wrong_words[0].partition("=")[0] not in groups_of(SCHEMAS[name]):
            with _wrong_words_answered(name, wrong_words):
                raise
        raise
    except SystemExit as ended:
        *_, (last, line) = traceback.walk_tb(ended.__traceback__)
        if last.f_code is unwrap(main).__code__:
            raise
        file = last.f_code.co_filename  # such as a plugin's, which would end a run without a word
        raise RuntimeError(f"{file}, line {line}, ends the program: {ended!r}") from ended


def checked(name: str, *words: str) -> Any:
    """The checked keys of a declared command with these words.

    ValueError: a word is wrong, a key has no value, or the keys break a rule. The message names the fix.
    """
    values = composed(name, *words)
    with _wrong_words_answered(name, words):
        return typed(values, SCHEMAS[name])


def composed(name: str, *words: str) -> DictConfig:
    """The configuration of a declared command with these words. It may lack values, or break rules between keys.

    ValueError: see `checked`.
    """
    with _wrong_words_answered(name, words), composing(name):
        return hydra.compose(PRIMARY.get(name, name), [as_typed(word, SCHEMAS[name]) for word in words])


@contextmanager
def composing(name: str, folder: str | None = None) -> Iterator[Hydra]:
    """Context in which Hydra composes a command's configurations, also inside a program of Hydra's.

    `folder`: where the configurations are; by default configs/, and below it those of plugins and of --config-dir.
    """
    store_choices(SCHEMAS[name])
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    search_path = create_config_search_path(folder or str(CONFIGS))
    for plugin_folder in plugins.folders():
        search_path.prepend("command", f"file://{plugin_folder}", SearchPathQuery(provider="schema"))
    try:
        hydra.version.setbase("1.3")
        yield Hydra.create_main_hydra2(name, search_path)
    finally:
        GlobalHydra.instance().hydra = running


@contextmanager
def _wrong_words_answered(name: str, words: Sequence[str]) -> Iterator[None]:
    """Context that turns an error of a command's words into the ValueError that names the fix."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        from engine.configuration.messages import Messages  # a right command needs no words of other programs

        raise ValueError(Messages(name, SCHEMAS[name]).message(words, error)) from error


def command_line() -> str:
    """The command that started this process, quoted for the shell."""
    return shlex.join(["python", *sys.argv])
