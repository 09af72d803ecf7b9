"""Messages about a wrong command: one line that names the fix."""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from engine.configuration import words as words_of_others
from engine.configuration.choices import choices, groups_in, no_such_choice
from engine.schema.commands import RUNS
from engine.schema.keys import Keys, declared_in, expected, groups_of

OF_TORCHRUN = re.compile(r"--(nproc|nnodes|node[-_]rank|rdzv|master|standalone|max[-_]restarts)")
QUOTE = "quote lists and mappings for the shell, as in 'key=[a, b]'"


@contextmanager
def explained(command: str, schema: type[Keys], words: Sequence[str]) -> Iterator[None]:
    """Context that turns Hydra's and OmegaConf's errors about a command's overrides into a one-line ValueError."""
    groups = groups_in(command)
    for word in words:  # values that fail late, or with a message about something else
        name, _, value = word.partition("=")
        keys = {*declared_in(schema), *groups}
        if name in keys and (meant := words_of_others.meant(name, _unquoted(value), keys)):
            raise ValueError(f"{name}={_unquoted(value)}: {meant[1]}{_needed(meant[0], words, schema)}")
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(_explanation(error, groups, words, schema)) from error


def refuse_options(words: Sequence[str], schema: type[Keys]) -> None:
    """Raise ValueError for words with dashes, and for Hydra's options: here Hydra only composes the configuration."""
    for word, following in zip(words, [*words[1:], "-"], strict=False):
        if OF_TORCHRUN.match(word):
            raise ValueError(f"{word} is an option of torchrun: give it before the program, as in torchrun {word} …")
        if word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            value = value if equals or following.startswith("-") or "=" in following else following
            such = "".join(f", such as {each}={value or '…'}" for each in _nearest(name, schema)[:1])
            meant = words_of_others.meant(name, value, {*declared_in(schema)})
            raise ValueError(f"{word}: keys have no dashes; {meant[1] if meant else f'give key=value{such}'}")
        if word.startswith(("hydra.", "hydra/")):
            raise ValueError(f"{word}: options of Hydra have no effect here; leave it out")


def _explanation(error: Exception, groups: list[str], words: Sequence[str], schema: type[Keys]) -> str:
    for word in words:
        name, equals, value = word.lstrip("+").partition("=")
        if word.startswith("~"):
            return f"{word}: leave {word[1:]} out to keep its default"
        if not equals or name != name.strip() or not name:
            if meant := words_of_others.meant(words_of_others.ALONE, word, {*declared_in(schema), *groups}):
                return f"{word}: expected key=value; {meant[1]}"
            spaces = "expected key=value without spaces; --help lists the keys"
            return f"{word or 'an empty argument'}: {QUOTE if word.endswith((',', ']', '}')) else spaces}"
        if name in groups and "," not in value and not value.startswith(("[", "{")):
            if word.startswith("+"):
                return f"{word}: leave out the +: {word.lstrip('+')}"
            if (choice := value.removesuffix(".yaml")) not in (fitting := choices(name, schema)):
                of = [task for task, run in RUNS.items() if choice in choices(name, run)]
                if of and schema in RUNS.values():
                    return f"{word} is for {of[0]}: train_seg.py trains segmentation, train_imagenet.py classification"
                return str(no_such_choice(name, choice, fitting))
    if several := re.match("Ambiguous value for argument '(.+?)=(.*)'", str(error)):
        return _about_value(several[1], several[2], schema)
    if isinstance(error, OverrideParseException):
        return f"{error.override}: Hydra cannot read the value; {QUOTE}"
    reason = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    about, key = re.split(r"\n    full_key|\nTo append", str(reason))[0], getattr(reason, "full_key", None) or ""
    unknown = re.match(r"Could not override '(.+)'\.", str(error))
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    if unknown or re.match("Key '.+' (?:is )?not in", about):
        return _unknown(unknown[1] if unknown and unknown[1] not in groups else key, given, groups, schema)
    if below := [each for each in declared_in(schema) if each.startswith(f"{key}.")]:
        return f"{key}: expected one of the keys {', '.join(below[:5])}"
    if isinstance(reason, ValidationError) and key in given and key in declared_in(schema):
        return _about_value(key, _unquoted(given[key]), schema)
    _, of_resolver, own = about.partition("ValueError raised while resolving interpolation: ")
    # A resolver, such as ${per_process:…}, counts processes: the key is not to blame.
    return own if of_resolver else f"{key}: " * bool(key) + " ".join(about.split())


def _about_value(key: str, value: str, schema: type[Keys]) -> str:
    """The message for a value of a wrong type, or for several values."""
    several, declared = "," in value and not value.startswith(("[", "(", "{")), declared_in(schema).get(key)
    if declared is None or key in groups_of(schema):  # a group
        return f"{key}={value}: expected one choice; with -m the command runs once for each"
    is_list = declared.kind is Any or "list[" in str(declared.kind)
    if is_list and not value.startswith(("[", "(", "{")) and value not in ("", "null"):
        entries = 1 if several else len(declared.metadata.get("entries") or [""])
        listed = f"; give {key}=[{','.join([value] * entries)}]"
    else:
        listed = "; with -m the command runs once for each of several" if several else ""
    return f"{key}={value}: expected {expected(declared)}{listed}"


def _unknown(name: str, given: dict[str, str], groups: list[str], schema: type[Keys]) -> str:
    """The message for a key that the command does not have, and for all like it if the fix is known for each."""
    keys = {*declared_in(schema), *groups}
    if name in keys:
        group = name.partition(".")[0]
        having = [each for each, own in groups_of(schema)[group].items() if name in declared_in(own, f"{group}.")]
        return f"{name} is for {' and '.join(f'{group}={each}' for each in having)}; another {group} is chosen"
    words = [f"{key}={value}" for key, value in given.items()]
    unknown = {key: given[key] for key in given if key not in keys and not any(k.startswith(f"{key}.") for k in keys)}
    meant = {key: words_of_others.meant(key, _unquoted(value), keys) for key, value in unknown.items()}
    if len(meant) > 1 and name in meant and all(each is not None and each[0] for each in meant.values()):
        answers = " ".join(each[0] for each in meant.values() if each is not None and each[0])
        return f"there are no such keys as {' and '.join(meant)}; give {answers}{_needed(answers, words, schema)}"
    value = given.get(name, "…")
    own = words_of_others.meant(name, _unquoted(value), keys)
    if own is not None:
        return f"{name}={value}: there is no such key; {own[1]}{_needed(own[0], words, schema)}"
    nearest = " or ".join(f"{key}={value}" for key in _nearest(name, schema))
    return f"{name}={value}: there is no such key; {f'give {nearest}' if nearest else '--help lists them all'}"


def _needed(give: str | None, words: Sequence[str], schema: type[Keys]) -> str:
    """What must also be given, if only some choices of a group have a key."""
    for key in words_of_others.keys_of(give or ""):
        group, _, own = key.partition(".")
        alternatives = groups_of(schema).get(group, {}) if own else {}
        having = [each for each, keys in alternatives.items() if key in declared_in(keys, f"{group}.")]
        chosen = {f"{group}={each}" for each in having} & {*words, *(give or "").split()}
        if having and len(having) < len(alternatives) and not chosen:
            return f", with {' or '.join(f'{group}={each}' for each in having)}"
    return ""


def _unquoted(value: str) -> str:
    """A value without the quotes that keep it a text for Hydra."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def _nearest(name: str, schema: type[Keys]) -> list[str]:
    """Keys with this last part; else the most similar, first in its group."""
    known = [key for key in declared_in(schema) if not key.endswith(".name")]
    group, _, last = name.replace("-", "_").rpartition(".")
    if same := [key for key in known if key.rpartition(".")[2] == last]:
        return same
    for keys in ([key for key in known if key.rpartition(".")[0] == group], known):
        parts = {key.rpartition(".")[2]: key for key in keys}
        if alike := difflib.get_close_matches(last, parts, n=1):
            return [parts[alike[0]]]
    return []
