"""Other programs' words for our keys and values: words.yaml, which messages about wrong arguments ask."""

import re
import sys
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import NamedTuple

from omegaconf import OmegaConf

ALONE = "alone"  # the name of an argument without =
ANY = re.compile(".*", re.DOTALL)


class Entry(NamedTuple):
    """An entry of words.yaml, which says what each part means."""

    word: tuple[str, ...]
    value: re.Pattern[str] | None  # None: any
    give: str | None
    say: str
    of: str | None
    program: str

    def fits(self, name: str, value: str, keys: Collection[str]) -> re.Match[str] | None:
        """The match of an argument's value, if this entry has advice about it for a command with these keys."""
        if name not in self.word or (self.of is not None and self.of not in keys):
            return None
        if self.give is not None and not keys_of(self.give) <= {*keys}:
            return None
        if name in keys and self.value is None:
            return None  # the command's own key
        return (self.value or ANY).fullmatch(value) if re.fullmatch(self.program, program()) else None


@cache
def entries() -> list[Entry]:
    """The entries of words.yaml, in order."""
    listed = OmegaConf.to_container(OmegaConf.load(Path(__file__).with_suffix(".yaml")))
    assert isinstance(listed, list)
    return [
        Entry(
            tuple(each["word"].split()),
            re.compile(each["is"], re.IGNORECASE) if "is" in each else None,
            each.get("give"),
            each.get("say", ""),
            each.get("of"),
            each.get("program", ".*"),
        )
        for each in map(dict, listed)
    ]


def keys_of(give: str) -> set[str]:
    """{"optim", "optim.lr"} of "optim=sgd optim.lr=0.1"."""
    return {word.partition("=")[0] for word in give.split(" ")}


def meant(name: str, value: str, keys: Collection[str]) -> tuple[str | None, str] | None:
    """Our words for a key, or for a value of our key, that another program has; None if there is no advice.

    The first result is what to give, or None if the second, a sentence, says more. `keys`: of the command.
    """
    names = [name] if name in keys else [name, name.rpartition(".")[2]]
    words = [each.lower().replace("-", "_") for each in names]
    for entry, match in ((entry, entry.fits(word, value, keys)) for word in words for entry in entries()):
        if match is None:
            continue
        text = match.expand(entry.give or entry.say).replace("{value}", value).replace("{program}", program())
        text = re.sub(r"=(\d+)/(\d+)", lambda ratio: f"={int(ratio[1]) / int(ratio[2]):g}", text)
        if entry.give is None:
            return None, text
        own, _, given = text.partition("=")
        again = None if own == name or " " in text else meant(own, given, keys)
        return again if again is not None and again[0] else (text, f"give {text}")
    return None


def program() -> str:
    """The name of this command, without folders and suffix."""
    return re.split(r"[/.]", sys.argv[0].removesuffix(".py"))[-1]
