"""The groups of a command, and which choices in configs/ fit them."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from omegaconf import DictConfig, OmegaConf

from engine.process.plugins import folders
from engine.schema.keys import CHOICES, CONFIGS, groups_of


def groups_in(command: str) -> dict[str, str | None]:
    """{group: default choice} of configs/COMMAND.yaml, in its order; empty if a command has no such file."""
    file = CONFIGS / f"{command}.yaml"
    entries = OmegaConf.load(file).defaults if file.is_file() else ()
    pairs = (pair for entry in entries if isinstance(entry, DictConfig) for pair in entry.items())
    return {str(group): name or None for group, name in pairs}  # null and [] choose nothing


def file_of(group: str, choice: str) -> Path | None:
    """The file of a choice; None if it has none."""
    files = (folder / group / f"{choice}.yaml" for folder in (CONFIGS, *folders()))
    return next((file for file in files if file.is_file()), None)


def about_choice(group: str, choice: str) -> str:
    """The first sentence of the comment at the top of a choice's file, or of its docstring."""
    file = file_of(group, choice)
    if file is None:
        text = CHOICES[group][choice].__doc__ or ""
    else:
        lines = file.read_text("utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#") and not line.startswith("# paper:"), lines)
        text = " ".join(line[1:] for line in comment if "@package" not in line)
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(text.split()))[0]


def choices(group: str, schema: type) -> list[str]:
    """The choices of a group that fit the schema: their files use only alternatives of its groups."""
    groups = groups_of(schema)
    names: set[str] = set()
    for folder in (CONFIGS, *folders()):
        files = (folder / group).rglob("*.yaml")
        names.update(file.relative_to(folder / group).with_suffix("").as_posix() for file in files)
    classes = {name for name, kind in groups.get(group, {}).items() if not kind.is_base}

    def fits(name: str) -> bool:
        alternatives = alternatives_of(group, name)
        return name in classes or all(choice in groups[used] for used, choice in alternatives if used in groups)

    return [*filter(fits, sorted(names | classes))]


def alternatives_of(group: str, choice: str) -> Iterator[tuple[str, str]]:
    """(group, alternative) of every schema that a choice uses, directly or through other choices with a file."""
    file = file_of(group, choice)
    if file is None:
        if choice in CHOICES.get(group, {}):
            yield group, choice
        return
    for entry in content_of(file).get("defaults", ()):
        if isinstance(entry, dict):  # of an experiment, such as {"override /data": "camvid"}
            for path, names in entry.items():
                for name in names if isinstance(names, list) else [names]:
                    yield from alternatives_of(str(path).split("/")[-1], str(name))
        elif entry.startswith("/schema/"):
            _, _, schema_group, name = entry.split("/")
            yield schema_group, name
        elif entry.startswith("/"):  # of another folder, such as "/experiment/revnet/cifar10_revnet38"
            _, folder, name = entry.split("/", 2)
            yield from alternatives_of(folder, name)
        else:  # relative to the choice's folder
            yield from alternatives_of(group, (PurePosixPath(choice).parent / entry).as_posix())


@cache
def content_of(file: Path) -> dict:
    """The content of a choice's file; none if there is no file. Choices share files, so each is read once."""
    content = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else None
    return content if isinstance(content, dict) else {}
