"""The text of --help: about the command, its groups, and its keys with the comments of their declarations."""

import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, get_type_hints

from omegaconf import DictConfig, ListConfig, OmegaConf

from engine.configuration.choices import about_choice, choices, groups_in
from engine.schema.evaluation import CLASSIFICATION, SEGMENTATION
from engine.schema.keys import Declared, Keys, expected

LONGEST_VALUE = 50
TASKS = (SEGMENTATION, CLASSIFICATION)


def help_text(about: str, command: str, schema: type, values: DictConfig) -> str:
    """`about`, the choices of a command's groups that fit its schema, and the keys of `values`."""
    columns = max(60, min(shutil.get_terminal_size().columns, 120))
    parts = [about.strip()]
    if groups := dict(_choices(command, schema)):
        parts += ["", "Groups (group=choice; * is chosen if none is given):", *_rows(groups, 34, columns)]
    if keys := dict(_keys(values)):
        parts += ["", "Keys (key=value; ??? must be given; null: not given):", *_rows(keys, 34, columns)]
    return "\n".join([*parts, "", "Hydra's own options: --hydra-help"])


def _choices(command: str, schema: type) -> Iterator[tuple[str, str]]:
    """(group=choice, its meaning), the default of each group first; experiments by folder, before all.

    Choices whose first sentence begins with "For TASK: " are left out of the help of other tasks.
    """
    advice, groups = sentences(schema), groups_in(command)
    own = getattr(schema, "task", None)
    others = tuple(f"For {task}: " for task in TASKS if own not in (None, task))
    for group, default in sorted(groups.items(), key=lambda item: item[0] != "experiment"):
        names = choices(group, schema)
        if group == "experiment":
            for folder, found in itertools.groupby(names, lambda name: name.rpartition("/")[0]):
                if not folder:
                    yield from ((f"{group}={name}", about_choice(group, name)) for name in found)
                    continue
                count = len([*found])
                yield f"{group}={folder}/…", f"{count} experiment{'s' * (count > 1)}: configs/{group}/{folder}"
            continue
        if group in advice:
            yield group, advice[group]
        for name in sorted(names, key=lambda name: name != default):
            if not (said := about_choice(group, name)).startswith(others):
                yield f"{group}={name}{' *' * (name == default)}", said.removeprefix(f"For {own}: ")


def _keys(values: DictConfig, prefix: str = "", used: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(key=value, its meaning) for the keys of a config that Hydra composed from a schema; ??? is a missing value."""
    owner: type[Keys] | None = OmegaConf.get_type(values)
    assert owner is not None
    for entry in fields(owner):
        if used and entry.name not in used:
            continue
        name, value = prefix + entry.name, "???"
        if not OmegaConf.is_missing(values, entry.name):
            value = values[entry.name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            yield from _keys(value, f"{name}.", entry.metadata.get("used", ()))
        elif not name.endswith(".name"):  # of a group's choice, which group=choice gives
            allowed = expected(Declared(get_type_hints(owner)[entry.name], entry.metadata))
            said = sentences(owner).get(entry.name, "")
            if task := entry.metadata.get("task"):
                said = f"Only for {task}: {said}".removesuffix(": ")
            about = said if said and allowed.endswith("a text") else f"{said} ({allowed})" if said else allowed
            yield f"{name}={as_text(value):.{LONGEST_VALUE}}", about


@cache
def sentences(schema: type) -> dict[str, str]:
    """{field: the comments above and beside its declaration}, of a dataclass and its base classes."""
    found: dict[str, str] = {}
    for owner in filter(is_dataclass, reversed(schema.__mro__)):
        own: dict[str, list[str]] = {}
        said: list[str] = []
        of_last: list[str] | None = None
        for line in inspect.getsource(owner).splitlines():
            code, *comment = re.split(r"(?:^|\s)# ", line, maxsplit=1)
            if declared := re.match(r"\s+(\w+): ", code):
                own[declared[1]] = of_last = [] if said is of_last else said
                said = of_last
            elif not code.strip() and (not comment or said is of_last):
                said = []
            said += (re.sub(r"type: ignore\[.*?\]\s*(# )?", "", text) for text in comment)
        found |= {name: " ".join(said) for name, said in own.items() if said}
    return found


def as_text(value: Any) -> str:
    """A value as it is given on the command line."""
    if isinstance(value, (list, ListConfig)):
        return f"[{','.join(map(as_text, value))}]"
    if value in (None, ""):
        return "null" if value is None else "''"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _rows(rows: dict[str, str], width: int, columns: int) -> Iterator[str]:
    """Two columns: a key or group, and wrapped text about it."""
    for given, about in rows.items():
        lines = textwrap.wrap(about, columns - width, break_long_words=False) or [""]
        if len(given) + 4 > width:
            lines.insert(0, "")
        for line in lines:
            yield f"  {given:{width - 2}}{line}".rstrip()
            given = ""
