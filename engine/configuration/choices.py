"""The groups of a command, and which choices in configs/ fit them."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from engine.process.plugins import folders
from engine.schema.keys import CHOICES, CONFIGS, Keys, declared_in, groups_of


def groups_in(command: str) -> dict[str, str | None]:
    """{group: default choice} of configs/COMMAND.yaml, in its order; empty if a command has no such file."""
    file = CONFIGS / f"{command}.yaml"
    entries = OmegaConf.load(file).defaults if file.is_file() else ()
    given = (pair for entry in entries if isinstance(entry, DictConfig) for pair in entry.items())
    return {str(group): name or None for group, name in given}  # null and [] choose nothing


def file_of(group: str, choice: str) -> Path | None:
    """The file of a choice; None if it has none."""
    files = (folder / group / f"{choice}.yaml" for folder in (CONFIGS, *folders()))
    return next((file for file in files if file.is_file()), None)


def store_choices(schema: type[Keys]) -> None:
    """Make choices of a schema that have no YAML file here, such as plugins', known to Hydra."""
    for group, known in groups_of(schema).items():
        is_list = "is_list" in declared_in(schema)[group].metadata
        for name, own in known.items():
            places = [f"schema/{group}"] * is_list + [group] * (file_of(group, name) is None and not own.is_base)
            for place in places:
                ConfigStore.instance().store(name, own, place, f"{group}.{name}" if is_list else group)


def about_choice(group: str, choice: str) -> str:
    """The first sentence of the comment at the top of a choice's file, or of its docstring."""
    if (file := file_of(group, choice)) is None:
        said = CHOICES[group][choice].__doc__ or ""
    else:
        lines = file.read_text("utf-8").splitlines()
        comment = itertools.takewhile(lambda line: line.startswith("#") and not line.startswith("# paper:"), lines)
        said = " ".join(line[1:] for line in comment if "@package" not in line)
    return re.split(r"(?<=\.) (?=[A-Z])", " ".join(said.split()))[0]


def choices(group: str, schema: type) -> list[str]:
    """The choices of a group that fit the schema: their files use only alternatives of its groups."""
    groups, places = groups_of(schema), [folder / group for folder in (CONFIGS, *folders())]
    names = {file.relative_to(own).with_suffix("").as_posix() for own in places for file in own.rglob("*.yaml")}
    own = {name for name, kind in groups.get(group, {}).items() if not kind.is_base}

    def fits(name: str) -> bool:
        used = alternatives_of(group, name)
        return name in own or all(each in groups[other] for other, each in used if other in groups)

    return [*filter(fits, sorted(names | own))]


def alternatives_of(group: str, choice: str) -> Iterator[tuple[str, str]]:
    """(group, alternative) of every schema that a choice uses, directly or through other choices with a file."""
    if (file := file_of(group, choice)) is None:
        yield from [(group, choice)] if choice in CHOICES.get(group, {}) else []
        return
    for entry in content_of(file).get("defaults", ()):
        if isinstance(entry, dict):  # of an experiment, such as {"override /data": "camvid"}
            for other, name in entry.items():
                for each in name if isinstance(name, list) else [name]:
                    yield from alternatives_of(str(other).split("/")[-1], str(each))
        elif entry.startswith("/schema/"):
            _, _, own, name = entry.split("/")
            yield own, name
        elif entry.startswith("/"):  # of another folder, such as "/experiment/revnet/cifar10_revnet38"
            _, other, name = entry.split("/", 2)
            yield from alternatives_of(other, name)
        else:  # relative to the choice's folder
            yield from alternatives_of(group, (PurePosixPath(choice).parent / entry).as_posix())


@cache
def content_of(file: Path) -> dict:
    """The content of a choice's file; none if there is no file. Choices share files, so each is read once."""
    content = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else None
    return content if isinstance(content, dict) else {}
