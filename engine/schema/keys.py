"""Declare and check configuration keys: defaults, bounds, groups, and which keys a resumed run may change."""

import hashlib
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import Field, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    ClassVar,
    NamedTuple,
    Protocol,
    TypedDict,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    runtime_checkable,
)

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import MISSING
from typing_extensions import Unpack, dataclass_transform

from models.private_torch import tree_leaves

LONGEST_NAME = 255  # bytes, of Linux's filesystems
# Larger values are mistakes.
MOST_PIXELS = 65_536
MOST_SECONDS = 1_000_000
MOST_WORKERS = 1_024
MOST_NUMBERS = 1_000
NAME_OF_CHOICE = r"[A-Za-z]\w*"
T = TypeVar("T")


@runtime_checkable
class Keys(Protocol):
    """An instance of a dataclass of `engine.schema`."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


class Rules(TypedDict, total=False):
    """Which values a key may have, and what a command does with it. Bounds hold for every number in a list."""

    above: float
    least: float
    most: float
    one_of: tuple  # the allowed values; of a list, the allowed entries
    entries: tuple[str, ...]  # names of the list's entries, which fix its length
    names: bool  # the value is a name or a list of different names
    # The value is this word or a whole number, without bounds a boolean. (The type is Any: OmegaConf cannot merge
    # `int | str`.)
    word: str
    free_on_resume: bool  # a resumed run may change the key, which says where or how to compute, not what
    per_machine: bool  # ranks may also have different values
    task: str  # the only task that has the key, see `refuse_other_tasks`
    written: bool  # a file or folder that the command replaces, so jobs of a sweep need different ones
    is_argument: bool  # False: what a choice builds does not take the key as an argument of the same name


def key(default: T, **rules: Unpack[Rules]) -> T:
    """A key with a default. None (null) is allowed, except for `names` and, unless it is the default, with a `word`."""
    may_be_null = default is None or not (rules.get("names") or rules.get("word"))
    is_free = rules.get("free_on_resume", False) or rules.get("per_machine", False)
    is_bounded = "above" in rules or "least" in rules  # (no key has an upper bound alone)
    metadata = {**rules, "free_on_resume": is_free, "may_be_null": may_be_null, "is_bounded": is_bounded}
    return field(default_factory=lambda: deepcopy(default), metadata=metadata)


def leaves(config: Keys, prefix: str = "") -> Iterator[tuple[str, Any, Field[Any]]]:
    """("optim.lr", 1, its field), …: the keys that hold no other keys."""
    for entry in fields(config):
        name = prefix + entry.name
        value = getattr(config, entry.name)
        if isinstance(value, Keys):
            yield from leaves(value, f"{name}.")
        elif entry.metadata.get("is_list"):
            yield name, [*value], entry
            for place, choice in chosen(name, value):
                for key, leaf, key_entry in leaves(choice, f"{place}."):
                    yield key, leaf, entry if entry.metadata["free_on_resume"] else key_entry
        else:
            yield name, value, entry


def refuse_other_tasks(config: Keys, task: str, source: str) -> None:
    """Raise ValueError if a key that `task` does not have is not at its default. `source` is for `task`."""
    for name, value, entry in leaves(config):
        key_task = entry.metadata.get("task")
        if key_task in (None, task):
            continue
        assert callable(entry.default_factory), name
        if value != entry.default_factory():
            raise ValueError(f"{name}={value} is for {key_task}, and {source} is for {task}: leave it out")


CONFIGS = Path(__file__).resolve().parents[2] / "configs"  # a YAML file there comes first
CHOICES: dict[str, dict[str, type[Any]]] = {}  # {group: {name: dataclass}}, which only `choice` fills


@dataclass_transform()
def choice(group: str, *, is_base: bool = False) -> Callable[[type[T]], type[T]]:
    """Class decorator: makes a dataclass of keys, the choice GROUP=NAME. NAME is the default of its key `name`.

    Its class attribute `builds` is what is built from it, a class or function, or names it, as "package.module.Name".
    How that is called, by group: `engine.assemble.contracts`.

    Args:
        group: the key that a command has for such choices.
        is_base: only YAML files build on it; GROUP=NAME alone is no choice.

    ValueError: the group has another choice of this name, the class names nothing that it builds, or a key of its own
    has the name of an argument that every choice of the group is given.
    """

    def register(decorated: type[T]) -> type[T]:
        """Check the class, and make it known here and to Hydra."""
        kind: type[Any] = decorated if "__dataclass_fields__" in vars(decorated) else dataclass(decorated)
        name = getattr(kind, "name", "")
        if not isinstance(name, str) or not re.fullmatch(NAME_OF_CHOICE, name):
            raise ValueError(f'{kind.__name__}: give it a name, such as name: str = "mine", of letters, digits and _')
        builds = getattr(kind, "builds", "")
        if isinstance(builds, str) and not re.fullmatch(r"[\w.]+\.\w+", builds):
            raise ValueError(f'{group}={name}: {kind.__name__} needs builds: ClassVar[str] = "module.Name"')
        _check_arguments(kind, f"{group}={name}", group)
        choices = CHOICES.setdefault(group, {})
        other = choices.get(name, kind)
        if (other.__module__, other.__qualname__) != (kind.__module__, kind.__qualname__):
            files = [getattr(sys.modules[choice.__module__], "__file__", None) for choice in (other, kind)]
            raise ValueError(f"{group}={name} is registered twice: in {files[0]} and in {files[1]}; rename one")
        kind.is_base = is_base
        kind.is_absent = False  # `engine.checkpoint.recorded` makes classes for choices that no loaded plugin has
        choices[name] = kind
        package = f"{group}.{name}" if getattr(kind, "is_one_of_several", False) else group
        ConfigStore.instance().store(name, kind, f"schema/{group}", package)
        if not is_base and not (CONFIGS / group / f"{name}.yaml").is_file():
            ConfigStore.instance().store(name, kind, group, package)
        declared_in.cache_clear()
        return decorated

    return register


def _check_arguments(kind: type[Any], choice: str, group: str) -> None:
    """ValueError: a key of the choice's own has the name of an argument that its group's contract gives."""
    base = next((parent for parent in kind.__mro__ if "called_with" in vars(parent)), kind)
    reserved = {*getattr(base, "called_with", ())} - {entry.name for entry in fields(base)}
    for entry in fields(kind):
        if entry.name in reserved and entry.metadata.get("is_argument", True):
            raise ValueError(
                f"{choice}: its key {entry.name} has the name of an argument that every {group} is given: rename "
                f"it, or declare it by key(…, is_argument=False), which does not hand it on"
            )


def group(used: tuple[str, ...] = ()) -> Any:
    """A group of keys (norm, body, …) whose `name` selects one dataclass of several: those registered by `choice`.

    These are subclasses of the field's type. An option that the selected dataclass does not have is an error; one
    dataclass for all would ignore it. `used`: the only options that --help lists, of a command for which the others do
    not matter.
    """
    return field(default=MISSING, metadata={"is_group": True, "used": used})


def several(*, free_on_resume: bool = False) -> Any:
    """A group that may have several choices: {name: choice}, in this order. Its type is dict[str, base class]."""
    return field(default_factory=dict, metadata={"is_group": True, "is_list": True, "free_on_resume": free_on_resume})


def chosen(group: str, value: Any) -> Iterable[tuple[str, Any]]:
    """("norm", choice), or ("scores.NAME", choice) of each of `several`: where its keys are."""
    if isinstance(value, dict):
        return [(f"{group}.{name}", choice) for name, choice in value.items()]
    return [(group, value)]


def bases_of(schema: type[Keys]) -> dict[str, type[Any]]:
    """{group: base class of its choices}"""
    groups = [entry for entry in fields(schema) if "is_group" in entry.metadata]
    hints = get_type_hints(schema) if groups else {}
    return {
        group.name: get_args(hints[group.name])[1] if "is_list" in group.metadata else hints[group.name]
        for group in groups
    }


def groups_of(schema: type[Keys]) -> dict[str, dict[str, type[Any]]]:
    """{group: {name: dataclass}}"""
    return {
        group: {name: kind for name, kind in CHOICES.get(group, {}).items() if issubclass(kind, base)}
        for group, base in bases_of(schema).items()
    }


class Declared(NamedTuple):
    """A key's type, and the rules for its values (see `key`)."""

    kind: Any
    metadata: Mapping[str, Any]


@cache
def declared_in(schema: type[Keys], prefix: str = "") -> dict[str, Declared]:
    """The keys of a schema, its groups, and all their alternatives; a type that differs between these is Any."""
    keys: dict[str, Declared] = {}
    hints = get_type_hints(schema)
    groups = groups_of(schema)
    for entry in fields(schema):
        name = prefix + entry.name
        of_alternatives = []  # of a group: the keys of each choice; of a dataclass as a key: its keys
        for choice, kind in groups.get(entry.name, {"": hints[entry.name]}).items():
            if isinstance(kind, type) and is_dataclass(kind):
                place = f"{name}.{choice}." if "is_list" in entry.metadata else f"{name}."
                of_alternatives.append(declared_in(kind, place))
        for below in of_alternatives:
            for key, declared in below.items():
                is_same = keys.get(key, declared).kind == declared.kind
                keys[key] = declared if is_same else declared._replace(kind=Any)
        if entry.name in groups or not of_alternatives:
            keys[name] = Declared(hints[entry.name], entry.metadata)
    return keys


def alternative(group_name: str, alternatives: Mapping[str, type[T]], name: Any) -> type[T]:
    """The dataclass selected by `name`. ValueError for an unknown name."""
    if name not in alternatives:
        raise ValueError(f"{group_name}.name={name}: expected one of {', '.join(alternatives)}")
    return alternatives[name]


def complete_and_check(config: Keys, prefix: str = "") -> None:
    """Check every value against its key's rules, then each dataclass by its methods `check` and `complete`, if any.

    `complete` fills in values that follow from others. If a key has the choice "false", the boolean that Hydra and YAML
    make of it becomes the word again.

    ValueError: names the key, its value and the expected values.
    """
    for entry in fields(config):
        name = prefix + entry.name
        value = getattr(config, entry.name)
        if str(value).lower() == "false" and "false" in (entry.metadata.get("one_of") or ()):
            value = "false"
            setattr(config, entry.name, value)
        if "is_group" in entry.metadata:
            for place, choice in chosen(name, value):
                if choice is None:
                    alternative(place, groups_of(type(config))[entry.name], None)  # which refuses it
                if choice.is_absent:
                    continue
                if choice.name != type(choice).name:
                    raise ValueError(
                        f"{place}.name={choice.name} does not change the {name}: give {name}={choice.name}"
                    )
                complete_and_check(choice, f"{place}.")
        elif isinstance(value, Keys):
            complete_and_check(value, f"{name}.")
        else:
            _check_value(name, value, entry, type(config))
    for method in ("check", "complete"):
        getattr(config, method, lambda: None)()


def expected(declared: Declared) -> str:
    """The type of a key and the values that it allows, in words: a whole number above 0."""
    kind, bounds = declared
    word = bounds.get("word")
    one_of = bounds.get("one_of")
    entries = bounds.get("entries")
    if word:
        without_word = Declared(int, {**bounds, "word": None})
        return f"{word}, or {expected(without_word)}" if bounds.get("is_bounded") else f"{word}, true or false"
    if bounds.get("names"):
        return "a name or a list of different names, such as [A,B]"
    if isinstance(kind, UnionType):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
    lists = 0
    while get_origin(kind) is list:
        (kind,) = get_args(kind)
        lists += 1
    above = bounds.get("above")
    limits = {"above {}": above, "{} or more": bounds.get("least"), "at most {}": bounds.get("most")}
    within = ", ".join(text.format(limit) for text, limit in limits.items() if limit is not None)
    if entries is not None:
        text = f"{len(entries)} numbers: {', '.join(entries)}"
        return f"{text}, each {within}" if within else text
    type_texts = {bool: "true or false", int: "a whole number", float: "a number", Any: "a text or a list"}
    text = type_texts.get(kind, "a text") if one_of is None else f"one of {', '.join(map(str, one_of))}"
    if within:
        text += f" {within}" if above is not None else f", {within}"
    return ("", "a list, each ", "a list of lists, each ")[lists] + text


def _check_value(name: str, value: Any, entry: Field[Any], owner: type[Keys]) -> None:
    """ValueError, which says what the key expects: its rules do not allow the value."""
    rules = entry.metadata
    if rules.get("written") and str(value).lower() in ("true", "false", "yes", "no", "on", "off"):
        raise ValueError(
            f"{name}={value}: expected the path to write to, such as {name}=OUT; left out, nothing is written"
        )
    number_count = len(tree_leaves(value)) if rules.get("is_bounded") else 0
    if number_count > MOST_NUMBERS:
        raise ValueError(f"{name} has {number_count:,} numbers: expected at most {MOST_NUMBERS:,}")
    if not _is_allowed(value, rules):
        declared = Declared(get_type_hints(owner)[entry.name], rules)
        raise ValueError(f"{name}={'null' if value is None else value}: expected {expected(declared)}")


def _is_allowed(value: Any, rules: Mapping[str, Any]) -> bool:
    """Whether a key with these rules may have a value, whose type fits."""
    word = rules.get("word")
    one_of = rules.get("one_of")
    if value is None:
        return rules.get("may_be_null", True)
    if one_of is not None:
        values = value if isinstance(value, list) else [value]
        return bool(values) and all(single in one_of for single in values)
    if rules.get("names"):
        return bool(as_list(value))
    if word is not None and value == word:
        return True
    if not rules.get("is_bounded"):
        return word is None or type(value) is bool
    if word is not None and type(value) is not int:
        return False
    numbers = tree_leaves(value)
    above = rules.get("above", -math.inf)
    least = rules.get("least", -math.inf)
    most = rules.get("most", math.inf)
    is_complete = len(value) == len(rules["entries"]) if "entries" in rules else bool(numbers)
    return is_complete and all(above < number < math.inf and least <= number <= most for number in numbers)


def as_list(value: Any) -> list[str]:
    """A key of `names` as a list; [] for any other value."""
    names = value if isinstance(value, list) else [value]
    are_different = len({*map(str, names)}) == len(names)
    return names if are_different and all(isinstance(name, str) for name in names) else []


def override(name: str, path: object) -> str:
    """`name=path` as a Hydra override, quoted for Hydra if needed. Quote the result for the shell as well."""
    return f"{name}={quoted(str(path))}"


def quoted(text: str) -> str:
    """A text as Hydra reads it back, in quotes if it would read something else, such as a number."""
    plain = re.fullmatch(r"(?!(null|true|false|inf|nan)\Z)(\.{0,2}/|[a-z_])[\w/.+-]*", text, re.ASCII | re.IGNORECASE)
    return text if plain else QuotedString(without_interpolation(text), Quote.double).with_quotes()


def named_after(overrides: Sequence[str], digest: bool = False) -> str:
    """A file name that lists key=value overrides: optim.lr=0.1,seed=0.

    Brackets and quotes are left out, and a slash becomes a dash, so that few names need quotes. A name that is too
    long, or one with `digest`, ends with a part of the overrides' hash.
    """
    text = ",".join(overrides)
    name = re.sub(r"[^\w.+=,-]+", "-", re.sub(r"[][{}()'\"\s\\]", "", text))
    if digest or len(name.encode()) > LONGEST_NAME:
        hashed = hashlib.sha256(text.encode()).hexdigest()[:8]
        name = f"{name.encode()[: LONGEST_NAME - 9].decode(errors='ignore')}-{hashed}"
    return name


def deciding(overrides: Iterable[str], config: Keys) -> list[str]:
    """The overrides that a resumed run may not change: of groups, and of keys that are not `free_on_resume`.

    Hydra's own, such as hydra.verbose=true, change no run.
    """
    free = {name for name, _, entry in leaves(config) if entry.metadata.get("free_on_resume")}
    ours = (override for override in overrides if not re.match("[+]*hydra[./]", override))
    return [override for override in ours if override.partition("=")[0].lstrip("+") not in free]


def without_interpolation(text: str) -> str:
    """Escape every ${ for OmegaConf, which would replace it by another key's value, or an environment variable's."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
