"""Commands: Hydra composes what their words choose, and each starts with a checked dataclass."""

import shlex
import sys
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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

from engine.configuration.config import Schema, typed
from engine.configuration.help import help_text
from engine.configuration.multirun import Jobs, sweep
from engine.configuration.texts import ERRORS_OF_WORDS, as_typed
from engine.process import plugins
from engine.process.completion import write_cache
from engine.process.distributed import launcher, world_size
from engine.process.stopping import errors_for_users
from engine.schema.keys import CHOICES, CONFIGS, Keys, declared_in, groups_of

SCHEMAS: dict[str, type[Keys]] = {}  # of declared commands
MULTIRUN = "hydra.mode=MULTIRUN"  # what -m means
# ${per_process:2} in a configuration: twice the number of processes.
OmegaConf.register_new_resolver("per_process", lambda count: count * world_size())


def register(name: str, schema: type[Keys]) -> None:
    """Make the keys of a command known to Hydra. It composes configs/NAME.yaml, or without that file has no groups."""
    SCHEMAS[name] = schema
    ConfigStore.instance().store(name, schema, "schema", "_global_")
    for group in groups_of(schema):
        ConfigStore.instance().repo.setdefault(group, {})  # also without choices, GROUP=[] chooses none
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
        started = record(main) if launcher() else main  # `record` leaves the error for torchrun to print

        @wraps(main)
        def run() -> None:
            """Print the help, or have Hydra do what its options ask for: by default, compose the keys of `main`."""
            with errors_for_users(_restart_advice(schema)):
                options, words = _parsed_arguments(sys.argv[1:])
                plugins.load(words, CHOICES)
                plugins.ADDED[:] = [Path(options.config_dir).resolve()] if options.config_dir else []
                if not {*words} <= {*options.overrides}:
                    raise _answered(name, words, HydraException("expected key=value"))
                if options.help:
                    text = description or sys.modules[main.__module__].__doc__ or name
                    print(help_text(text, name, schema, composed(name, *words, primary=options.config_name)))
                else:
                    _run_hydra(name, started, options, words)

        return run

    return decorated


def _restart_advice(schema: type[Keys]) -> str:
    """How to go on with this process's command, which has these keys, when it was stopped."""
    if "resume" not in declared_in(schema) or not {"-m", "--multirun"}.isdisjoint(sys.argv):
        return "start it again"
    is_named = any(word.startswith("run_dir=") for word in sys.argv)
    return "start it again with resume=auto" + ("" if is_named else " and run_dir=FOLDER, the one that it has named")


def _parsed_arguments(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Split arguments, in any order, into Hydra's options and words: key=value, and what is no option of Hydra's.

    ValueError: Hydra's parser refuses an option, or it cannot be followed.
    """

    def refuse(message: str) -> NoReturn:
        from engine.configuration.words import ALONE, advice_about

        advice = advice_about(ALONE, "", ())  # the keys that a command needs
        raise ValueError(f"{message}; {advice.say}" if advice else message)

    parser = get_args_parser()
    parser.allow_abbrev = False
    parser.error = refuse  # type: ignore[method-assign]
    options, unknown = parser.parse_known_intermixed_args(arguments)
    if options.resolve and not (options.cfg or options.help):
        raise ValueError("The --resolve flag can only be used in conjunction with --cfg or --help")
    if options.experimental_rerun:
        raise ValueError("--experimental-rerun: leave it out; run_dir=RUN resume=auto continues a run")
    if options.config_dir and not Path(options.config_dir).is_dir():
        raise ValueError(f"Additional config directory '{Path(options.config_dir).resolve()}' not found")
    options.multirun |= MULTIRUN in options.overrides
    if options.package and not options.cfg:  # -p of another program, so its value is no option of Hydra's
        return options, [*arguments]
    return options, [word for word in arguments if word in (*options.overrides, *unknown) and word != MULTIRUN]


def _run_hydra(name: str, main: Callable[[Any], Any], options: Namespace, words: list[str]) -> None:
    """Do what Hydra's options ask for; without any, start the command."""
    schema = SCHEMAS[name]
    primary = options.config_name or name
    errors: list[Exception] = []

    def start(values: DictConfig) -> Any:
        try:
            return _call_main(name, main, words, _typed(name, words, values))
        except Exception as error:  # about which Hydra would print a traceback
            errors.append(error)

    try:
        overrides = [as_typed(word, schema, sweeps=options.multirun) for word in words]
        with composing(name, options.config_path) as program:
            if options.hydra_help:
                program.hydra_help(primary, get_args_parser(), options)
            elif options.cfg:
                program.show_cfg(primary, overrides, options.cfg, options.package, options.resolve)
            elif options.info:
                program.show_info(options.info, primary, overrides)
            elif options.shell_completion:
                program.shell_completion(primary, words)
                write_cache(name)
            elif options.multirun:
                hydra_options = [word for word in sys.argv[1:] if word not in (*words, "-m", "--multirun", MULTIRUN)]
                check = partial(checked, name, primary=options.config_name)
                sweep(program, primary, check, Jobs(schema, hydra_options), overrides)
            else:
                program.run(primary, start, [*overrides, "hydra.mode=RUN"])
    except ERRORS_OF_WORDS as error:
        if options.multirun and not isinstance(error, (HydraException, OmegaConfBaseException)):
            raise  # of `sweep`, which has checked the words of each job
        raise _answered(name, words, error) from error
    if errors:
        raise errors[0]


def _call_main(name: str, main: Callable[[Any], Any], words: Sequence[str], config: Keys) -> Any:
    """Call a command's own function. ValueErrors about the value of one of the words also say what to give instead.

    Messages of ours about a value begin with KEY=, such as init.weights=last, a file that does not exist. Those that
    begin with GROUP=NAME are about what a choice builds, and the choice itself was right.

    RuntimeError: other code than the command's own ends the program.
    """
    try:
        return main(config)
    except ValueError as error:
        key = str(error).partition("=")[0]
        words_of_key = [word for word in words if word.partition("=")[0] == key]
        if words_of_key and key not in groups_of(SCHEMAS[name]):
            raise _answered(name, words_of_key, error) from error
        raise
    except SystemExit as ended:
        place = _place_of_foreign_exit(ended, main)
        if place is None:
            raise
        raise RuntimeError(f"{place}, ends the program: {ended!r}") from ended


def _place_of_foreign_exit(ended: SystemExit, main: Callable[[Any], Any]) -> str | None:
    """The line of code, such as a plugin's, that ends a run without a word; None if the command has ended itself."""
    *_, (last, line) = traceback.walk_tb(ended.__traceback__)
    return None if last.f_code is unwrap(main).__code__ else f"{last.f_code.co_filename}, line {line}"


def checked(name: str, *words: str, primary: str | None = None) -> Any:
    """The checked keys of a declared command with these words. `primary`: see `composed`.

    ValueError: a word is wrong, a key has no value, or the keys break a rule. The message names the fix.
    """
    return _typed(name, words, composed(name, *words, primary=primary))


def _typed(name: str, words: Sequence[str], values: DictConfig) -> Any:
    """The checked keys of values that Hydra composed from these words. ValueError: see `checked`."""
    try:
        return typed(values, SCHEMAS[name])
    except (OmegaConfBaseException, ValueError) as error:
        raise _answered(name, words, error) from error


def composed(name: str, *words: str, primary: str | None = None) -> DictConfig:
    """The configuration of a declared command with these words. It may lack values, or break rules between keys.

    `primary`: the name of its main file, if that is not configs/NAME.yaml. ValueError: see `checked`.
    """
    try:
        with composing(name):
            return hydra.compose(primary or name, [as_typed(word, SCHEMAS[name]) for word in words])
    except ERRORS_OF_WORDS as error:
        raise _answered(name, words, error) from error


@contextmanager
def composing(name: str, folder: str | None = None) -> Iterator[Hydra]:
    """Context in which Hydra composes a command's configurations, also inside a program of Hydra's.

    `folder`: where the configurations are; by default configs/, and below it those of plugins and of --config-dir.
    """
    running = GlobalHydra.instance().hydra
    GlobalHydra.instance().clear()
    search_path = create_config_search_path(folder or str(CONFIGS))
    for added_folder in plugins.folders():
        search_path.prepend("command", f"file://{added_folder}", SearchPathQuery(provider="schema"))
        for file in added_folder.glob("*/*.yaml"):  # is GROUP=NAME in place of the values of the class of this name
            ConfigStore.instance().repo.get(file.parent.name, {}).pop(file.name, None)
    try:
        hydra.version.setbase("1.3")
        yield Hydra.create_main_hydra2(name, search_path)
    finally:
        GlobalHydra.instance().hydra = running


def _answered(name: str, words: Sequence[str], error: Exception) -> ValueError:
    """The error of a command's words as one that names the fix. An error that no word explains is raised as it is."""
    from engine.configuration.messages import Messages  # a right command needs no words of other programs

    return ValueError(Messages(name, SCHEMAS[name]).message(words, error))


def command_line() -> str:
    """The command that started this process, quoted for the shell."""
    return shlex.join(["python", *sys.argv])
