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
NUMBER = re.compile(r"[-+]?\d*\.?\d+(e-?\d+)?")
TEXT = re.compile(r"(?!-|[A-Z_]+(\.[A-Z0-9_]+)+$)[^=]*(/.*)?", re.DOTALL)  # no option, key of detectron2, or key=value


class Argument(NamedTuple):
    text: str  # one or several words
    name: str  # without dashes; ALONE for a word that has no key
    value: str
    fault: str = ""  # one of those above


def arguments(words: Sequence[str], keys: Collection[str]) -> Iterator[Argument]:
    """The arguments of a command that has these keys. Arguments that remove a key (~KEY) are left out."""
    remaining = [word for word in words if not word.startswith("~")]
    while remaining:
        word = remaining.pop(0)
        prefixed_name, equals, value = word.partition("=")
        is_option = word.startswith("-")
        name = prefixed_name.lstrip("-").replace("-", "_") if is_option else prefixed_name.lstrip("+")
        next_values = _values_in_front(remaining)
        if equals and name:
            is_key = name in keys or any(key.startswith(f"{name}.") for key in keys)
            value = value.strip("'\"")  # which keep it a text for Hydra
            fault = DASHES if is_option else "" if is_key else NO_KEY
            yield Argument(f"{prefixed_name}={value}", name, value, fault)
        elif is_option or (next_values and _is_key(word, next_values[0], keys)):
            del remaining[: len(next_values)]
            value = f"[{','.join(next_values)}]" if len(next_values) > 1 else "".join(next_values)
            yield Argument(" ".join([word, *next_values]), name, value, DASHES if is_option else SPACE)
        else:
            yield Argument(word or "an empty argument", ALONE, word, NO_VALUE)


def _values_in_front(words: Sequence[str]) -> list[str]:
    """The value that words begin with, or several numbers, such as 224 224; none if they begin with another key."""
    numbers = [*itertools.takewhile(NUMBER.fullmatch, words)]
    return numbers or [word for word in words[:1] if TEXT.fullmatch(word)]


def _is_key(word: str, next_word: str, keys: Collection[str]) -> bool:
    """Whether a word without = is a key, and the next one its value."""
    if not word.replace(".", "").isidentifier() or advice_about(ALONE, word, keys):
        return False
    return "." in word or word in keys or advice_about(word, next_word, keys) is not None
