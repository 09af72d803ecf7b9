"""The groups of a command, and which choices in configs/ fit them."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from engine.configuration.config import flat
from engine.process.plugins import folders
from engine.schema.keys import CHOICES, CONFIGS, Keys, declared_in, groups_of

# Entries of an experiment's `# paper:` mapping, besides scores. `eval` and `source` belong to the scores beside them.
PAPER = ("table", "row", "command", "hardware", "steps", "planned", "eval", "source", "also")


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


@cache
def store_choices(schema: type[Keys], count: int) -> None:
    """Make choices of a schema that have no YAML file, such as plugins', known to Hydra. `count`: of all and plugins."""
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
    for entry in _content(file).get("defaults", ()):
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


def settings_of(experiment: str) -> dict[str, object]:
    """{group: choice, key: value} of an experiment and those it builds on, as their files have them."""
    found: dict[str, object] = {}
    file = file_of("experiment", experiment)
    content = {} if file is None else dict(_content(file))
    for entry in content.pop("defaults", ()):
        if isinstance(entry, dict):
            found |= {str(group).rpartition("/")[2]: name for group, name in entry.items()}
        elif entry != "_self_":
            below = PurePosixPath("/experiment", experiment).parent / entry
            found |= settings_of(below.relative_to("/experiment").as_posix())
    return found | flat(content)


@cache
def paper_of(experiment: str) -> dict[str, Any]:
    """The mapping `# paper:` at the head of an experiment's file (docs/extending.md); {} if it has none.

    ValueError: it is no mapping, or an entry is neither one of `PAPER` nor a score.
    """
    file = file_of("experiment", experiment)
    found = re.search(r"^# paper:.*\n(#  .*\n)*", file.read_text("utf-8") if file else "", re.MULTILINE)
    if found is None:
        return {}
    try:
        paper = yaml.safe_load(re.sub(r"(?m)^# ", "", found[0]))["paper"]
        entries = [pair for part in (paper, *paper.get("also", ())) for pair in part.items()]
    except (yaml.YAMLError, AttributeError, TypeError) as error:
        raise ValueError(f"{file}: the comment `# paper:` is no YAML mapping: {error}") from error
    for name, value in entries:
        if name not in PAPER and not isinstance(value, (int, float)):
            raise ValueError(
                f"{file}: paper: {name}={value}: expected a score in percent, or one of {', '.join(PAPER)}"
            )
    return paper


def command_of(experiment: str) -> str:
    """The command at an experiment's head, without its [optional] keys; empty if there is none."""
    return str(paper_of(experiment).get("command", "")).partition(" [")[0]


def weights_of(experiment: str) -> list[str]:
    """The key in an experiment's command that takes a file of weights; none if it starts from random weights."""
    return [word.removesuffix("=FILE") for word in command_of(experiment).split() if word.endswith(".weights=FILE")]


@cache
def _content(file: Path) -> dict:
    """The content of a choice's file; none if there is no file. Choices share files, so each is read once."""
    content = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else None
    return content if isinstance(content, dict) else {}
