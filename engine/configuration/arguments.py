"""The arguments that the words of a command make, also as other programs write them: --lr 0.1, SOLVER.BASE_LR 0.1."""

import itertools
import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from engine.configuration.words import ALONE, advice_about

# What may be wrong with an argument's form.
NO_KEY = "there is no such key"
DASHES = "keys have no dashes"
NO_VALUE = "expected key=value"
SPACE = "expected key=value without spaces"
DETECTRON2_KEY = re.compile(r"[A-Z_]+(\.[A-Z0-9_]+)+")
KEY = re.compile(r"[A-Za-z_]\w*(\.\w+)*")
NUMBER = re.compile(r"[-+]?\d*\.?\d+(e-?\d+)?")


class Argument(NamedTuple):
    text: str  # one or several words
    name: str  # without dashes; ALONE for a word that has no key
    value: str
    fault: str = ""  # one of those above

    @property
    def title(self) -> str:
        """Its name in a message about several."""
        return self.text.partition("=")[0] if self.fault == NO_KEY else self.text


def arguments(words: Sequence[str], keys: Collection[str]) -> Iterator[Argument]:
    """The arguments of a command that has these keys. Arguments that remove a key (~KEY) are left out."""
    remaining = [word for word in words if not word.startswith("~")]
    while remaining:
        word = remaining.pop(0)
        prefixed_name, equals, value = word.partition("=")
        has_dashes = prefixed_name.startswith("-")
        name = prefixed_name.lstrip("-").replace("-", "_") if has_dashes else prefixed_name.lstrip("+")
        if equals and name:
            is_key = name in keys or any(key.startswith(f"{name}.") for key in keys)
            value = unquoted(value)
            fault = DASHES if has_dashes else "" if is_key else NO_KEY
            yield Argument(f"{prefixed_name}={value}", name, value, fault)
        elif has_dashes or _is_key(word, remaining, keys):
            values = _values_in_front(remaining)
            del remaining[: len(values)]
            value = f"[{','.join(values)}]" if len(values) > 1 else "".join(values)
            yield Argument(" ".join([word, *values]), name, value, DASHES if has_dashes else SPACE)
        else:
            yield Argument(word, ALONE, word, NO_VALUE)


def _is_key(word: str, next_words: Sequence[str], keys: Collection[str]) -> bool:
    """Whether a word without = is a key, and the next one its value."""
    if not KEY.fullmatch(word) or not next_words or not _is_value(next_words[0]) or advice_about(ALONE, word, keys):
        return False
    return "." in word or word in keys or advice_about(word, next_words[0], keys) is not None


def _values_in_front(words: Sequence[str]) -> Sequence[str]:
    """The value that words begin with, or several numbers, such as 224 224; none if they begin with another key."""
    numbers = [*itertools.takewhile(NUMBER.fullmatch, words)]
    if len(numbers) > 1:
        return numbers
    return words[:1] if words and _is_value(words[0]) else []


def _is_value(word: str) -> bool:
    if word.startswith("-") or DETECTRON2_KEY.fullmatch(word):
        return NUMBER.fullmatch(word) is not None
    return "/" in word.partition("=")[0] or "=" not in word


def unquoted(value: str) -> str:
    """A value without the quotes that keep it a text for Hydra."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
