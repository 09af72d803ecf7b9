"""The groups of a command, and which choices in configs/ fit them."""

import itertools
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path, PurePosixPath

from omegaconf import DictConfig, OmegaConf

from engine.configuration.config import flat
from engine.schema.keys import groups_of

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


def groups_in(command: str) -> dict[str, str | None]:
    """{group: default choice} of configs/COMMAND.yaml, sorted; empty if a command has no such file."""
    file = CONFIGS / f"{command}.yaml"
    entries = OmegaConf.load(file).defaults if file.is_file() else ()
    chosen = {str(group): name for entry in entries if isinstance(entry, DictConfig) for group, name in entry.items()}
    return dict(sorted(chosen.items()))


def about_choice(group: str, choice: str) -> str:
    """The first sentence of the comment at the top of a choice's file."""
    lines = (CONFIGS / group / f"{choice}.yaml").read_text("utf-8").splitlines()
    lines = [*itertools.takewhile(lambda line: line.startswith("#"), lines)]
    said = " ".join(line[1:].strip() for line in lines if "@package" not in line)
    return re.split(r"(?<=\.) (?=[A-Z])", said)[0]


def choices(group: str, schema: type, configs: Path = CONFIGS) -> list[str]:
    """The choices of a group that fit the schema: their files use only alternatives of its groups."""
    folder, groups = configs / group, groups_of(schema)
    names = sorted(file.relative_to(folder).with_suffix("").as_posix() for file in folder.rglob("*.yaml"))
    return [
        name
        for name in names
        if all(used in groups[own] for own, used in alternatives_of(group, name, configs) if own in groups)
    ]


def alternatives_of(group: str, choice: str, configs: Path = CONFIGS) -> Iterator[tuple[str, str]]:
    """(group, alternative) of every schema that a choice uses, directly or through other choices with a file."""
    for entry in _content(configs / group / f"{choice}.yaml").get("defaults", ()):
        if isinstance(entry, dict):  # of an experiment, such as {"override /data": "camvid"}
            for other, name in entry.items():
                yield from alternatives_of(str(other).split("/")[-1], str(name), configs)
        elif entry.startswith("/schema/"):
            _, _, own, name = entry.split("/")
            yield own, name
        elif entry.startswith("/"):  # of another folder, such as "/experiment/revnet/cifar10_revnet38"
            _, other, name = entry.split("/", 2)
            yield from alternatives_of(other, name, configs)
        else:  # relative to the choice's folder
            yield from alternatives_of(group, (PurePosixPath(choice).parent / entry).as_posix(), configs)


def settings_of(experiment: str) -> dict[str, object]:
    """{group: choice, key: value} of an experiment and those it builds on, as their files have them."""
    found: dict[str, object] = {}
    content = dict(_content(CONFIGS / "experiment" / f"{experiment}.yaml"))
    for entry in content.pop("defaults", ()):
        if isinstance(entry, dict):
            found |= {str(group).rpartition("/")[2]: name for group, name in entry.items()}
        elif entry != "_self_":
            below = PurePosixPath("/experiment", experiment).parent / entry
            found |= settings_of(below.relative_to("/experiment").as_posix())
    return found | flat(content)


def header(experiment: str) -> str:
    """The comment at the top of an experiment's file; empty if there is none."""
    file = CONFIGS / "experiment" / f"{experiment}.yaml"
    return file.read_text("utf-8").partition("defaults:")[0] if file.is_file() else ""


def command_of(experiment: str) -> str:
    """The command in an experiment's header, without its [optional] keys; empty if there is none."""
    found = re.search(r"(?m)^# +((?:python|torchrun) .*experiment=\S+.*?)(?: \[.*\])*$", header(experiment))
    return found[1] if found else ""


def weights_of(experiment: str) -> list[str]:
    """The key in an experiment's command that takes a file of weights; none if it starts from random weights."""
    return re.findall(r"(\S+\.weights)=FILE", command_of(experiment))


@cache
def _content(file: Path) -> dict:
    """The content of a choice's file; none if there is no file. Choices share files, so each is read once."""
    content = OmegaConf.to_container(OmegaConf.load(file)) if file.is_file() else None
    return content if isinstance(content, dict) else {}
