"""Messages about a wrong command: one line that names the fix."""

import difflib
import itertools
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from engine.configuration.arguments import NO_KEY, NO_VALUE, SPACE, Argument, arguments
from engine.configuration.choices import choices, groups_in
from engine.configuration.config import RUNS
from engine.configuration.texts import HYDRA_KEY, fits
from engine.configuration.words import PLUGIN, SLIP, Advice, advice_about, entries, pairs_in
from engine.schema.keys import CHOICES, Declared, Keys, declared_in, expected, groups_of

QUOTE = "quote lists and mappings for the shell, as in 'key=[a, b]'"
SOME = "…"  # stands for a value
HELP = "--help lists the keys"
NO_NEAREST = "--help lists them all"
NONE = "there is none"  # how words.yaml says it


class Messages:
    """What a command with these keys and groups answers to words that it cannot take.

    It is asked after an error. Words that the command takes are right, whatever other programs mean by them.
    """

    def __init__(self, command: str, schema: type[Keys]):
        self.schema = schema
        self.declared = declared_in(schema)
        self.groups = groups_in(command)
        self.keys = {*self.declared, *self.groups}

    def message(self, words: Sequence[str], error: Exception) -> str:
        """The message about words that caused an error: what to give instead of all arguments that are wrong.

        If none is known to be wrong, it is about the + or ~ of a word, else about the error itself.

        TypeError, AssertionError: the error is one, and no word explains it.
        """
        split_word = _split_at_spaces(words)
        if split_word:
            return f"{split_word}: quote the space for the shell, as in '{split_word}'"
        our_words = [word for word in words if "=" not in word or not HYDRA_KEY.match(_key_in(word))]
        advice_by_argument = {argument: self._advice(argument) for argument in arguments(our_words, self.keys)}
        answers = {argument: advice for argument, advice in advice_by_argument.items() if advice}
        if answers:
            return self._joined(answers, our_words)
        for word in our_words:
            if word.startswith("~"):
                return f"{word}: leave {word[1:]} out to keep its default"
            if word.startswith("+") and _key_in(word) in self.groups:
                return f"{word}: leave out the +: {word.lstrip('+')}"
        if isinstance(error, (TypeError, AssertionError)):
            raise error
        return self._about_error(error, _wrong_word(words, error))

    def _advice(self, argument: Argument) -> Advice | None:
        """What to give instead of an argument; None if it may be right, or if the error says more."""
        text, name, value, fault = argument
        if not fault and self._takes(name, value):
            return None
        nearest = [] if name in self.keys else self._nearest_keys(name, value)
        advice = self._advice_of_words(argument, [key for key in nearest if _last(key) == _last(name).lower()])
        if advice is not None:
            return self._corrected(advice)
        if name in self.keys:
            pair = self._pair(name, value)
            return self._correction(name, value) or (Advice(pair, f"give {pair}") if fault else None)
        if fault == NO_VALUE:
            is_cut = text.endswith((",", "]", "}"))  # by the shell, at a space
            return Advice("", QUOTE if is_cut else f"{SPACE}; {HELP}")
        parent = self.declared.get(name.rpartition(".")[0])
        if not fault or (parent and parent.kind is Any):
            return None
        pairs = [self._pair(key, value) for key in nearest]
        if pairs:
            return Advice(pairs[0] if len(pairs) == 1 else "", f"give {' or '.join(pairs)}")
        return Advice("", NO_NEAREST if fault == NO_KEY else HELP)

    def _takes(self, name: str, value: str) -> bool:
        """Whether the command surely takes a value: it has the choice, or the key and the value fits.

        A text fits every key of texts, so it may be what is wrong.
        """
        if name in self.groups:
            return self._about_choice(name, value) is None
        declared = self.declared.get(name)
        if declared is None or (declared.kind in (str, str | None, Any) and not declared.metadata.get("one_of")):
            return False
        return fits(value, declared)

    def _advice_of_words(self, argument: Argument, same: list[str]) -> Advice | None:
        """Advice from other programs' words; None if one of our keys with the `same` last part counts before it."""
        _, name, value, fault = argument
        advice = advice_about(name, value, self.keys, patterns=not same)
        if advice is None and fault == NO_VALUE:
            advice = advice_about(value, "", self.keys)
        group = name.partition(".")[0]
        if advice is None or (group in self.groups and _has_plugins(group)):
            return None  # a plugin may have what is meant: `no_such` lists its choices, too
        if name not in map(_last, same) or any(key in advice.say for key in same):
            return advice
        # A choice's own key counts before another program's word that is spelled alike, so a new choice need not know
        # words.yaml. Not so for data, whose keys all datasets share.
        is_of_choice = any(key.partition(".")[0] in self.groups.keys() - {"data"} for key in same)
        return None if is_of_choice or advice.say.startswith(NONE) else advice

    def _corrected(self, advice: Advice) -> Advice:
        """Advice from other programs' words, with the values that our keys can take."""
        gives = []
        say = advice.say
        for key, value in pairs_in(advice.give).items():
            correction = self._correction(key, value) or Advice(f"{key}={value}", "")
            gives.append(correction.give)
            if not correction.give:
                say = f"{key}={value}: {correction.say}"
        give = " ".join(filter(None, gives))
        return Advice(give, f"give {give}" if all(gives) and gives else say)

    def _correction(self, name: str, value: str) -> Advice | None:
        """What to give instead of a value that our key cannot take.

        None if the key takes it, or if only the error of setting it can say more.
        """
        if name in self.groups:
            sentence = self._about_choice(name, value)
            return Advice("", sentence) if sentence else None
        likely = _likely_value(value, self.declared[name])
        return Advice(f"{name}={likely}", self._about_value(name, value)) if likely else None

    def _about_choice(self, group: str, text: str) -> str | None:
        """What is wrong with a choice, or with one in a list; None if a group has it, or if only Hydra can tell."""
        names = choices(group, self.schema)
        is_bracketed = text.startswith("[") and text.endswith("]")
        is_list = is_bracketed or (group in self.declared and "is_list" in self.declared[group].metadata)
        texts = [part.strip("[] ") for part in text.split(",")] if is_list else [text]
        chosen = [name.removesuffix(".yaml") for name in texts if name or not is_list]  # [] chooses none
        choice = next((name for name in chosen if name not in names and (is_list or name[:1] != "{")), None)
        if choice is None:
            return None
        if "," in choice:  # between arguments, or between the choices of jobs
            words = re.sub(r",\s*(?=[\w.]+=|$)", " ", choice).strip()
            if words == choice:
                return "expected one choice; with -m the command runs once for each"
            return f"expected spaces between arguments, without commas: {group}={words}"
        tasks = [task for task, run in RUNS.items() if choice in choices(group, run)]
        if tasks and self.schema in RUNS.values():
            return f"it is for {tasks[0]}: train_seg.py trains segmentation, train_imagenet.py classification"
        sentence = no_such(group, choice, names)
        return sentence if tasks or group not in self.declared or PLUGIN in sentence else f"{sentence}; {PLUGIN}"

    def _about_error(self, error: Exception, word: str) -> str:
        """The message about the value of `word`, or a key, a rule, an interpolation or a file that is wrong."""
        reason = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
        name, _, value = word.lstrip("+").partition("=")
        key = getattr(reason, "full_key", None) or name
        if isinstance(reason, (ConfigAttributeError, ConfigKeyError)) and not HYDRA_KEY.match(key):
            return self._about_unknown_key(key)
        keys_below = [name for name in self.declared if name.startswith(f"{key}.")]
        if keys_below:
            return f"{key}: expected one of the keys {', '.join(keys_below[:5])}"
        if isinstance(reason, (HydraException, ValidationError)) and key == name and key in self.declared:
            value = value.strip("'\"")
            return f"{key}={value}: {self._about_value(key, value)}"
        if isinstance(reason, OmegaConfBaseException) and type(reason.__context__) is ValueError:
            return str(reason.__context__)  # of a resolver, such as ${per_process:…}, which counts processes
        if not isinstance(reason, (HydraException, OmegaConfBaseException)):
            return str(reason)
        text = " ".join(str(reason).partition("\n    full_key")[0].partition("\nTo append to your ")[0].split())
        primary = re.match("Cannot find primary config '(.+?)'", text)
        if primary and "experiment" in self.groups:
            sentence = no_such("experiment", primary[1], choices("experiment", self.schema))
            return f"{primary[0]}: configurations are given as experiment=NAME; {sentence}"
        if text.endswith("is not in struct") and word:  # of Hydra's, such as a variable in hydra.job.env_set
            return f"{word}: {NO_KEY}; +{word} adds it"
        if "@experiment." in text:
            return f"{text.partition(':')[0]}: the file must begin with the line `# @package _global_`"
        return f"{key}: {text}" if key else text

    def _about_value(self, key: str, value: str) -> str:
        """What is expected instead of a value of a wrong type, or of several values."""
        likely = _likely_value(value, self.declared[key]) or ""
        sentence = f"expected {expected(self.declared[key])}"
        if "," in value and not value.startswith(("[", "(", "{")) and not likely.startswith(("[", "(", "{")):
            sentence += "; with -m the command runs once for each of several"
        elif "," in value and not likely and self.declared[key].kind in (int, float, int | None, float | None):
            sentence += f"; with -m the command runs once for each of several: {key}={value.strip('[]() ')}"
        return f"{sentence}; give {key}={likely}" if likely else sentence

    def _about_unknown_key(self, name: str) -> str:
        """The message for a key that does not exist, or that the chosen alternatives do not have."""
        choices_with_key = self._choices_with(name)
        if choices_with_key:
            group = name.partition(".")[0]
            return f"{name} is for {' and '.join(choices_with_key)}; another {group} is chosen"
        advice = self._advice(Argument(name, name, "", NO_KEY))
        return f"{name}={SOME}: {NO_KEY}; {advice.say if advice else NO_NEAREST}"

    def _joined(self, answers: Mapping[Argument, Advice], words: Sequence[str]) -> str:
        """One message about all arguments that are wrong."""
        gives = _one_value_each(answers)
        needed = self._needed_choice(gives, words)
        if len(answers) == 1:
            ((argument, advice),) = answers.items()
            says_fault = not argument.fault or advice.say.startswith((NONE, argument.fault))
            return f"{argument.text}: {'' if says_fault else f'{argument.fault}; '}{advice.say}{needed}"
        titles: dict[str, list[str]] = {"": []}  # of the arguments with the same sentence; first of those to replace
        for argument, advice in answers.items():
            title = argument.text.partition("=")[0] if argument.fault == NO_KEY else argument.text
            titles.setdefault("" if advice.give else advice.say, []).append(title)
        replaced = " and ".join(titles.pop(""))
        sentences = [f"{' and '.join(same)}: {say}" for say, same in titles.items()]
        if replaced:
            start = f"{replaced}:"
            if all(argument.fault == NO_KEY for argument in answers):
                there_are = "there are no such keys" if " and " in replaced else "there is no such key"
                start = f"{there_are} as {replaced};"
            sentences.insert(0, f"{start} give {' '.join(gives)}{needed}")
        return "; ".join(sentences)

    def _needed_choice(self, give: Sequence[str], words: Sequence[str]) -> str:
        """What must also be given, if only some choices of a group have a key."""
        for pair in give:
            choices_with_key = self._choices_with(pair.partition("=")[0])
            if choices_with_key and {*choices_with_key}.isdisjoint([*words, *give]):
                return f", with {' or '.join(choices_with_key)}"
        return ""

    def _choices_with(self, key: str) -> list[str]:
        """[optim=sgd, …]: the choices of a key's group that have the key, if others have it not."""
        group, _, name_in_group = key.partition(".")
        alternatives: dict[str, type[Keys]] = groups_of(self.schema).get(group, {}) if name_in_group else {}
        names = [name for name, keys in alternatives.items() if key in declared_in(keys, f"{group}.")]
        return [f"{group}={name}" for name in names] if len(names) < len(alternatives) else []

    def _pair(self, key: str, value: str) -> str:
        """key=value, also of an option without a value."""
        return f"{key}={value or ('true' if key in self.declared and self.declared[key].kind is bool else SOME)}"

    def _nearest_keys(self, name: str, value: str) -> list[str]:
        """Keys with this last part that take the value; else the most similar one of the group, or of all."""
        all_keys = [key for key in self.declared if not key.endswith(".name")]
        group, _, last = name.lower().replace("-", "_").rpartition(".")
        candidates = [[key for key in all_keys if _last(key) == last]]
        for keys in ([key for key in all_keys if key.rpartition(".")[0] == group], all_keys):
            parts = {_last(key): key for key in keys}
            candidates.append([parts[part] for part in difflib.get_close_matches(last, parts, n=1, cutoff=0.75)])
        fitting = ([key for key in keys if not value or fits(value, self.declared[key])] for keys in candidates)
        return next(filter(None, fitting), [])


def _key_in(word: str) -> str:
    """optim.lr of +optim.lr=0.1."""
    return word.lstrip("+~").partition("=")[0]


def _split_at_spaces(words: Sequence[str]) -> str | None:
    """data.root=/my images, if that path exists and the shell has split it at its spaces; else None."""
    for start, end in itertools.combinations(range(len(words) + 1), 2):
        key, _, path = " ".join(words[start:end]).partition("=")
        if end - start > 1 and " " not in key and os.path.exists(path):
            return f"{key}={path}"
    return None


def _wrong_word(words: Sequence[str], error: Exception) -> str:
    """The last word of the key that Hydra's error is about, or of a key below it; "" if it names none."""
    override = getattr(error, "override", None)
    text = f"override {override}" if override else str(error)
    match = re.search(r"(?:override|parameters|argument) '?[+]*([^'=\s]+)", text)  # as Hydra names a word
    key = getattr(error, "full_key", None) or (match and match[1])
    candidates = [word for word in reversed(words) if f"{_key_in(word)}.".startswith(f"{key}.")]
    return min(candidates, key=lambda word: len(_key_in(word)), default="")


def _one_value_each(answers: Mapping[Argument, Advice]) -> list[str]:
    """What to give for several arguments. Of two values for a key, one that was given counts more than our own."""
    value_by_key: dict[str, str] = {}
    for argument, advice in answers.items():
        for key, value in pairs_in(advice.give).items():
            if key not in value_by_key or value == argument.value:
                value_by_key[key] = value
    return [f"{key}={value}" for key, value in value_by_key.items()]


def _has_plugins(group: str) -> bool:
    """Whether a plugin has registered a choice of a group."""
    return any(not kind.__module__.startswith("engine.") for kind in CHOICES.get(group, {}).values())


def _last(key: str) -> str:
    """lr of optim.lr."""
    return key.rpartition(".")[2]


def _likely_value(value: str, declared: Declared) -> str | None:
    """A value that a key takes, if it is probably meant by one that it cannot take."""
    advice = (entry.advice(value, ()) for entry in entries()[SLIP])
    likely = [correction.give for correction in advice if correction]
    is_list = declared.kind is Any or "list[" in str(declared.kind)
    if is_list and value not in ("", "null", SOME) and not value.startswith(("[", "(", "{")):
        entry_count = 1 if "," in value else len(declared.metadata.get("entries") or [""])
        likely.append(f"[{','.join(itertools.repeat(value, entry_count))}]")
    if not likely or fits(value, declared):
        return None
    return next((candidate for candidate in likely if fits(candidate, declared)), None)


def no_such(group: str, choice: str, names: Collection[str]) -> str:
    """A sentence about a choice that does not exist: its right spelling, the nearest ones, or what there is instead."""
    sentence = f"there is no such {re.sub('(?<!s)s$', '', group)}"  # one of several scores, a loss
    same = [name for name in names if _letters(name) == _letters(choice)]
    if same:
        return f"{sentence}; give {group}={same[0]}"
    candidates = [name for name in names if name.startswith(choice)] or [*names]
    advice = None if _has_plugins(group) else advice_about(f"no_such_{group}", choice, ())  # about the choices of ours
    nearest = difflib.get_close_matches(choice, candidates, n=5)
    if not nearest and (advice is None or len(candidates) < 8):
        nearest = difflib.get_close_matches(choice, candidates, n=5, cutoff=0)
    if nearest:
        sentence += f"; the nearest {'is' if len(nearest) == 1 else 'are'} {', '.join(nearest)}"
    return f"{sentence}; {advice.say}" if advice else sentence


def _letters(text: str) -> str:
    return re.sub(r"[\W_]", "", text.lower())
