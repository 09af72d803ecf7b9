"""Declaring and checking configuration keys: defaults, bounds, groups, and which keys a resumed run may change."""

import math
import re
from copy import deepcopy
from dataclasses import field, fields, is_dataclass

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import MISSING


def key(
    default,
    *,
    above: float | None = None,
    least: float | None = None,
    most: float | None = None,
    one_of: tuple | None = None,
    entries: tuple[str, ...] | None = None,
    free_on_resume: bool = False,
):
    """A key with a default. Bounds hold for every number of a list; None (null) is always allowed.

    Args:
        above, least, most: a number must be > above, >= least, <= most.
        one_of: the allowed values.
        entries: what the entries of a list are, which fixes its length.
        free_on_resume: a resumed run may change the key: it says where or how the run computes, not what.
    """
    bounds = {"above": above, "least": least, "most": most, "one_of": one_of, "entries": entries}
    return field(default_factory=lambda: deepcopy(default), metadata={**bounds, "free_on_resume": free_on_resume})


def group(alternatives: dict[str, type]):
    """A group of keys (norm, body, …) with one dataclass per alternative, which its `name` selects.

    An option that the selected alternative does not have is then an error; a single dataclass would ignore it.
    """
    return field(default=MISSING, metadata={"alternatives": alternatives})


def groups_of(schema: type) -> dict[str, dict[str, type]]:
    """{group: {name: dataclass}}"""
    return {entry.name: entry.metadata["alternatives"] for entry in fields(schema) if "alternatives" in entry.metadata}


def alternative(group_name: str, alternatives: dict[str, type], name: object) -> type:
    """The dataclass that `name` selects. ValueError for an unknown name."""
    if name not in list(alternatives):  # a list: a name from a checkpoint may not be hashable
        raise ValueError(f"{group_name}.name={name}: expected one of {', '.join(alternatives)}")
    return alternatives[name]


def check_values(config, prefix: str = "") -> None:
    """Check every value against its bounds, then the rules of each dataclass, its method `check` if it has one.

    Raises:
        ValueError: names the key, its value and what is expected.
    """
    for entry in fields(config):
        value, name = getattr(config, entry.name), prefix + entry.name
        if "alternatives" in entry.metadata:
            selected = value and value.name
            if type(value) is not alternative(name, entry.metadata["alternatives"], selected):
                raise ValueError(f"{name}.name={selected} does not change the {name}: give {name}={selected}")
        if is_dataclass(value):
            check_values(value, f"{name}.")
        elif value is not None:
            _check_bounds(name, value, entry.metadata)
    if hasattr(config, "check"):
        config.check()


def _check_bounds(name: str, value, bounds) -> None:
    above, least, most, one_of, entries = (
        bounds.get(bound) for bound in ("above", "least", "most", "one_of", "entries")
    )
    if one_of is not None and value not in one_of:
        raise ValueError(f"{name}={value}: expected one of {', '.join(map(str, one_of))}")
    if entries is not None and len(value) != len(entries):
        raise ValueError(f"{name}={value}: expected {len(entries)} numbers: {', '.join(entries)}")
    if above is None and least is None:
        return
    numbers = _numbers(value)
    # Written so that NaN fails. An empty list is refused too.
    low_enough = bool(numbers) and all(number <= (math.inf if most is None else most) for number in numbers)
    at_most = "" if most is None else f", at most {most}"
    if above is not None and not (low_enough and all(above < number < math.inf for number in numbers)):
        raise ValueError(f"{name}={value}: expected a number above {above}{at_most}")
    if least is not None and not (low_enough and all(least <= number < math.inf for number in numbers)):
        raise ValueError(f"{name}={value}: expected {least} or more{at_most}")


def _numbers(value) -> list[float]:
    return [number for entry in value for number in _numbers(entry)] if isinstance(value, list) else [value]


def override(name: str, path: object) -> str:
    """`name=path` as a Hydra override, quoted where Hydra needs it. Quote the result for the shell as well."""
    text = str(path)
    if not re.fullmatch(r"[\w.+-]*(/[\w.+-]+)+", text, re.ASCII):
        text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # an interpolation otherwise
        text = QuotedString(text, Quote.double).with_quotes()
    return f"{name}={text}"
