"""Keep texts on the command line as typed: Hydra reads run_dir=1.10 as the number 1.1, and cannot read ~/data."""

import os
import re
from dataclasses import field, make_dataclass
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.schema.keys import Declared, Keys, check_values, declared_in, quoted

AS_IT_IS = re.compile(r"""\s*(?:(["']).*\1|null|)\s*""", re.IGNORECASE | re.DOTALL)
WORD = re.compile(r"[\w.+-]+")
# A comma inside quotes, brackets or braces does not end an entry.
LIST_ENTRY = re.compile(r"""(?:"[^"]*"|'[^']*'|\[[^][]*\]|\{[^{}]*\}|[^][{}"',])+""")
ENTRY = r"""[^][{}"':,]+:[^][{}"',]+"""
PLAIN_MAPPING = re.compile(rf"\{{({ENTRY}(?:,{ENTRY})*)\}}")
INTERPOLATION, ESCAPED = re.compile(r"\$\{.*\}", re.DOTALL), re.compile(r"\\[]\\()[{}:=, \t]")
BOOLEAN = re.compile("true|false|yes|no|on|off|y|n|[01]", re.IGNORECASE)


def as_typed(word: str, schema: type[Keys], sweeps: bool = False) -> str:
    """An argument; a text value that Hydra would change or refuse is quoted.

    Quotes, null, interpolations and escapes such as \\, keep Hydra's meaning; so do mappings in mappings and, in
    sweeps (-m), functions. In sweeps commas separate the values of several jobs, unless they belong to a path.
    """
    given, equals, value = word.partition("=")
    declared, is_path = declared_in(schema).get(given.lstrip("+")), os.path.exists(value)
    kind = declared and declared.kind
    if declared and declared.metadata.get("word"):  # or a number
        return word
    if value.startswith("[") and value.endswith("]") and (kind is Any or "list[str]" in str(kind)):
        entries = LIST_ENTRY.findall(value[1:-1])
        if value == f"[{','.join(entries)}]":
            return f"{given}=[{','.join(map(_for_hydra, entries))}]"
    if kind is Any and (mapped := PLAIN_MAPPING.fullmatch(value)):
        pairs = (entry.partition(":") for entry in mapped[1].split(","))
        return f"{given}={{{','.join(f'{name}:{_for_hydra(text)}' for name, _, text in pairs)}}}"
    if kind not in (str, str | None) and not (kind is Any and (is_path or WORD.fullmatch(value))):
        return word
    texts = [value]
    if sweeps and not is_path and re.search(r"[,(]", value):
        if re.search(r"""["'({[]""", value):
            return word
        texts = value.split(",")
    return given + equals + ",".join(map(_for_hydra, texts))


def fits(text: str, declared: Declared) -> bool:
    """Whether a key takes a text as its value on the command line."""
    kind, rules = declared
    if kind is bool:
        return BOOLEAN.fullmatch(text) is not None
    typed = make_dataclass("Typed", [("value", kind, field(metadata={**rules}))])
    try:
        value = text if kind in (str, str | None) else OverridesParser.create().parse_override(f"key={text}").value()
        check_values(cast(Keys, OmegaConf.to_object(OmegaConf.structured(typed(value)))))
    except (HydraException, OmegaConfBaseException, ValueError):
        return False
    return True


def _for_hydra(text: str) -> str:
    interpolates = INTERPOLATION.search(text)
    if AS_IT_IS.fullmatch(text) or ((interpolates or ESCAPED.search(text)) and _is_read(text)):
        return text
    return QuotedString(text.strip(), Quote.double).with_quotes() if interpolates else quoted(text.strip())


def _is_read(text: str) -> bool:
    try:
        OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return False
    return True
