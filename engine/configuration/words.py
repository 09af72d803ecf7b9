"""Other programs' words for our keys and values: words.yaml, which messages about wrong arguments ask."""

import re
import sys
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

ALONE = "alone"  # the name of an argument without =
SLIP = "slip"  # the name of an argument with a value that its key cannot take
PLUGIN = "a plugin adds it: docs/extending.md"
ANY = re.compile(".*", re.DOTALL)


class Entry(NamedTuple):
    """An entry of words.yaml, which says what each part means."""

    word: tuple[str, ...]
    value: re.Pattern[str] | None  # None: any
    give: str | None = None
    say: str = ""
    needs: str | None = None  # a key
    program: str = ".*"
    beside: str | None = None
    unit: str | None = None

    def match(self, name: str, value: str, keys: Collection[str]) -> re.Match[str] | None:
        """The match of an argument's value; None if this entry has no advice for a command with these keys."""
        if self.needs is not None and self.needs not in keys:
            return None
        if self.give is not None and not keys_of(self.give).issubset(keys):
            return None
        if name in keys and self.value is None:
            return None  # the command's own key
        if self.beside is not None and not any(re.fullmatch(self.beside, word) for word in sys.argv):
            return None
        if self.program != ".*" and not re.fullmatch(self.program, program()):
            return None
        return (self.value or ANY).fullmatch(value)


class Advice(NamedTuple):
    """Our words for another program's."""

    give: str | None  # None: `say` says more
    say: str  # a sentence


@cache
def entries() -> list[Entry]:
    """The entries of words.yaml, in order."""
    text = Path(__file__).with_suffix(".yaml").read_bytes()
    parsed = []
    for fields in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # in C if possible: it is long
        pattern = fields.pop("is", None)
        value = None if pattern is None else re.compile(pattern, re.IGNORECASE)
        parsed.append(Entry(tuple(fields.pop("word").split()), value, **fields))
    return parsed


@cache
def _by_word() -> dict[str, list[Entry]]:
    by_word: dict[str, list[Entry]] = {}
    for entry in entries():
        for word in dict.fromkeys(entry.word):
            by_word.setdefault(word, []).append(entry)
    return by_word


@cache
def _entries_of(name: str, patterns: bool) -> list[Entry]:
    """The entries of a name, then of the names that it ends with, after a dot; then of `patterns`, words with a *."""
    parts = name.split(".")
    words = [".".join(parts[start:]) for start in range(len(parts))]
    if patterns:
        words += [word for word in _by_word() if "*" in word and fnmatchcase(name, word)]
    return [entry for word in words for entry in _by_word().get(word, ())]


def keys_of(give: str) -> set[str]:
    """{"optim", "optim.lr"} of "optim=sgd optim.lr=0.1"."""
    return {word.partition("=")[0] for word in give.split(" ")}


def corrected_values(value: str) -> Iterator[str]:
    """What may be meant by a value that its key cannot take: 0.5 by 50%."""
    for entry in _by_word()[SLIP]:
        assert entry.value is not None and entry.give is not None, entry
        match = entry.value.fullmatch(value)
        if match:
            yield _with_ratio(match.expand(entry.give))


def _with_ratio(text: str) -> str:
    """Text with 0.5 in place of 512/1024, if that is its only or last value; a ratio to 0 stays."""
    ratio = re.search(r"(?:^|(?<==))(\d+(?:\.\d+)?)/(\d+)$", text)
    if ratio is None or int(ratio[2]) == 0:
        return text
    return f"{text[: ratio.start()]}{float(ratio[1]) / int(ratio[2]):g}"


def _with_rest(text: str) -> str:
    """Text with {rest} filled in, what the other share in its list leaves of 1: [0.25,{rest}] becomes [0.25,0.75]."""
    share = re.search(r"[\[,](0?\.\d+)[\],]", text)
    return text.replace("{rest}", f"{1 - float(share[1]):g}") if share else text


def advice_about(name: str, value: str, keys: Collection[str], patterns: bool = True) -> Advice | None:
    """Our words for a key, or for a value of our key, that another program has; None if there is no advice.

    `keys`: of the command. `patterns`: also by words with a *.
    """
    is_ours = name in keys
    word = name if is_ours else re.sub(r"\.\d+(?=\.)|\[\d+\]", "", name.lower().replace("-", "_"))
    for entry in _entries_of(word, patterns):
        if is_ours and word not in entry.word:
            continue  # it is about the last part of our key's name, in other programs
        match = entry.match(word, value, keys)
        if match is None:
            continue
        if entry.give is None:
            return Advice(None, _filled_in(entry.say, match, value))
        text = _with_rest(_filled_in(entry.give, match, value))
        text = _with_ratio(text) if "/" in entry.give else text  # not in a folder such as 2024/05
        if text == f"{name}={value}":
            continue
        our_key, _, our_value = text.partition("=")
        better_advice = None
        if our_key != name and " " not in text:  # a single pair: there may be advice about its value, too
            better_advice = advice_about(our_key, our_value, keys)
        return better_advice or Advice(text, f"give {text}")
    return None


def _filled_in(template: str, match: re.Match[str], value: str) -> str:
    """An entry's `give` or `say` about an argument's value."""
    text = match.expand(template) if "\\" in template else template  # `expand` takes long
    return text.replace("{value}", value or "…").replace("{program}", program()).replace("{plugin}", PLUGIN)


def program() -> str:
    """The name of this command, without folders and suffix."""
    return re.split(r"[/.]", sys.argv[0].removesuffix(".py"))[-1]
