"""Check command-line overrides and explain how to fix them in one or two lines.

Hydra's own messages advise `+key=value`, which is refused here, and have five lines or more.
"""

import difflib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from engine.configuration.choices import CONFIGS, alternatives_of, choices, groups_in, no_such_choice
from engine.configuration.config import Known, Schema, flat, known_in, typed
from engine.schema.commands import COMMANDS, SYNONYMS
from engine.schema.keys import groups_of, types_in

OF_TORCHRUN = re.compile(r"--(nproc|nnodes|node[-_]rank|rdzv|master|standalone|max[-_]restarts)")
# Hydra's options without a value, and with one, as in --cfg job.
OPTIONS = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m")
OPTIONS_WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--shell-completion", "-sc")
SHOWING = ("--hydra-help", "--version", *OPTIONS_WITH_VALUE)  # instead of a run
SHOWN = ("job", "hydra", "all")  # by --cfg
# Configurations from elsewhere: Hydra checks them.
FOLDER = ("--config-dir", "-cd")
ELSEWHERE = (*FOLDER, "hydra.searchpath")
OTHER_ROOTS = ("--config-path", "--config-name", "-cp", "-cn")
MOST_NAMED = 5  # keys or choices in a message
PARSER = OverridesParser.create()
Compose = Callable[..., DictConfig]


def check_arguments(command: str, arguments: Sequence[str], schema: type[Schema], compose: Compose) -> Schema | None:
    """The configuration of a run; None for a sweep (-m), if it is only shown (--cfg), or if Hydra alone can compose it.

    `compose(*overrides)`: the configuration that Hydra makes of them. Swept values are checked when each job starts.
    ValueError: the command does not take an argument; or see `typed`.
    """
    _check_options(arguments)
    if any(argument.startswith(ELSEWHERE) for argument in arguments):
        return None
    words = [
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if word.partition("=")[0] not in (*OPTIONS, *OPTIONS_WITH_VALUE) and before not in OPTIONS_WITH_VALUE
    ]
    options = {argument.partition("=")[0] for argument in arguments}
    sweeps, shows = bool(options & {"-m", "--multirun"}), bool(options & {*SHOWING})
    of_hydra = any("${hydra:" in word for word in words)  # values known only in the run
    with _in_a_line():
        Arguments(command, words, schema, compose, sweeps).check()
        return None if sweeps or shows or of_hydra else typed(compose(*words), schema)


def _check_options(arguments: Sequence[str]) -> None:
    """Raise ValueError for options of Hydra that it would answer with more lines, or with a run."""
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=False):
        option, equals, value = argument.partition("=")
        value = value if equals else after
        if option in OTHER_ROOTS:
            raise ValueError(f"{option}: this command has one configuration; --config-dir DIR adds choices of your own")
        if option in FOLDER and not os.path.isdir(value):
            raise ValueError(f"{option} {value}: expected a folder with choices of your own, such as norm/mine.yaml")
        if option in ("--cfg", "-c") and value not in SHOWN:
            raise ValueError(f"{option} {value}: expected one of {', '.join(SHOWN)}")


def chosen(command: str, arguments: Sequence[str], schema: type, compose: Compose) -> DictConfig:
    """The configuration of the choices among the arguments, with the defaults of all other keys."""
    with _in_a_line():
        words = [word for word in arguments if not word.startswith("-")]
        return Arguments(command, words, schema, compose, sweeps=True).values


@contextmanager
def _in_a_line() -> Iterator[None]:
    """Context that turns Hydra's errors into a ValueError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        reason = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        about, key = re.split(r"\n    full_key|\nTo append", str(reason))[0], getattr(reason, "full_key", "")
        _, of_resolver, own = about.partition("ValueError raised while resolving interpolation: ")
        if of_resolver:  # such as ${per_process:…}, which counts processes: the key is not to blame
            about, key = own, ""
        raise ValueError(f"{key}: " * bool(key) + " ".join(about.split())) from error


class Arguments:
    """The arguments of one command, without Hydra's options. `sweeps`: they may have several values."""

    def __init__(self, command: str, words: Sequence[str], schema: type, compose: Compose, sweeps: bool):
        self.words, self.schema, self.compose, self.groups = words, schema, compose, groups_in(command)
        self.sweeps = sweeps

    def check(self) -> None:
        """Raise ValueError for the first wrong argument."""
        overrides = [self._parsed(word) for word in self.words]
        known = self.known  # checks the choices, on which the keys depend
        for given in overrides:
            name, value = given.key_or_group, given.value()
            if name.startswith(("hydra.", "hydra/")) or self._is_new_entry(given):
                continue
            if isinstance(value, dict) and name not in known:  # several keys at once, as in window={size: 1024}
                for key, one in flat(value, f"{name}.").items():
                    if key not in known:
                        raise ValueError(self._unknown(key, str(one)))
            elif name in self.groups:
                continue
            elif name not in known:
                raise ValueError(self._unknown(name, value_of(given)))
            elif given.is_delete():
                raise ValueError(f"{given.input_line}: leave {name} out to keep its default")

    def _is_new_entry(self, given: Override) -> bool:
        """Whether an argument adds to a mapping: +roots.camvid=DIR."""
        parent = given.key_or_group.rpartition(".")[0]
        return given.is_add() and parent in self.known and self._hint(parent) is Any

    @cached_property
    def values(self) -> DictConfig:
        """The configuration of the choices (in a sweep, of the first ones) alone. ValueError: see `_check_choice`."""
        taken = []
        for word in self.words:
            group, equals, _ = word.lstrip("+~").partition("=")
            if group in self.groups and (equals or word.startswith("~")):
                given = self._parsed(word)
                if self.sweeps and given.is_discrete_sweep() and "glob(" not in word:
                    word = f"{group}={next(given.sweep_string_iterator())}"  # each job checks the keys of its own
                    given = PARSER.parse_override(word)
                self._check_choice(given)
                taken += [] if given.is_sweep_override() or isinstance(given.value(), dict) else [word]
        return self.compose(*taken)

    @cached_property
    def known(self) -> dict[str, Known]:
        """The keys that the choices have."""
        return {each.name: each for each in known_in(self.values)}

    def _hint(self, name: str) -> Any:
        """The type of a key's value."""
        return get_type_hints(self.known[name].owner)[self.known[name].entry.name]

    def _parsed(self, word: str) -> Override:
        name, equals, value = word.partition("=")
        if OF_TORCHRUN.match(word):
            raise ValueError(
                f"{word} is an option of torchrun: give it before the program, as in torchrun --nproc-per-node 2 …"
            )
        if word.startswith("-"):
            meant = [f", such as {key}={value or '…'}" for key in self._alike(name.strip("-").replace("-", "_"))]
            raise ValueError(f"{word}: keys have no dashes; give key=value{''.join(meant[:1])}")
        if not (equals or word.startswith("~")) or name != name.strip() or not name:
            raise ValueError(f"{word or 'an empty argument'}: expected key=value without spaces; --help lists the keys")
        try:
            return PARSER.parse_override(word)
        except HydraException as error:
            fix = "quote lists and mappings for the shell, as in 'key=[a, b]'"
            raise ValueError(f"{word}: Hydra cannot read the value; {fix}") from error

    def _check_choice(self, given: Override) -> None:
        group, argument = given.key_or_group, str(given.input_line)
        if given.is_sweep_override() and not self.sweeps:
            raise ValueError(f"{argument}: expected one choice; -m runs the command once with each")
        value, fitting = given.value(), choices(group, self.schema)
        several = isinstance(value, list) and all(isinstance(each, str) for each in value)
        if given.is_delete() or given.is_sweep_override() or isinstance(value, dict) or several:
            return
        if given.is_add():
            raise ValueError(f"{argument}: leave out the +: {argument.lstrip('+')}")
        choice = (value if isinstance(value, str) else value_of(given)).removesuffix(".yaml")
        if choice in fitting:
            return
        if not (CONFIGS / group / f"{choice}.yaml").is_file():
            raise no_such_choice(group, choice, fitting)
        takers = [name for name, schema in COMMANDS.items() if groups_of(schema) and choice in choices(group, schema)]
        here = "" if group == "experiment" else f"; expected one of {', '.join(fitting)}"
        raise ValueError(f"{group}={choice} is for {' and '.join(takers) or 'another command'}{here}")

    def _unknown(self, name: str, value: str) -> str:
        """The message for a key that the command does not have."""
        below = [known for known in self.known if known.startswith(f"{name}.") and not known.endswith(".name")]
        if below:
            more = ", …" if len(below) > MOST_NAMED else ""
            return f"{name}={value}: expected one of the keys {', '.join(below[:MOST_NAMED])}{more}"
        if of_choice := self._of_other_choice(name):
            return of_choice
        if meant := self._alike(name):
            return f"{name}={value}: there is no such key; give {' or '.join(f'{key}={value}' for key in meant)}"
        if takers := [command for command, schema in COMMANDS.items() if name in types_in(schema)]:
            trained = "checkpoint" in self.known and takers[0].startswith("train")
            return f"{name}={value} is for {' and '.join(takers)}" + ("; a checkpoint keeps its own" if trained else "")
        group, _, last = name.rpartition(".")
        for names in ([known for known in self.known if known.rpartition(".")[0] == group], self._names):
            parts = {known.rpartition(".")[2]: known for known in names}
            if found := difflib.get_close_matches(last, parts, n=1):
                return f"{name}={value}: there is no such key; the nearest is {parts[found[0]]}={value}"
        return f"{name}={value}: there is no such key; --help lists them all"

    @property
    def _names(self) -> list[str]:
        return [*self.known, *self.groups]

    def _alike(self, name: str) -> list[str]:
        """Keys and groups with the same last part, or the key that a synonym stands for."""
        last = name.rpartition(".")[2]
        same = [known for known in self._names if known.rpartition(".")[2] == last != "name"]
        return same or [key for key in SYNONYMS.get(last, ()) if key in self._names][:1]

    def _of_other_choice(self, name: str) -> str | None:
        """The message for a key that another choice of its group has, such as data.folds; None for other keys."""
        group = name.partition(".")[0]
        having = {
            (group, alternative)
            for alternative, schema in groups_of(self.schema).get(group, {}).items()
            if any(f"{known}.".startswith(f"{name}.") for known in types_in(schema, f"{group}."))
        }
        if not having:
            return None
        fitting = [
            f"{group}={choice}"
            for choice in choices(group, self.schema)
            if not having.isdisjoint(alternatives_of(group, choice))
        ]
        more = " …" if len(fitting) > MOST_NAMED else ""
        return f"{name} is for {', '.join(fitting[:MOST_NAMED])}{more}; here {group} is {self.values[group].name}"


def value_of(given: Override) -> str:
    """The value as it was typed."""
    return str(given.input_line).partition("=")[2]
