"""Texts on the command line as they were typed: Hydra reads run_dir=1.10 as the number 1.1, and ~/data not at all."""

import os
import re
from typing import Any, get_args

from engine.schema.keys import Keys, quoted, types_in

IN_QUOTES = r'"(?:\\.|[^"\\])*"|' + r"'(?:\\.|[^'\\])*'"
FOR_HYDRA = re.compile(rf"\s*(?:{IN_QUOTES}|null|.*(?:\$\{{|\\).*|)\s*", re.IGNORECASE | re.DOTALL)
ANY = re.compile(r"(?P<key>)(?P<text>.+)", re.DOTALL)
# What lies between brackets and commas, where ${a,b} has none.
BETWEEN = rf"\s*(?:{IN_QUOTES})\s*|(?:\$\{{(?:[^{{}}]|\{{[^{{}}]*\}})*\}}|[^][{{}},])+"
ENTRY, PAIR = re.compile(rf"(?P<key>)(?P<text>{BETWEEN})"), re.compile(rf"(?P<key>[^][{{}},:]+:)?(?P<text>{BETWEEN})")


def as_typed(word: str, schema: type[Keys], sweeps: bool = False) -> str:
    """An argument, with quotes around texts that Hydra would change or refuse, also in lists and mappings.

    `sweeps` (-m): commas separate the values of several jobs, unless a path has them. Quotes, null, interpolations and
    escapes such as \\, mean what they mean to Hydra.
    """
    given, equals, value = word.partition("=")
    name, types = given.lstrip("+"), types_in(schema)
    if sweeps and (function := re.fullmatch(r"(\w+)\((.*)\)", value)):
        if function[1] != "choice":
            return word
        value = function[2]
    kind, is_path = types.get(name), os.path.exists(value)
    whole = kind in (str, str | None) and not (sweeps and "," in value and not is_path) or kind is Any and is_path
    name_now = name

    def piece(match: re.Match) -> str:
        nonlocal name_now
        key, text = match["key"] or "", match["text"]
        if key:
            name_now = f"{name}.{key.strip(' :')}"
        kept = FOR_HYDRA.fullmatch(text) or not _holds_text(types.get(name_now, types.get(name_now.rpartition(".")[0])))
        return key + (text if kept else quoted(text.strip()))

    return given + equals + (ANY if whole else PAIR if value.startswith("{") else ENTRY).sub(piece, value)


def _holds_text(kind: Any) -> bool:
    return kind in (str, Any) or any(map(_holds_text, get_args(kind)))  # Any: a name or several, or paths by name
