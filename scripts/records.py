"""A measurement's record, FILE.json, and the page made from it: what the benchmarks have in common."""

import json
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

PASS, MISS, NOT_MEASURED = "reached", "**missed**", "not measured"


def record(values: DictConfig, measure: Callable[[], dict], write_page: Callable[[Path], Path]) -> Path:
    """Write what `measure()` returns to the file `out` of the arguments, then its page; returns the page's path.

    `measure=false` makes the page again from the file. Raises ValueError where `out` is impossible.
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
    return write_page(out)


def conditions(environment: dict) -> str:
    """The words of a page for `engine.environment.environment()`, with "threads"."""
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    threads = f"{environment['threads']} thread" + "s" * (environment["threads"] > 1)
    return f"{environment['hardware']}, {threads}; {versions}; commit {environment['commit']}"


def as_text(result: dict) -> str:
    """JSON; of a list of rows each has a line of its own."""
    return "{\n" + ",\n".join(f'"{key}": {_value(value)}' for key, value in result.items()) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, dict) for entry in value):
        return "[\n" + ",\n".join(json.dumps(entry) for entry in value) + "\n]"
    return json.dumps(value, indent=1)
