"""A measurement's record, FILE.json, and the page made from it: what the benchmarks have in common."""

import json
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

PASS, MISS, NOT_MEASURED = "reached", "**missed**", "not measured"


def record(values: DictConfig, measure: Callable[[], dict], page_of: Callable[[dict, Path], str]) -> Path:
    """Write what `measure()` returns to FILE.json, the `out` of the arguments, then FILE.md, its page; returns that.

    `page_of(result, FILE.png)` is the page's text; it may draw a picture for it. `measure=false` makes the page again
    from the file. Raises ValueError where `out` is impossible.
    """
    if OmegaConf.is_missing(values, "out"):
        raise ValueError("out has no value: give out=FILE.json, the file to write")
    out = Path(values.out)
    if out.suffix != ".json":
        raise ValueError(f"out={out}: expected a file that ends in .json")
    if values.measure:
        result = measure()
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(as_text(result))
    elif not out.is_file():
        raise ValueError(f"measure=false makes the page of a file that was measured before, and {out} does not exist")
    page = out.with_suffix(".md")
    page.write_text(page_of(json.loads(out.read_text()), out.with_suffix(".png")))
    return page


def opening(title: str, result: dict, about: str) -> list[str]:
    """The first lines of a page: title, command, hardware and versions, and `about` what was measured how often."""
    environment = result["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    threads = f"{environment['threads']} thread" + "s" * (environment["threads"] > 1)
    conditions = f"{environment['hardware']}, {threads}; {versions}; commit {environment['commit']}"
    minutes = f"the run took {result['seconds'] / 60:.1f} minutes"
    return [f"# {title}", "", "```", result["command"], "```", "", f"{conditions}. {about}; {minutes}."]


def target_lines(judged: list[tuple[str, ...]], columns: tuple[str, ...] = ("to reach", "measured")) -> list[str]:
    """The table of targets: what each is about, the columns, and the verdict."""
    titles = ["", *columns, ""]
    lines = ["## Targets", "", "| " + " | ".join(titles).strip() + " |", "|" + "---|" * len(titles)]
    return [*lines, *("| " + " | ".join(row) + " |" for row in judged)]


def as_text(result: dict) -> str:
    """JSON; of a list of rows each has a line of its own."""
    return "{\n" + ",\n".join(f'"{key}": {_value(value)}' for key, value in result.items()) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
    return json.dumps(value, indent=1)
