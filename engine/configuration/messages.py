"""Messages about a wrong command: one line that names the fix."""

import difflib
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException, ValidationError

from engine.configuration import words as words_of_others
from engine.configuration.arguments import NO_KEY, NO_VALUE, SPACE, Argument, arguments, unquoted
from engine.configuration.choices import choices, exists, groups_in, no_such
from engine.configuration.texts import fits
from engine.schema.commands import RUNS
from engine.schema.keys import Declared, Keys, declared_in, expected, groups_of

OF_TORCHRUN = re.compile(r"--(nproc|nnodes|node[-_]rank|rdzv|master|standalone|max[-_]restarts)")
QUOTE = "quote lists and mappings for the shell, as in 'key=[a, b]'"
CHOICE = re.compile(r"(?!null$)[\w/. -]+")
SOME = "…"  # stands for a value
HELP = "--help lists the keys"


class Answer(NamedTuple):
    """What to give instead of an argument."""

    argument: Argument
    give: list[str]  # our key=value
    say: str  # the same as a sentence, or that there is no such thing


@contextmanager
def explained(command: str, schema: type[Keys], words: Sequence[str]) -> Iterator[None]:
    """Context that turns Hydra's and OmegaConf's errors about a command's overrides into a one-line ValueError."""
    groups = list(groups_in(command))
    _refuse_words_of_others(words, schema, groups)
    try:
        yield
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ValueError(_explanation(error, groups, words, schema)) from error


def refuse_options(command: str, schema: type[Keys], words: Sequence[str]) -> None:
    """Raise ValueError for words with dashes, and for Hydra's options: here Hydra only composes the configuration."""
    for word in words:
        if OF_TORCHRUN.match(word):
            raise ValueError(f"{word} is an option of torchrun: give it before the program, as in torchrun {word} …")
        if word.startswith(("hydra.", "hydra/")):
            raise ValueError(f"{word}: options of Hydra have no effect here; leave it out")
    if any(word.startswith("-") for word in words):
        _refuse_words_of_others(words, schema, list(groups_in(command)))


def _refuse_words_of_others(words: Sequence[str], schema: type[Keys], groups: list[str]) -> None:
    """Raise ValueError if a command has words that are not its keys, choices or values: one message about all."""
    found = arguments(words, {*declared_in(schema), *groups})
    answers = [answer for each in found if (answer := _answer(each, schema, groups)) is not None]
    if not answers:
        return
    gives: dict[str, str] = {}
    for answer in answers:
        for pair in answer.give:  # of two values for a key, one that was given counts more than one that is suggested
            key, _, value = pair.partition("=")
            gives[key] = pair if key not in gives or value == answer.argument.value else gives[key]
    needed = _needed([*gives.values()], words, schema)
    if len(answers) == 1:
        ((text, _, _, fault), _, say), none = answers[0], answers[0].say.startswith("there is none")
        raise ValueError(f"{text}: {f'{fault}; ' if fault and not none else ''}{say}{needed}")
    given = [each.argument.title for each in answers if each.give]
    no_keys = all(each.argument.fault == NO_KEY for each in answers)
    start = f"there are no such keys as {' and '.join(given)}; " if no_keys else f"{' and '.join(given)}: "
    said: dict[str, list[str]] = {}
    for each in answers:
        if not each.give:
            said.setdefault(each.say, []).append(each.argument.title)
    advice = [f"{start}give {' '.join(gives.values())}{needed}"] * bool(given)
    raise ValueError("; ".join([*advice, *(f"{' and '.join(titles)}: {say}" for say, titles in said.items())]))


def _answer(argument: Argument, schema: type[Keys], groups: list[str]) -> Answer | None:
    """What to give instead of an argument; None if it may be right, or if Hydra's error says more."""
    _, name, value, fault = argument
    declared = declared_in(schema)
    keys = {*declared, *groups}
    nearest = [] if name in keys else _nearest(name, value, schema)
    is_ours = any(key.rpartition(".")[2] == name.rpartition(".")[2].lower() for key in nearest)
    meant = words_of_others.meant(name, value, keys, patterns=not is_ours)
    if fault == NO_VALUE and meant is None:
        meant = words_of_others.meant(value, "", keys)
    if meant:
        own = re.split(r" (?=[\w.]+=)", meant[0]) if meant[0] else []  # values may have spaces
        parted = [pair.partition("=") for pair in own]
        mended = [_instead(key, text, schema, groups) or ([f"{key}={text}"], "") for key, _, text in parted]
        give = [pair for pairs, _ in mended for pair in pairs]
        problems = [f"{pair}: {say}" for pair, (pairs, say) in zip(own, mended, strict=True) if not pairs]
        return Answer(argument, give, problems[-1] if problems else f"give {' '.join(give)}" if give else meant[1])
    if name in keys:
        if instead := _instead(name, value, schema, groups):
            return Answer(argument, *instead)
        return Answer(argument, [_pair(name, value, schema)], f"give {_pair(name, value, schema)}") if fault else None
    if fault in ("", NO_VALUE) or any(declared[each].kind is Any for each in declared if name.startswith(f"{each}.")):
        return None
    nearest = [_pair(key, value, schema) for key in nearest]
    say = f"give {' or '.join(nearest)}" if nearest else "--help lists them all" if fault == NO_KEY else HELP
    return Answer(argument, nearest if len(nearest) == 1 else [], say)


def _instead(name: str, value: str, schema: type[Keys], groups: list[str]) -> tuple[list[str], str] | None:
    """What to give instead of a value that our key cannot take, and a sentence about it.

    None if the key takes it, or if only Hydra's error can say more.
    """
    if name in groups:
        choice = value.removesuffix(".yaml")
        if not CHOICE.fullmatch(choice) or exists(name, choice):
            return None
        return [], no_such(name, choice, choices(name, schema))
    declared = declared_in(schema).get(name)
    if declared is None or (likely := _likely(value, declared)) is None:
        return None
    return [f"{name}={likely}"], _about_value(name, value, schema)


def _likely(value: str, declared: Declared) -> str | None:
    """A value that a key takes, if it is probably meant by one that it cannot take."""
    likely = [*words_of_others.slips(value)]
    is_list = declared.kind is Any or "list[" in str(declared.kind)
    if is_list and value not in ("", "null") and not value.startswith(("[", "(", "{")):
        entries = 1 if "," in value else len(declared.metadata.get("entries") or [""])
        likely.append(f"[{','.join([value] * entries)}]")
    if not likely or value == SOME or fits(value, declared):
        return None
    return next((each for each in likely if fits(each, declared)), None)


def _explanation(error: Exception, groups: list[str], words: Sequence[str], schema: type[Keys]) -> str:
    for word in words:
        name, equals, value = word.lstrip("+").partition("=")
        if word.startswith("~"):
            return f"{word}: leave {word[1:]} out to keep its default"
        if not equals or name != name.strip() or not name:
            spaces = f"{SPACE}; {HELP}"
            return f"{word or 'an empty argument'}: {QUOTE if word.endswith((',', ']', '}')) else spaces}"
        if name in groups and "," not in value and not value.startswith(("[", "{")):
            if word.startswith("+"):
                return f"{word}: leave out the +: {word.lstrip('+')}"
            if (choice := value.removesuffix(".yaml")) not in (fitting := choices(name, schema)):
                of = [task for task, run in RUNS.items() if choice in choices(name, run)]
                if of and schema in RUNS.values():
                    return f"{word} is for {of[0]}: train_seg.py trains segmentation, train_imagenet.py classification"
                return f"{word}: {no_such(name, choice, fitting)}"
    if several := re.match("Ambiguous value for argument '(.+?)=(.*)'", str(error)):
        return f"{several[1]}={several[2]}: {_about_value(several[1], several[2], schema)}"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: Hydra cannot read the value; {QUOTE}"
    reason = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    about, key = re.split(r"\n    full_key|\nTo append", str(reason))[0], getattr(reason, "full_key", None) or ""
    unknown = re.match(r"Could not override '(.+)'\.", str(error))
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    if unknown or re.match("Key '.+' (?:is )?not in", about):
        return _unknown(unknown[1] if unknown and unknown[1] not in groups else key, schema, groups)
    if below := [each for each in declared_in(schema) if each.startswith(f"{key}.")]:
        return f"{key}: expected one of the keys {', '.join(below[:5])}"
    if isinstance(reason, ValidationError) and key in given and key in declared_in(schema):
        value = unquoted(given[key])
        return f"{key}={value}: {_about_value(key, value, schema)}"
    _, of_resolver, own = about.partition("ValueError raised while resolving interpolation: ")
    # A resolver, such as ${per_process:…}, counts processes: the key is not to blame.
    return own if of_resolver else f"{key}: " * bool(key) + " ".join(about.split())


def _about_value(key: str, value: str, schema: type[Keys]) -> str:
    """What is expected instead of a value of a wrong type, or of several values."""
    declared = declared_in(schema).get(key)
    if declared is None or key in groups_of(schema):  # a group
        return "expected one choice; with -m the command runs once for each"
    likely = _likely(value, declared) or ""
    is_swept = "," in value and not any(each.startswith(("[", "(", "{")) for each in (value, likely))
    several = "; with -m the command runs once for each of several" * is_swept
    return f"expected {expected(declared)}{several}{f'; give {key}={likely}' if likely else ''}"


def _unknown(name: str, schema: type[Keys], groups: list[str]) -> str:
    """The message for a key that the chosen alternatives do not have."""
    if name in declared_in(schema):
        group = name.partition(".")[0]
        having = [each for each, own in groups_of(schema)[group].items() if name in declared_in(own, f"{group}.")]
        return f"{name} is for {' and '.join(f'{group}={each}' for each in having)}; another {group} is chosen"
    answer = _answer(Argument(name, name, "", NO_KEY), schema, groups)
    return f"{name}={SOME}: {NO_KEY}; {answer.say if answer else '--help lists them all'}"


def _needed(give: Sequence[str], words: Sequence[str], schema: type[Keys]) -> str:
    """What must also be given, if only some choices of a group have a key."""
    for key in (pair.partition("=")[0] for pair in give):
        group, _, own = key.partition(".")
        alternatives = groups_of(schema).get(group, {}) if own else {}
        having = [each for each, keys in alternatives.items() if key in declared_in(keys, f"{group}.")]
        chosen = {f"{group}={each}" for each in having} & {*words, *give}
        if having and len(having) < len(alternatives) and not chosen:
            return f", with {' or '.join(f'{group}={each}' for each in having)}"
    return ""


def _pair(key: str, value: str, schema: type[Keys]) -> str:
    """key=value, also of an option without a value."""
    declared = declared_in(schema).get(key)
    return f"{key}={value or ('true' if declared is not None and declared.kind is bool else SOME)}"


def _nearest(name: str, value: str, schema: type[Keys]) -> list[str]:
    """Keys with this last part that take the value; else the most similar one of the group, or of all."""
    declared = declared_in(schema)
    known = [key for key in declared if not key.endswith(".name")]
    group, _, last = name.lower().replace("-", "_").rpartition(".")
    found = [[key for key in known if key.rpartition(".")[2] == last]]
    for keys in ([key for key in known if key.rpartition(".")[0] == group], known):
        parts = {key.rpartition(".")[2]: key for key in keys}
        found.append([parts[part] for part in difflib.get_close_matches(last, parts, n=1, cutoff=0.75)])
    fitting = ([key for key in keys if not value or fits(value, declared[key])] for keys in found)
    return next(filter(None, fitting), [])
