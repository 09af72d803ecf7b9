"""What the files of experiments say about a paper's rows."""

import re
from functools import cache
from pathlib import PurePosixPath
from typing import Any

import yaml  # type: ignore[import-untyped]

from engine.configuration.choices import content_of, file_of
from engine.configuration.config import flat

# Entries of an experiment's `# paper:` mapping, besides scores. `eval` and `source` belong to the scores beside them.
PAPER = ("table", "row", "command", "hardware", "steps", "planned", "eval", "source", "also")


def settings_of(experiment: str) -> dict[str, object]:
    """{group: choice, key: value} of an experiment and those it builds on, as their files have them."""
    settings: dict[str, object] = {}
    file = file_of("experiment", experiment)
    content = {} if file is None else dict(content_of(file))
    for entry in content.pop("defaults", ()):
        if isinstance(entry, dict):
            settings |= {str(group).rpartition("/")[2]: name for group, name in entry.items()}
        elif entry != "_self_":
            below = PurePosixPath("/experiment", experiment).parent / entry
            settings |= settings_of(below.relative_to("/experiment").as_posix())
    return settings | flat(content)


@cache
def paper_of(experiment: str) -> dict[str, Any]:
    """The mapping `# paper:` at the head of an experiment's file (docs/extending.md); {} if it has none.

    ValueError: it is no mapping, or an entry is neither one of `PAPER` nor a score.
    """
    file = file_of("experiment", experiment)
    comment = re.search(r"^# paper:.*\n(#  .*\n)*", file.read_text("utf-8") if file else "", re.MULTILINE)
    if comment is None:
        return {}
    try:
        paper = yaml.safe_load(re.sub(r"(?m)^# ", "", comment[0]))["paper"]
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
