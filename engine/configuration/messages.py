"""Messages about a wrong command: one line that names the fix."""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from engine.configuration.choices import choices, groups_in, no_such_choice
from engine.schema.commands import RUNS, SYNONYMS
from engine.schema.keys import Keys, groups_of, types_in

OF_TORCHRUN = re.compile(r"--(nproc|nnodes|node[-_]rank|rdzv|master|standalone|max[-_]restarts)")
QUOTE = "quote lists and mappings for the shell, as in 'key=[a, b]'"


@contextmanager
def explained(command: str, schema: type[Keys], words: Sequence[str]) -> Iterator[None]:
    """Context that turns Hydra's and OmegaConf's errors about a command's overrides into a one-line ValueError."""
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(_explanation(error, groups_in(command), words, schema)) from error


def refuse_options(words: Sequence[str], schema: type[Keys]) -> None:
    """Raise ValueError for words with dashes, and for Hydra's options: here Hydra only composes the configuration."""
    for word in words:
        if OF_TORCHRUN.match(word):
            raise ValueError(f"{word} is an option of torchrun: give it before the program, as in torchrun {word} …")
        if word.startswith("-"):
            name, _, value = word.lstrip("-").partition("=")
            nearest = _nearest(name.replace("-", "_"), schema)
            meant = f", such as {nearest[0]}={value or '…'}" if nearest else ""
            raise ValueError(f"{word}: keys have no dashes; give key=value{meant}")
        if word.startswith(("hydra.", "hydra/")):
            raise ValueError(f"{word}: options of Hydra have no effect here; leave it out")


def _explanation(error: Exception, groups: list[str], words: Sequence[str], schema: type[Keys]) -> str:
    for word in words:
        name, equals, value = word.lstrip("+").partition("=")
        if word.startswith("~"):
            return f"{word}: leave {word[1:]} out to keep its default"
        if not equals or name != name.strip() or not name:
            expected = "expected key=value without spaces; --help lists the keys"
            return f"{word or 'an empty argument'}: {QUOTE if word.endswith((',', ']', '}')) else expected}"
        if name in groups and "," not in value and not value.startswith(("[", "{")):
            if word.startswith("+"):
                return f"{word}: leave out the +: {word.lstrip('+')}"
            if (choice := value.removesuffix(".yaml")) not in (fitting := choices(name, schema)):
                of = [task for task, run in RUNS.items() if choice in choices(name, run)]
                if of and schema in RUNS.values():
                    return f"{word} is for {of[0]}: train_seg.py trains segmentation, train_imagenet.py classification"
                return str(no_such_choice(name, choice, fitting))
    if isinstance(error, OverrideParseException):
        return f"{error.override}: Hydra cannot read the value; {QUOTE}"
    reason = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    about, key = re.split(r"\n    full_key|\nTo append", str(reason))[0], getattr(reason, "full_key", None) or ""
    unknown = re.match(r"Could not override '(.+)'\.", str(error))
    if unknown or re.match("Key '.+' (?:is )?not in", about):
        name = unknown[1] if unknown and unknown[1] not in groups else key
        values = (word.partition("=")[2] for word in words if word.lstrip("+").startswith(f"{name}="))
        return _unknown(name, next(values, "…"), schema)
    if below := [each for each in types_in(schema) if each.startswith(f"{key}.")]:
        return f"{key}: expected one of the keys {', '.join(below[:5])}"
    _, of_resolver, own = about.partition("ValueError raised while resolving interpolation: ")
    # A resolver, such as ${per_process:…}, counts processes: the key is not to blame.
    return own if of_resolver else f"{key}: " * bool(key) + " ".join(about.split())


def _unknown(name: str, value: str, schema: type[Keys]) -> str:
    """The message for a key that the command does not have."""
    if name in types_in(schema):
        group = name.partition(".")[0]
        having = [each for each, keys in groups_of(schema)[group].items() if name in types_in(keys, f"{group}.")]
        return f"{name} is for {' and '.join(f'{group}={each}' for each in having)}; another {group} is chosen"
    meant = " or ".join(f"{key}={value}" for key in _nearest(name, schema))
    return f"{name}={value}: there is no such key; {f'give {meant}' if meant else '--help lists them all'}"


def _nearest(name: str, schema: type[Keys]) -> list[str]:
    """Keys with this last part; else our key for another tool's name; else the most similar, first in its group."""
    known = [key for key in types_in(schema) if not key.endswith(".name")]
    group, _, last = name.rpartition(".")
    if same := [key for key in known if key.rpartition(".")[2] == last]:
        return same
    if meant := [key for key in SYNONYMS.get(last, ()) if key in known]:
        return meant[:1]
    for keys in ([key for key in known if key.rpartition(".")[0] == group], known):
        parts = {key.rpartition(".")[2]: key for key in keys}
        if alike := difflib.get_close_matches(last, parts, n=1):
            return [parts[alike[0]]]
    return []
