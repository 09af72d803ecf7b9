"""What is wrong with a command's arguments, in a line or two that say how to write them.

Hydra would say it too, but it advises `+key=value`, which is refused, and its messages have five lines or more.
"""

import difflib
import re
import shlex
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.configuration.choices import CONFIGS, alternatives_of, choices, groups_in, no_such_choice
from engine.configuration.config import Known, Schema, flat, known_in, typed
from engine.schema.keys import groups_of, names_in, override
from engine.schema.words import COMMANDS, FOLDER, OF_OTHERS, OF_TRAINED, WORDS

TORCHRUNS = re.compile(r"nproc|nnodes|node_rank|rdzv|master_|standalone|max_restarts|monitor_interval|local_addr")
# Hydra's options without a value, and with one, as in --cfg job.
OPTIONS = ("--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m")
OPTIONS_WITH_VALUE = ("--cfg", "-c", "--info", "-i", "--package", "-p", "--shell-completion", "-sc")
SHOWING = ("--hydra-help", "--version", *OPTIONS_WITH_VALUE)  # instead of a run
# Configurations from elsewhere: Hydra checks them.
ELSEWHERE = ("--config-dir", "--config-path", "--config-name", "-cd", "-cp", "-cn", "hydra.searchpath")
MOST_NAMED = 5  # keys or choices in a message
PARSER = OverridesParser.create()
Compose = Callable[..., DictConfig]


def check_arguments(command: str, arguments: Sequence[str], schema: type[Schema], compose: Compose) -> Schema | None:
    """The configuration of a run; None for a sweep (-m), if it is only shown (--cfg), or if Hydra alone can compose it.

    `compose(*overrides)`: the configuration that Hydra makes of them. Values of a sweep are left to each of its runs.
    ValueError: the command does not take an argument; or see `typed`.
    """
    if any(argument.startswith(ELSEWHERE) for argument in arguments):
        return None
    words = [
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if word.partition("=")[0] not in (*OPTIONS, *OPTIONS_WITH_VALUE) and before not in OPTIONS_WITH_VALUE
    ]
    options = {argument.partition("=")[0] for argument in arguments}
    sweeps, shows = bool(options & {"-m", "--multirun"}), bool(options & {*SHOWING})
    of_hydra = any("${hydra:" in word for word in words)  # values that exist in the run alone
    with _in_a_line():
        Arguments(command, words, schema, compose, sweeps).check()
        return None if sweeps or shows or of_hydra else typed(compose(*words), schema)


def chosen(command: str, arguments: Sequence[str], schema: type, compose: Compose) -> DictConfig:
    """The configuration of the choices among the arguments, with the defaults of all other keys."""
    with _in_a_line():
        words = [word for word in arguments if not word.startswith("-")]
        return Arguments(command, words, schema, compose, sweeps=True).values


@contextmanager
def _in_a_line() -> Iterator[None]:
    """Context whose errors of Hydra, where no check above found the mistake, become a ValueError of one line."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        about, key = re.split(r"\n    full_key|\nTo append", str(error))[0], getattr(error, "full_key", "")
        raise ValueError(f"{key}: " * bool(key) + " ".join(about.split())) from error


class Arguments:
    """The arguments of one command, without Hydra's options. `sweeps`: they may have several values."""

    def __init__(self, command: str, words: Sequence[str], schema: type, compose: Compose, sweeps: bool):
        self.words, self.schema, self.compose, self.groups = words, schema, compose, groups_in(command)
        self.sweeps = sweeps

    def check(self) -> None:
        """Raise ValueError for the first wrong argument."""
        overrides = [self._parsed(number) for number in range(len(self.words))]
        known = self.known  # checks the choices, on which the keys depend
        for given in overrides:
            name, value = given.key_or_group, given.value()
            if name.startswith(("hydra.", "hydra/")) or self._is_new_entry(given):
                continue
            if isinstance(value, dict) and name not in known:  # several keys at once, as in window={size: 1024}
                for key, one in flat(value, f"{name}.").items():
                    if key not in known:
                        raise ValueError(self._unknown(key, str(one)))
                continue
            if name in self.groups:
                continue
            if name not in known:
                raise ValueError(self._unknown(name, value_of(given)))
            if given.is_delete():
                null = f", and give {name}=null for no value" if "None" in str(self._hint(name)) else ""
                raise ValueError(f"{given.input_line}: leave {name} out to keep its default{null}")
            if not (self.sweeps and given.is_sweep_override()):
                self._check_value(given, [each for each in overrides if each.key_or_group == name])

    def _is_new_entry(self, given: Override) -> bool:
        """Whether an argument adds to a mapping: +roots.camvid=DIR."""
        parent = given.key_or_group.rpartition(".")[0]
        return given.is_add() and parent in self.known and self._hint(parent) is Any

    @cached_property
    def values(self) -> DictConfig:
        """The configuration of the choices (in a sweep, of the first ones) alone. ValueError: see `_check_choice`."""
        taken = []
        for number, word in enumerate(self.words):
            group, equals, _ = word.lstrip("+~").partition("=")
            if group in self.groups and (equals or word.startswith("~")):
                given = self._parsed(number)
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

    @property
    def _names(self) -> list[str]:
        return [*self.known, *self.groups]

    def _hint(self, name: str) -> Any:
        if self.known[name].entry.metadata.get("names"):
            return list[str]
        return get_type_hints(self.known[name].owner)[self.known[name].entry.name]

    def _parsed(self, number: int) -> Override:
        word = self.words[number]
        if word.startswith("-"):
            raise ValueError(self._option(number))
        if "=" not in word and not word.startswith("~"):
            raise ValueError(self._without_key(number))
        try:
            return PARSER.parse_override(word)
        except HydraException as error:
            raise ValueError(self._unreadable(number)) from error

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
        if FOLDER.startswith(f"{group}.") and (choice.startswith(("/", "~", ".")) or Path(choice).is_dir()):
            raise ValueError(f"{argument}: a folder is given as {argument_of(FOLDER, choice)}")
        if not (CONFIGS / group / f"{choice}.yaml").is_file():
            raise no_such_choice(group, choice, fitting)
        takers = [name for name, schema in COMMANDS.items() if groups_of(schema) and choice in choices(group, schema)]
        here = "" if group == "experiment" else f"; expected one of {', '.join(fitting)}"
        raise ValueError(f"{group}={choice} is for {' and '.join(takers) or 'another command'}{here}")

    def _check_value(self, given: Override, alike: list[Override]) -> None:
        """Raise ValueError if the value has the wrong type. `alike`: what is given for the same key."""
        name, several = given.key_or_group, given.is_sweep_override()
        hint = self._hint(name)
        if not several:
            try:
                OmegaConf.update(self.values, name, given.value())
                return
            except OmegaConfBaseException:
                pass
        text = ",".join(map(value_of, alike))  # {a,b} has become two arguments
        if "list" in str(hint) and not text.startswith(("[", "null")):
            fix = f"; give {list_of(name, text)}"
        elif several and hint in (str, str | None):
            fix = f"; give {shlex.quote(override(name, text))}"
        else:
            fix = "; -m runs the command once with each value" if several else ""
        raise ValueError(f"{given.input_line}: expected {kind_of(hint)}{fix}")

    def _unknown(self, name: str, value: str) -> str:
        """The message for a key that the command does not have."""
        below = [known for known in self.known if known.startswith(f"{name}.") and not known.endswith(".name")]
        if below:
            more = ", …" if len(below) > MOST_NAMED else ""
            return f"{name}={value}: expected one of the keys {', '.join(below[:MOST_NAMED])}{more}"
        if of_choice := self._of_other_choice(name):
            return of_choice
        if meant := self._alike(name):
            return f"{name}={value}: there is no such key; give {' or '.join(argument_of(key, value) for key in meant)}"
        if takers := [command for command, schema in COMMANDS.items() if name in names_in(schema)]:
            trained = "checkpoint" in self.known and takers[0].startswith("train")
            return f"{name}={value} is for {' and '.join(takers)}" + ("; a checkpoint keeps its own" if trained else "")
        if meant := self._nearest(name):
            return f"{name}={value}: there is no such key; the nearest is {argument_of(meant[0], value)}"
        return f"{name}={value}: there is no such key; --help lists them all"

    def _alike(self, name: str) -> list[str]:
        """Keys and groups with the same last part, or what another tool's word stands for."""
        last = name.rpartition(".")[2]
        same = [known for known in self._names if known.rpartition(".")[2] == last != "name"]
        return same or [key for key in WORDS.get(last, ()) if key.partition("=")[0] in self._names][:1]

    def _nearest(self, name: str) -> list[str]:
        """The most similar key, in the same group if possible."""
        group, _, last = name.rpartition(".")
        for names in ([known for known in self.known if known.rpartition(".")[0] == group], self._names):
            parts = {known.rpartition(".")[2]: known for known in names}
            if found := difflib.get_close_matches(last, parts, n=1):
                return [parts[found[0]]]
        return []

    def _of_other_choice(self, name: str) -> str | None:
        group = name.partition(".")[0]
        having = [
            (group, alternative)
            for alternative, schema in groups_of(self.schema).get(group, {}).items()
            if any(f"{known}.".startswith(f"{name}.") for known in names_in(schema, f"{group}."))
        ]
        if not having:
            return None
        fitting = [
            f"{group}={choice}"
            for choice in choices(group, self.schema)
            if not set(having).isdisjoint(alternatives_of(group, choice))
        ]
        more = " …" if len(fitting) > MOST_NAMED else ""
        here = self.values[group].name
        return f"{name} is for {', '.join(fitting[:MOST_NAMED])}{more}; here {group} is {here}"

    def _option(self, number: int) -> str:
        """The message for --name or --name=value."""
        word, after = self.words[number], next(iter(self.words[number + 1 :]), "-")
        name, equals, value = word.lstrip("-").partition("=")
        name = name.replace("-", "_")
        if TORCHRUNS.match(name):
            return f"{word} is an option of torchrun: give it before the program, as in torchrun --nproc-per-node 2 …"
        if not equals and not after.startswith("-") and "=" not in after:
            word, value = f"{word} {after}", after
        if name in self.groups and value not in choices(name, self.schema) and FOLDER in self.known:
            name = FOLDER
        if name in self._names:
            value = value or ("true" if name in self.known and self._hint(name) is bool else "…")
            return f"{word}: keys have no dashes; give {argument_of(name, value)}"
        return self._unknown(name, value or "…").replace(f"{name}={value or '…'}", word, 1)

    def _without_key(self, number: int) -> str:
        """The message for a word without =."""
        word = self.words[number]
        before, _, after, last, *_ = ["", *self.words, "", ""][number:]
        if before.endswith("="):
            return f"{before} {word}: give it without spaces: {before}{word}"
        if after.startswith("="):
            value = after[1:] or last
            return f"{word} {after} {'' if after[1:] else last}".rstrip() + f": give it without spaces: {word}={value}"
        name, _, value = word.partition(":")
        if name in self._names:
            return f"{word}: expected key=value; give {argument_of(name, value or after or '…')}"
        groups = [group for group in self.groups if word in choices(group, self.schema)]
        place = [] if groups else self._key_of_path(word)
        key, given, _ = before.partition("=")
        if given and key in self.known and "str" in str(self._hint(key)) and place in ([], [key]) and not groups:
            return f"{before} {word}: quote a value with spaces: {shlex.quote(f'{before} {word}')}"
        if place and "list" in str(self._hint(place[0])):
            words = ",".join(word for word in self.words if "=" not in word)
            return f"{word}: expected key=value; give {list_of(place[0], words)}"
        if groups or place:
            return f"{word}: expected key=value; give {argument_of((groups or place)[0], word)}"
        return f"{word or 'an empty argument'}: expected key=value; --help lists the keys"

    def _key_of_path(self, word: str) -> list[str]:
        """The key that a file or folder is probably meant for."""
        if not word or not ("/" in word or "." in word or Path(word).exists()):
            return []
        trained = word.endswith((".pt", ".pth")) or Path(word, "checkpoints").is_dir()
        return [name for name in (OF_TRAINED if trained else OF_OTHERS) if name in self.known][:1]

    def _unreadable(self, number: int) -> str:
        """The message for key=value that Hydra's grammar does not have."""
        word = self.words[number]
        name, _, value = word.partition("=")
        if value.startswith(("[", "{")):
            for end in range(number + 1, len(self.words) + 1):
                whole = " ".join(self.words[number:end])
                if whole.count("[") == whole.count("]") and whole.count("{") == whole.count("}"):
                    if whole == word:
                        example = f'{name}=["a=b",c]' if value.startswith("[") else f'{name}={{key: "a=b"}}'
                        return f"{word}: Hydra needs quotes of its own here, as in {shlex.quote(example)}"
                    return f"{word}: quote lists and mappings for the shell: {shlex.quote(whole)}"
            return f"{word}: a bracket is not closed; quote lists and mappings for the shell, as in 'key=[1, 2]'"
        if name != name.strip():
            return f"{word}: give it without spaces: {argument_of(name.strip(), value.strip())}"
        name = name.strip("+~")
        if name in self.groups:
            return str(no_such_choice(name, value, choices(name, self.schema)))
        if name not in self.known:
            return self._unknown(name, value)
        if "list" in (hint := str(self._hint(name))):
            return f"{word}: expected a list; give {list_of(name, value.strip('()'))}"
        if "str" in hint:
            return f"{word}: Hydra needs quotes of its own here; give {argument_of(name, value)}"
        return f"{word}: expected {kind_of(self._hint(name))}"


def value_of(given: Override) -> str:
    """The value as it was typed."""
    return str(given.input_line).partition("=")[2]


def argument_of(name: str, value: str) -> str:
    """key=value as it is typed in a shell."""
    plain = name if "=" in name else f"{name}={value}"
    if value == "…":
        return plain
    try:
        PARSER.parse_override(plain)
    except HydraException:
        plain = override(name, value)
    return shlex.quote(plain)


def list_of(name: str, values: str) -> str:
    """key=[value,value] as it is typed in a shell."""
    return shlex.quote(f"{name}=[{values}]")


def kind_of(hint: Any, several: bool = False) -> str:
    """The type of a key's value in words."""
    if get_origin(hint) in (Union, types.UnionType):
        (hint,) = (each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is list:
        return f"{'lists' if several else 'a list'} of {kind_of(get_args(hint)[0], several=True)}"
    one, many = {
        bool: ("true or false", "true or false"),
        int: ("a whole number", "whole numbers"),
        float: ("a number", "numbers"),
    }.get(hint, ("text", "words"))
    return many if several else one
