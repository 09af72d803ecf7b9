"""Messages about a wrong command: one line that names the fix."""

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from engine.configuration import words as words_of_others
from engine.configuration.arguments import NO_KEY, NO_VALUE, SPACE, Argument, arguments, unquoted
from engine.configuration.choices import choices, groups_in
from engine.configuration.config import RUNS
from engine.configuration.texts import HYDRA_S, fits
from engine.configuration.words import PLUGIN
from engine.process.plugins import LOADED
from engine.schema.keys import CHOICES, Declared, Keys, declared_in, expected, groups_of

OF_TORCHRUN = re.compile(r"--(nproc|nnodes|node[-_]rank|rdzv|master|standalone|max[-_]restarts)")
QUOTE = "quote lists and mappings for the shell, as in 'key=[a, b]'"
SOME = "…"  # stands for a value
HELP = "--help lists the keys"
NONE = "there is none"  # how words.yaml says it


class Answer(NamedTuple):
    """What to give instead of an argument."""

    argument: Argument
    give: list[str]  # our key=value
    say: str  # the same as a sentence, or that there is no such thing


class Messages:
    """What a command with these keys and groups answers to words that it cannot take.

    It is asked after an error. Words that the command takes are right, whatever other programs mean by them.
    """

    def __init__(self, command: str, schema: type[Keys]):
        self.schema, self.declared, self.groups = schema, declared_in(schema), groups_in(command)
        self.keys = {*self.declared, *self.groups}

    def about(self, words: Sequence[str], error: Exception) -> str:
        """The message about words that caused an error."""
        if launchers := [word for word in words if OF_TORCHRUN.match(word)]:
            return (
                f"{launchers[0]} is an option of torchrun: give it before the program, as in torchrun {launchers[0]} …"
            )
        ours = [word for word in words if not ("=" in word and HYDRA_S.match(word.lstrip("+~").partition("=")[0]))]
        said = [self._of_others(ours, error), *map(self._of_form, ours)]
        text = f"override {own}" if (own := getattr(error, "override", None)) else str(error)
        named = re.search(r"(?:override|parameters|argument) '?[+]*([^'=\s]+)", text)  # as Hydra names a word
        key = getattr(error, "full_key", None) or (named and named[1])
        word = next((each for each in reversed(words) if each.lstrip("+").partition("=")[0] == key), "")
        return next(filter(None, said), None) or self._of_error(error, word)

    def _of_others(self, words: Sequence[str], error: Exception) -> str:
        """One message about all words that are not the command's keys, choices or values."""
        found = (each for each in arguments(words, self.keys) if not self._takes(each, error))
        answers = [answer for answer in map(self._answer, found) if answer is not None]
        if not answers:
            return ""
        gives: dict[str, str] = {}
        for answer in answers:
            for pair in answer.give:  # of two values for a key, one that was given counts more than a suggested one
                key, _, value = pair.partition("=")
                gives[key] = pair if key not in gives or value == answer.argument.value else gives[key]
        needed = self._needed([*gives.values()], words)
        if len(answers) == 1:
            ((text, _, _, fault), _, say), none = answers[0], answers[0].say.startswith(NONE)
            return f"{text}: {f'{fault}; ' if fault and not none else ''}{say}{needed}"
        given = [each.argument.title for each in answers if each.give]
        no_keys = all(each.argument.fault == NO_KEY for each in answers)
        start = f"there are no such keys as {' and '.join(given)}; " if no_keys else f"{' and '.join(given)}: "
        said: dict[str, list[str]] = {}
        for each in answers:
            if not each.give:
                said.setdefault(each.say, []).append(each.argument.title)
        advice = [f"{start}give {' '.join(gives.values())}{needed}"] * bool(given)
        return "; ".join([*advice, *(f"{' and '.join(titles)}: {say}" for say, titles in said.items())])

    def _takes(self, argument: Argument, error: Exception) -> bool:
        """Whether the command has an argument's choice, or a key for its value; texts are not known to be right."""
        _, name, value, fault = argument
        if fault or str(error).startswith(f"{name}="):
            return False
        if name in self.groups:
            return not self._about_choice(name, value)
        if (declared := self.declared.get(name)) is None:
            return False
        is_text = declared.kind in (str, str | None, Any) and not declared.metadata.get("one_of")
        return not is_text and fits(value, declared)

    def _answer(self, argument: Argument) -> Answer | None:
        """What to give instead of an argument; None if it may be right, or if the error says more."""
        _, name, value, fault = argument
        nearest = [] if name in self.keys else self._nearest(name, value)
        if (meant := self._meant(argument, nearest)) is not None:
            return Answer(argument, *self._mended(*meant))
        if name in self.keys:
            pair = self._pair(name, value)
            instead = self._instead(name, value) or (([pair], f"give {pair}") if fault else None)
            return instead and Answer(argument, *instead)
        free = tuple(f"{key}." for key, declared in self.declared.items() if declared.kind is Any)  # of any names
        if fault in ("", NO_VALUE) or name.startswith(free):
            return None
        pairs = [self._pair(key, value) for key in nearest]
        say = f"give {' or '.join(pairs)}" if pairs else "--help lists them all" if fault == NO_KEY else HELP
        return Answer(argument, pairs if len(pairs) == 1 else [], say)

    def _meant(self, argument: Argument, nearest: list[str]) -> tuple[str | None, str] | None:
        """What another program means by an argument. Where a key ends so, it does not say that there is none."""
        _, name, value, fault = argument
        same = [key for key in nearest if _last(key) == _last(name).lower()]
        meant = words_of_others.meant(name, value, self.keys, patterns=not same)
        if meant is None and fault == NO_VALUE:
            return words_of_others.meant(value, "", self.keys)
        if meant and LOADED and name in self.groups and meant[0] is None:
            return None  # a plugin may have what is meant: `no_such` lists its choices, too
        if meant is None or name not in map(_last, same):
            return meant
        # A choice's own key counts before another program's word that is spelled alike, so a new choice need not know
        # words.yaml. Not so for data, whose keys all datasets share.
        of_choices = any(key.partition(".")[0] in self.groups.keys() - {"data"} for key in same)
        gives = {_last(key) for key in words_of_others.keys_of(meant[0] or "")}
        if meant[0] is None and any(key in meant[1] for key in same):
            return meant  # it says what our key is, such as a share of something else
        return None if meant[1].startswith(NONE) or of_choices and name not in gives else meant

    def _mended(self, give: str | None, say: str) -> tuple[list[str], str]:
        """Advice from other programs' words, with the values that our keys can take."""
        own = re.split(r" (?=[\w.]+=)", give) if give else []  # values may have spaces
        parted = [pair.partition("=") for pair in own]
        mended = [self._instead(key, text) or ([f"{key}={text}"], "") for key, _, text in parted]
        problems = [f"{pair}: {say}" for pair, (pairs, say) in zip(own, mended, strict=True) if not pairs]
        gives = [pair for pairs, _ in mended for pair in pairs]
        return gives, problems[-1] if problems else f"give {' '.join(gives)}" if gives else say

    def _instead(self, name: str, value: str) -> tuple[list[str], str] | None:
        """What to give instead of a value that our key cannot take, and a sentence about it.

        None if the key takes it, or if only the error of setting it can say more.
        """
        if name in self.groups:
            return ([], say) if (say := self._about_choice(name, value)) else None
        if name not in self.declared or (likely := _likely(value, self.declared[name])) is None:
            return None
        return [f"{name}={likely}"], self._about_value(name, value)

    def _of_form(self, word: str) -> str:
        """The message about a word that is not key=value."""
        name, equals, value = word.lstrip("+").partition("=")
        if word.startswith("~"):
            return f"{word}: leave {word[1:]} out to keep its default"
        if not equals or name != name.strip() or not name:
            spaces = f"{SPACE}; {HELP}"
            return f"{word or 'an empty argument'}: {QUOTE if word.endswith((',', ']', '}')) else spaces}"
        return f"{word}: leave out the +: {word.lstrip('+')}" if word[0] == "+" and name in self.groups else ""

    def _about_choice(self, group: str, choice: str) -> str:
        """What is wrong with a choice; "" if nothing is, or if only Hydra's error can say more."""
        if group in self.declared and "is_list" in self.declared[group].metadata:
            choice = choice.strip("[]")
            if "," in choice:
                return next(filter(None, (self._about_choice(group, each) for each in choice.split(","))), "")
        choice, known = choice.removesuffix(".yaml"), choices(group, self.schema)
        none = ["null"] * (self.groups[group] is None)
        if choice in (*known, *none) or choice.startswith(("[", "{")):
            return ""
        if "," in choice:
            apart = re.sub(r",\s*(?=[\w.]+=|$)", " ", choice).strip()
            spaces = f"expected spaces between arguments, without commas: {group}={apart}"
            return "expected one choice; with -m the command runs once for each" if apart == choice else spaces
        of = [task for task, run in RUNS.items() if choice in choices(group, run)]
        if of and self.schema in RUNS.values():
            return f"it is for {of[0]}: train_seg.py trains segmentation, train_imagenet.py classification"
        said = no_such(group, choice, known)
        return said if of or group not in CHOICES or PLUGIN in said else f"{said}; {PLUGIN}"

    def _of_error(self, error: Exception, word: str) -> str:
        """The message about the value of `word`, or a key, a rule, an interpolation or a file that is wrong."""
        reason = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        given, _, value = word.lstrip("+").partition("=")
        key = getattr(reason, "full_key", None) or given
        if isinstance(reason, (ConfigAttributeError, ConfigKeyError)) and not HYDRA_S.match(key):
            return self._unknown(key)
        if below := [each for each in self.declared if each.startswith(f"{key}.")]:
            return f"{key}: expected one of the keys {', '.join(below[:5])}"
        if isinstance(reason, (HydraException, ValidationError)) and key == given and key in self.declared:
            return f"{key}={unquoted(value)}: {self._about_value(key, unquoted(value))}"
        if isinstance(reason, OmegaConfBaseException) and type(reason.__context__) is ValueError:
            return str(reason.__context__)  # of a resolver, such as ${per_process:…}, which counts processes
        if not isinstance(reason, (HydraException, OmegaConfBaseException)):
            return str(reason)
        about = " ".join(str(reason).partition("\n    full_key")[0].partition("\nTo append to your ")[0].split())
        if "@experiment." in about:
            return f"{about.partition(':')[0]}: the file must begin with the line `# @package _global_`"
        return f"{key}: {about}" if key else about

    def _about_value(self, key: str, value: str) -> str:
        """What is expected instead of a value of a wrong type, or of several values."""
        likely = _likely(value, self.declared[key]) or ""
        is_swept = "," in value and not any(each.startswith(("[", "(", "{")) for each in (value, likely))
        several = "; with -m the command runs once for each of several" * is_swept
        return f"expected {expected(self.declared[key])}{several}{f'; give {key}={likely}' if likely else ''}"

    def _unknown(self, name: str) -> str:
        """The message for a key that does not exist, or that the chosen alternatives do not have."""
        if having := self._having(name):
            group = name.partition(".")[0]
            return f"{name} is for {' and '.join(having)}; another {group} is chosen"
        answer = self._answer(Argument(name, name, "", NO_KEY))
        return f"{name}={SOME}: {NO_KEY}; {answer.say if answer else '--help lists them all'}"

    def _needed(self, give: Sequence[str], words: Sequence[str]) -> str:
        """What must also be given, if only some choices of a group have a key."""
        for key in (pair.partition("=")[0] for pair in give):
            having = self._having(key)
            if having and len(having) < len(groups_of(self.schema)[key.partition(".")[0]]):
                if not {*having} & {*words, *give}:
                    return f", with {' or '.join(having)}"
        return ""

    def _having(self, key: str) -> list[str]:
        """[optim=sgd, …]: the choices of a key's group that have it."""
        group, _, own = key.partition(".")
        alternatives: dict[str, type[Keys]] = groups_of(self.schema).get(group, {}) if own else {}
        return [f"{group}={name}" for name, keys in alternatives.items() if key in declared_in(keys, f"{group}.")]

    def _pair(self, key: str, value: str) -> str:
        """key=value, also of an option without a value."""
        return f"{key}={value or ('true' if key in self.declared and self.declared[key].kind is bool else SOME)}"

    def _nearest(self, name: str, value: str) -> list[str]:
        """Keys with this last part that take the value; else the most similar one of the group, or of all."""
        known = [key for key in self.declared if not key.endswith(".name")]
        group, _, last = name.lower().replace("-", "_").rpartition(".")
        found = [[key for key in known if _last(key) == last]]
        for keys in ([key for key in known if key.rpartition(".")[0] == group], known):
            parts = {_last(key): key for key in keys}
            found.append([parts[part] for part in difflib.get_close_matches(last, parts, n=1, cutoff=0.75)])
        fitting = ([key for key in keys if not value or fits(value, self.declared[key])] for keys in found)
        return next(filter(None, fitting), [])


def _last(key: str) -> str:
    """lr of optim.lr."""
    return key.rpartition(".")[2]


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


def no_such(group: str, choice: str, known: Iterable[str]) -> str:
    """A sentence about a choice that does not exist: its right spelling, the nearest ones, or what there is instead."""
    known = [*known]
    if same := [name for name in known if _letters(name) == _letters(choice)]:
        return f"there is no such {group}; give {group}={same[0]}"
    below = [name for name in known if name.startswith(choice)] or known
    advice = None if LOADED else words_of_others.meant(f"no_such_{group}", choice, ())  # about the choices of ours
    nearest = difflib.get_close_matches(choice, below, n=5)
    if not nearest and (advice is None or len(below) < 8):
        nearest = difflib.get_close_matches(choice, below, n=5, cutoff=0)
    are = f"; the nearest {'is' if len(nearest) == 1 else 'are'} {', '.join(nearest)}" * bool(nearest)
    return f"there is no such {group}{are}" + (f"; {advice[1]}" if advice else "")


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())
