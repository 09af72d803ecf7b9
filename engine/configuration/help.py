"""The text of --help: about the command, its groups, and its keys with the comments of their declarations."""

import inspect
import itertools
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import Field, fields, is_dataclass
from functools import cache
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from engine.configuration.choices import about_choice, choices, groups_in
from engine.schema.evaluation import CLASSIFICATION, SEGMENTATION
from engine.schema.keys import Keys, declared_in, expected

LONGEST_VALUE = 50
MARGIN = 34 * " "
# Comment lines, KEY: TYPE, and lines that continue it.
DECLARATION = re.compile(r"((?:^ +# .*\n)*)^ +(\w+): (.*\n(?:(?! +\w+: | +# | *\n).+\n)*)", re.MULTILINE)


def help_text(description: str, command: str, schema: type, values: DictConfig) -> str:
    """The description, the choices of a command's groups that fit its schema, and the keys of `values`."""
    columns = max(60, min(shutil.get_terminal_size().columns, 120))
    parts = [description.strip()]
    groups = [_row(name, meaning, columns) for name, meaning in _choices(command, schema)]
    if groups:
        parts += ["", "Groups (group=choice; * is chosen if none is given):", *groups]
    keys = [_row(name, meaning, columns) for name, meaning in _keys(values)]
    if keys:
        parts += ["", "Keys (key=value; ??? must be given; null: not given):", *keys]
    return "\n".join([*parts, "", "Hydra's own options: --hydra-help"])


def _choices(command: str, schema: type) -> Iterator[tuple[str, str]]:
    """(group=choice, its meaning), the default of each group first; experiments, before all, by folder.

    Choices whose first sentence begins with "For TASK: " are left out of the help of other tasks.
    """
    advice = sentences(schema)
    command_task = getattr(schema, "task", None)
    other_tasks = tuple(f"For {task}: " for task in (SEGMENTATION, CLASSIFICATION) if command_task not in (None, task))
    for group, default in sorted(groups_in(command).items(), key=lambda pair: pair[0] != "experiment"):
        if group in advice:
            yield group, advice[group]
        names = sorted(choices(group, schema), key=lambda name: name != default)
        for folder, in_folder in itertools.groupby(names, lambda name: name.rpartition("/")[0]):
            if folder and group == "experiment":
                count = len([*in_folder])
                plural = "s" if count > 1 else ""
                yield f"{group}={folder}/…", f"{count} experiment{plural}: configs/experiment/{folder}"
                continue
            for name in in_folder:
                sentence = about_choice(group, name)
                if not sentence.startswith(other_tasks):
                    mark = " *" if name == default else ""
                    yield f"{group}={name}{mark}", sentence.removeprefix(f"For {command_task}: ")


def _keys(values: DictConfig, prefix: str = "", used: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(key=value, its meaning) for the keys of a config that Hydra composed from a schema; ??? is a missing value."""
    owner: type[Keys] | None = OmegaConf.get_type(values)
    assert owner is not None
    for field in fields(owner):
        if used and field.name not in used:
            continue
        name = prefix + field.name
        value = "???" if OmegaConf.is_missing(values, field.name) else values[field.name]
        if isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value)):
            yield from _keys(value, f"{name}.", field.metadata.get("used", ()))
        elif not name.endswith(".name"):  # of a group's choice, which group=choice gives
            yield f"{name}={as_text(value):.{LONGEST_VALUE}}", _meaning(owner, field)


def _meaning(owner: type[Keys], field: Field) -> str:
    """What is said of a key: its task, if only one has it, the comment at its declaration, and the allowed values."""
    allowed = expected(declared_in(owner)[field.name])
    task = field.metadata.get("task")
    comment = sentences(owner).get(field.name, "")
    if task:
        comment = f"Only for {task}: {comment}".removesuffix(": ")
    if not comment:
        return allowed
    return comment if allowed.endswith("a text") else f"{comment} ({allowed})"


@cache
def sentences(schema: type) -> dict[str, str]:
    """{field: the comments above and beside its declaration}, of a dataclass and its base classes."""
    sentence_by_field: dict[str, str] = {}
    for owner in filter(is_dataclass, reversed(schema.__mro__)):
        for above, name, code in DECLARATION.findall(inspect.getsource(owner)):
            comments = re.findall(r"\s# (?:type: ignore\[.*?\]\s*(?:# )?)?(.*)", above + code)
            if comments:
                sentence_by_field[name] = " ".join(comments)
    return sentence_by_field


def as_text(value: Any) -> str:
    """A value as it is given on the command line."""
    if isinstance(value, (list, ListConfig)):
        return f"[{','.join(map(as_text, value))}]"
    if value in (None, ""):
        return "null" if value is None else "''"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _row(name: str, meaning: str, columns: int) -> str:
    """Two columns: a key or group, and wrapped text about it."""
    text = textwrap.fill(meaning, columns, initial_indent=MARGIN, subsequent_indent=MARGIN, break_long_words=False)
    start = f"  {name}"
    return start + text[len(start) :] if len(start) < len(MARGIN) - 1 else f"{start}\n{text}".rstrip()
