"""Other programs' words for our keys and values: words.yaml, which messages about wrong arguments ask."""

import re
import sys
from collections import defaultdict
from collections.abc import Collection, Mapping
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import yaml  # type: ignore[import-untyped]

ALONE = "alone"  # the name of an argument without =
SLIP = "slip"  # the name of an argument with a value that its key cannot take
PLUGIN = "a plugin adds it: docs/extending.md"


class Advice(NamedTuple):
    """What to give instead of an argument."""

    give: str  # one or more key=value of ours; "": there is none, and `say` says more
    say: str  # a sentence


class Entry(NamedTuple):
    """An entry of words.yaml, which says what each part means."""

    value: re.Pattern[str] | None  # None: any
    keys: frozenset[str]  # of a command that it is for: those in `give`, and `needs`
    give: str = ""
    say: str = ""
    command: str = r"\S+"
    unit: str = ""

    def advice(self, value: str, keys: Collection[str]) -> Advice | None:
        """The advice about an argument with this value; None if there is none for a command with these keys."""
        if not self.keys.issubset(keys):
            return None
        if not re.match(rf"(?:{self.command})(?: |$)", " ".join([program(), *sys.argv[1:]])):
            return None
        match = self.value.fullmatch(value) if self.value else re.fullmatch("(?s).*", value)
        if match is None:
            return None
        give = _filled_in(self.give, match)
        return Advice(give, f"give {give}" if give else _filled_in(self.say, match))


@cache
def entries() -> Mapping[str, list[Entry]]:
    """{word: the entries of words.yaml about it, in order}"""
    text = Path(__file__).with_suffix(".yaml").read_bytes()
    entries_by_word = defaultdict(list)
    for fields in yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # in C if possible: it is long
        words = fields.pop("word").split()
        value = re.compile(fields.pop("is"), re.IGNORECASE) if "is" in fields else None
        needed = fields.pop("needs", "").split()
        entry = Entry(value, frozenset([*needed, *pairs_in(fields.get("give", ""))]), **fields)
        for word in words:
            entries_by_word[word].append(entry)
    return entries_by_word


def pairs_in(give: str) -> dict[str, str]:
    """{"optim": "sgd", "optim.lr": "0.1"} of "optim=sgd optim.lr=0.1". Values may have spaces."""
    return dict(re.findall(r"([\w.]+)=(.*?)(?= [\w.]+=|$)", give, re.DOTALL))


@cache
def _entries_of(name: str, patterns: bool) -> list[Entry]:
    """The entries of a name, then of the names that it ends with, after a dot; then of `patterns`, words with a *."""
    parts = name.split(".")
    words = [".".join(parts[start:]) for start in range(len(parts))]
    if patterns:
        words += [word for word in entries() if "*" in word and fnmatchcase(name, word)]
    return [entry for word in words for entry in entries().get(word, ())]


def advice_about(name: str, value: str, keys: Collection[str], patterns: bool = True) -> Advice | None:
    """Our words for a key, or for a value of our key, that another program has; None if there is no advice.

    `keys`: of the command. `patterns`: also by words with a *.
    """
    if name in keys:  # other programs may use its last part, or another value, for something else
        about_name = [entry for entry in entries().get(name, ()) if entry.value]
    else:
        about_name = _entries_of(re.sub(r"\.\d+(?=\.)|\[\d+\]", "", name.lower().replace("-", "_")), patterns)
    candidates = (entry.advice(value, keys) for entry in about_name)
    first = next((advice for advice in candidates if advice and advice.give != f"{name}={value}"), None)
    pairs = pairs_in(first.give) if first else {}
    if len(pairs) == 1 and name not in pairs:  # there may be advice about its value, too
        return advice_about(*pairs.popitem(), keys) or first
    return first


def _filled_in(template: str, match: re.Match[str]) -> str:
    """An entry's `give` or `say` about an argument whose value it has matched."""
    text = match.expand(template) if "\\" in template else template  # `expand` takes long
    text = text.replace("{value}", match[0] or "…").replace("{program}", program()).replace("{plugin}", PLUGIN)
    return re.sub(r"\{([\d.]+)([-/])([\d.]+)\}", _computed, text)


def _computed(term: re.Match[str]) -> str:
    """0.75 for {1-0.25}, 2 for {1024/512}; a division by zero stays."""
    left, right = float(term[1]), float(term[3])
    if term[2] == "-":
        return f"{left - right:g}"
    return f"{left / right:g}" if right else term[0].strip("{}")


def program() -> str:
    """The name of this command, without folders and suffix."""
    return re.split(r"[/.]", sys.argv[0].removesuffix(".py"))[-1]
