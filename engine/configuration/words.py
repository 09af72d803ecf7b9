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

    def fits(self, name: str, value: str, keys: Collection[str]) -> re.Match[str] | None:
        """The match of an argument's value, if this entry has advice about it for a command with these keys."""
        if self.needs is not None and self.needs not in keys:
            return None
        if self.give is not None and not all(key in keys for key in keys_of(self.give)):
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
    entries = []
    for fields in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # in C if possible: it is long
        pattern = fields.pop("is", None)
        value = None if pattern is None else re.compile(pattern, re.IGNORECASE)
        entries.append(Entry(tuple(fields.pop("word").split()), value, **fields))
    return entries


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


def slips(value: str) -> Iterator[str]:
    """What may be meant by a value that its key cannot take: 0.5 by 50%."""
    for entry in _by_word()[SLIP]:
        match = entry.value.fullmatch(value) if entry.give and entry.value else None
        if match:
            yield _computed(match.expand(f"={entry.give}"))[1:]


def _computed(text: str) -> str:
    """Text with =512/1024 computed, and {rest} of a share."""
    share = re.search(r"0?\.\d+", text)
    if share:
        text = text.replace("{rest}", f"{1 - float(share[0]):g}")
    return re.sub(r"=([\d.]+)/(\d+)$", lambda ratio: f"={float(ratio[1]) / int(ratio[2]):g}", text)


def advice_about(name: str, value: str, keys: Collection[str], patterns: bool = True) -> Advice | None:
    """Our words for a key, or for a value of our key, that another program has; None if there is no advice.

    `keys`: of the command. `patterns`: also by words with a *.
    """
    word = name if name in keys else re.sub(r"\.\d+(?=\.)|\[\d+\]", "", name.lower().replace("-", "_"))
    for entry in _entries_of(word, patterns):
        match = None if name in keys and word not in entry.word else entry.fits(word, value, keys)
        if match is None:
            continue
        text = entry.give or entry.say
        text = match.expand(text) if "\\" in text else text  # which takes long
        text = text.replace("{value}", value or "…").replace("{program}", program()).replace("{plugin}", PLUGIN)
        if entry.give is None:
            return Advice(None, text)
        text = _computed(text) if "/" in entry.give or "{rest}" in entry.give else text
        our_key, _, our_value = text.partition("=")
        if text == f"{name}={value}":
            continue
        next_advice = None if our_key == name or " " in text else advice_about(our_key, our_value, keys)
        return next_advice or Advice(text, f"give {text}")
    return None


def program() -> str:
    """The name of this command, without folders and suffix."""
    return re.split(r"[/.]", sys.argv[0].removesuffix(".py"))[-1]
