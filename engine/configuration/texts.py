"""Texts on the command line as they were typed: Hydra reads run_dir=1.10 as the number 1.1, and ~/data not at all."""

import os
import re
from itertools import accumulate
from typing import Any, get_args

from hydra.core.override_parser.overrides_parser import OverridesParser, create_functions
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException

from engine.schema.keys import Keys, quoted, types_in

IN_QUOTES = r'"(?:\\.|[^"\\])*"|' + r"'(?:\\.|[^'\\])*'"
WHOLE = r"\$\{(?:[^{}]|\{[^{}]*\})*\}"  # an interpolation
AS_IT_IS = re.compile(rf"\s*(?:{IN_QUOTES}|null|)\s*", re.IGNORECASE)
ESCAPED = re.compile(r"\\[]\\()[{}:=, \t]")
CALL = re.compile(r"\s*(?P<name>\w+)\((?P<inside>.*?)(?:,\s*reverse=\w+\s*)?\)\s*", re.DOTALL)
OF_SEVERAL, OF_VALUES = ("shuffle", "sort"), ("choice", "str")  # functions of texts; the last two change none
ANY = re.compile(r"(?P<key>)(?P<text>.+)", re.DOTALL)
# What lies between brackets and commas, where ${a,b} has none.
BETWEEN = rf"\s*(?:{IN_QUOTES})\s*|(?:{WHOLE}|\$\{{|[^][{{}},])+"
ENTRY, PAIR = re.compile(rf"(?P<key>)(?P<text>{BETWEEN})"), re.compile(rf"(?P<key>[^][{{}},:]+:)?(?P<text>{BETWEEN})")


def as_typed(word: str, schema: type[Keys], sweeps: bool = False) -> str:
    """An argument, with quotes around texts that Hydra would change or refuse, also in lists and mappings.

    `sweeps` (-m): commas separate the values of several jobs, unless a path has them. Quotes, null, interpolations,
    escapes such as \\, and, in sweeps, functions mean what they mean to Hydra.
    """
    given, equals, value = word.partition("=")
    name, types = given.lstrip("+"), types_in(schema)

    def kind_of(name: str) -> Any:
        return types.get(name, types.get(name.rpartition(".")[0]))

    before = after = ""
    while sweeps and (call := CALL.fullmatch(value)) and _is_one(call):
        if call["name"] not in (*OF_SEVERAL, *OF_VALUES) or not _holds_text(kind_of(name)):
            return word
        if call["name"] in OF_SEVERAL:
            before, after = before + value[: call.start("inside")], value[call.end("inside") :] + after
        value = call["inside"]
    kind, is_path = types.get(name), os.path.exists(value)
    whole = kind in (str, str | None) and not (sweeps and "," in value and not is_path) or kind is Any and is_path
    of_value = ANY if whole else PAIR if value.startswith("{") else ENTRY
    name_now = name

    def piece(match: re.Match) -> str:
        nonlocal name_now
        key, text = match["key"] or "", match["text"]
        if key:
            name_now = f"{name}.{key.strip(' :')}"
        return key + (_for_hydra(text) if _holds_text(kind_of(name_now)) else text)

    return given + equals + before + of_value.sub(piece, value) + after


def _is_one(call: re.Match) -> bool:
    """Whether it is a function of Hydra, and its last bracket closes its first: not so in choice(a),choice(b)."""
    brackets = re.findall("[()]", re.sub(IN_QUOTES, "", call["inside"]))
    depths = accumulate({"(": 1, ")": -1}[each] for each in brackets)
    return call["name"] in create_functions().functions and min(depths, default=0) >= 0


def _for_hydra(text: str) -> str:
    """A text in quotes, unless it means something to Hydra; an interpolation does so also in quotes."""
    interpolates = re.search(WHOLE, text)
    if AS_IT_IS.fullmatch(text) or ((interpolates or ESCAPED.search(text)) and _is_read(text)):
        return text
    return QuotedString(text.strip(), Quote.double).with_quotes() if interpolates else quoted(text.strip())


def _is_read(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return False
    return True


def _holds_text(kind: Any) -> bool:
    return kind in (str, Any) or any(map(_holds_text, get_args(kind)))  # Any: a name or several, or paths by name
