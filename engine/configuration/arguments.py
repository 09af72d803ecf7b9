"""The arguments that the words of a command make, also as other programs write them: --lr 0.1, SOLVER.BASE_LR 0.1."""

import re
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from engine.configuration.words import ALONE, meant

# What may be wrong with an argument's form.
NO_KEY, DASHES, NO_VALUE, SPACE = (
    "there is no such key",
    "keys have no dashes",
    "expected key=value",
    "expected key=value without spaces",
)
OF_DETECTRON2 = re.compile(r"[A-Z_]+(\.[A-Z0-9_]+)+")  # a key
KEY, NUMBER = re.compile(r"[A-Za-z_]\w*(\.\w+)*"), re.compile(r"[-+]?\d*\.?\d+(e-?\d+)?")


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
    left = [word for word in words if not word.startswith("~")]
    while left:
        word = left.pop(0)
        given, equals, value = word.partition("=")
        has_dashes = given.startswith("-")
        name = given.lstrip("-").replace("-", "_") if has_dashes else given.lstrip("+")
        if equals and name:
            known = name in keys or any(each.startswith(f"{name}.") for each in keys)
            fault, value = DASHES if has_dashes else "" if known else NO_KEY, unquoted(value)
            yield Argument(f"{given}={value}", name, value, fault)
        elif has_dashes or _is_key(word, left, keys):
            count = int(bool(left) and _is_value(left[0]))
            while 0 < count < len(left) and all(map(NUMBER.fullmatch, left[: count + 1])):  # 3 224 224
                count += 1
            values, left = left[:count], left[count:]
            value = f"[{','.join(values)}]" if count > 1 else "".join(values)
            yield Argument(" ".join([word, *values]), name, value, DASHES if has_dashes else SPACE)
        else:
            yield Argument(word, ALONE, word, NO_VALUE)


def _is_key(word: str, left: Sequence[str], keys: Collection[str]) -> bool:
    """Whether a word without = is a key, and the next one its value."""
    if not KEY.fullmatch(word) or not left or not _is_value(left[0]) or meant(ALONE, word, keys):
        return False
    return "." in word or word in keys or meant(word, left[0], keys) is not None


def _is_value(word: str) -> bool:
    if word.startswith("-") or OF_DETECTRON2.fullmatch(word):
        return NUMBER.fullmatch(word) is not None
    return "/" in word.partition("=")[0] or "=" not in word


def unquoted(value: str) -> str:
    """A value without the quotes that keep it a text for Hydra."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
