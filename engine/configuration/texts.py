"""Read key=value: texts as typed, as run_dir=1.10 is no number and Hydra cannot read ~/data; the rest as Hydra does."""

import os
import re
from dataclasses import field, make_dataclass
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from engine.schema.keys import CHOICES, CONFIGS, Declared, Keys, complete_and_check, declared_in, quoted

QUOTED_OR_NULL = re.compile(r"""\s*(?:(["']).*\1|null|)\s*""", re.IGNORECASE | re.DOTALL)
WORD = re.compile(r"[\w.+-]+")
# A comma inside quotes, brackets or braces does not end an entry.
LIST_ENTRY = re.compile(r"""(?:"[^"]*"|'[^']*'|\[[^][]*\]|\{[^{}]*\}|[^][{}"',])+""")
ENTRY = r"""[^][{}"':,]+:[^][{}"',]+"""
PLAIN_MAPPING = re.compile(rf"\{{({ENTRY}(?:,{ENTRY})*)\}}")
INTERPOLATION = re.compile(r"\$\{.*\}", re.DOTALL)
ESCAPED = re.compile(r"\\[]\\()[{}:=, \t]")
HYDRA_KEY = re.compile(r"hydra\b|.*[/@]")
BOOLEAN = re.compile("true|false|yes|no|on|off|y|n|[01]", re.IGNORECASE)
# What Hydra raises about words; the last two of values that it does not expect, such as scores=[1].
ERRORS_OF_WORDS = (HydraException, OmegaConfBaseException, ValueError, TypeError, AssertionError)


def as_typed(word: str, schema: type[Keys], sweeps: bool = False) -> str:
    """An argument of a command with these keys; a text value that Hydra would change or refuse is quoted.

    HydraException, ValueError: ~ before a key would remove it, and hydra.run.dir name no run.
    """
    prefixed_name, equals, text = word.partition("=")
    name = prefixed_name.lstrip("+~")
    keys = declared_in(schema)
    if name == "hydra.run.dir" and "run_dir" in keys:
        raise ValueError(f"{word}: give run_dir={text}, the folder of the run")
    declared = keys.get(name)
    parent = keys.get(name.rpartition(".")[0])
    if parent and parent.kind is Any:  # a mapping with any names, such as `roots`
        return f"++{name}={text}" if equals and prefixed_name[0] != "~" else word
    is_ours = not HYDRA_KEY.match(name) and not (CONFIGS / name).is_dir() and name not in CHOICES
    if name != prefixed_name and is_ours:
        if prefixed_name[0] == "~":
            raise HydraException(f"{word}: leave it out")
        prefixed_name = name  # + would add a key that nothing reads
    return prefixed_name + equals + (_for_hydra(text, declared, sweeps) if declared else text)


def _for_hydra(text: str, declared: Declared, sweeps: bool = False) -> str:
    """A key's value as Hydra's grammar has it.

    Quotes, null, interpolations and escapes such as \\, keep Hydra's meaning; so do mappings in mappings and, in
    sweeps (-m), functions. In sweeps commas separate the values of several jobs, unless they belong to a path.
    """
    kind = declared.kind
    is_path = os.path.exists(text)
    if declared.metadata.get("word"):  # or a number
        return text
    if text.startswith("[") and text.endswith("]") and (kind is Any or "list[str]" in str(kind)):
        entries = LIST_ENTRY.findall(text[1:-1])
        if text == f"[{','.join(entries)}]":
            return f"[{','.join(map(quoted_for_hydra, entries))}]"
    mapping = PLAIN_MAPPING.fullmatch(text) if kind is Any else None
    if mapping:
        pairs = (pair.partition(":") for pair in mapping[1].split(","))
        return f"{{{','.join(f'{name}:{quoted_for_hydra(value)}' for name, _, value in pairs)}}}"
    is_text = kind in (str, str | None) or (kind is Any and (is_path or WORD.fullmatch(text)))
    if not is_text:
        return text
    if not sweeps or is_path or not re.search(r"[,(]", text):
        return quoted_for_hydra(text)
    has_syntax = re.search(r"""["'({[]""", text)
    return text if has_syntax else ",".join(map(quoted_for_hydra, text.split(",")))


def value_of(text: str, declared: Declared | None) -> Any:
    """The value of a text, read by its key's type. HydraException: it is no value, or several."""
    override = OverridesParser.create().parse_override(f"key={_for_hydra(text, declared) if declared else text}")
    if override.is_sweep_override():
        raise HydraException(f"{text}: expected one value")
    return override.value()


def fits(text: str, declared: Declared) -> bool:
    """Whether a key takes a text as its value on the command line."""
    kind, rules = declared
    if kind is bool:
        return BOOLEAN.fullmatch(text) is not None
    schema = make_dataclass("Schema", [("value", kind, field(metadata={**rules}))])
    try:
        # Of "a text or a list", numbers are not fitting texts: 1,2 does not mean 1.2.
        value = text if kind in (str, str | None) else value_of(text, None if kind is Any else declared)
        complete_and_check(cast(Keys, OmegaConf.to_object(OmegaConf.structured(schema(value)))))
    except (HydraException, OmegaConfBaseException, ValueError):
        return False
    return True


def quoted_for_hydra(text: str) -> str:
    """Quote a text for Hydra, if it needs quotes. Interpolations stay active; `quoted` escapes them."""
    has_interpolation = INTERPOLATION.search(text)
    has_syntax = has_interpolation or ESCAPED.search(text)
    if QUOTED_OR_NULL.fullmatch(text) or (has_syntax and _is_readable(text)):
        return text
    if has_interpolation:  # `quoted` would escape it
        return QuotedString(text.strip(), Quote.double).with_quotes()
    return quoted(text.strip())  # Hydra strips spaces outside quotes


def _is_readable(text: str) -> bool:
    """Whether Hydra's grammar has such a value."""
    try:
        OverridesParser.create().parse_override(f"key={text}")
    except HydraException:
        return False
    return True
